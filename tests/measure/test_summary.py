"""The stage of summary.json: its keys, hand-made numbers, laws, and what never depends on the order of requests."""

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measure_traces import NAN, closed_loop, make_trace

from calibration.trace import RequestTrace
from harness.measure.from_records import Deltas
from harness.measure.gaps import GapHistogram
from harness.measure.stats import KEYS, empty
from harness.measure.summary import StageReadings, summarise
from harness.measure.window import StageLoad

CONTRACT = [
    "index",
    "users",
    "request_rate",
    "valid",
    "reasons",
    "window",
    "requests",
    "ttft_ms",
    "ttfa_ms",
    "tpot_ms",
    "chunk_gap_ms",
    "e2e_ms",
    "output_tokens_per_s",
    "output_tokens_per_s_per_user",
    "total_tokens_per_s",
    "requests_per_s",
    "goodput_per_s",
    "client",
    "server",
]
DISTRIBUTIONS = (
    "ttft_ms",
    "ttfa_ms",
    "tpot_ms",
    "chunk_gap_ms",
    "e2e_ms",
    "ttft_from_schedule_ms",
    "e2e_from_schedule_ms",
)


def one_user(trace: RequestTrace, **known: Any) -> dict[str, Any]:
    return summarise(0, trace, StageLoad(users=1), **known)


#: one user, three requests of 1 s: first content after 0.1 s, then 9 tokens in 0.9 s; 20 tokens of prompt each
THREE = make_trace([0.0, 1.0, 2.0], 0.1, 1.0, output_tokens=10)


def test_every_key_of_the_contract_is_there() -> None:
    stage = one_user(THREE)
    assert set(CONTRACT) <= set(stage)
    assert set(stage["window"]) == {"start_s", "end_s", "steady"}
    assert set(stage["requests"]) == {"ok", "failed", "by_failure", "incomplete"}
    assert set(stage["client"]) == {"loop_lag_ms_p99", "cpu", "schedule_delay_ms_p99", "concurrency_mean"}
    for name in DISTRIBUTIONS:
        assert set(stage[name]) == set(KEYS)


def test_three_requests_by_hand() -> None:
    stage = summarise(4, THREE, StageLoad(users=1), slo={"ttft": 100, "tpot": 100, "e2e": 1000})
    assert (stage["index"], stage["users"], stage["request_rate"]) == (4, 1, None)
    assert (stage["valid"], stage["reasons"]) == (True, [])
    assert stage["window"] == {"start_s": 0.0, "end_s": 3.0, "steady": True}
    assert stage["requests"] == {"ok": 3, "failed": 0, "by_failure": {}, "incomplete": 0}
    assert stage["ttft_ms"]["mean"] == pytest.approx(100)
    assert stage["ttfa_ms"]["n"] == 3
    assert stage["tpot_ms"]["p50"] == pytest.approx(100)
    assert stage["tpot_ms_token_weighted"] == pytest.approx(100)
    assert stage["e2e_ms"]["p99"] == pytest.approx(1000)
    assert stage["output_tokens_per_s"] == stage["output_tokens_per_s_per_user"] == pytest.approx(10)
    assert stage["total_tokens_per_s"] == pytest.approx(30)
    assert stage["requests_per_s"] == pytest.approx(1)
    assert stage["goodput_per_s"] == pytest.approx(1)
    assert stage["output_tokens_estimated_share"] == 0
    assert stage["client"]["concurrency_mean"] == pytest.approx(1)
    assert stage["client"]["schedule_delay_ms_p99"] == 0
    assert stage["totals"] == {
        "output_tokens": 30,
        "prompt_tokens": 60,
        "output_tokens_mean": 10,
        "prompt_tokens_mean": 20,
        "duration_s": 3.0,
    }


def test_nothing_measured_is_null_and_never_zero() -> None:
    stage = one_user(make_trace([]))
    assert stage["window"] is None
    assert not stage["valid"]
    for name in DISTRIBUTIONS:
        assert stage[name] == empty()
    for name in (
        "output_tokens_per_s",
        "total_tokens_per_s",
        "requests_per_s",
        "goodput_per_s",
        "tpot_ms_token_weighted",
    ):
        assert stage[name] is None
    assert set(stage["client"].values()) == {None}
    assert stage["server"] is None
    assert set(stage["totals"].values()) == {None}
    assert stage["reasons"] == [
        "no request ended well: 0 failed, 0 cut by the end of the stage",
        "no window: nothing was in flight before the planned end of the stage",
    ]


