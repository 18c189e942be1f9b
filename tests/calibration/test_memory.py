"""Memory of a deployment: overhead by cause, pool left over, what does not fit; and measured servers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from calibration.catalog import find_gpu, find_model
from calibration.deployment import Deployment, resolve_deployment
from calibration.errors import InputError, Unsupported
from calibration.families import read_config
from calibration.memory import kv_bytes_per_token, kv_bytes_per_token_by_stage, plan_memory
from calibration.memory_rows import ScoredRow, score_rows, table
from calibration.overhead import overhead_by_stage

DATA = Path(__file__).resolve().parents[1] / "data" / "model"
GIB = 1 << 30
with (DATA / "public_memory_measurements.csv").open() as lines:
    ROWS = score_rows(csv.DictReader(lines))


def on(model: str, gpu: str = "h100-sxm", **changes: Any) -> Deployment:
    return resolve_deployment(find_model(model), gpu=find_gpu(gpu), **changes)


def text_only(recorded: bool) -> list[ScoredRow]:
    return [row for row in ROWS if row.flags_recorded == recorded and not row.is_multimodal]


@pytest.mark.parametrize("row", text_only(True), ids=lambda row: f"{row.model}-tp{row.tp}")
def test_the_pool_is_within_two_percent_of_the_measured_one_where_the_flags_are_recorded(row: ScoredRow) -> None:
    assert abs(row.error) < 0.02


@pytest.mark.parametrize("row", text_only(False), ids=lambda row: f"{row.model}-tp{row.tp}")
def test_the_pool_is_within_half_a_percent_where_vllms_defaults_are_assumed(row: ScoredRow) -> None:
    assert abs(row.error) < 0.005


def test_the_rows_that_are_far_off_are_the_multimodal_ones() -> None:
    # an image encoder's own activations, and the limits of the first of the two, are not recorded
    assert {row.model.split("/")[1][:13]: round(row.error, 2) for row in ROWS if row.is_multimodal} == {
        "Mistral-Small": -0.1,
        "Llama-4-Scout": 0.15,
    }


def test_every_row_is_listed_with_its_error() -> None:
    text = table(ROWS)
    assert len(text.splitlines()) == len(ROWS) + 1 == 13
    assert "+0.68%" in text
    assert "multimodal" in text


def test_the_sampler_takes_38_bytes_a_logit_and_hidden_states_4_a_number() -> None:
    (found,) = overhead_by_stage(on("llama-3.1-8b", max_num_seqs=100, max_num_batched_tokens=1000))
    assert found.sampler_bytes == 38 * 100 * 128256
    assert found.hidden_bytes == 4 * 1000 * 4096
    assert found.rotary_bytes == 2 * 128 * 131072
    assert found.activation_bytes == found.sampler_bytes + found.hidden_bytes


def test_a_forward_pass_counts_where_it_exceeds_the_sampler() -> None:
    (found,) = overhead_by_stage(on("llama-3.1-8b", max_num_seqs=1, max_num_batched_tokens=8192))
    assert found.forward_bytes == 2 * 8192 * 3 * 14336
    assert found.activation_bytes == found.forward_bytes + found.hidden_bytes


def test_experts_visit_more_tokens_than_a_dense_layer() -> None:
    (found,) = overhead_by_stage(on("mixtral-8x7b", tp=2, max_num_batched_tokens=2048))
    assert found.forward_bytes == 2 * 2048 * 2 * (3 * 14336 // 2 + 4096)
    whole = on("mixtral-8x7b", tp=2, max_num_batched_tokens=2048, expert_parallel=True)
    (spread,) = overhead_by_stage(whole)
    assert spread.forward_bytes == 2 * 2048 * 2 * (3 * 14336 + 4096)


def test_graphs_are_set_aside_from_0_21_on_and_never_when_eager() -> None:
    (new,) = overhead_by_stage(on("llama-3.1-8b"))
    (old,) = overhead_by_stage(on("llama-3.1-8b", vllm_version="0.20.0"))
    (eager,) = overhead_by_stage(on("llama-3.1-8b", enforce_eager=True))
    assert (new.cuda_graph_bytes, old.cuda_graph_bytes, eager.cuda_graph_bytes) == (int(0.7 * GIB), 0, 0)
    assert new.low_bytes < new.total_bytes < new.high_bytes
    assert (old.high_bytes - old.total_bytes, old.total_bytes - old.low_bytes) == (int(0.4 * GIB), int(0.4 * GIB))


def test_the_sampler_runs_on_the_last_stage_and_several_gpus_talk() -> None:
    first, last = overhead_by_stage(on("llama-3.1-8b", pp=2))
    assert (first.sampler_bytes, last.sampler_bytes > 0) == (0, True)
    assert first.runtime_bytes == int(0.55 * GIB)


def test_ten_million_positions_need_a_table_of_two_and_a_half_gib() -> None:
    (found,) = overhead_by_stage(on("llama-4-scout", tp=1, gpu="b300-sxm"))
    assert found.rotary_bytes / GIB == pytest.approx(2.5)


def test_memory_adds_up() -> None:
    plan = plan_memory(on("llama-3.3-70b", tp=2, weights="fp8", max_model_len=8192))
    stage = plan.tightest
    assert stage.overhead is not None
    assert stage.budget_bytes == int(0.92 * 85029027840)
    assert stage.budget_bytes == stage.weights.total_bytes + stage.overhead.total_bytes + stage.kv_bytes
    assert plan.pool is not None
    assert plan.pool.num_blocks == stage.kv_bytes // plan.pool.bytes_per_block
    assert plan.fits
    assert plan.blocks_range is not None
    low, high = plan.blocks_range
    assert low < plan.pool.num_blocks < high


@pytest.mark.parametrize(
    ("model", "changes", "whole", "per_gpu"),
    [
        ("llama-3.3-70b", {"tp": 4}, 327_680, 81_920),
        ("llama-3.3-70b", {"tp": 4, "kv": "fp8"}, 163_840, 40_960),
        ("mistral-small-24b", {}, 163_840, 163_840),
        ("deepseek-v3", {"tp": 8, "gpu": "h200-sxm"}, 70_272, 70_272),
        ("deepseek-v3", {"tp": 8, "gpu": "h200-sxm", "kv": "fp8_ds_mla"}, 40_016, 40_016),
        ("qwen3-235b-a22b", {"tp": 8}, 192_512, 48_128),
        ("llama-3.1-8b", {"pp": 2}, 131_072, 65_536),
    ],
)
def test_kv_bytes_of_a_token_in_the_model_and_on_a_gpu(
    model: str, changes: dict[str, Any], whole: int, per_gpu: int
) -> None:
    deployment = on(model, **changes)
    assert kv_bytes_per_token(deployment) == whole
    assert max(kv_bytes_per_token_by_stage(deployment)) == per_gpu


def test_mistral_small_24b_has_40_layers() -> None:
    assert find_model("mistral-small-24b").num_layers == 40


@pytest.mark.parametrize(("gpu", "tp"), [("h100-sxm", 8), ("h200-sxm", 4)])
def test_deepseek_v3_in_fp8_fits_neither_eight_h100_nor_four_h200(gpu: str, tp: int) -> None:
    plan = plan_memory(on("deepseek-v3", gpu, tp=tp))
    assert not plan.fits
    assert plan.pool is None
    assert "the weights alone need" in plan.reason
    # about 690 GB over all GPUs, with what every rank copies
    assert plan.tightest.weights.total_bytes * tp == pytest.approx(690e9, rel=0.02)


def test_deepseek_v3_in_fp8_fits_eight_h200() -> None:
    plan = plan_memory(on("deepseek-v3", "h200-sxm", tp=8))
    assert plan.fits
    assert plan.pool is not None
    assert plan.pool.size_tokens > 163_840


def test_what_the_overhead_leaves_nothing_for_is_said() -> None:
    plan = plan_memory(on("qwen3-32b", "l40s", tp=2, gpu_memory_utilization=0.72, max_num_seqs=256))
    assert not plan.fits
    assert "leave nothing of" in plan.reason


def test_a_context_longer_than_the_pool_does_not_fit_and_the_longest_that_does_is_named() -> None:
    plan = plan_memory(on("qwen3-32b", max_num_seqs=1024))
    assert not plan.fits
    assert "max_model_len = 40960" in plan.reason
    assert "the longest that fits is" in plan.reason
    assert plan.pool is not None
    assert plan.pool.num_blocks > 0


def test_a_given_pool_needs_no_gpu_and_is_refused_like_a_start() -> None:
    given = resolve_deployment(find_model("llama-3.1-8b"), kv_cache_memory_bytes=32 * GIB, max_model_len=8192)
    plan = plan_memory(given)
    assert plan.pool_is_given
    assert (plan.tightest.budget_bytes, plan.tightest.overhead, plan.blocks_range) == (None, None, None)
    assert plan.pool is not None
    assert plan.pool.num_blocks == 32 * GIB // (16 * 131072)
    too_small = resolve_deployment(find_model("llama-3.1-8b"), kv_cache_memory_bytes=GIB)
    with pytest.raises(InputError, match="max_model_len = 131072: one such request takes"):
        plan_memory(too_small)


def test_a_pool_given_beside_a_gpu_takes_the_place_of_what_is_left() -> None:
    plan = plan_memory(on("llama-3.1-8b", kv_cache_memory_bytes=32 * GIB))
    assert plan.tightest.kv_bytes == 32 * GIB
    assert plan.tightest.overhead is not None


def test_a_model_that_keeps_nothing_has_no_pool_to_size() -> None:
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "--",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
    }
    deployment = resolve_deployment(read_config(config, "x"), kv_cache_memory_bytes=GIB)
    with pytest.raises(Unsupported, match="keeps no cache"):
        plan_memory(deployment)


@pytest.mark.parametrize("override", [None, 513])
def test_the_parts_of_a_gpu_are_all_of_it(override: int | None) -> None:
    plan = plan_memory(on("llama-3.1-8b", max_model_len=8192, num_gpu_blocks_override=override))
    parts = plan.parts
    assert parts is not None
    assert plan.deployment.gpu is not None
    assert sum(parts) == plan.deployment.gpu.usable_bytes
    assert (parts.unused > 0) == (override is not None)
    assert plan.pool is not None
    assert override is None or parts.pool == plan.pool.bytes == 513 * 16 * 131_072
