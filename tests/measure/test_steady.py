"""Warm-up and trend, on series whose answer is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.measure.steady import MSER_VALUES, TREND_VALUES, trend, warm_up

NOISE = np.random.default_rng(7).normal(0, 0.03, 100)


def naive_mser(values: np.ndarray) -> int:
    """The definition, one candidate at a time."""
    scores = [values[d:].var() / (len(values) - d) for d in range(len(values) // 2 + 1)]
    return int(np.argmin(scores))


def test_a_slow_start_is_cut_where_it_ends() -> None:
    values = 1 + NOISE[:40]
    values[:7] += 2.0
    assert warm_up(values) == naive_mser(values)
    assert 7 <= warm_up(values) <= 9


def test_a_fall_to_the_steady_value_is_cut_near_its_end() -> None:
    values = 1 + NOISE + 3 * np.exp(-np.arange(100) / 5)
    assert 12 <= warm_up(values) <= 25


def test_a_steady_series_is_not_cut() -> None:
    assert warm_up(1 + NOISE) == 0
    assert warm_up(np.ones(50)) == 0


def test_a_difference_too_small_to_matter_is_not_cut() -> None:
    values = 1 + NOISE[:40] / 100
    values[:7] += 0.04
    assert naive_mser(values) >= 7
    assert warm_up(values) == 0


def test_few_values_cannot_tell_a_warm_up() -> None:
    values = np.array([9.0] + [1.0] * (MSER_VALUES - 2))
    assert warm_up(values) == 0
    assert warm_up(np.append(values, 1.0)) == 1


def test_at_most_half_is_cut() -> None:
    values = np.concatenate([np.full(30, 5.0), np.full(10, 1.0)]) + NOISE[:40]
    assert warm_up(values) <= 20


@given(st.lists(st.floats(min_value=0.1, max_value=100), min_size=MSER_VALUES, max_size=60))
def test_what_is_cut_is_what_the_definition_cuts_or_nothing(values: list[float]) -> None:
    sample = np.array(values)
    cut = warm_up(sample)
    assert 0 <= cut <= len(sample) // 2
    if cut:
        scores = [sample[d:].var() / (len(sample) - d) for d in range(len(sample) // 2 + 1)]
        assert scores[cut] == pytest.approx(min(scores), rel=1e-6, abs=1e-9)


def test_a_rise_is_told_with_its_size() -> None:
    found = trend(np.linspace(10, 12, 20))
    assert found is not None
    assert found.relative_change == pytest.approx(2 / 11)
    # all 190 pairs rise: (190 - 1) / sqrt(20 * 19 * 45 / 18)
    assert found.z == pytest.approx(189 / 950**0.5)
    assert found.matters


def test_a_fall_is_a_trend_too() -> None:
    found = trend(np.linspace(12, 10, 20))
    assert found is not None
    assert found.z == pytest.approx(-189 / 950**0.5)
    assert found.relative_change == pytest.approx(-2 / 11)
    assert found.matters


def test_a_significant_trend_that_moves_little_does_not_matter() -> None:
    found = trend(np.linspace(100, 105, 20))
    assert found is not None
    assert found.z > 6
    assert not found.matters


def test_noise_is_no_trend() -> None:
    found = trend(1 + 5 * NOISE[:20])
    assert found is not None
    assert not found.matters


def test_alternation_is_no_trend() -> None:
    found = trend(np.tile([1.0, 3.0], 10))
    assert found is not None
    assert not found.matters


def test_few_values_cannot_tell_a_trend() -> None:
    assert trend(np.arange(TREND_VALUES - 1.0)) is None
    found = trend(np.arange(1.0, TREND_VALUES + 1.0))
    assert found is not None
    assert found.matters


def test_a_constant_series_has_no_trend_even_at_zero() -> None:
    for level in (0.0, 5.0):
        found = trend(np.full(10, level))
        assert found is not None
        assert (found.z, found.relative_change) == (0.0, 0.0)


def test_false_alarms_on_independent_noise_are_under_one_percent() -> None:
    rng = np.random.default_rng(1)
    alarms = sum(bool((found := trend(rng.lognormal(0, 0.5, 20))) and found.matters) for _ in range(1000))
    assert alarms <= 15
