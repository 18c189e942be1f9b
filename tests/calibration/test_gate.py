"""Two runs side by side: intervals that hold, rules read strictly, verdicts that are no noise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.errors import InputError
from calibration.gate import (
    METRICS,
    Blocked,
    LoadKey,
    Options,
    Row,
    Sample,
    Spot,
    compare_samples,
    difference_interval,
    matched,
    mean_spot,
    quantile_spot,
    rate_spot,
    ratio_interval,
    spot_of,
)
from calibration.gate_rules import parse_rule, rulings
from calibration.trace import Floats

LOAD = LoadKey(8, None, 256.0, 128.0)
BLOCKS = 20


def correlated(rng: np.random.Generator, n: int, rho: float = 0.8) -> Floats:
    """An autoregressive series about 100 with standard deviation 5."""
    noise = rng.normal(0, 5 * math.sqrt(1 - rho * rho), n)
    values = np.empty(n)
    values[0] = rng.normal(0, 5)
    for i in range(1, n):
        values[i] = rho * values[i - 1] + noise[i]
    return 100 + values


def blocked(values: Floats, blocks: int = BLOCKS) -> Blocked:
    """In order of time, blocks equally long."""
    return Blocked(values, (np.arange(len(values)) * blocks // len(values)).astype(np.int64), blocks)


def sample(seed: int, load: LoadKey = LOAD, slower: float = 1.0, n: int = 800, failed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    latencies = {name: blocked(correlated(rng, n) * slower) for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
    rates = {"output_tokens_per_s": correlated(rng, BLOCKS, 0.0) / slower}
    return Sample(load, latencies, rates, failed, n)


def by_metric(rows: list[Row]) -> dict[str, Row]:
    return {row.metric: row for row in rows}


@pytest.mark.parametrize(("kind", "truth"), [("mean", 100.0), ("p90", 100 + 5 * 1.2816)])
def test_intervals_of_correlated_requests_hold_the_truth(kind: str, truth: float) -> None:
    """95 % intervals; those of independent requests would hold it in about 48 of 100."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        values = blocked(correlated(rng, 800))
        spot = mean_spot(values, 0.05) if kind == "mean" else quantile_spot(values, 0.9, 0.05)
        held += spot.low <= truth <= spot.high
    assert held >= 180


def test_a_rate_has_the_interval_of_its_blocks() -> None:
    rng = np.random.default_rng(2)
    spots = [rate_spot(rng.normal(50, 4, 10), 0.1) for _ in range(300)]
    held = sum(spot is not None and spot.low <= 50 <= spot.high for spot in spots)
    assert 255 <= held <= 285
    assert rate_spot(np.zeros(5), 0.1) is None
    assert rate_spot(np.array([3.0]), 0.1) == Spot(3.0, 0.0, math.inf)


def test_a_percentile_that_the_sample_does_not_hold_has_no_upper_end() -> None:
    spot = quantile_spot(blocked(np.linspace(1, 2, 60)), 0.99, 0.05)
    assert spot.high == math.inf
    assert 1 < spot.low < spot.value < 2


def test_equal_pairs_are_seldom_called_different() -> None:
    worse = 0
    for seed in range(40):
        rows = compare_samples([sample(2 * seed)], [sample(2 * seed + 1)])
        worse += any(row.verdict == "worse" for row in rows)
    assert worse <= 2


def test_a_regression_is_found_and_named() -> None:
    found = 0
    for seed in range(30):
        rows = by_metric(compare_samples([sample(2 * seed)], [sample(2 * seed + 1, slower=1.1)]))
        found += rows["tpot_ms.mean"].verdict == "worse"
        assert rows["tpot_ms.mean"].change == pytest.approx(0.1, abs=0.05)
    assert found >= 29
    rows = by_metric(compare_samples([sample(1)], [sample(2, slower=0.8)]))
    assert rows["output_tokens_per_s"].verdict == "better"
    assert rows["ttft_ms.mean"].verdict == "better"


def test_a_small_change_is_no_change_however_sure() -> None:
    sure = blocked(np.full(400, 100.0) + np.linspace(0, 0.01, 400))
    other = blocked(sure.values * 1.005)
    a, b = (Sample(LOAD, {"tpot_ms": values}, {}, 0, 400) for values in (sure, other))
    row = by_metric(compare_samples([a], [b]))["tpot_ms.mean"]
    assert row.low is not None
    assert row.low > 0
    assert row.verdict == "same"
    eager = Options(negligible=0.001)
    assert by_metric(compare_samples([a], [b], eager))["tpot_ms.mean"].verdict == "worse"


