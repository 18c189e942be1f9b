"""Weights on a GPU: what is split, what is copied, formats, stages."""

from __future__ import annotations

from typing import Any

import pytest

from calibration.catalog import find_gpu, find_model
from calibration.deployment import Deployment, resolve_deployment
from calibration.families import read_config
from calibration.formats import declared_format
from calibration.weights import text_bytes, weights_by_stage

GIB = 1 << 30


def on(model: str, gpu: str = "h200-sxm", **changes: Any) -> Deployment:
    return resolve_deployment(find_model(model), gpu=find_gpu(gpu), **changes)


def one_gpu(model: str, **changes: Any) -> int:
    (stage,) = weights_by_stage(on(model, **changes))
    return stage.total_bytes


def test_one_gpu_holds_the_whole_checkpoint() -> None:
    assert one_gpu("llama-3.1-8b") == 16060522496
    assert one_gpu("qwen3-0.6b") == 1192099840


@pytest.mark.parametrize(
    ("model", "changes", "gib"),
    [
        # loaded by vLLM, as printed (llm-d-planner) or computed from its config (inference-sim)
        ("llama-3.1-8b", {}, 14.99),
        ("qwen3-32b", {}, 61.03),
        ("gpt-oss-20b", {}, 13.47),
        ("gpt-oss-120b", {}, 64.38),
        ("llama-3.3-70b", {"weights": "fp8"}, 67.72),
        ("mistral-small-3.2-24b", {}, 44.76),
        ("llama-2-7b", {}, 12.55),
        ("llama-3.1-70b", {"tp": 4}, 32.85),
        ("mistral-nemo-12b", {"tp": 2}, 11.41),
        ("yi-34b", {"tp": 2}, 32.03),
    ],
)
def test_weights_are_those_a_server_loaded(model: str, changes: dict[str, Any], gib: float) -> None:
    assert one_gpu(model, **changes) / GIB == pytest.approx(gib, rel=0.003)


def test_deepseek_v3_in_fp8_weighs_what_its_checkpoint_says() -> None:
    found = find_model("deepseek-v3")
    text = text_bytes(found, declared_format(found.quantization, found.dtype), 2)
    # 688.6 GB of files hold the MTP layer, with the embedding and the head a second time
    assert text == pytest.approx(673.15e9, rel=1e-5)
    mtp = next(weight.params for weight in found.extra_weights if weight.role == "mtp")
    assert text + mtp == pytest.approx(688.6e9, rel=0.005)


def test_latents_norms_and_routers_are_copied_on_every_rank() -> None:
    (stage,) = weights_by_stage(on("deepseek-v3", tp=8))
    # q_a and kv_a projections: 61 layers of 7168 x (1536 + 576) in FP8, 1.13 GB with routers
    assert 0.9e9 < stage.replicated_bytes < 1.2e9
    assert stage.total_bytes > 673.15e9 / 8 + stage.replicated_bytes * 7 / 8


def test_mla_keeps_a_16_bit_copy_of_a_quantised_up_projection() -> None:
    copies = 61 * 128 * 256 * 512 * 2
    quantised = one_gpu("deepseek-v3")
    text = text_bytes(find_model("deepseek-v3"), on("deepseek-v3").weights, 2)
    assert quantised - text == copies
    sixteen_bit = one_gpu("deepseek-v3", weights="bf16")
    assert sixteen_bit == text_bytes(find_model("deepseek-v3"), on("deepseek-v3", weights="bf16").weights, 2)


def test_key_and_value_projections_are_copied_where_ranks_outnumber_kv_heads() -> None:
    four, eight = one_gpu("qwen3-235b-a22b", tp=4), one_gpu("qwen3-235b-a22b", tp=8)
    key_value = 94 * 2 * 4096 * 4 * 128 * 2
    halved = (four - key_value // 4) / 2 + key_value // 4
    assert eight == pytest.approx(halved, rel=0.001)


def test_experts_are_spread_over_all_ranks_of_all_replicas_and_attention_is_not() -> None:
    both = on("deepseek-v3", tp=2, dp=8, expert_parallel=True)
    (stage,) = weights_by_stage(both)
    experts = find_model("deepseek-v3").params_routed_experts
    assert stage.experts_bytes == pytest.approx(experts / 16, rel=0.001)
    (sliced,) = weights_by_stage(on("deepseek-v3", tp=2, dp=8))
    assert sliced.experts_bytes == pytest.approx(stage.experts_bytes, rel=1e-6)


def test_whole_experts_are_rounded_up_to_a_rank() -> None:
    (stage,) = weights_by_stage(on("mixtral-8x7b", tp=1, dp=6, expert_parallel=True))
    per_expert = find_model("mixtral-8x7b").params_routed_experts * 2 // 8
    assert stage.experts_bytes == 2 * per_expert


def test_a_pipeline_has_the_embedding_first_and_the_head_last() -> None:
    first, middle, last = weights_by_stage(on("llama-3.1-8b", pp=3))
    embedding = 128256 * 4096 * 2
    layer = 436_224_000
    assert (first.layers, middle.layers, last.layers) == (11, 11, 10)
    assert first.total_bytes - first.layers * layer == pytest.approx(embedding, rel=1e-4)
    assert middle.total_bytes == pytest.approx(middle.layers * layer, rel=1e-4)
    assert last.total_bytes - last.layers * layer == pytest.approx(embedding, rel=1e-4)


def test_a_tied_embedding_lies_on_both_ends_of_a_pipeline() -> None:
    first, last = weights_by_stage(on("llama-3.2-1b", pp=2))
    whole = one_gpu("llama-3.2-1b")
    assert first.total_bytes + last.total_bytes == whole + 128256 * 2048 * 2


def test_a_vision_tower_is_loaded_and_an_mtp_layer_is_not() -> None:
    gemma = find_model("gemma-3-27b")
    vision = sum(weight.params for weight in gemma.extra_weights)
    assert one_gpu("gemma-3-27b") == 2 * (gemma.params_total + vision)
    qwen = find_model("qwen3-next-80b-a3b")
    assert {weight.role for weight in qwen.extra_weights} == {"mtp"}
    assert one_gpu("qwen3-next-80b-a3b") == 2 * qwen.params_total


def test_the_vocabulary_is_padded_to_64_rows() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "num_hidden_layers": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
    }
    architecture = read_config(config, "x")
    (stage,) = weights_by_stage(resolve_deployment(architecture, kv_cache_memory_bytes=GIB))
    padding = 2 * (1024 - 1000) * 64 * 2
    assert stage.total_bytes == 2 * architecture.params_total + padding