@pytest.mark.parametrize(
    "trace", [THREE, make_trace([]), make_trace([0.0], NAN, NAN, NAN, ok=False, failure="timeout")]
)
def test_a_stage_is_json_without_nan(trace: RequestTrace) -> None:
    assert json.loads(json.dumps(one_user(trace), allow_nan=False)) == one_user(trace)


def test_failed_requests_enter_failure_counts_only() -> None:
    trace = make_trace(
        [0.0, 1.0, 2.0, 3.0],
        ttft_s=[0.1, 0.9, 0.1, 0.1],
        e2e_s=[1.0, 1.0, 1.0, 1.0],
        output_tokens=[10, 500, 10, 10],
        ok=[True, False, True, True],
        failure=["", "truncated", "", ""],
    )
    stage = one_user(trace)
    assert stage["requests"] == {"ok": 3, "failed": 1, "by_failure": {"truncated": 1}, "incomplete": 0}
    assert stage["ttft_ms"]["n"] == stage["e2e_ms"]["n"] == 3
    assert stage["ttft_ms"]["max"] == pytest.approx(100)
    assert stage["output_tokens_per_s"] == pytest.approx(30 / 4)
    assert stage["total_tokens_per_s"] == pytest.approx(90 / 4)
    assert stage["requests_per_s"] == pytest.approx(3 / 4)


def test_a_stage_in_which_all_fail_is_invalid_and_names_the_kinds() -> None:
    trace = make_trace([0.0, 1.0, 2.0], 0.1, 1.0, ok=False, failure=["http_503", "stalled", "http_503"])
    stage = one_user(trace)
    assert not stage["valid"]
    assert stage["reasons"][0] == (
        "no request ended well: 3 failed (http_503 2, stalled 1), 0 cut by the end of the stage"
    )
    assert stage["output_tokens_per_s"] is None


def test_only_the_window_is_summarised() -> None:
    """Two users overlap from 1 to 3 s; what begins or ends outside is not counted, tokens are where they arrive."""
    trace = make_trace([0.0, 1.0, 2.0], ttft_s=[0.5, 0.5, 0.5], e2e_s=[2.0, 2.0, 2.0], output_tokens=16)
    stage = summarise(0, trace, StageLoad(users=2))
    assert (stage["window"]["start_s"], stage["window"]["end_s"]) == (1.0, 3.0)
    # first contents at 0.5, 1.5, 2.5 s; last ones at 2, 3, 4 s
    assert (stage["ttft_ms"]["n"], stage["e2e_ms"]["n"]) == (2, 2)
    assert stage["requests_per_s"] == 1.0
    # 15 tokens over 1.5 s: 10 from the first request, all 16 of the second, 1 + 5 of the third
    assert stage["output_tokens_per_s"] == pytest.approx((10 + 16 + 6) / 2)
    assert stage["total_tokens_per_s"] == pytest.approx((10 + 16 + 6 + 2 * 20) / 2)
    assert stage["totals"]["output_tokens"] == 48


def test_reasoning_that_never_answers_has_no_ttfa() -> None:
    stage = one_user(make_trace([0.0, 1.0, 2.0], 0.1, 1.0, ttfa_s=[0.5, NAN, 0.7]))
    assert stage["ttfa_ms"]["n"] == 2
    assert stage["ttfa_ms"]["mean"] == pytest.approx(600)


def test_latency_from_schedule_stands_beside_latency_from_sent() -> None:
    stage = one_user(make_trace([0.0, 1.0, 2.0], 0.1, 1.0, scheduled_s=[0.0, 0.95, 1.95]))
    assert stage["ttft_ms"]["max"] == pytest.approx(100)
    assert stage["ttft_from_schedule_ms"]["max"] == pytest.approx(150)
    assert stage["e2e_from_schedule_ms"]["max"] == pytest.approx(1050)
    assert stage["client"]["schedule_delay_ms_p99"] == pytest.approx(50)


def test_long_requests_weigh_more_in_the_token_weighted_tpot() -> None:
    # 10 later tokens at 10 ms, 90 at 50 ms
    trace = make_trace([0.0, 1.0], 0.1, [0.2, 4.6], output_tokens=[11, 91])
    stage = one_user(trace)
    assert stage["tpot_ms"]["mean"] == pytest.approx(30)
    assert stage["tpot_ms_token_weighted"] == pytest.approx((10 * 10 + 90 * 50) / 100)


