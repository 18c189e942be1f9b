"""When a run ends before its last stage."""

from __future__ import annotations

from typing import Any

import pytest

from harness.load.stops import out_of_time, reason_to_stop, saturated
from loadprofiles.profile import Profile, Stage, parse_profile


def profile(**limits: Any) -> Profile:
    return parse_profile({"name": "x", "stages": [{"users": [1, 2], "duration": "10s"}], "limits": limits}, "x")


def stage(index: int = 0, users: int | None = 4, rate: float | None = 100.0, **changed: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "index": index,
        "users": users,
        "valid": True,
        "output_tokens_per_s": rate,
        "ttft_ms": {"p50": 200.0},
        "server": {"preemptions": 0, "waiting_mean": 0.0, "kv_cache_usage_max": 0.3, "running_mean": 4.0},
    }
    return base | changed


NEXT = Stage(users=8, duration=10.0)


def test_too_many_failed_requests_end_a_run() -> None:
    why = reason_to_stop(profile(error_rate=0.1), [stage()], (2, 10), NEXT)
    assert why == "stage 1: 2 of 10 requests failed, more than limits.error_rate of 0.1"
    assert reason_to_stop(profile(error_rate=0.1), [stage()], (1, 10), NEXT) is None
    assert reason_to_stop(profile(error_rate=0.1), [stage()], (0, 0), NEXT) is None


def test_nothing_is_stopped_after_the_last_stage() -> None:
    assert reason_to_stop(profile(error_rate=0.1), [stage()], (9, 10), None) is None


def test_a_long_wait_ends_a_run() -> None:
    why = reason_to_stop(profile(ttft="150ms"), [stage()], (0, 10), NEXT)
    assert why == "stage 1: the median TTFT is 200 ms, more than limits.ttft of 150 ms"
    assert reason_to_stop(profile(ttft="250ms"), [stage()], (0, 10), NEXT) is None
    assert reason_to_stop(profile(ttft="150ms"), [stage(ttft_ms={"p50": None})], (0, 10), NEXT) is None


def test_no_stage_begins_that_would_end_too_late() -> None:
    assert out_of_time(profile(total_time="60s"), 49.0, NEXT) is None
    late = out_of_time(profile(total_time="60s"), 51.0, NEXT)
    assert late == "limits.total_time of 60 s leaves no room for another stage (51 s are gone)"
    assert out_of_time(profile(), 1e6, NEXT) is None


def test_preemptions_or_a_queue_for_room_are_saturation() -> None:
    server = stage()["server"]
    preempted = stage(server=server | {"preemptions": 3})
    assert saturated([preempted]) == "stage 1: saturated at 4 users: 3 preemptions"
    queued = stage(users=40, server=server | {"waiting_mean": 6.0, "kv_cache_usage_max": 0.99})
    assert saturated([queued]) == "stage 1: saturated at 40 users: 6.0 streams waiting with the pool 99% full"
    assert saturated([stage()]) is None


def test_throughput_that_no_longer_follows_the_users_is_saturation() -> None:
    flat = [stage(0, 4, 100.0), stage(1, 8, 105.0)]
    assert saturated(flat) == "stage 2: saturated at 8 users: 100% more users than 4 brought +5% throughput"
    assert saturated([stage(0, 4, 100.0), stage(1, 8, 150.0)]) is None
    # the level nearest below counts, in whatever order they were run; a few more users tell nothing
    assert saturated([stage(0, 4, 100.0), stage(1, 16, 200.0), stage(2, 8, 190.0)]) is None
    assert saturated([stage(0, 8, 100.0), stage(1, 9, 100.0)]) is None


@pytest.mark.parametrize(
    "changed", [{"valid": False}, {"output_tokens_per_s": None}, {"users": None}, {"server": None, "users": None}]
)
def test_what_does_not_count_is_no_saturation(changed: dict[str, Any]) -> None:
    assert saturated([stage(0, 4, 100.0), stage(1, 8, 100.0) | changed]) is None


def test_saturation_ends_a_run_only_where_asked() -> None:
    flat = [stage(0, 4, 100.0), stage(1, 8, 100.0)]
    assert reason_to_stop(profile(), flat, (0, 10), NEXT) is None
    assert "saturated at 8 users" in (reason_to_stop(profile(saturation="stop"), flat, (0, 10), NEXT) or "")
