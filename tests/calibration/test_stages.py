"""A stage of a summary becomes an observation, or is left out with its reason."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from calibration.errors import InputError
from calibration.stages import read_stage

#: 8 users of 100 + 50 tokens for 20 s: 10 ms a token, 60 ms to the first, nothing in the way
GOOD: dict[str, Any] = {
    "index": 2,
    "users": 8,
    "request_rate": None,
    "valid": True,
    "reasons": [],
    "window": {"start_s": 1.0, "end_s": 21.0, "steady": True},
    "requests": {"ok": 290, "failed": 0, "by_failure": {}, "incomplete": 0},
    "ttft_ms": {"n": 290, "mean": 60.0, "std": 6.0},
    "tpot_ms": {"n": 280, "mean": 10.1, "std": 0.2},
    "e2e_ms": {"n": 280, "mean": 550.0, "std": 5.0},
    "chunk_gap_ms": {"n": 14_200, "mean": 10.0},
    "output_tokens_per_s": 8 * 50 / (0.06 + 49 * 0.01),
    "intervals": {"tpot_ms": {"low": 10.0, "high": 10.2}, "ttft_ms": None},
    "server": {
        "preemptions": 0,
        "waiting_mean": 0.0,
        "waiting_capacity_mean": 0.0,
        "kv_cache_usage_max": 0.3,
        "running_max": 8,
        "contamination": [],
        "steps": 1800,
        "step_ms_mean": 10.2,
        "tokens_per_step_mean": 24.0,
    },
    "totals": {"prompt_tokens_mean": 100.0, "output_tokens_mean": 50.0},
}


def stage(**changes: Any) -> dict[str, Any]:
    """A copy with ``a__b=value`` changed at ``["a"]["b"]``."""
    found = copy.deepcopy(GOOD)
    for path, value in changes.items():
        *outer, last = path.split("__")
        inner = found
        for key in outer:
            inner = inner[key]
        inner[last] = value
    return found


def test_a_steady_stage_is_an_observation() -> None:
    read = read_stage(stage())
    o = read.observation
    assert o is not None
    assert (o.users, o.shape.prompt_tokens, o.shape.output_tokens, o.shape.think_s) == (8, 100, 50, 0)
    assert o.ttft_s == pytest.approx(0.060)
    # 90 % interval of 0.2 ms about 10.1 ms
    assert o.tpot_log_sd == pytest.approx(0.1 / 1.645 / 10.1, rel=1e-3)
    # no interval: eight at a time are one
    assert o.ttft_log_sd == pytest.approx(6 / 60 / (290 / 8) ** 0.5)
    assert read.label == "stage 3: 8 users, 100 + 50 tokens"
    assert read.little_error == pytest.approx(0.0, abs=0.001)


def test_the_gap_between_tokens_is_the_time_per_token_where_each_came_alone() -> None:
    o = read_stage(stage()).observation
    assert o is not None
    assert o.tpot_s == pytest.approx(0.0100)


def test_with_several_tokens_a_chunk_requests_tell_the_time_per_token() -> None:
    o = read_stage(stage(chunk_gap_ms__n=7_000, chunk_gap_ms__mean=20.0)).observation
    assert o is not None
    assert o.tpot_s == pytest.approx(0.0101)


def test_where_the_load_had_settled_requests_tell_it() -> None:
    o = read_stage(stage(), {"ramp_up": 0.55, "warm_up": 1.1}).observation
    assert o is not None
    assert o.tpot_s == pytest.approx(0.0101)
    few = read_stage(stage(tpot_ms__n=15), {"ramp_up": 0.55, "warm_up": 1.1}).observation
    assert few is not None
    assert few.tpot_s == pytest.approx(0.0100)


def test_think_time_is_the_profile_s() -> None:
    read = read_stage(stage(), {"think": 2.0})
    assert read.observation is not None
    assert read.observation.shape.think_s == 2.0
    assert read.little_error == pytest.approx(0.55 / 2.55 - 1, abs=0.001)


def test_the_server_s_step_stands_beside() -> None:
    o = read_stage(stage()).observation
    assert o is not None
    assert o.step_s == pytest.approx(0.0102)
    # of 24 tokens, 16 are of prompts
    assert o.step_running == pytest.approx(8.0)
    alone = read_stage(stage(users=1, server__running_max=1)).observation
    assert alone is not None
    assert alone.step_s is None


def test_starts_that_crowd_tell_little_and_those_at_once_tell_who_stays_with_whom() -> None:
    """A life is 0.55 s, a step 10 ms."""
    lengths = {"prompt_tokens": 100, "output_tokens": 50}
    spread, crowded, at_once, drawn = (
        read_stage(stage(), {"ramp_up": ramp_up, **planned}).observation
        for ramp_up, planned in ((0.55, lengths), (0.35, lengths), (0.014, lengths), (0.35, {}))
    )
    assert spread is not None
    assert crowded is not None
    assert at_once is not None
    assert drawn is not None
    short = 1 - 0.35 * 8 / 7 / 0.55
    assert crowded.tpot_log_sd == pytest.approx(math.hypot(spread.tpot_log_sd, 0.3 * short))
    assert crowded.ttft_log_sd == pytest.approx(math.hypot(spread.ttft_log_sd, 1.2 * short))
    for even in (at_once, drawn):
        assert (even.tpot_log_sd, even.ttft_log_sd) == (spread.tpot_log_sd, spread.ttft_log_sd)


def test_closed_metrics_cost_the_server_s_side_only() -> None:
    o = read_stage(stage(server=None)).observation
    assert o is not None
    assert (o.tpot_s, o.step_s) == (pytest.approx(0.0100), None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"users": None, "request_rate": 5.0}, "an arrival rate, not users"),
        ({"users": 50, "request_rate": 5.0}, "an arrival rate, not users"),
        ({"valid": False, "reasons": ["client: lag"]}, "invalid: client: lag"),
        ({"requests__failed": 20}, "20 of 310 requests failed"),
        ({"totals__output_tokens_mean": None}, "no token counts"),
        ({"server__contamination": ["prefix_hits: 30 hits"]}, "contaminated: prefix_hits: 30 hits"),
        ({"server__preemptions": 3}, "beyond the wall: 3 preemptions"),
        (
            {"server__waiting_capacity_mean": 4.0, "server__kv_cache_usage_max": 0.98},
            "beyond the wall: 4.0 streams waiting with the pool 98% full",
        ),
        ({"window": None}, "not steady: no window"),
        (
            {"window__steady": False, "reasons": ["not steady: request time moves by +20% over the window"]},
            "not steady: request time moves by +20% over the window",
        ),
        ({"tpot_ms__mean": None, "chunk_gap_ms__mean": None}, "no time per output token"),
        ({"intervals__tpot_ms": {"low": 1.0, "high": 30.0}}, "too few answers ended"),
    ],
)
def test_what_says_little_of_the_server_is_left_out(changes: dict[str, Any], said: str) -> None:
    read = read_stage(stage(**changes))
    assert read.observation is None
    assert read.reason.startswith(said)


def test_users_beyond_the_pool_or_max_num_seqs_are_left_out() -> None:
    assert read_stage(stage(), wall_users=7.5).reason == "beyond the wall: the pool holds 7.5 streams on average"
    assert read_stage(stage(server=None), max_num_seqs=4).reason == "beyond the limit max_num_seqs of 4"


def test_a_window_that_is_only_short_counts_for_less() -> None:
    short = stage(window__steady=False, reasons=["not steady: too short: 1 s for a median residence of 0.55 s"])
    o = read_stage(short).observation
    assert o is not None
    assert (o.tpot_log_sd, o.ttft_log_sd) == (0.02, 0.06)
    hardly = stage(window__steady=False, window__end_s=1.3, reasons=["not steady: too short"])
    assert read_stage(hardly).reason == "not steady: too short"


def test_a_short_stage_is_used_where_it_was_meant_short() -> None:
    short = stage(window__steady=False, window__end_s=1.3, reasons=["not steady: too short"])
    assert read_stage(short, unsteady_is_used=True).observation is not None


def test_what_is_no_stage_is_refused() -> None:
    with pytest.raises(InputError, match="a stage cannot be read"):
        read_stage({"index": 0})


def printed_only(**changes: Any) -> dict[str, Any]:
    """As another tool's aggregates are carried over: its printed means, no gaps, nothing called steady."""
    found = stage(window__steady=False, intervals=None, server=None, **changes)
    return found | {"carried_over": True, "chunk_gap_ms": {"n": 0, "mean": 10.0}}