def test_goodput_counts_requests_within_every_limit() -> None:
    trace = make_trace([0.0, 1.0, 2.0, 3.0], [0.1, 0.3, 0.1, 0.1], [1.0, 1.0, 1.0, 0.1], output_tokens=[10, 10, 4, 1])
    for slo, good in (({"ttft": 200}, 3), ({"tpot": 150}, 3), ({"ttft": 200, "tpot": 150}, 2), ({"e2e": 999}, 1)):
        stage = one_user(trace, slo=slo)
        assert stage["goodput_per_s"] * (stage["window"]["end_s"] - stage["window"]["start_s"]) == pytest.approx(good)


def test_without_slo_there_is_no_goodput_and_an_unknown_one_is_refused() -> None:
    assert one_user(THREE)["goodput_per_s"] is None
    with pytest.raises(ValueError, match="SLO 'itl': expected one of ttft, tpot, e2e"):
        one_user(THREE, slo={"itl": 50})


def test_streams_cut_by_the_end_count_with_what_they_brought() -> None:
    """One user: a good request, then one that is cut after 6 of its chunks; two tokens a chunk."""
    trace = make_trace(
        [0.0, 1.0],
        [0.1, 0.1],
        [1.0, 0.6],
        output_tokens=[20, NAN],
        first=2,
        prompt_tokens=[20, NAN],
        stream_end_s=[1.0, 1.0],
        ok=[True, False],
        incomplete=[False, True],
    )
    stage = one_user(trace, deltas=Deltas(chunks=np.array([10, 6])))
    assert stage["requests"]["incomplete"] == 1
    assert stage["ttft_ms"]["n"] == 2
    assert stage["e2e_ms"]["n"] == stage["tpot_ms"]["n"] == 1
    assert stage["output_tokens_per_s"] == pytest.approx(32 / 2)
    assert stage["output_tokens_estimated_share"] == pytest.approx(12 / 32)
    assert stage["total_tokens_per_s"] == pytest.approx((32 + 40) / 2)
    without = one_user(trace)
    assert without["output_tokens_per_s"] == pytest.approx(20 / 2)
    assert "1 of 1 cut streams have no token count: token rates leave them out" in without["reasons"]


def test_good_requests_without_a_token_count_are_said_and_not_guessed() -> None:
    stage = one_user(make_trace([0.0, 1.0, 2.0], output_tokens=[10, NAN, 10]), deltas=Deltas(chunks=np.full(3, 10)))
    assert stage["output_tokens_per_s"] == pytest.approx(20 / 3)
    assert "1 of 3 good requests have no token count: token rates leave them out" in stage["reasons"]
    assert one_user(make_trace([0.0, 1.0, 2.0], output_tokens=NAN))["output_tokens_per_s"] is None


def test_unknown_prompts_leave_the_total_unknown() -> None:
    stage = one_user(make_trace([0.0, 1.0, 2.0], prompt_tokens=[20, NAN, 20]))
    assert stage["total_tokens_per_s"] is None
    assert stage["output_tokens_per_s"] == pytest.approx(10)


def test_chunk_gaps_come_from_the_histogram_cut_to_the_window() -> None:
    gaps = GapHistogram(0.0)
    gaps.add(np.array([0.5, 1.5, 2.5, 9.0]), np.array([10.0, 20.0, 30.0, 999.0]))
    stage = one_user(THREE, readings=StageReadings(gaps=gaps))
    assert (stage["chunk_gap_ms"]["n"], stage["chunk_gap_ms"]["mean"], stage["chunk_gap_ms"]["max"]) == (3, 20.0, 30.0)


def test_saved_gaps_are_exact_and_leave_failed_requests_out() -> None:
    trace = make_trace([0.0, 1.0, 2.0], 0.1, 0.4, output_tokens=3, ok=[True, False, True], failure=["", "stalled", ""])
    times = np.array([0.1, 0.2, 0.4])
    deltas = Deltas(chunks=np.full(3, 3), times_s=np.tile(times, 3), offsets=np.array([0, 3, 6, 9]))
    stage = one_user(trace, deltas=deltas)
    assert stage["chunk_gap_ms"]["n"] == 4
    assert stage["chunk_gap_ms"]["min"] == pytest.approx(100)
    assert stage["chunk_gap_ms"]["max"] == pytest.approx(200)


def test_a_stage_the_client_limited_is_invalid() -> None:
    readings = StageReadings(loop_lag_ms_p99=80.0, cpu=0.99, server={"running_mean": 0.9})
    stage = one_user(THREE, readings=readings)
    assert not stage["valid"]
    assert stage["window"]["steady"]
    assert len(stage["reasons"]) == 2
    assert (stage["client"]["loop_lag_ms_p99"], stage["client"]["cpu"]) == (80.0, 0.99)
    assert stage["server"] == {"running_mean": 0.9}


