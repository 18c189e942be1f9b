"""A deployment is complete and valid: vLLM's defaults by version and device, and what vLLM refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calibration.architecture import Architecture
from calibration.catalog import find_gpu, find_model
from calibration.deployment import Deployment, resolve_deployment
from calibration.errors import InputError, Unsupported
from calibration.families import read_config
from calibration.vllm_defaults import parse_version

CASES = json.loads((Path(__file__).resolve().parents[1] / "data" / "model" / "transformers_params.json").read_text())


def small(case: str) -> Architecture:
    return read_config(next(c["config"] for c in CASES if c["id"] == case), case)


def on(gpu: str = "h100-sxm", model: str = "llama-3.1-8b", **changes: Any) -> Deployment:
    return resolve_deployment(find_model(model), gpu=find_gpu(gpu), **changes)


def on_cpu(architecture: Architecture, **changes: Any) -> Deployment:
    return resolve_deployment(architecture, device="cpu", kv_cache_memory_bytes=1 << 30, **changes)


@pytest.mark.parametrize(
    ("gpu", "version", "seqs", "budget"),
    [
        ("h100-sxm", "0.32.0", 1024, 8192),
        ("h200-sxm", "0.32.0", 1024, 8192),
        ("b200-sxm", "0.32.0", 1024, 16384),
        ("b200-sxm", "0.20.0", 1024, 8192),
        ("a100-80-sxm", "0.32.0", 256, 2048),
        ("l40s", "0.32.0", 256, 2048),
        ("l4", "0.32.0", 256, 2048),
    ],
)
def test_batch_limits_are_vllms_for_the_device(gpu: str, version: str, seqs: int, budget: int) -> None:
    found = on(gpu, vllm_version=version)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (seqs, budget)


def test_batch_limits_on_cpu_grow_with_the_ranks() -> None:
    found = on_cpu(find_model("llama-3.1-8b"), tp=2)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (256, 4096)


def test_default_limits_are_held_against_each_other_and_the_context() -> None:
    assert on(max_model_len=4, max_num_seqs=8).max_num_batched_tokens == 32
    assert on(max_num_batched_tokens=64).max_num_seqs == 64


def test_a_plan_without_a_gpu_takes_the_small_limits() -> None:
    found = resolve_deployment(find_model("llama-3.1-8b"), kv_cache_memory_bytes=1 << 34)
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.gpu) == (256, 2048, None)


@pytest.mark.parametrize(("version", "share"), [("0.32.0", 0.92), ("0.22.0", 0.92), ("0.19.1", 0.9), ("0.11.0", 0.9)])
def test_the_share_of_memory_is_the_versions(version: str, share: float) -> None:
    assert on(vllm_version=version).gpu_memory_utilization == share


def test_what_was_asked_is_marked_and_what_was_not_is_a_default() -> None:
    found = on(max_num_seqs=64, kv="fp8", tp=2)
    assert found.given == {"gpu", "max_num_seqs", "kv", "tp"}
    assert on().given == {"gpu"}


def test_batches_in_flight() -> None:
    assert on().concurrent_batches == 2
    assert on(pp=2, tp=2).concurrent_batches == 3
    assert on(pp=2, tp=2, vllm_version="0.20.0").concurrent_batches == 2
    assert on(vllm_version="0.13.0").concurrent_batches == 1
    assert on_cpu(find_model("llama-3.1-8b")).concurrent_batches == 1


def test_ranks_and_replicas_are_counted() -> None:
    found = on("h200-sxm", "deepseek-v3", tp=4, pp=2, dp=2, expert_parallel=True)
    assert (found.gpus, found.expert_ranks, found.dtype_bytes) == (16, 8, 2)
    assert on(tp=2).expert_ranks == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 3}, "tp = 3, expected a divisor of the 32 attention heads"),
        ({"tp": 0}, "tp = 0, expected a whole number of at least 1"),
        ({"pp": 33}, "pp = 33, expected at most the 32 layers"),
        ({"expert_parallel": True}, "LlamaForCausalLM has no experts"),
        ({"device": "tpu"}, "device = 'tpu', expected cuda or cpu"),
        ({"device": "cpu"}, "device = 'cpu' with gpu = 'h100-sxm', expected one of them"),
        ({"vllm_version": "new"}, "vllm_version = 'new', expected a version such as 0.32.0"),
        ({"vllm_version": "0.6.3"}, "vllm_version = '0.6.3', expected 0.8.0 or later"),
        ({"dtype": "int8"}, "dtype = 'int8', expected auto, bfloat16"),
        ({"weights": "int3"}, "weights = 'int3', expected one of auto, bf16"),
        ({"kv": "fp7"}, "kv = 'fp7', expected one of auto, bf16"),
        ({"kv": "fp8_ds_mla"}, "kv = 'fp8_ds_mla', expected a dtype for LlamaForCausalLM: this one is for MLA only"),
        ({"kv": "fp8_e5m2", "weights": "fp8"}, "kv = 'fp8_e5m2', expected fp8 or fp8_e4m3"),
        ({"max_model_len": 200_000}, "max_model_len = 200000, expected at most the model's 131072"),
        ({"max_model_len": 0}, "max_model_len = 0, expected a whole number of at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0, expected a whole number of at least 1"),
        (
            {"max_num_seqs": 64, "max_num_batched_tokens": 32},
            r"max_num_batched_tokens = 32, expected at least max_num_seqs \(64\)",
        ),
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization = 1.2, expected a fraction above 0, at most 1"),
        ({"block_size": 0}, "block_size = 0, expected a whole number of at least 1"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override = 0"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes = 0"),
        ({"mamba_ssm_cache_dtype": "fp8"}, "mamba_ssm_cache_dtype = 'fp8', expected auto, float32"),
    ],
)
def test_what_cannot_be_is_refused_by_key_value_and_expectation(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        on(**changes)


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match="tp = 4, expected a divisor or a multiple of the 10 KV heads"):
        on(model="phi-4", tp=4)
    with pytest.raises(InputError, match="tp = 16, expected a divisor of the 24 attention heads"):
        on(model="qwen3.5-27b", tp=16)
    with pytest.raises(InputError, match="tp = 32, expected a divisor of the 16 heads of the recurrent state"):
        on_cpu(small("mamba2_None"), tp=32)
    hybrid = small("granite_8_4_32_2_None")
    with pytest.raises(InputError, match="tp = 4, expected a divisor of the 2 Mamba groups"):
        on_cpu(hybrid, tp=4)


def test_mla_refuses_caches_that_are_packed_by_head() -> None:
    with pytest.raises(InputError, match="expected a dtype that MLA can hold"):
        on("h200-sxm", "deepseek-v3", tp=8, kv="nvfp4")


def test_a_plan_needs_a_gpu_or_a_pool() -> None:
    with pytest.raises(InputError, match="gpu = None, expected a GPU, or the pool itself"):
        resolve_deployment(find_model("llama-3.1-8b"))


def test_the_cpu_takes_few_cache_dtypes_and_head_dims() -> None:
    with pytest.raises(InputError, match="kv = 'nvfp4', expected auto, fp8, fp8_e4m3 or fp8_e5m2 on CPU"):
        on_cpu(find_model("llama-3.1-8b"), kv="nvfp4")
    odd = small("llama_8_96_3_None_700")
    assert on_cpu(odd, kv="fp8").kv.name == "fp8_e4m3"
    config = {**next(c["config"] for c in CASES if c["id"] == "llama_8_96_3_None_700"), "head_dim": 80}
    with pytest.raises(InputError, match="head dims in multiples of 32, not 80"):
        on_cpu(read_config(config, "x"), kv="fp8")


def test_the_cpu_runs_mla_without_chunks_and_prefix_cache() -> None:
    found = on_cpu(small("dsv3_512_64"), max_model_len=3000, max_num_batched_tokens=256)
    assert (found.max_num_batched_tokens, found.enable_prefix_caching) == (3000, False)


def test_experts_without_a_gate_are_not_served_on_cpu() -> None:
    with pytest.raises(Unsupported, match="experts without a gate are served on GPUs only"):
        on_cpu(small("nemotron_pat"))


def test_an_architecture_that_vllm_dropped_is_refused_for_later_versions() -> None:
    with pytest.raises(Unsupported, match=r"'BambaForCausalLM' is not served by vLLM 0.24.0 and later"):
        on_cpu(small("bamba"))
    assert on_cpu(small("bamba"), vllm_version="0.23.0").architecture.name == "BambaForCausalLM"


def test_auto_dtype_is_the_checkpoints_but_bfloat16_for_float32() -> None:
    assert on().dtype == "bfloat16"
    assert on(model="llama-2-7b").dtype == "float16"
    config = {**next(c["config"] for c in CASES if c["id"] == "llama_bias"), "dtype": "float32"}
    assert on_cpu(read_config(config, "x")).dtype == "bfloat16"
    assert on_cpu(read_config(config, "x"), dtype="float32").dtype_bytes == 4


@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
def test_what_is_unstable_in_float16_is_refused_in_it(case: str) -> None:
    model = read_config({**next(c["config"] for c in CASES if c["id"].startswith(case)), "dtype": "float16"}, case)
    with pytest.raises(InputError, match="dtype = 'fp16', expected bfloat16 or float32"):
        on_cpu(model, dtype="fp16")
    assert on_cpu(model).dtype == "bfloat16"


def test_a_model_without_a_position_limit_takes_any_length() -> None:
    config = next(c["config"] for c in CASES if c["config"]["architectures"] == ["Mamba2ForCausalLM"])
    free = read_config({key: value for key, value in config.items() if key != "max_position_embeddings"}, "x")
    assert on_cpu(free).max_model_len == 2048
    assert on_cpu(free, max_model_len=9_000).max_model_len == 9_000
    with pytest.raises(InputError, match="max_model_len = 9000, expected at most the model's 1000"):
        on_cpu(read_config({**config, "max_position_embeddings": 1000}, "x"), max_model_len=9_000)


def test_weights_named_like_the_checkpoints_format_take_its_coverage() -> None:
    assert on("h200-sxm", "deepseek-v3", tp=8, weights="fp8").weights.name == "fp8-block"
    scout = on(model="RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", tp=4, weights="fp8")
    assert "attention" not in scout.weights.roles
    assert on(model="gpt-oss-20b").weights.roles == ("expert",)
    assert on(model="qwen3-30b-a3b", weights="mxfp4").weights.roles == ("expert",)
    assert "attention" in on(weights="mxfp4").weights.roles


def test_recurrent_states_are_float32_on_cpu_unless_asked() -> None:
    hybrid = small("granite_6_3_64_1_None")
    found = on_cpu(hybrid)
    assert found.mamba_ssm_cache_dtype == "float32"
    assert any("AVX-512 BF16" in warning for warning in found.warnings)
    asked = on_cpu(hybrid, mamba_ssm_cache_dtype="bf16")
    assert (asked.mamba_ssm_cache_dtype, asked.warnings) == ("bfloat16", ())


def test_rules_that_are_not_the_versions_own_are_said() -> None:
    assert any("those of vLLM 0.32" in w for w in on(model="gpt-oss-20b", vllm_version="0.20.0").warnings)
    assert any("newer than 0.32" in w for w in on(vllm_version="0.40.1").warnings)
    assert on(vllm_version="0.20.0").warnings == ()


def test_models_without_attention_have_no_prefix_cache() -> None:
    mamba = small("mamba2_None")
    assert not on_cpu(mamba).enable_prefix_caching
    assert on_cpu(mamba, enable_prefix_caching=True).enable_prefix_caching


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.32.0", (0, 32, 0)), ("v0.15.1 (fork)", (0, 15, 1)), ("0.9", (0, 9, 0)), ("1.2.3rc1", (1, 2, 3))],
)
def test_versions_are_read(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version
