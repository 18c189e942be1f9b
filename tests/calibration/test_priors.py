"""Prices and the factors they make: by generation, format, version."""

from __future__ import annotations

from typing import Any

import pytest

from calibration.catalog import find_gpu, find_model
from calibration.deployment import Deployment, resolve_deployment
from calibration.errors import InputError, Unsupported
from calibration.factors import FACTORS
from calibration.priors import factor_values, generation, generation_of, physics_of, prior_factors


def deployed(model: str = "llama-3.1-70b", gpu: str | None = "h100-sxm", **changes: Any) -> Deployment:
    return resolve_deployment(find_model(model), gpu=None if gpu is None else find_gpu(gpu), **changes)


def value(name: str, deployment: Deployment) -> float:
    return prior_factors(deployment).value(name)


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("h100-sxm", "hopper"),
        ("h200-sxm", "hopper"),
        ("b200-sxm", "blackwell"),
        ("b300-sxm", "blackwell"),
        ("a100-80-sxm", "ampere"),
        ("rtx-a6000", "ampere"),
        ("l40s", "ada"),
        ("l4", "ada"),
        ("mi300x", "generic"),
        ("rtx-5090", "generic"),
        ("v100-32-sxm", "generic"),
    ],
)
def test_a_gpu_has_the_prices_of_its_generation(gpu: str, name: str) -> None:
    assert generation_of(deployed("llama-3.1-8b", gpu, max_model_len=4096)).name == name


def test_a_cpu_is_timed_without_a_gpu() -> None:
    cpu = deployed("smollm2-135m", None, device="cpu", kv_cache_memory_bytes=1 << 30)
    assert generation_of(cpu).name == "cpu"
    assert prior_factors(cpu).value("step_overhead") == pytest.approx(0.025, rel=0.2)


def test_a_pool_without_any_device_cannot_be_timed() -> None:
    with pytest.raises(Unsupported, match="no step time without a device"):
        physics_of(deployed("llama-3.1-8b", None, kv_cache_memory_bytes=1 << 34, max_model_len=4096))


def test_an_unknown_generation_is_refused() -> None:
    with pytest.raises(InputError, match="generation = 'volta', expected one of hopper"):
        generation("volta")


@pytest.mark.parametrize("name", ["hopper", "blackwell", "ampere", "ada", "generic", "cpu"])
def test_every_generation_is_complete_and_says_where_it_comes_from(name: str) -> None:
    kind = generation(name)
    assert set(kind.log_sd) == set(FACTORS)
    assert set(kind.residual_log_sd) == {"tpot", "ttft", "throughput", "per_user"}
    assert len(kind.evidence) > 30
    assert all(price >= 0 for price in kind.prices)


def test_what_was_not_measured_is_wide() -> None:
    assert generation("generic").log_sd["step_overhead"] > 2 * generation("hopper").log_sd["step_overhead"]


def test_the_overhead_is_linear_in_layers_and_weight_bytes() -> None:
    # the law of the public rows: 75 us * L + W / (TP * BW), at TP 1 to 8 on H200
    for tp in (1, 2, 4, 8):
        d = deployed(gpu="h200-sxm", tp=tp, weights="fp8", vllm_version="0.18.0")
        law = 75e-6 * 80 + 70.55e9 / (tp * 4.8e12)
        assert value("step_overhead", d) == pytest.approx(law, rel=0.08)


def test_nvfp4_reads_slower_than_its_bytes() -> None:
    d = deployed(gpu="b200-sxm", weights="nvfp4")
    amounts = physics_of(d)
    prices = generation("blackwell").prices
    plain = factor_values(prices._replace(weight_read_nvfp4=1.0), amounts, d)["step_overhead"]
    read = prices.weight_read * amounts.weight_bytes / amounts.bandwidth_bytes_per_s
    assert value("step_overhead", d) - plain == pytest.approx((prices.weight_read_nvfp4 - 1) * read)


def test_older_versions_pay_more_for_experts() -> None:
    def overhead(version: str) -> float:
        return value("step_overhead", deployed("minimax-m2", tp=4, vllm_version=version))

    assert overhead("0.12.0") > overhead("0.16.0") > overhead("0.18.0") == overhead("0.19.0") == overhead("0.32.0")


def test_dense_models_pay_nothing_for_a_version_but_its_scheduler() -> None:
    def factors(version: str) -> tuple[float, float]:
        d = deployed(tp=2, weights="fp8", vllm_version=version)
        return value("step_overhead", d), value("per_sequence", d)

    new, old = factors("0.14.0"), factors("0.13.0")
    prices = generation("hopper").prices
    assert old[0] - new[0] == pytest.approx(prices.sync_step_s)
    assert old[1] - new[1] == pytest.approx(prices.sync_sequence_s)
    assert factors("0.32.0") == new


def test_a_thinner_slice_of_an_expert_is_read_less_efficiently() -> None:
    factors = [value("expert_read_factor", deployed("minimax-m2", tp=tp)) for tp in (1, 2, 4, 8)]
    assert factors == sorted(factors)
    assert factors[0] == pytest.approx(0.90, abs=0.03)


def test_unpacking_goes_at_a_rate_of_its_own() -> None:
    h100 = value("expert_read_factor", deployed("gpt-oss-120b", tp=2))
    h200 = value("expert_read_factor", deployed("gpt-oss-120b", "h200-sxm", tp=2))
    # as many bytes a second on both, though H200's memory gives 1.43 times as many
    assert h200 / h100 == pytest.approx(4.8 / 3.35, rel=0.05)


def test_without_experts_their_factor_is_the_kernels() -> None:
    assert value("expert_read_factor", deployed()) == generation("hopper").prices.expert_read


@pytest.mark.parametrize(("gpu", "ratio"), [("h200-sxm", 2.105), ("b200-sxm", 1.0)])
def test_an_fp8_cache_is_read_no_faster_on_hopper(gpu: str, ratio: float) -> None:
    full, half = (value("kv_read_factor", deployed(gpu=gpu, tp=2, kv=kv)) for kv in ("bf16", "fp8"))
    assert half / full == pytest.approx(ratio)


def test_all_reduce_makes_prompts_and_sequences_dearer() -> None:
    one, eight = (deployed(gpu="h200-sxm", tp=tp, weights="fp8") for tp in (1, 8))
    assert value("prefill_factor", eight) > 1.4 * value("prefill_factor", one)
    sent = 80 * 2 * 2 * 7 / 8 * 8192 * 2 / 450e9
    prices = generation("hopper").prices
    compute = physics_of(one).compute_s_per_token * prices.sequence_compute
    assert value("per_sequence", eight) - value("per_sequence", one) == pytest.approx(
        prices.sequence_reduce * sent - compute * 7 / 8, rel=0.02
    )
