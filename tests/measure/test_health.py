"""The client's verdict on itself, by the documented limits."""

from typing import Any

import numpy as np
import pytest
from measure_traces import NAN, closed_loop

from harness.measure.health import ClientReadings, HealthLimits, asked_standard_error, client_verdict, run_fault
from harness.measure.window import InFlight, spans

HEALTHY = {
    "loop_lag_ms_p99": 25.0,
    "cpu": 0.9,
    "schedule_delay_ms_p99": 100.0,
    "concurrency_mean": 98.0,
    "asked": 100.0,
}


def test_at_the_limits_a_stage_stands() -> None:
    assert client_verdict(ClientReadings(**HEALTHY)) == (True, [])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loop_lag_ms_p99": 40.0}, "client: event-loop lag p99 is 40 ms, more than 25"),
        ({"cpu": 0.97}, "client: CPU of the busiest process is 0.97 of a core, more than 0.9"),
        ({"schedule_delay_ms_p99": 150.0}, "client: schedule delay p99 is 150 ms, more than 100"),
        ({"concurrency_mean": 24.9}, "client: 24.9 of 100 streams asked were in flight (24.9%)"),
    ],
)
def test_beyond_a_limit_a_stage_is_invalid_and_says_why(change: dict[str, float], reason: str) -> None:
    assert client_verdict(ClientReadings(**(HEALTHY | change))) == (False, [reason])


def test_every_reason_is_given() -> None:
    valid, reasons = client_verdict(ClientReadings(loop_lag_ms_p99=99.0, cpu=1.0, schedule_delay_ms_p99=999.0))
    assert not valid
    assert len(reasons) == 3


def test_what_was_not_measured_gives_no_verdict() -> None:
    assert client_verdict(ClientReadings()) == (True, [])
    assert client_verdict(ClientReadings(concurrency_mean=1.0)) == (True, [])


def test_the_scatter_of_thinking_users_is_allowed_for() -> None:
    low = ClientReadings(concurrency_mean=9.0, asked=10.0)
    assert not client_verdict(low)[0]
    assert client_verdict(ClientReadings(concurrency_mean=9.0, asked=10.0, asked_se=0.3))[0]


def test_limits_can_be_set() -> None:
    assert client_verdict(ClientReadings(cpu=0.95), HealthLimits(cpu=0.99))[0]


def test_the_scatter_of_thinking_users_is_what_a_simulation_shows() -> None:
    """Exponential think times of 3 s and nearly exponential requests of 1 s, 40 users, windows of 30 s, 200 times."""
    means = [
        InFlight.of(*spans(closed_loop(40, 50.0, np.random.default_rng(seed), think_s=3.0, spread=0.8))).mean(
            20.0, 50.0
        )
        for seed in range(200)
    ]
    assert np.mean(means) == pytest.approx(10.0, rel=0.02)
    assert asked_standard_error(40, 1.0, 3.0, 30.0) == pytest.approx(np.std(means), rel=0.2)


def test_without_thinking_or_knowing_there_is_no_scatter() -> None:
    assert asked_standard_error(8, 1.0, 0.0, 30.0) == 0
    assert asked_standard_error(8, NAN, 3.0, 30.0) == 0


def stage(
    *, valid: bool = True, tokens: float | None = 10.0, ttfts: int = 3, reasons: tuple[str, ...] = ()
) -> dict[str, Any]:
    return {"valid": valid, "reasons": list(reasons), "totals": {"output_tokens": tokens}, "ttft_ms": {"n": ttfts}}


def test_a_run_with_one_valid_stage_means_something() -> None:
    assert run_fault([stage(valid=False), stage()]) is None


def test_a_run_means_nothing_without_stages_tokens_or_a_valid_stage() -> None:
    assert run_fault([]) == "the run has no stage"
    for nothing in (None, 0.0):
        empty = stage(tokens=nothing, ttfts=0, valid=False, reasons=("no request ended well: 3 failed (http_503 3)",))
        assert run_fault([empty]) == (
            "no output token was received in the whole run: no request ended well: 3 failed (http_503 3)"
        )
    bound = stage(valid=False, reasons=("client: CPU of the busiest process is 0.97 of a core, more than 0.9",))
    assert run_fault([bound, bound]) == f"every stage is invalid (2 of 2): {bound['reasons'][0]}"


def test_content_without_a_token_count_is_no_empty_run() -> None:
    assert run_fault([stage(tokens=None, ttfts=5)]) is None
