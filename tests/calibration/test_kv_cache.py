"""The KV pool, to the block: real starts, vLLM's own planning code, and the rules one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.catalog import find_gpu, find_model
from calibration.deployment import Deployment, pipeline_stages, resolve_deployment
from calibration.errors import CalibrationError, InputError, Unsupported
from calibration.families import read_config
from calibration.kv_cache import (
    Pool,
    build_pool,
    cache_groups,
    kernel_block,
    layer_caches,
    longest_request,
    pool_of,
    primary_block_size,
    request_blocks,
    stage_bytes_per_block,
    start_refusal,
)

DATA = Path(__file__).resolve().parents[1] / "data" / "model"
STARTS = json.loads((DATA / "kv_starts.json").read_text())
PLANNED = json.loads((DATA / "kv_planned_by_vllm.json").read_text())
BY_TAG = {start["tag"]: start["config"] for start in STARTS}
GIB = 1 << 30

#: option of a start -> argument of resolve_deployment
ARGUMENTS = {
    "--max-model-len": "max_model_len",
    "--block-size": "block_size",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--max-num-seqs": "max_num_seqs",
    "--num-gpu-blocks-override": "num_gpu_blocks_override",
}


def deployment_of(start: dict[str, Any]) -> Deployment:
    options = dict(start["options"])
    numbers = {ARGUMENTS[key]: int(value) for key, value in options.items() if key in ARGUMENTS}
    return resolve_deployment(
        read_config(start["config"], start["tag"]),
        device="cpu",
        kv=options.get("--kv", "auto"),
        dtype=options.get("--dtype"),
        hybrid_kv_cache_manager="--disable-hybrid-kv-cache-manager" not in options,
        kv_cache_memory_bytes=int(float(start["kv_cache_gib"]) * GIB),
        **numbers,
    )


def pool_given(start: dict[str, Any]) -> Pool:
    deployment = deployment_of(start)
    return build_pool(deployment, [deployment.kv_cache_memory_bytes or 0])


@pytest.mark.parametrize("start", [s for s in STARTS if s["started"]], ids=lambda start: start["tag"])
def test_the_pool_is_the_one_a_real_server_made(start: dict[str, Any]) -> None:
    pool = pool_given(start)
    assert pool.num_blocks == start["num_blocks"]
    assert pool.size_tokens == start["size_tokens"]
    assert pool.block_size == start["block_size"]
    assert pool.max_concurrency == start["max_concurrency"]


@pytest.mark.parametrize(
    "start", [s for s in STARTS if not s["started"] and s["kv_cache_gib"] != "0.5"], ids=lambda start: start["tag"]
)
def test_what_a_real_server_refused_is_refused(start: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        pool_given(start)


def planned_deployment(case: dict[str, Any]) -> Deployment:
    config = {**(BY_TAG[case["base"]] if case["base"] else {}), **case["set"]}
    for key in case["drop"]:
        del config[key]
    arguments = dict(case["args"])
    arguments["hybrid_kv_cache_manager"] = not arguments.pop("disable_hybrid_kv_cache_manager", False)
    arguments["kv"] = arguments.pop("kv_cache_dtype", "auto")
    arguments["mamba_ssm_cache_dtype"] = arguments.pop("ssm", "float32")
    arguments.setdefault("dtype", "bfloat16")
    return resolve_deployment(read_config(config, case["id"]), device="cpu", **arguments)


def planned_pool(case: dict[str, Any]) -> tuple[Deployment, Pool]:
    deployment = planned_deployment(case)
    return deployment, build_pool(deployment, [case["args"]["kv_cache_memory_bytes"]])


@pytest.mark.parametrize("case", PLANNED, ids=lambda case: case["id"])
def test_the_pool_is_the_one_vllms_own_code_plans(case: dict[str, Any]) -> None:
    if "refused" in case:
        with pytest.raises(CalibrationError):
            planned_pool(case)
        return
    deployment, pool = planned_pool(case)
    assert (pool.num_blocks, pool.size_tokens, pool.block_size) == (
        case["num_blocks"],
        case["size_tokens"],
        case["block_size"],
    )
    assert pool.max_concurrency == case["max_concurrency"]
    for key in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        assert getattr(deployment, key) == case[key]


def gpu_deployment(model: str, **changes: Any) -> Deployment:
    return resolve_deployment(find_model(model), gpu=find_gpu(changes.pop("gpu", "h100-sxm")), **changes)


def test_the_null_block_counts_in_the_pool_but_not_for_the_first_request() -> None:
    four = resolve_deployment(find_model("llama-3.2-1b"), device="cpu", max_model_len=512, num_gpu_blocks_override=4)
    refusal = start_refusal(four, [0])
    assert refusal is not None
    assert "the longest that fits is 384" in refusal.message
    five = resolve_deployment(find_model("llama-3.2-1b"), device="cpu", max_model_len=512, num_gpu_blocks_override=5)
    pool = build_pool(five, [0])
    assert (pool.num_blocks, pool.usable_blocks, pool.size_tokens) == (5, 4, 640)


def test_no_memory_is_no_pool_and_a_refusal() -> None:
    deployment = gpu_deployment("llama-3.1-8b")
    pool = pool_of(deployment, [-5])
    assert (pool.num_blocks, pool.usable_blocks, pool.bytes) == (0, 0, 0)
    with pytest.raises(InputError, match="no memory for the KV cache: 0 bytes are left"):
        build_pool(deployment, [-5])


def test_a_pool_too_small_for_one_token_says_so() -> None:
    deployment = resolve_deployment(
        find_model("gemma-3-27b"), device="cpu", max_model_len=4096, num_gpu_blocks_override=3
    )
    with pytest.raises(InputError, match="not even one token fits"):
        build_pool(deployment, [0])


def test_kernel_blocks_of_devices_and_caches() -> None:
    assert kernel_block(gpu_deployment("llama-3.1-8b")) == 16
    assert kernel_block(gpu_deployment("deepseek-v3", gpu="h200-sxm", tp=8)) == 16
    assert kernel_block(gpu_deployment("deepseek-v3", gpu="h200-sxm", tp=8, kv="fp8")) == 64
    assert kernel_block(gpu_deployment("deepseek-v3", gpu="b200-sxm", tp=8)) == 32
    given_pool = resolve_deployment(find_model("deepseek-v3"), kv_cache_memory_bytes=GIB)
    assert kernel_block(given_pool) == 16


def test_a_block_size_the_kernels_do_not_take_is_refused() -> None:
    deployment = gpu_deployment("llama-3.1-8b", block_size=24, max_model_len=4096)
    with pytest.raises(InputError, match="block_size = 24, expected a multiple of 16 on cuda"):
        build_pool(deployment, [8 * GIB])


def test_key_value_heads_are_copied_where_ranks_outnumber_them_and_mla_is_whole() -> None:
    def block_bytes(model: str, **changes: Any) -> list[int]:
        deployment = gpu_deployment(model, **changes)
        return stage_bytes_per_block(deployment, cache_groups(deployment))

    assert block_bytes("llama-3.3-70b", tp=4) == [16 * 81920]
    assert block_bytes("qwen3-235b-a22b", tp=8) == [16 * 192512 // 4]
    assert block_bytes("deepseek-v3", gpu="h200-sxm", tp=8) == [16 * 70272]


def test_packed_caches_have_their_own_sizes() -> None:
    ds = gpu_deployment("deepseek-v3", gpu="h200-sxm", tp=8, kv="fp8_ds_mla")
    assert layer_caches(ds)[0][1].page_bytes == 64 * 656
    nvfp4 = gpu_deployment("llama-3.1-8b", kv="nvfp4")
    # 4 bits a number and a scale byte for 16 of them: 128 / 2 + 128 / 16 bytes a head and side
    assert layer_caches(nvfp4)[0][1].page_bytes == 16 * 8 * 2 * 72
    per_head = gpu_deployment("llama-3.1-8b", kv="int8_per_token_head")
    assert layer_caches(per_head)[0][1].page_bytes == 16 * 8 * 2 * (128 + 4)


def test_hybrid_groups_of_known_models() -> None:
    def sizes(model: str, **changes: Any) -> list[tuple[str, int]]:
        return [(g.cache.kind, len(g.layers)) for g in cache_groups(gpu_deployment(model, **changes))]

    assert sizes("gpt-oss-120b") == [("sliding", 18), ("full", 18)]
    gemma = sizes("gemma-3-27b")
    assert sorted(gemma) == sorted([("full", 10), *[("sliding", 9)] * 4, *[("sliding", 8)] * 2])
    assert sizes("llama-4-scout", tp=8) == [("chunked", 12)] * 3 + [("full", 12)]
    assert sizes("llama-3.1-8b") == [("full", 32)]


def test_a_hybrid_raises_its_block_size_until_an_attention_page_covers_a_state() -> None:
    deployment = gpu_deployment("qwen3-next-80b-a3b", tp=4)
    # state of one layer and rank: (8192 channels * 3 + 32 heads * 128 * 128) / 4 in 16 bits
    state = (8192 * 3 + 32 * 128 * 128) // 4 * 2
    token = 1 * 2 * 256 * 2
    block = primary_block_size(deployment)
    assert block % 16 == 0
    assert (block - 16) * token < state <= block * token


def test_states_without_attention_beside_them_keep_the_asked_block_or_16_on_any_device() -> None:
    """Seen on a real vLLM 0.32: the CPU's default of 128 comes after the states have taken theirs."""
    config = {**BY_TAG["qwen3next_max_model_len_512"], "layer_types": ["linear_attention"] * 8}
    for asked, block in ((None, 16), (96, 96)):
        deployment = resolve_deployment(
            read_config(config, "x"), device="cpu", block_size=asked, kv_cache_memory_bytes=GIB
        )
        assert pool_of(deployment, [GIB]).block_size == block


