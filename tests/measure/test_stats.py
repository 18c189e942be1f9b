import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.measure.stats import KEYS, describe, empty

values = st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=50)


def test_five_values_by_hand() -> None:
    assert describe(np.array([30.0, 10.0, 20.0, 50.0, 40.0])) == pytest.approx(
        {
            "n": 5,
            "mean": 30.0,
            "std": 200**0.5,
            "p50": 30.0,
            "p90": 46.0,
            "p95": 48.0,
            "p99": 49.6,
            "min": 10.0,
            "max": 50.0,
        }
    )


def test_one_value_is_all_its_percentiles() -> None:
    assert describe(np.array([7.0])) == {"n": 1, "std": 0.0} | dict.fromkeys(
        ("mean", "p50", "p90", "p95", "p99", "min", "max"), 7.0
    )


def test_what_was_not_measured_is_left_out_and_nothing_measured_is_null() -> None:
    assert describe(np.array([np.nan, 1.0, np.nan, 3.0]))["n"] == 2
    assert describe(np.array([np.nan])) == empty() == {"n": 0} | dict.fromkeys(KEYS[1:])
    assert tuple(empty()) == KEYS


@given(values)
def test_percentiles_are_numpys_linear_ones(sample: list[float]) -> None:
    found = describe(np.array(sample))
    for percent in (50, 90, 95, 99):
        assert found[f"p{percent}"] == pytest.approx(np.percentile(sample, percent), rel=1e-12, abs=1e-12)


@given(values, st.randoms())
def test_order_does_not_matter(sample: list[float], random: object) -> None:
    shuffled = sample.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert describe(np.array(sample)) == describe(np.array(shuffled))


@given(values)
def test_the_numbers_are_in_order(sample: list[float]) -> None:
    found = describe(np.array(sample))
    ordered = [found[key] for key in ("min", "p50", "p90", "p95", "p99", "max")]
    assert ordered == sorted(ordered)  # type: ignore[type-var]
    assert found["min"] <= found["mean"] <= found["max"]  # type: ignore[operator]


def test_a_million_values_take_well_under_a_second() -> None:
    sample = np.random.default_rng(0).lognormal(3, 1, 1_000_000)
    began = time.process_time()
    assert describe(sample)["n"] == 1_000_000
    assert time.process_time() - began < 1.0