def test_what_another_tool_printed_of_a_whole_run_counts_for_less() -> None:
    o = read_stage(printed_only()).observation
    assert o is not None
    assert (o.tpot_s, o.tpot_log_sd) == (pytest.approx(0.0101), pytest.approx(0.05))
    assert o.ttft_log_sd == pytest.approx(0.2)


def test_printed_numbers_that_are_mostly_fill_and_drain_are_left_out() -> None:
    rate = GOOD["output_tokens_per_s"]
    assert read_stage(printed_only(output_tokens_per_s=0.92 * rate)).observation is not None
    read = read_stage(printed_only(output_tokens_per_s=0.8 * rate))
    assert read.observation is None
    assert read.reason == "only the numbers of a whole run are known, and fill and drain are too much of it"


def test_a_level_of_which_few_streams_were_in_flight_is_left_out() -> None:
    assert read_stage(stage(client={"concurrency_mean": 7.6})).observation is not None
    read = read_stage(stage(client={"concurrency_mean": 5.9}))
    assert read.reason == "only 5.9 of 8 streams were in flight on average"
    thinking = read_stage(stage(client={"concurrency_mean": 5.9}), {"think": 0.2})
    assert thinking.observation is not None


@pytest.mark.parametrize(
    ("planned", "gap_s"),
    [
        # as a ramp starts its users where the stage does not say
        ({"prompt_tokens": 100, "output_tokens": 64, "duration": 30.0}, 0.002),
        ({"prompt_tokens": 100, "output_tokens": 64, "ramp_up": 0.0}, 0.0),
        # over half a life and more: they come one by one
        ({"prompt_tokens": 100, "output_tokens": 64, "ramp_up": 600.0}, None),
        # requests that are not equal part again
        ({"prompt_tokens": 100, "output_tokens": {"mean": 64}, "ramp_up": 0.0}, None),
        ({"prompt_tokens": 100, "output_tokens": 64, "ramp_up": 0.0, "handover": True}, None),
        ({}, None),
    ],
)
def test_how_close_users_start_is_known_where_it_matters(planned: dict[str, Any], gap_s: float | None) -> None:
    found = read_stage(stage(), planned).observation
    assert found is not None
    assert found.shape.start_gap_s == gap_s