def test_state_dtypes_follow_the_model_on_gpus() -> None:
    assert gpu_deployment("qwen3.5-27b").mamba_ssm_cache_dtype == "float32"
    assert gpu_deployment("qwen3-next-80b-a3b", tp=4).mamba_ssm_cache_dtype == "bfloat16"


def test_more_sequences_than_state_blocks_are_refused_on_gpus_with_graphs() -> None:
    refused = gpu_deployment("qwen3.5-27b", max_model_len=4096, max_num_seqs=512, num_gpu_blocks_override=300)
    with pytest.raises(InputError, match="max_num_seqs = 512, expected at most the 300 blocks of the pool"):
        build_pool(refused, [0])
    eager = gpu_deployment(
        "qwen3.5-27b", max_model_len=4096, max_num_seqs=512, num_gpu_blocks_override=300, enforce_eager=True
    )
    assert build_pool(eager, [0]).num_blocks == 300


def test_chunked_layers_are_kept_whole_before_vllm_0_23() -> None:
    old = cache_groups(gpu_deployment("llama-4-scout", tp=8, vllm_version="0.15.1"))
    assert [(group.cache.kind, len(group.layers)) for group in old] == [("full", 48)]
    assert len(cache_groups(gpu_deployment("llama-4-scout", tp=8, vllm_version="0.23.0"))) == 4


