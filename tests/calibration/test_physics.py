"""Amounts of a step: bytes and operations on one rank, against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest

from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.errors import Unsupported
from calibration.physics import Physics, expected_share, measure


def amounts(model: str, gpu: str = "h100-sxm", **changes: Any) -> Physics:
    return measure(resolve_deployment(find_model(model), gpu=find_gpu(gpu), **changes))


def test_weights_are_read_but_for_the_input_embedding() -> None:
    found = amounts("llama-3.1-8b")
    # 8.030 B parameters in bf16, without the look-up table of 128256 x 4096
    assert found.weight_bytes == pytest.approx(2 * (8_030_261_248 - 128256 * 4096), rel=1e-4)
    assert found.experts == ()
    assert found.expert_bytes == 0


def test_a_tied_embedding_is_read_for_the_logits() -> None:
    found = amounts("llama-3.2-1b")
    assert found.weight_bytes == pytest.approx(2 * 1_235_814_400, rel=1e-4)


def test_tensor_parallelism_divides_the_weights() -> None:
    one, four = amounts("llama-3.1-8b"), amounts("llama-3.1-8b", tp=4)
    assert four.weight_bytes == pytest.approx(one.weight_bytes / 4, rel=1e-3)
    assert four.compute_s_per_token == pytest.approx(one.compute_s_per_token / 4)
    # two all-reduces a layer send 2 * 3/4 of 4096 x 2 bytes each; one GPU sends nothing
    assert four.reduced_bytes_per_token == pytest.approx(32 * 2 * 2 * 3 / 4 * 4096 * 2)
    assert one.reduced_bytes_per_token == 0


def test_a_pipeline_reads_the_same_weights_one_stage_after_another() -> None:
    assert amounts("llama-3.1-8b", pp=2).weight_bytes == amounts("llama-3.1-8b").weight_bytes


def test_fp8_halves_the_bytes_and_doubles_the_rate() -> None:
    full, half = amounts("llama-3.1-70b", tp=2), amounts("llama-3.1-70b", tp=2, weights="fp8")
    assert half.weight_bytes / full.weight_bytes == pytest.approx(0.508, abs=0.005)
    assert half.compute_s_per_token / full.compute_s_per_token == pytest.approx(989.4 / 1978.9, rel=1e-3)


def test_a_device_without_units_computes_in_16_bits() -> None:
    a100 = amounts("llama-3.1-70b", "a100-80-sxm", tp=4, weights="fp8")
    assert a100.compute_s_per_token == amounts("llama-3.1-70b", "a100-80-sxm", tp=4).compute_s_per_token


def test_experts_are_counted_by_layer_and_rank() -> None:
    found = amounts("minimax-m2", tp=4)
    (group,) = found.experts
    assert (group.layers, group.total, group.per_token) == (62, 256, 8)
    # 224.68 B routed parameters, FP8 with a scale for each 128 x 128
    assert group.bytes == pytest.approx(224_680_476_672 * (1 + 4 / 16384) / 4, rel=1e-3)
    assert (found.moe_layers, found.fp8_expert_layers, found.mla_layers) == (62, 62, 0)
    assert not found.unpacks_experts


def test_experts_hit_grow_with_the_batch_and_never_exceed_all() -> None:
    found = amounts("gpt-oss-120b", tp=2)
    assert found.expert_bytes_hit(1) == pytest.approx(found.expert_bytes * 4 / 128)
    assert found.expert_bytes_hit(32) == pytest.approx(found.expert_bytes * (1 - (1 - 4 / 128) ** 32))
    assert found.expert_bytes_hit(10_000) == pytest.approx(found.expert_bytes)
    assert found.expert_bytes_hit(0) == 0


def test_replicas_share_the_experts_and_the_tokens_that_choose_them() -> None:
    one, two = amounts("gpt-oss-120b", tp=2), amounts("gpt-oss-120b", tp=2, dp=2)
    assert two.expert_bytes == pytest.approx(one.expert_bytes / 2, rel=1e-3)
    assert two.expert_bytes_hit(8) / two.expert_bytes == pytest.approx(one.expert_bytes_hit(16) / one.expert_bytes)


@pytest.mark.parametrize(
    ("model", "gpu", "weights", "unpacked"),
    [
        ("gpt-oss-120b", "h100-sxm", "auto", True),
        ("gpt-oss-120b", "b200-sxm", "auto", False),
        ("kimi-k2.5", "h200-sxm", "auto", True),
        ("kimi-k2.5", "b200-sxm", "nvfp4", False),
        ("mixtral-8x7b", "h100-sxm", "bf16", False),
        ("llama-3.1-70b", "h100-sxm", "int4", True),
    ],
)
def test_formats_without_units_are_unpacked(model: str, gpu: str, weights: str, unpacked: bool) -> None:
    assert amounts(model, gpu, tp=8, weights=weights).unpacks_experts is unpacked


def test_a_window_is_read_no_further_than_it_is_long() -> None:
    found = amounts("gpt-oss-120b")
    token = 18 * 2 * 8 * 64 * 2
    assert found.kv_bytes(1, 100) == pytest.approx(2 * token * 100)
    assert found.kv_bytes(1, 10_000) == pytest.approx(token * (10_000 + 128))
    assert found.kv_bytes(4, 40_000) == pytest.approx(4 * token * (10_000 + 128))


def test_mla_reads_the_latent_whole_on_every_rank() -> None:
    assert amounts("deepseek-v3", tp=8).kv_bytes(1, 1000) == pytest.approx(70_272 * 1000)


def test_a_recurrent_state_is_read_and_written_whatever_the_length() -> None:
    found = amounts("qwen3-next-80b-a3b", tp=2, max_model_len=8192)
    assert found.state_bytes_per_sequence > 0
    short, long = found.kv_bytes(1, 1), found.kv_bytes(1, 1001)
    assert long - short == pytest.approx(1000 * sum(group.kv_bytes_per_token for group in found.attention))
    assert short > 2 * found.state_bytes_per_sequence


def test_without_a_device_there_is_no_time() -> None:
    pool = resolve_deployment(find_model("llama-3.1-8b"), kv_cache_memory_bytes=1 << 34, max_model_len=4096)
    with pytest.raises(Unsupported, match="no step time without a device"):
        measure(pool)


def test_a_device_without_any_rate_is_refused() -> None:
    bare = find_gpu("h100-sxm")
    odd = bare._replace(flops_per_s={"fp64": 1e12})
    deployment = resolve_deployment(find_model("llama-3.1-8b"), gpu=odd)
    with pytest.raises(Unsupported, match="has none of the rates bf16, fp16"):
        measure(deployment)


def test_an_even_router_hits_what_chance_says() -> None:
    assert expected_share(8, 2, 1) == pytest.approx(0.25)
    assert expected_share(8, 2, 0) == 0.0
    assert expected_share(8, 2, 3) == pytest.approx(1 - 0.75**3)
