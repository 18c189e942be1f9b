"""When tokens arrived: by hand, and how far the even spread is off where the truth is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure_traces import NAN, make_trace

from harness.measure.from_records import Deltas
from harness.measure.tokens import by_delta, count_tokens, first_delta_tokens, spread_evenly


def test_the_first_deltas_tokens_are_read_back_from_tpot() -> None:
    trace = make_trace([0.0, 0.0, 0.0], 0.1, 1.0, output_tokens=[10, 10, 3], first=[1, 4, 3])
    assert first_delta_tokens(trace) == pytest.approx([1, 4, 3])


def test_the_first_delta_comes_at_once_and_the_rest_evenly() -> None:
    # 2 tokens at 10.5 s, 8 more evenly until 12.5 s
    trace = make_trace([10.0], 0.5, 2.5, output_tokens=10, first=2)
    flow = spread_evenly(trace, count_tokens(trace))
    assert flow.until(np.array([10.4, 10.5, 11.0, 12.5, 99.0])) == pytest.approx([0, 2, 4, 10, 10])
    assert flow.between(10.5, 12.5) == pytest.approx(10)
    assert flow.between(10.6, 11.6) == pytest.approx(4)


def test_all_in_one_read_comes_at_once() -> None:
    trace = make_trace([0.0], 0.5, 0.5, output_tokens=10)
    flow = spread_evenly(trace, count_tokens(trace))
    assert flow.until(np.array([0.49, 0.5])) == pytest.approx([0, 10])


def test_failed_requests_bring_nothing_and_unknown_counts_are_no_zero() -> None:
    trace = make_trace([0.0, 0.0], ok=[False, True], failure=["stalled", ""], output_tokens=[10, NAN])
    counts = count_tokens(trace, Deltas(chunks=np.array([10, 10])))
    assert np.isnan(counts.first).all()
    assert spread_evenly(trace, counts).until(np.array([100.0])) == 0


def test_a_cut_stream_counts_its_chunks_at_the_rate_of_the_good_ones() -> None:
    trace = make_trace([0.0, 0.0], 0.1, 1.0, output_tokens=[20, NAN], ok=[True, False], incomplete=[False, True])
    counts = count_tokens(trace, Deltas(chunks=np.array([10, 4])))
    assert (counts.first[1], counts.rest[1]) == (2, 6)
    assert counts.estimated.tolist() == [False, True]


def test_a_cut_stream_stays_unknown_where_nothing_tells_tokens_per_chunk() -> None:
    trace = make_trace([0.0], 0.1, 1.0, output_tokens=NAN, ok=False, incomplete=True)
    for deltas in (None, Deltas(chunks=np.array([4]))):
        counts = count_tokens(trace, deltas)
        assert np.isnan(counts.rest[0])
        assert not counts.estimated[0]


def test_saved_gaps_put_every_delta_at_its_time() -> None:
    # request 0: 1 token at 1 s, then 2 a delta at 1.1 and 1.9 s; request 1: everything at 2 s; request 2: not saved
    trace = make_trace([0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.9, 1.0, 2.0], output_tokens=[5, 7, 11])
    deltas = Deltas(chunks=np.array([3, 1, 11]), times_s=np.array([1.0, 1.1, 1.9, 1.0]), offsets=np.array([0, 3, 4, 4]))
    flow = by_delta(trace, count_tokens(trace), deltas)
    # request 2 is spread evenly: 1 at 1 s, 10 by 2 s
    assert flow.until(np.array([1.0, 1.1, 1.5, 1.9, 2.0])) == pytest.approx([2, 5, 9, 15, 23])


def test_without_saved_gaps_by_delta_is_the_even_spread() -> None:
    trace = make_trace([0.0])
    counts = count_tokens(trace)
    moments = np.linspace(0, 2, 9)
    np.testing.assert_array_equal(
        by_delta(trace, counts, Deltas(chunks=np.array([10]))).until(moments),
        spread_evenly(trace, counts).until(moments),
    )


def paced(gaps_s: np.ndarray, sent_s: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Even spread and truth, in tokens per second, for streams with these gaps, over the middle of their span."""
    times = 0.1 + np.concatenate([[0.0], np.cumsum(gaps_s)])
    trace = make_trace(sent_s, times[0], times[-1], output_tokens=len(times))
    deltas = Deltas(
        chunks=np.full(len(sent_s), len(times)),
        times_s=np.tile(times, len(sent_s)),
        offsets=np.arange(len(sent_s) + 1) * len(times),
    )
    counts = count_tokens(trace)
    start, end = 2.0, 6.0
    rates = [
        flow.between(start, end) / (end - start)
        for flow in (spread_evenly(trace, counts), by_delta(trace, counts, deltas))
    ]
    truth = ((sent_s[:, None] + times >= start) & (sent_s[:, None] + times <= end)).sum() / (end - start)
    assert rates[1] == pytest.approx(truth)
    return sent_s, rates[0], truth


def test_the_even_spread_of_even_streams_is_at_most_a_token_off_per_stream_and_edge() -> None:
    _, spread, truth = paced(np.full(99, 0.03), np.arange(40) * 0.25)
    # about 13 streams cross either edge; over 4 s that is at most 6.5 tokens/s
    assert abs(spread - truth) < 6.5
    assert spread == pytest.approx(truth, rel=0.005)


def test_the_even_spread_of_slowing_streams_is_within_two_percent_when_staggered() -> None:
    # gaps grow from 20 to 40 ms, as contexts grow
    _, spread, truth = paced(np.linspace(0.02, 0.04, 99), np.arange(40) * 0.25)
    assert spread == pytest.approx(truth, rel=0.02)


def test_the_even_spread_of_paused_streams_in_lock_step_is_off_and_the_saved_gaps_are_not() -> None:
    # 8 streams send a token each 30 ms from 1.1 s on, pause from 2.6 to 6.6 s (preempted), then go on
    gaps = np.full(99, 0.03)
    gaps[50] = 4.0
    _, spread, truth = paced(gaps, np.full(8, 1.0))
    assert truth == 8 * 21 / 4
    assert spread == pytest.approx(8 * 99 / (98 * 0.03 + 4.0), rel=1e-6)


requests = st.lists(
    st.tuples(
        st.floats(min_value=0, max_value=100),
        st.floats(min_value=0.001, max_value=5),
        st.floats(min_value=0, max_value=20),
        st.integers(min_value=1, max_value=500),
    ),
    min_size=1,
    max_size=20,
)


@given(requests)
def test_every_token_arrives_once_and_none_is_taken_back(rows: list[tuple[float, float, float, int]]) -> None:
    sent, ttft, decode, tokens = np.array(rows, dtype=float).T
    trace = make_trace(sent, ttft, ttft + decode, tokens)
    flow = spread_evenly(trace, count_tokens(trace))
    arrived = flow.until(np.linspace(-1, 200, 50))
    # a thousandth of a token is rounding, of rates over microseconds
    assert (np.diff(arrived) >= -1e-3).all()
    assert arrived[0] == 0
    assert arrived[-1] == pytest.approx(tokens.sum(), abs=1e-3)
