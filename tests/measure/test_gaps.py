import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.measure.gaps import (
    CEILING_MS,
    FLOOR_MS,
    MAX_SLICES,
    RELATIVE_ERROR,
    SLICE_S,
    GapHistogram,
    bin_of,
    merged,
    value_of,
)
from harness.measure.stats import describe, empty

PERCENTILE_KEYS = ("p50", "p90", "p95", "p99")
EXACT_KEYS = ("n", "mean", "min", "max")


def histogram(end_s: np.ndarray, gaps_ms: np.ndarray, origin_s: float = 0.0) -> GapHistogram:
    counted = GapHistogram(origin_s)
    counted.add(end_s, gaps_ms)
    return counted


@given(st.floats(min_value=FLOOR_MS, max_value=CEILING_MS * 0.99))
def test_a_bin_stands_for_its_values_within_the_error(gap_ms: float) -> None:
    shown = value_of(bin_of(np.array([gap_ms])), math.nan)[0]
    assert abs(shown - gap_ms) <= RELATIVE_ERROR * gap_ms * (1 + 1e-9)


@given(st.lists(st.floats(min_value=0, max_value=CEILING_MS * 10), min_size=1, max_size=60))
def test_percentiles_keep_the_error_and_the_rest_is_exact(gaps_ms: list[float]) -> None:
    gaps = np.array(gaps_ms)
    # above the ceiling only the largest is known, so the law is stated below it
    gaps = np.where(gaps >= CEILING_MS, gaps.max(), gaps)
    found, truth = histogram(np.arange(len(gaps)) * 0.01, gaps).stats(), describe(gaps)
    for key in EXACT_KEYS:
        assert found[key] == pytest.approx(truth[key], rel=1e-12)
    assert found["std"] == pytest.approx(truth["std"], rel=1e-6, abs=1e-5 * gaps.max())
    for key in PERCENTILE_KEYS:
        assert found[key] == pytest.approx(truth[key], rel=RELATIVE_ERROR * (1 + 1e-9), abs=FLOOR_MS)


def test_deltas_of_one_read_have_gaps_of_zero() -> None:
    found = histogram(np.zeros(4), np.array([0.0, 0.0, 0.0, 20.0])).stats()
    assert (found["n"], found["min"], found["p50"], found["max"], found["mean"]) == (4, 0.0, 0.0, 20.0, 5.0)


def test_nothing_added_is_null() -> None:
    counted = GapHistogram(0.0)
    counted.add(np.empty(0), np.empty(0))
    assert counted.stats() == empty()
    assert counted.to_dict()["slices"] == []


def test_a_window_takes_the_slices_whose_middle_it_holds() -> None:
    counted = histogram(np.array([10.05, 10.2, 10.3, 11.0]), np.array([1.0, 2.0, 3.0, 4.0]), origin_s=10.0)
    # slices of 0.125 s: middles 10.0625, 10.1875, 10.3125, 11.0625
    assert counted.stats(10.1, 10.32)["n"] == 2
    assert counted.stats(10.1, 10.31)["n"] == 1
    assert counted.stats(12.0, 13.0) == empty()


def test_a_long_stage_widens_its_slices_and_keeps_its_counts() -> None:
    counted = GapHistogram(5.0)
    end_s = 5.0 + np.arange(20 * 60) * 1.0
    for second in end_s:
        counted.add(np.full(10, second), np.full(10, second))
    assert counted.stats()["n"] == 12_000
    assert counted.slice_s == 8.0
    assert counted._counts.nbytes + counted._sums.nbytes < 2.5e6
    assert counted.stats(5.0, 605.0)["n"] == 6_000
    assert counted.stats()["mean"] == pytest.approx(end_s.mean())


def test_far_in_time_still_fits() -> None:
    counted = histogram(np.array([0.0, 10.0 * 24 * 3600]), np.array([1.0, 3.0]))
    assert len(counted._counts) <= MAX_SLICES
    assert counted.stats()["mean"] == 2.0


gap_lists = st.lists(
    st.tuples(st.floats(min_value=0, max_value=8), st.floats(min_value=0, max_value=1e5)), min_size=1, max_size=30
)


@given(gap_lists, gap_lists)
def test_merging_processes_is_counting_in_one(
    first: list[tuple[float, float]], second: list[tuple[float, float]]
) -> None:
    parts = [histogram(*np.array(part).T) for part in (first, second)]
    together = histogram(*np.array(first + second).T)
    one = merged(parts)
    assert one is not None
    assert one.slice_s == together.slice_s
    for window in ((-math.inf, math.inf), (2.0, 6.0)):
        found, expected = one.stats(*window), together.stats(*window)
        assert found["n"] == expected["n"]
        for key in (key for key in found if found["n"]):
            assert found[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-2)
    assert sum(int(part.stats()["n"] or 0) for part in parts) == one.stats()["n"]


def test_a_process_that_saw_more_of_a_stage_widens_the_other() -> None:
    short, long = histogram(np.array([1.0]), np.array([10.0])), histogram(np.array([500.0]), np.array([30.0]))
    for first, second in ((short, long), (long, short)):
        both = merged([first, second])
        assert both is not None
        assert (both.slice_s, both.stats()["n"], both.stats()["mean"]) == (2.0, 2, 20.0)
        assert both.stats(499.0, 501.0)["max"] == 30.0
    assert (short.slice_s, short.stats()["n"]) == (SLICE_S, 1)


@given(gap_lists)
def test_written_and_read_back_it_says_the_same(gaps: list[tuple[float, float]]) -> None:
    counted = histogram(*np.array(gaps).T)
    again = GapHistogram.from_dict(json.loads(json.dumps(counted.to_dict())))
    assert again.to_dict() == counted.to_dict()
    assert again.stats(2.0, 6.0) == counted.stats(2.0, 6.0)


def test_nothing_to_merge_is_nothing() -> None:
    assert merged([]) is None


def test_histograms_of_different_stages_do_not_merge() -> None:
    with pytest.raises(ValueError, match=r"origins differ: 0.0 s and 1.0 s"):
        GapHistogram(0.0).merge(GapHistogram(1.0))


@pytest.mark.parametrize(
    ("end_s", "gap_ms", "message"),
    [
        (1.0, -1.0, "a gap is a length in ms >= 0, not -1.0"),
        (1.0, math.nan, "not nan"),
        (1.0, math.inf, "not inf"),
        (-0.1, 1.0, "ends at -0.1 s, expected a time from the origin at 0.0 s on"),
        (math.nan, 1.0, "ends at nan s"),
        (math.inf, 1.0, "ends at inf s"),
    ],
)
def test_impossible_gaps_are_refused(end_s: float, gap_ms: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        histogram(np.array([end_s]), np.array([gap_ms]))


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ends for 1 gaps"):
        histogram(np.zeros(2), np.zeros(1))


@pytest.mark.parametrize(("key", "value"), [("schema_version", 2), ("relative_error", 0.01)])
def test_what_another_version_wrote_is_refused(key: str, value: float) -> None:
    content = GapHistogram(0.0).to_dict() | {key: value}
    with pytest.raises(ValueError, match=f"{key} is {value}, expected"):
        GapHistogram.from_dict(content)


def test_the_first_slice_is_an_eighth_of_a_second() -> None:
    assert GapHistogram(0.0).slice_s == SLICE_S == 0.125
