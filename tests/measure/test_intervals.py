"""Intervals hold their confidence on series whose mean is known, alike or not."""

from __future__ import annotations

import numpy as np
import pytest

from calibration.trace import Floats
from harness.measure.intervals import (
    autocorrelation_time,
    effective_size,
    mean_interval,
    share_at_least,
    share_interval,
)


def ar1(phi: float, n: int, rng: np.random.Generator) -> Floats:
    """Mean 10, and an autocorrelation time of (1 + phi) / (1 - phi)."""
    noise = rng.normal(size=n + 200)
    values = np.empty(n + 200)
    values[0] = noise[0]
    for i in range(1, n + 200):
        values[i] = phi * values[i - 1] + noise[i]
    return 10 + values[200:]


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.9])
def test_the_autocorrelation_time_of_a_known_process(phi: float) -> None:
    rng = np.random.default_rng(7)
    found = np.mean([autocorrelation_time(ar1(phi, 4000, rng)) for _ in range(20)])
    assert found == pytest.approx((1 + phi) / (1 - phi), rel=0.15)


@pytest.mark.parametrize(("phi", "n"), [(0.0, 40), (0.6, 200), (0.9, 1000)])
def test_nine_of_ten_intervals_hold_the_mean(phi: float, n: int) -> None:
    rng = np.random.default_rng(11)
    held = 0
    for _ in range(400):
        found = mean_interval(ar1(phi, n, rng))
        assert found is not None
        held += found.low <= 10 <= found.high
    assert 0.86 <= held / 400 <= 0.95


def test_an_interval_that_took_neighbours_for_independent_would_miss() -> None:
    """What this module is for: with phi = 0.9 the naive interval holds far less than it says."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        values = ar1(0.9, 1000, rng)
        half = 1.645 * values.std() / np.sqrt(len(values))
        held += abs(values.mean() - 10) <= half
    assert held / 200 < 0.5


def test_equal_values_are_as_many_as_they_are() -> None:
    values = np.full(50, 0.1) + np.arange(50) * 1e-15
    assert effective_size(values) == 50
    found = mean_interval(values)
    assert found is not None
    assert found.high - found.low < 1e-12


def test_a_swing_is_worth_no_more_than_its_values() -> None:
    assert effective_size(np.tile([1.0, 3.0], 100)) == 200


def test_too_few_values_or_one_long_drift_have_no_interval() -> None:
    assert mean_interval(np.arange(5.0)) is None
    assert mean_interval(np.full(20, np.nan)) is None
    assert effective_size(np.empty(0)) == 0


@pytest.mark.parametrize(("share", "n"), [(0.9, 50), (0.5, 30), (0.97, 200)])
def test_nine_of_ten_share_intervals_hold_the_share(share: float, n: int) -> None:
    rng = np.random.default_rng(5)
    intervals = [share_interval(float(k), float(n)) for k in rng.binomial(n, share, size=2000)]
    held = np.mean([low <= share <= high for low, high in intervals])
    assert 0.86 <= held <= 0.96


def test_a_share_is_at_least_a_target_with_a_probability() -> None:
    assert share_at_least(100, 100, 0.9) > 0.99
    assert share_at_least(0, 100, 0.9) < 1e-6
    assert share_at_least(90, 100, 0.9) == pytest.approx(0.5, abs=0.1)
