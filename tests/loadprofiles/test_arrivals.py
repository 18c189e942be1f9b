"""Arrivals: the plan is data, seeded and pure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadprofiles.arrivals import START_RATE_PER_S, due_times_s, ramp_up_s, start_times_s


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_constant_arrivals_are_exactly_spaced() -> None:
    times = due_times_s(200.0, rng=rng(), arrival="constant", duration_s=5.0)
    assert len(times) == 1000
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(4.995)
    assert np.diff(times) == pytest.approx(0.005)


def test_a_count_ends_constant_arrivals() -> None:
    assert list(due_times_s(10.0, rng=rng(), arrival="constant", requests=3)) == [0.0, 0.1, 0.2]
    assert len(due_times_s(10.0, rng=rng(), arrival="constant", requests=3, duration_s=0.15)) == 2


def test_poisson_gaps_have_mean_and_deviation_of_the_exponential() -> None:
    gaps = np.diff(due_times_s(50.0, rng=rng(1), requests=40_000))
    assert gaps.mean() == pytest.approx(0.02, rel=0.02)
    assert gaps.std() == pytest.approx(0.02, rel=0.03)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_gamma_gaps_have_the_deviation_their_burstiness_says(burstiness: float) -> None:
    gaps = np.diff(due_times_s(50.0, rng=rng(1), arrival="gamma", burstiness=burstiness, requests=40_000))
    assert gaps.mean() == pytest.approx(0.02, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_poisson_process_is_not_stretched_to_hit_its_count() -> None:
    counts = [len(due_times_s(20.0, rng=rng(seed), duration_s=10.0)) for seed in range(200)]
    assert np.mean(counts) == pytest.approx(200, rel=0.02)
    assert np.var(counts) == pytest.approx(200, rel=0.3)


@given(
    st.floats(0.1, 1000), st.integers(1, 500), st.integers(0, 2**32), st.sampled_from(["poisson", "gamma", "constant"])
)
def test_times_ascend_and_the_same_seed_gives_the_same_times(rate: float, count: int, seed: int, kind: str) -> None:
    first = due_times_s(rate, rng=rng(seed), arrival=kind, requests=count)  # type: ignore[arg-type]
    assert len(first) == count
    assert (np.diff(first) >= 0).all()
    assert (first == due_times_s(rate, rng=rng(seed), arrival=kind, requests=count)).all()  # type: ignore[arg-type]


def test_a_duration_holds_every_arrival() -> None:
    times = due_times_s(1000.0, rng=rng(3), duration_s=2.0)
    assert times.max() < 2.0
    assert times.min() >= 0.0


def test_without_an_end_there_is_no_list() -> None:
    with pytest.raises(ValueError, match="needs duration_s or requests"):
        due_times_s(1.0, rng=rng())


def test_users_start_over_the_given_time_or_at_a_bounded_rate() -> None:
    assert ramp_up_s(100, 7.0, 10.0) == 7.0
    assert ramp_up_s(1001, None, None) == pytest.approx(1000 / START_RATE_PER_S)
    assert ramp_up_s(1001, None, 10.0) == pytest.approx(1.0)
    assert ramp_up_s(1, None, None) == 0.0


def test_start_times_span_the_whole_ramp_up() -> None:
    assert list(start_times_s(5, 2.0)) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert list(start_times_s(1, 2.0)) == [0.0]