def test_delivered_concurrency_under_98_percent_is_invalid() -> None:
    # a user who needs 50 ms between a stream and the next send
    stage = one_user(make_trace(np.arange(20) * 1.05))
    assert not stage["valid"]
    assert stage["reasons"] == ["client: 0.9547 of 1 streams asked were in flight (95.5%)"]


def test_a_stage_that_is_not_steady_stays_valid_and_says_so() -> None:
    stage = summarise(0, make_trace(np.zeros(8), 0.1, np.linspace(1.0, 1.1, 8)), StageLoad(users=8))
    assert stage["valid"]
    assert not stage["window"]["steady"]
    assert all(reason.startswith("not steady: ") for reason in stage["reasons"])


def test_a_rate_has_no_users_and_no_rate_per_user() -> None:
    stage = summarise(1, make_trace(np.arange(40) * 0.5, 0.1, 2.0), StageLoad(request_rate=2.0))
    assert (stage["users"], stage["request_rate"]) == (None, 2.0)
    assert stage["output_tokens_per_s_per_user"] is None
    assert stage["output_tokens_per_s"] == pytest.approx(20, rel=0.05)
    assert stage["valid"]


@pytest.mark.parametrize("users", [4, 32])
def test_littles_law_holds_in_a_closed_loop(users: int) -> None:
    """Throughput times residence is concurrency; and tokens flow at the tokens of a request times throughput."""
    trace = closed_loop(users, 200.0, np.random.default_rng(users), start_over_s=1.0, output_tokens=50)
    stage = summarise(0, trace, StageLoad(users=users, planned_end_s=200.0))
    concurrency = stage["requests_per_s"] * stage["e2e_ms"]["mean"] / 1000
    assert concurrency == pytest.approx(stage["client"]["concurrency_mean"], rel=0.01)
    assert concurrency == pytest.approx(users, rel=0.01)
    assert stage["output_tokens_per_s"] == pytest.approx(50 * stage["requests_per_s"], rel=0.01)


seeds = st.integers(min_value=0, max_value=2**32 - 1)


def numbers(stage: dict[str, Any]) -> list[float]:
    """Every number of a stage but where its window lies."""
    found = [value for name in DISTRIBUTIONS for value in stage[name].values()]
    found += [stage[name] for name in ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s", "goodput_per_s")]
    return [value for value in found + list(stage["client"].values()) if value is not None]


def summary_of(trace: RequestTrace, end_s: float) -> dict[str, Any]:
    return summarise(0, trace, StageLoad(users=5, planned_end_s=end_s), slo={"ttft": 100, "e2e": 1000})


@settings(max_examples=30)
@given(seeds)
def test_the_order_of_requests_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trace = closed_loop(5, 8.0, rng, start_over_s=1.0)
    order = rng.permutation(len(trace))
    shuffled = make_trace(trace.sent_s[order], trace.ttft_s[order], trace.e2e_s[order])
    here, there = summary_of(trace, 8.0), summary_of(shuffled, 8.0)
    assert numbers(there) == pytest.approx(numbers(here), rel=1e-9)
    assert (there["window"], there["requests"]) == (here["window"], here["requests"])


@settings(max_examples=30)
@given(seeds, st.integers(min_value=-1000, max_value=10_000))
def test_shifting_time_changes_nothing(seed: int, shift: int) -> None:
    trace = closed_loop(5, 8.0, np.random.default_rng(seed), start_over_s=1.0)
    moved = make_trace(trace.sent_s + shift, trace.ttft_s, trace.e2e_s)
    here, there = summary_of(trace, 8.0), summary_of(moved, 8.0 + shift)
    assert numbers(there) == pytest.approx(numbers(here), rel=1e-6, abs=1e-6)


def test_a_million_requests_are_summarised_in_seconds() -> None:
    rng = np.random.default_rng(0)
    sent = np.sort(rng.uniform(0, 10_000, 1_000_000))
    trace = make_trace(sent, rng.lognormal(-2, 0.5, len(sent)), 1 + rng.lognormal(0, 0.3, len(sent)), 100)
    began = time.process_time()
    stage = summarise(0, trace, StageLoad(request_rate=100.0), slo={"ttft": 200})
    assert time.process_time() - began < 10
    assert stage["requests"]["ok"] == 1_000_000
    assert stage["output_tokens_per_s"] == pytest.approx(10_000, rel=0.01)
