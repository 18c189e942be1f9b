"""Combinations side by side, and the fewest GPUs that fit."""

from __future__ import annotations

import pytest

from calibration.candidates import Build, Candidate, Choice, choices, compare, fitting_sizes, smallest_fit
from calibration.catalog import find_gpu, find_model
from calibration.deployment import Deployment, resolve_deployment
from calibration.errors import InputError
from calibration.limits import Slo
from calibration.plan import Load

LOAD = Load(1000, 500, True)


def compared(model: str, options: list[Choice], slo: Slo | None = None) -> list[Candidate]:
    def build(gpu: str | None, tp: int, pp: int, weights: str, kv: str) -> Deployment:
        device = None if gpu is None else find_gpu(gpu)
        given = (1 << 34) if gpu is None else None
        return resolve_deployment(
            find_model(model),
            gpu=device,
            tp=tp,
            pp=pp,
            weights=weights,
            kv=kv,
            kv_cache_memory_bytes=given,
            max_model_len=8192,
        )

    return compare(options, build, lambda _: LOAD, slo or Slo())


def test_every_combination_is_there_once() -> None:
    found = list(choices(["a", "b"], [1, 2], [1], ["fp8"], ["auto", "fp8"]))
    assert len(found) == len(set(found)) == 8
    assert found[0] == Choice("a", 1, 1, "fp8", "auto")
    assert found[-1] == Choice("b", 2, 1, "fp8", "fp8")


def test_combinations_are_planned_in_order_and_say_why_not() -> None:
    options = list(choices(["h100-sxm"], [1, 3, 4], [1], ["fp8"], ["auto"]))
    too_big, refused, good = compared("llama-3.3-70b", options)
    assert not too_big.fits
    assert "leave nothing of" in too_big.reason
    assert too_big.limits is None
    assert too_big.tokens_per_s_per_gpu is None
    assert refused.plan is None
    assert refused.reason.startswith("tp = 3, expected a divisor")
    assert not refused.fits
    assert good.fits
    assert good.limits is not None
    assert good.point is not None
    assert good.reason == ""
    assert good.tokens_per_s_per_gpu == good.point.output_tokens_per_s / 4


def test_more_gpus_are_faster_for_one_stream_and_hold_more() -> None:
    two, four = compared("llama-3.3-70b", list(choices(["h200-sxm"], [2, 4], [1], ["fp8"], ["auto"])))
    assert two.limits is not None
    assert four.limits is not None
    assert four.limits.kv_staggered > 2 * two.limits.kv_staggered
    assert two.point is not None
    assert four.point is not None
    assert four.point.tpot_s < two.point.tpot_s


def test_a_limit_on_latency_counts_in_a_comparison() -> None:
    (found,) = compared("llama-3.1-8b", [Choice("h100-sxm", 1, 1, "auto", "auto")], Slo(tpot_s=0.0085))
    assert found.limits is not None
    assert found.limits.binding == "tpot"
    assert found.point is not None
    assert found.point.tpot_s == pytest.approx(0.0085, rel=1e-3)


def test_a_given_pool_without_a_device_says_so() -> None:
    (found,) = compared("llama-3.1-8b", [Choice(None, 1, 1, "auto", "auto")])
    assert "no step time without a device" in found.reason


def test_sizes_grow_by_powers_of_two_and_then_by_nodes() -> None:
    sizes = list(fitting_sizes())
    assert sizes[:6] == [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 3)]
    assert sizes[-1] == (8, 8)
    assert [tp * pp for tp, pp in sizes] == sorted(tp * pp for tp, pp in sizes)


@pytest.mark.parametrize(
    ("model", "gpu", "weights", "ways"),
    [
        ("llama-3.1-8b", "l40s", "auto", (1, 1)),
        ("llama-3.3-70b", "h100-sxm", "fp8", (2, 1)),
        ("deepseek-v3", "h200-sxm", "auto", (8, 1)),
        # 690 GB: eight H100 of 80 GB are too few
        ("deepseek-v3", "h100-sxm", "auto", (8, 2)),
    ],
)
def test_the_fewest_gpus_that_fit(model: str, gpu: str, weights: str, ways: tuple[int, int]) -> None:
    plan = smallest_fit(gpu, weights, "auto", builder(model), lambda _: LOAD)
    assert (plan.deployment.tp, plan.deployment.pp) == ways
    assert plan.kv_full >= 1


def builder(model: str) -> Build:
    def build(gpu: str | None, tp: int, pp: int, weights: str, kv: str) -> Deployment:
        assert gpu is not None
        return resolve_deployment(
            find_model(model), gpu=find_gpu(gpu), tp=tp, pp=pp, weights=weights, kv=kv, max_model_len=8192
        )

    return build


def test_what_is_too_long_for_its_pool_needs_more() -> None:
    def long(deployment: Deployment) -> Load:
        return Load(7000, 1000, True)

    # 16 layers of 8 heads of 64: one T4 holds the model and several such streams; TP 16 of 9 heads is never tried
    assert smallest_fit("t4", "bf16", "auto", builder("llama-3.2-1b"), long).deployment.tp == 1
    # 9 heads are divided by no power of two, so nothing but one GPU can be tried
    with pytest.raises(InputError, match="expected a divisor of the 9 attention heads"):
        smallest_fit("t4", "bf16", "auto", builder("smollm2-135m"), lambda _: Load(8000, 8000, True))


def test_what_no_number_of_gpus_holds_is_refused() -> None:
    with pytest.raises(InputError, match=r"nothing up to 64 x t4 fits: .*GB"):
        smallest_fit("t4", "bf16", "auto", builder("kimi-k2.5"), lambda _: LOAD)