def test_what_was_not_measured_is_missing() -> None:
    bare = Sample(LOAD, {}, {}, 0, 0)
    assert {row.verdict for row in compare_samples([bare], [sample(1)])} == {"missing"}


def test_stages_are_matched_by_load_and_repeats_taken_together() -> None:
    other, longer = LOAD._replace(users=16), LOAD._replace(prompt_tokens=512.0)
    pairs = matched([sample(1), sample(2, other), sample(3)], [sample(4, longer), sample(5), sample(6, other)])
    assert [(len(a), len(b)) for a, b in pairs] == [(2, 1), (1, 1)]
    with pytest.raises(InputError, match="no load is in both runs"):
        compare_samples([sample(1)], [sample(2, longer)])


def test_repeats_that_lie_apart_widen_the_interval() -> None:
    near = spot_of("tpot_ms.mean", [sample(1), sample(2), sample(3)], 0.05)
    apart = spot_of("tpot_ms.mean", [sample(1), sample(2, slower=1.2), sample(3, slower=0.85)], 0.05)
    assert near is not None
    assert apart is not None
    assert near.high / near.value < 1.05
    assert apart.high / apart.value > 1.3


def test_noise_between_runs_that_is_stated_widens_the_interval() -> None:
    plain, noisy = (spot_of("tpot_ms.mean", [sample(1)], 0.05, sd) for sd in (0.0, 0.05))
    assert plain is not None
    assert noisy is not None
    assert math.log(noisy.high / noisy.value) >= 1.9 * 0.05 > math.log(plain.high / plain.value)


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(1.001, 1.5), st.floats(1.001, 1.5))
def test_the_interval_of_a_ratio_holds_it_and_turns_around(a: float, b: float, wide_a: float, wide_b: float) -> None:
    here, there = Spot(a, a / wide_a, a * wide_a), Spot(b, b / wide_b, b * wide_b)
    low, high = ratio_interval(here, there)
    assert low < b / a - 1 < high
    back_low, back_high = ratio_interval(there, here)
    assert (1 + low) * (1 + back_high) == pytest.approx(1)
    assert (1 + high) * (1 + back_low) == pytest.approx(1)


def test_failures_are_compared_as_shares() -> None:
    low, high = difference_interval(0, 200, 30, 200, 0.05)
    assert 0.09 < low < 0.15 < high < 0.22
    rows = by_metric(compare_samples([sample(1)], [sample(2, failed=200)]))
    assert rows["failure_rate"].verdict == "worse"
    assert rows["failure_rate"].change == pytest.approx(0.25)
    assert by_metric(compare_samples([sample(1)], [sample(2)]))["failure_rate"].verdict == "same"


# --- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "metric", "sign", "threshold"),
    [
        ("ttft_ms.p99 > +10%", "ttft_ms.p99", ">", 0.10),
        ("ttft_ms.p99>10%", "ttft_ms.p99", ">", 0.10),
        ("output_tokens_per_s < -2.5%", "output_tokens_per_s", "<", -0.025),
        ("failure_rate > +1%", "failure_rate", ">", 0.01),
        ("worse", None, ">", 0.0),
    ],
)
def test_a_rule_is_read(text: str, metric: str | None, sign: str, threshold: float) -> None:
    rule = parse_rule(text)
    assert (rule.metric, rule.sign, rule.threshold) == (metric, sign, pytest.approx(threshold))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft.p99 > +10%", "unknown metric 'ttft.p99'"),
        ("ttft_ms.p99 > 10", "expected METRIC > "),
        ("ttft_ms.p99 >= 10%", "expected METRIC > "),
        ("ttft_ms.p99 10%", "expected METRIC > "),
        ("ttft_ms.p99 > -10%", "breaks where nothing changes"),
        ("output_tokens_per_s < 5%", "breaks where nothing changes"),
        ("", "expected METRIC > "),
        ("ttft_ms.p99 > ten%", "expected METRIC > "),
    ],
)
def test_what_is_no_rule_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        parse_rule(text)
    assert refused.value.hint


def test_a_rule_needs_both_size_and_certainty() -> None:
    def row(**values: Any) -> Row:
        base = {"a": 100.0, "b": 120.0, "change": 0.2, "low": 0.1, "high": 0.3, "verdict": "worse", "n": (9, 9)}
        return Row(LOAD, "tpot_ms.mean", **{**base, **values})

    rule = parse_rule("tpot_ms.mean > +10%")
    assert rule.broken_by(row())
    assert not rule.broken_by(row(change=0.05, low=0.04, high=0.06))
    assert not rule.broken_by(row(low=-0.1))
    assert not rule.broken_by(row()._replace(metric="ttft_ms.mean"))
    falls = parse_rule("output_tokens_per_s < -10%")
    assert falls.broken_by(row(change=-0.2, low=-0.3, high=-0.1)._replace(metric="output_tokens_per_s"))
    assert not falls.broken_by(row(change=0.2)._replace(metric="output_tokens_per_s"))