def test_the_hybrid_manager_cannot_be_disabled_for_unlike_caches() -> None:
    deployment = gpu_deployment("qwen3-next-80b-a3b", tp=4, hybrid_kv_cache_manager=False)
    with pytest.raises(Unsupported, match="cannot be disabled"):
        cache_groups(deployment)


def test_pipeline_stages_divide_as_vllm_divides() -> None:
    assert pipeline_stages(80, 4) == [20, 20, 20, 20]
    assert pipeline_stages(61, 4) == [15, 15, 16, 15]
    assert pipeline_stages(30, 4) == [7, 8, 8, 7]
    assert pipeline_stages(7, 1) == [7]


def test_the_pool_of_a_pipeline_is_the_smallest_of_its_stages() -> None:
    deployment = gpu_deployment("llama-3.1-405b", gpu="h200-sxm", tp=8, pp=4, max_model_len=8192)
    per_stage = stage_bytes_per_block(deployment, cache_groups(deployment))
    assert per_stage == [layers * 16 * 512 for layers in (31, 32, 32, 31)]
    pool = build_pool(deployment, [10 * GIB, 9 * GIB, 10 * GIB, 10 * GIB])
    assert pool.num_blocks == 9 * GIB // per_stage[1]


def test_in_flight_tokens_widen_a_window_with_asynchronous_scheduling() -> None:
    sync = gpu_deployment("gpt-oss-20b", vllm_version="0.11.0", max_num_batched_tokens=2048)
    now = gpu_deployment("gpt-oss-20b", max_num_batched_tokens=2048)
    assert (sync.max_in_flight_tokens, now.max_in_flight_tokens) == (2048, 4096)
    (sliding,) = [g for g in cache_groups(now) if g.cache.kind == "sliding"]
    assert sliding.blocks_at_most(100_000, 4096) == -(-(127 + 4096) // 16) + 1


@given(blocks=st.integers(1, 400), limit=st.integers(1, 5000))
def test_the_longest_request_fits_and_one_token_more_does_not(blocks: int, limit: int) -> None:
    groups = cache_groups(resolve_deployment(find_model("gpt-oss-20b"), device="cpu", kv_cache_memory_bytes=GIB))
    longest = longest_request(groups, blocks, 256, limit)
    if longest:
        assert request_blocks(groups, longest, 256) <= blocks
    if longest < limit:
        assert request_blocks(groups, longest + 1, 256) > blocks
