"""Levels held more than once: which stages are one level, and an interval that holds what the next pass would say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from harness.measure.repeats import METRICS, pooled, repeated_levels


def stage(index: int, users: int | None = 8, tpot_ms: float | None = 20.0, half_ms: float = 0.2, **changes: Any) -> Any:
    value = tpot_ms or 0.0
    interval = {"low": value - half_ms, "high": value + half_ms}
    stats = {"mean": tpot_ms}
    return {
        "index": index,
        "users": users,
        "request_rate": None,
        "valid": True,
        "window": {"start_s": 0.0, "end_s": 10.0, "steady": True},
        "totals": {"prompt_tokens_mean": 64.0, "output_tokens_mean": 100.0},
        "tpot_ms": stats,
        "ttft_ms": stats,
        "e2e_ms": stats,
        "output_tokens_per_s": tpot_ms,
        "intervals": dict.fromkeys(METRICS, interval),
        **changes,
    }


def test_passes_of_a_level_are_one_in_whatever_order_they_ran() -> None:
    stages = [stage(0, 8), stage(1, 2), stage(2, 4), stage(3, 2), stage(4, 8, totals=dict.fromkeys(
        ("prompt_tokens_mean", "output_tokens_mean"), 65.0))]  # fmt: skip
    found = repeated_levels(stages)
    assert [(level.load.users, level.stages, level.left_out) for level in found] == [(2, (1, 3), ())]
    assert all(found[0].metrics[metric] is not None for metric in METRICS)


def test_a_pass_that_is_invalid_or_has_no_window_is_left_out() -> None:
    stages = [stage(0), stage(1, valid=False), stage(2), stage(3, window=None)]
    (level,) = repeated_levels(stages)
    assert (level.stages, level.left_out) == ((0, 2), (1, 3))
    (level,) = repeated_levels([stage(0), stage(1, valid=False)])
    assert (level.stages, level.metrics["tpot_ms"]) == ((0,), None)
    assert level.to_dict()["tpot_ms"] is None


def test_users_that_think_are_another_load() -> None:
    stages = [stage(0), stage(1), stage(2)]
    planned = [{"think": think, "repetition": number} for think, number in ((0.0, 0), (2.0, 0), (0.0, 1))]
    assert [level.stages for level in repeated_levels(stages, planned)] == [(0, 2)]


def test_lengths_that_are_drawn_are_one_load_by_what_was_asked() -> None:
    asked = {"users": 8, "output_tokens": {"distribution": "uniform", "low": 30, "high": 100}}
    means = [{"prompt_tokens_mean": 64.0, "output_tokens_mean": mean} for mean in (60.0, 70.0, 68.0)]
    stages = [stage(index, totals=mean) for index, mean in enumerate(means)]
    planned = [asked | {"repetition": 0}, asked | {"repetition": 1}, asked | {"output_tokens": 68, "repetition": 0}]
    assert [level.stages for level in repeated_levels(stages, planned)] == [(0, 1)]
    # what an imported run has: its level alone
    assert [level.stages for level in repeated_levels(stages, [{"users": 8}] * 3)] == [(1, 2)]


def test_rates_and_users_are_told_apart() -> None:
    stages = [stage(0, 8), stage(1, 8, request_rate=8.0), stage(2, None, request_rate=8.0)]
    assert [level.stages for level in repeated_levels(stages)] == [(1, 2)]


def test_without_token_counts_nothing_is_known_to_be_alike() -> None:
    unknown = dict.fromkeys(("prompt_tokens_mean", "output_tokens_mean"))
    assert repeated_levels([stage(0, totals=unknown), stage(1, totals=unknown)]) == []


def test_passes_far_apart_widen_what_each_says_of_itself() -> None:
    found = pooled([stage(0, tpot_ms=20.0), stage(1, tpot_ms=22.0), stage(2, tpot_ms=21.0)], "tpot_ms")
    assert found is not None
    logs = np.log([20.0, 22.0, 21.0])
    assert found.value == pytest.approx(math.exp(logs.mean()))
    assert found.spread == pytest.approx(logs.std(ddof=1))
    # Student's 95 % quantile with two degrees of freedom
    half = 2.919986 * logs.std(ddof=1) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((found.value * math.exp(-half), found.value * math.exp(half)))


def test_passes_that_agree_are_as_sure_as_what_each_says() -> None:
    found = pooled([stage(i, tpot_ms=20.0, half_ms=0.4) for i in range(4)], "tpot_ms")
    assert found is not None
    assert math.log(found.high / found.value) == pytest.approx(0.4 / 20 / 2)


def test_a_pass_without_an_interval_still_counts() -> None:
    found = pooled([stage(0, tpot_ms=20.0, intervals=None), stage(1, tpot_ms=21.0, intervals=None)], "tpot_ms")
    assert found is not None
    assert found.low < 20.0 < 21.0 < found.high
    assert pooled([stage(0), stage(1, tpot_ms=None)], "tpot_ms") is None


@pytest.mark.parametrize("passes", [2, 3, 5])
@pytest.mark.parametrize("apart", [0.0, 0.01, 0.05])
def test_the_interval_holds_what_the_server_does_on_average(passes: int, apart: float) -> None:
    """Passes scatter by ``apart`` beyond the 1 % that each knows of itself: at least nine of ten intervals hold the truth,
    where those of single passes would not."""
    rng = np.random.default_rng(passes)
    own = 0.01
    inside, single = [], []
    for _ in range(600):
        values = 20.0 * np.exp(rng.normal(0, apart, passes) + rng.normal(0, own, passes))
        rows = [stage(i, tpot_ms=float(v), half_ms=1.645 * own * float(v)) for i, v in enumerate(values)]
        found = pooled(rows, "tpot_ms")
        assert found is not None
        inside.append(found.low <= 20.0 <= found.high)
        end = rows[0]["intervals"]["tpot_ms"]
        single.append(end["low"] <= 20.0 <= end["high"])
    assert np.mean(inside) >= 0.88
    if apart == 0.05:
        assert np.mean(single) < 0.5
