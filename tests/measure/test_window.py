"""The window rule, by hand, on synthetic closed loops and on what a real vLLM did."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measure_traces import NAN, closed_loop, make_trace

from calibration.trace import RequestTrace
from harness.measure.tokens import count_tokens, spread_evenly
from harness.measure.window import InFlight, StageLoad, Window, expected_in_flight, find_window, residence_s, spans


def window_of(trace: RequestTrace, **load: float | None) -> Window | None:
    return find_window(trace, StageLoad(**load), spread_evenly(trace, count_tokens(trace)))  # type: ignore[arg-type]


def window(trace: RequestTrace, **load: float | None) -> Window:
    found = window_of(trace, **load)
    assert found is not None
    return found


def test_in_flight_steps_up_when_sent_and_down_at_the_end() -> None:
    flight = InFlight.of(np.array([0.0, 1.0, 1.0]), np.array([4.0, 2.0, 5.0]))
    assert flight.times_s.tolist() == [0, 1, 2, 4, 5]
    assert flight.counts.tolist() == [1, 3, 2, 1, 0]
    assert flight.mean(0.0, 5.0) == pytest.approx((1 + 3 + 4 + 1) / 5)
    assert flight.mean(1.5, 2.5) == pytest.approx(2.5)


def test_a_stream_that_ends_as_another_begins_is_no_dip() -> None:
    flight = InFlight.of(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
    assert (flight.times_s.tolist(), flight.counts.tolist()) == ([0, 1, 2], [1, 1, 0])


def test_held_is_from_the_first_to_the_last_time_at_the_level() -> None:
    flight = InFlight.of(np.array([0.0, 1.0, 4.0]), np.array([9.0, 3.0, 6.0]))
    assert flight.held(2) == (1.0, 6.0)
    assert flight.held(3) is None


def test_stamps_of_one_moment_that_cross_by_rounding_hold_no_level() -> None:
    flight = InFlight.of(np.array([0.0, 1.0 - 1e-12]), np.array([1.0, 2.0]))
    assert flight.held(2) is None
    assert flight.held(1) == (0.0, 2.0)


def test_a_request_ends_with_its_stream_or_with_what_is_last_known() -> None:
    trace = make_trace(
        [0.0, 0.0, 0.0, 0.0, NAN],
        ttft_s=[0.1, 0.1, NAN, 0.1, NAN],
        e2e_s=[1.0, 1.0, NAN, 0.5, NAN],
        stream_end_s=[1.1, NAN, NAN, NAN, NAN],
        ok=[True, False, False, False, False],
        incomplete=[False, False, False, True, False],
    )
    starts, ends = spans(trace)
    assert starts.tolist() == [0, 0, 0, 0]
    # the good one, a failed one by its last content, one that never answered, a cut one by the last event of all
    assert ends.tolist() == [1.1, 1.0, 0.0, 1.1]


def test_one_user_and_three_requests_is_one_window_over_all() -> None:
    found = window(make_trace([0.0, 1.01, 2.02], 0.1, 1.0), users=1)
    assert (found.start_s, found.end_s, found.steady, found.reasons) == (0.0, 3.02, True, ())


def test_eight_users_and_three_rounds_end_where_the_first_user_has_no_more_to_send() -> None:
    rng = np.random.default_rng(3)
    lasts = rng.normal(1.0, 0.05, (3, 8))
    begins = np.vstack([np.zeros(8), np.cumsum(lasts, axis=0)[:2]])
    found = window(make_trace(begins.ravel(), 0.1, lasts.ravel()), users=8)
    assert (found.start_s, found.steady, found.reasons) == (0.0, True, ())
    assert found.end_s == pytest.approx(np.cumsum(lasts, axis=0)[2].min())


def test_fill_and_drain_are_outside() -> None:
    # four users join a second apart and leave in the same order; in-flight is 4 from 3 s to 20 s
    sent = [user + 2.0 * turn for user in range(4) for turn in range(9)]
    found = window(make_trace(sent, 0.1, 2.0), users=4)
    assert (found.start_s, found.end_s) == (3.0, 18.0)
    assert found.steady


def test_nothing_counts_after_the_planned_end() -> None:
    found = window(make_trace(np.arange(10.0), 0.1, 1.0), users=1, planned_end_s=7.5)
    assert found.end_s == 7.5


def test_a_single_round_is_too_short_and_says_so() -> None:
    found = window(make_trace(np.zeros(8), 0.1, np.linspace(1.0, 1.1, 8)), users=8)
    assert not found.steady
    assert (found.start_s, found.end_s) == (0.0, 1.0)
    assert "not steady: too short: 1 s for a median residence of 1.05 s, 2 are needed" in found.reasons
    assert "not steady: too short: 1 good requests ended in it, 8 are needed" in found.reasons


def test_a_level_that_is_never_reached_gives_the_whole_activity_and_the_reason() -> None:
    found = window(make_trace([5.0, 5.0, 6.0], 0.1, 1.0), users=4)
    assert (found.start_s, found.end_s, found.steady) == (5.0, 7.0, False)
    assert found.reasons == ("not steady: in-flight never held 95% of the level of 4: at most 2",)


def test_a_level_reached_only_after_the_planned_end_was_never_held() -> None:
    found = window(make_trace([0.0, 2.0], 0.1, 3.0), users=2, planned_end_s=1.5)
    assert (found.start_s, found.end_s, found.steady) == (0.0, 1.5, False)


@pytest.mark.parametrize(
    "trace",
    [
        make_trace([]),
        make_trace([NAN], ok=False, failure="connection"),
        make_trace([1.0], ttft_s=NAN, e2e_s=NAN, ok=False, failure="connection"),
    ],
    ids=["no request", "never sent", "refused at once"],
)
def test_without_activity_there_is_no_window(trace: RequestTrace) -> None:
    assert window_of(trace, users=1) is None


def test_a_stage_that_ended_before_it_began_has_no_window() -> None:
    assert window_of(make_trace([1.0]), users=1, planned_end_s=0.5) is None


def test_only_failures_are_not_steady() -> None:
    found = window(make_trace(np.arange(5.0), 0.1, 1.0, ok=False, failure="truncated"), users=1)
    assert found.reasons == ("not steady: no request ended well",)


def test_95_percent_of_many_users_is_enough() -> None:
    trace = make_trace(np.repeat(np.arange(10.0), 96), 0.1, 1.0)
    assert window(trace, users=100).steady
    assert not window(trace, users=102).steady


def test_a_slow_start_is_cut() -> None:
    """Requests sent in the first 5 s take three times as long, so the last slow one ends at about 8 s."""
    trace = closed_loop(8, 60.0, np.random.default_rng(1), slow_until_s=5.0, slow_by=3.0)
    found = window(trace, users=8, planned_end_s=60.0)
    assert 5.0 < found.start_s < 12.0
    assert found.steady


def test_a_load_that_keeps_slowing_down_is_not_steady() -> None:
    trace = closed_loop(8, 60.0, np.random.default_rng(1), drift_per_s=0.02)
    found = window(trace, users=8, planned_end_s=60.0)
    assert not found.steady
    assert any(reason.startswith("not steady: request time moves by +") for reason in found.reasons)
    assert any(reason.startswith("not steady: token rate moves by -") for reason in found.reasons)


def test_steady_loads_are_called_steady() -> None:
    """False alarms of the cut and of the trend test together, over 100 steady stages of heavy-tailed requests."""
    called = [
        window(closed_loop(8, 20.0, np.random.default_rng(seed), spread=0.8), users=8, planned_end_s=20.0)
        for seed in range(100)
    ]
    assert sum(found.steady for found in called) >= 93
    assert np.median([found.start_s for found in called]) < 1.0


def test_thinking_users_hold_the_level_that_thinking_leaves() -> None:
    trace = closed_loop(40, 60.0, np.random.default_rng(2), think_s=3.0)
    found = window(trace, users=40, think_s=3.0, planned_end_s=60.0)
    assert found.steady
    assert found.level == pytest.approx(40 * residence_s(trace) / (residence_s(trace) + 3.0))
    assert found.level == pytest.approx(10, rel=0.1)
    assert InFlight.of(*spans(trace)).mean(found.start_s, found.end_s) == pytest.approx(10, rel=0.1)


def test_users_who_do_not_think_or_of_whom_nothing_is_known_are_all_in_flight() -> None:
    assert expected_in_flight(8, 2.0, 0.0) == 8
    assert expected_in_flight(8, NAN, 3.0) == 8
    assert expected_in_flight(8, 1.0, 3.0) == 2


def poisson_arrivals(rate: float, until_s: float, rng: np.random.Generator) -> np.ndarray:
    sent = np.cumsum(rng.exponential(1 / rate, int(2 * rate * until_s)))
    return sent[sent < until_s]


def test_a_steady_rate_has_its_fill_cut_and_its_drain_outside() -> None:
    rng = np.random.default_rng(5)
    sent = poisson_arrivals(50.0, 60.0, rng)
    lasts = rng.lognormal(1.0, 0.2, len(sent))
    found = window(make_trace(sent, 0.1, lasts), request_rate=50.0, planned_end_s=60.0)
    assert found.steady
    # in-flight is near its level when the first requests begin to end, after about 2.7 s
    assert 2.0 < found.start_s < 10.0
    assert 59.0 < found.end_s <= sent.max()
    assert found.level == pytest.approx(50 * lasts.mean(), rel=0.1)


def test_a_rate_the_server_cannot_serve_is_not_steady() -> None:
    # one server that takes 0.12 s a request, asked ten times a second
    sent = np.arange(600) * 0.1
    ends = 0.12 * np.arange(1, 601)
    found = window(make_trace(sent, ends - sent - 0.05, ends - sent), request_rate=10.0, planned_end_s=60.0)
    assert not found.steady
    assert "not steady: in-flight rose until the second half of the arrivals" in found.reasons


def test_few_arrivals_do_not_tell_a_rate() -> None:
    found = window(make_trace(np.arange(8.0), 0.1, 0.5), request_rate=1.0)
    assert found.reasons == ("not steady: too short: 7 good requests ended in it, 10 are needed",)


def test_a_single_arrival_has_its_whole_activity_as_window() -> None:
    found = window(make_trace([3.0], 0.1, 1.0), request_rate=1.0)
    assert (found.start_s, found.end_s, found.steady) == (3.0, 4.0, False)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({}, "users or a request_rate"),
        ({"users": 1, "request_rate": 1.0}, "users or a request_rate"),
        ({"users": 0}, "users is 0, expected more than 0"),
        ({"request_rate": -1.0}, "request_rate is -1.0"),
        ({"users": 1, "think_s": -1.0}, "think_s is -1.0, expected 0 or more"),
    ],
)
def test_impossible_loads_are_refused(load: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StageLoad(**load)  # type: ignore[arg-type]


seeds = st.integers(min_value=0, max_value=2**32 - 1)
users = st.integers(min_value=1, max_value=12)


@settings(max_examples=40)
@given(seeds, users, st.floats(min_value=-1000, max_value=10_000))
def test_shifting_time_shifts_the_window_and_nothing_else(seed: int, n: int, shift: float) -> None:
    trace = closed_loop(n, 8.0, np.random.default_rng(seed), start_over_s=1.0)
    moved = make_trace(trace.sent_s + shift, trace.ttft_s, trace.e2e_s)
    here = window(trace, users=n, planned_end_s=8.0)
    there = window(moved, users=n, planned_end_s=8.0 + shift)
    assert there.start_s - shift == pytest.approx(here.start_s, abs=1e-6)
    assert there.end_s - shift == pytest.approx(here.end_s, abs=1e-6)
    assert there.steady == here.steady


@settings(max_examples=40)
@given(seeds, users)
def test_the_order_of_requests_does_not_matter_and_the_window_lies_in_the_activity(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    trace = closed_loop(n, 8.0, rng, start_over_s=1.0)
    order = rng.permutation(len(trace))
    shuffled = make_trace(trace.sent_s[order], trace.ttft_s[order], trace.e2e_s[order])
    here, there = window(trace, users=n), window(shuffled, users=n)
    assert (there.start_s, there.end_s, there.steady) == (here.start_s, here.end_s, here.steady)
    assert trace.sent_s.min() <= here.start_s < here.end_s <= (trace.sent_s + trace.stream_end_s).max()


SHARED = Path(os.environ.get("VLLM_HARNESS_SHARED", Path(__file__).parents[2].parent / "shared"))


@pytest.mark.skipif(not (SHARED / "oracle").is_dir(), reason="needs the oracle of a real vLLM")
def test_windows_of_a_real_server_agree_with_its_own_token_counter() -> None:
    """Ramps of SmolLM2 on vLLM 0.32.0 without preemptions: client's token rate beside the server's over its window."""
    levels = json.loads((SHARED / "oracle" / "preemption.json").read_text())["levels"]
    calm = [level for level in levels if not level["full"]["preemptions"]]
    assert len(calm) == 9
    for level in calm:
        sent, ttft, e2e = np.array(level["reqs"]).T
        trace = make_trace(sent, ttft, e2e, output_tokens=level["osl"])
        found = window(trace, users=level["N"], planned_end_s=level["dur"])
        assert found.steady, level["N"]
        assert abs(found.start_s - level["window_s"][0]) < level["window_s"][0] * 0.5 + 0.05
        rate = spread_evenly(trace, count_tokens(trace)).between(found.start_s, found.end_s) / found.length_s
        assert rate == pytest.approx(level["window"]["gen_tok_s"], rel=0.02)