def test_rulings_name_what_broke_and_what_cannot_be_told() -> None:
    a, b = [sample(1, n=400)], [sample(2, slower=1.3, n=400)]
    mean, tail, fine = rulings(
        [parse_rule("tpot_ms.mean > +10%"), parse_rule("ttft_ms.p99 > +10%"), parse_rule("failure_rate > +1%")], a, b
    )
    assert mean.broken
    assert [row.metric for row in mean.broken_by] == ["tpot_ms.mean"]
    assert not tail.broken
    assert len(tail.untold) == 1
    assert not fine.broken
    assert not fine.untold


def test_a_rule_on_what_nobody_measured_is_refused() -> None:
    bare = Sample(LOAD, {"ttft_ms": blocked(np.ones(50))}, {}, 0, 50)
    with pytest.raises(InputError, match=r"tpot_ms\.mean was not measured"):
        rulings([parse_rule("tpot_ms.mean > +5%")], [bare], [bare])


def test_every_metric_of_a_sample_is_in_the_table() -> None:
    assert [row.metric for row in compare_samples([sample(1)], [sample(2)])] == list(METRICS)


def test_lengths_that_are_drawn_may_differ_by_their_draws() -> None:
    """Means 8 % apart: of lengths that are all alike another load, of 40 drawn ones the same."""
    a, b = LOAD, LOAD._replace(output_tokens=138.0)
    fixed = sample(1, a), sample(2, b)
    assert matched(fixed[:1], fixed[1:]) == []
    drawn = [replace(s, length_errors=(0.0, 4.0)) for s in fixed]
    assert matched(drawn[:1], drawn[1:]) == [([drawn[0]], [drawn[1]])]
    far = replace(sample(3, LOAD._replace(output_tokens=180.0)), length_errors=(0.0, 4.0))
    assert matched(drawn[:1], [far]) == []


def test_equal_draws_are_one_load_nearly_always() -> None:
    rng = np.random.default_rng(0)
    apart = 0
    for _ in range(2000):
        sides = []
        for _ in range(2):
            lengths = rng.uniform(30, 100, 60)
            error = float(lengths.std() / math.sqrt(60))
            sides.append(
                replace(sample(1, LOAD._replace(output_tokens=float(lengths.mean()))), length_errors=(0.0, error))
            )
        apart += not sides[0].same_load(sides[1])
    assert apart <= 2


def test_passes_tell_together_what_each_is_too_small_for() -> None:
    """Five passes of 60 requests in 5 blocks: no single one holds an end of its 90th percentile at this level."""
    rng = np.random.default_rng(1)
    level = 0.05 / len(METRICS)
    parts = [Sample(LOAD, {"ttft_ms": blocked(correlated(rng, 60), 5)}, {}, 0, 60) for _ in range(5)]
    alone = spot_of("ttft_ms.p90", parts[:1], level)
    together = spot_of("ttft_ms.p90", parts, level)
    assert alone is not None
    assert together is not None
    assert alone.high == math.inf
    assert together.low < together.value < together.high < 130


def test_an_end_that_is_not_told_is_infinite_and_no_large_number() -> None:
    few = [Sample(LOAD, {"ttft_ms": blocked(np.array([10.0, 20.0, 30.0]), 2)}, {}, 0, 3) for _ in range(2)]
    spot = spot_of("ttft_ms.p99", few, 0.001)
    assert spot is not None
    assert spot.high == math.inf
    low, high = ratio_interval(spot, spot)
    assert (low, high) == (-1.0, math.inf)


def test_equal_runs_of_repeats_are_called_equal() -> None:
    """Passes that scatter by 3 % beyond their blocks: of 60 pairs at most 5 % have any row called different."""
    rng = np.random.default_rng(5)
    alarms = 0
    for _ in range(60):
        runs = []
        for _ in range(2):
            passes = []
            for _ in range(4):
                factor = math.exp(rng.normal(0, 0.03))
                values = {n: blocked(correlated(rng, 200) * factor, 10) for n in ("ttft_ms", "tpot_ms", "e2e_ms")}
                rates = {"output_tokens_per_s": correlated(rng, 10, 0.0) / factor}
                passes.append(Sample(LOAD, values, rates, 0, 200))
            runs.append(passes)
        alarms += any(row.verdict in ("worse", "better") for row in compare_samples(*runs))
    assert alarms <= 3
