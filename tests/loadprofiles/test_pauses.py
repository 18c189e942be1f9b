"""Think times: what a distribution means, and that a profile takes one wherever it takes a duration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.load.account import load_of
from harness.load.stages import order_of
from harness.workload.lengths import pauser
from loadprofiles.pauses import mean_pause_s, pauses_of
from loadprofiles.profile import ProfileError, Stage, parse_profile

DISTRIBUTIONS: list[dict[str, Any]] = [
    {"distribution": "fixed", "pause": "2s"},
    {"distribution": "uniform", "low": "500ms", "high": "3s"},
    {"distribution": "exponential", "mean": "2s"},
    {"distribution": "exponential", "mean": "2s", "low": "1s", "high": "5s"},
    {"distribution": "lognormal", "mean": "2s", "std": "3s"},
    {"distribution": "lognormal", "mean": "2s", "std": "3s", "low": "1s", "high": "4s"},
]


@pytest.mark.parametrize("think", DISTRIBUTIONS, ids=lambda think: "-".join(map(str, think.values())))
def test_the_mean_of_the_quantiles_is_the_mean_said(think: dict[str, Any]) -> None:
    known = pauses_of(think)
    assert not isinstance(known, float)
    p = (np.arange(200_000) + 0.5) / 200_000
    assert np.mean([known.quantile_s(float(one)) for one in p]) == pytest.approx(known.mean_s, rel=2e-3)


@given(st.sampled_from(DISTRIBUTIONS), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_quantiles_rise_within_the_bounds(think: dict[str, Any], one: float, two: float) -> None:
    known = pauses_of(think)
    assert not isinstance(known, float)
    low, high = sorted((one, two))
    assert 0 <= known.quantile_s(low) <= known.quantile_s(high)
    most = getattr(known, "high", None)
    assert most is None or known.quantile_s(high) <= most


def test_an_exponential_has_its_quantiles() -> None:
    known = pauses_of({"distribution": "exponential", "mean": 3})
    assert not isinstance(known, float)
    assert known.quantile_s(1 - np.exp(-1.0)) == pytest.approx(3.0)
    assert known.mean_s == 3.0


def test_a_pause_depends_on_its_seed_alone() -> None:
    draw, again = pauser(DISTRIBUTIONS[4]), pauser(DISTRIBUTIONS[4])
    drawn = [draw(f"1/think/0/{number}") for number in range(2000)]
    assert drawn == [again(f"1/think/0/{number}") for number in range(2000)]
    assert len(set(drawn)) == 2000
    assert np.mean(drawn) == pytest.approx(2.0, rel=0.15)
    assert pauser(1.5)("anything") == pauser({"distribution": "fixed", "pause": 1.5})("anything") == 1.5


@pytest.mark.parametrize("think", ["2s", *DISTRIBUTIONS])
def test_a_stage_takes_it_orders_it_and_measures_by_its_mean(think: Any) -> None:
    stages = [{"users": 2, "duration": 5, "think": think, "prompt_tokens": 1, "output_tokens": 1}]
    stage = parse_profile({"name": "x", "stages": stages}, "x").stages[0]
    again = Stage.model_validate({**stage.model_dump(mode="json", exclude_none=True)})
    assert again == stage, "as run.json keeps it"
    order = order_of(stage, 0, start_ns=0, seed=0, grace_s=1.0)
    assert mean_pause_s(order.think) == mean_pause_s(think) == load_of(stage, 0.0).think_s > 0


def test_an_unknown_key_of_a_distribution_is_told_the_known_ones() -> None:
    think = {"distribution": "exponential", "mean": 1, "most": 2}
    with pytest.raises(ProfileError) as refused:
        parse_profile({"name": "x", "stages": [{"users": 2, "duration": 5, "think": think}]}, "x")
    assert refused.value.hint == "known keys here: low, distribution, mean, high"


@pytest.mark.parametrize(
    ("think", "message"),
    [
        ({"distribution": "uniform", "low": "3s", "high": "1s"}, r"low \(3 s\) is above high \(1 s\)"),
        ({"distribution": "exponential", "mean": 0}, "think.mean"),
        ({"distribution": "exponential", "mean": 1, "std": 2}, "unknown key 'stages.0.think.std'"),
        ({"distribution": "normal", "mean": 1}, "'fixed', 'uniform', 'exponential', 'lognormal'"),
        ("soon", "expected a duration"),
    ],
)
def test_what_is_no_think_time_is_refused(think: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_profile({"name": "x", "stages": [{"users": 2, "duration": 5, "think": think}]}, "x")
