"""When a stage is hopeless it is ended, and only then."""

from __future__ import annotations

import pytest

from harness.errors import Refused, Unreachable
from harness.load.tally import GONE_S, Tally
from harness.record import Record


def record(outcome: str = "ok", failure: str | None = None, at_ms: float = 0.0, **more: object) -> Record:
    return Record(
        request_id="0-0",
        stage=0,
        user=0,
        scheduled_ms=at_ms,
        sent_ms=at_ms,
        outcome=outcome,
        failure=failure,
        **more,  # type: ignore[arg-type]
    )


def test_counts_and_means_come_from_the_records() -> None:
    tally = Tally(users=2)
    tally.add(record(output_tokens=10, ttft_ms=50.0, tpot_ms=20.0, chunks=10))
    tally.add(record(output_tokens=30, ttft_ms=150.0, chunks=30))
    tally.add(record("failed", "http_503", message="queue full"))
    tally.add(record("incomplete", chunks=3))
    assert (tally.ok, tally.failed, tally.incomplete, tally.ended) == (2, 1, 1, 4)
    assert tally.output_tokens == 40
    assert tally.output_unknown == 1
    assert (tally.ttft_ms_sum / tally.ttft_n, tally.tpot_n) == (100.0, 1)
    assert tally.verdict(1e9) is None


def test_a_server_that_refuses_everyone_is_not_asked_on() -> None:
    tally = Tally(users=8)
    for _ in range(2):
        tally.add(record("failed", "http_404", message="no such model"))
    assert tally.verdict(0.0) is None
    tally.add(record("failed", "http_404", message="no such model"))
    verdict = tally.verdict(0.0)
    assert isinstance(verdict, Refused)
    assert "no such model" in verdict.message
    assert verdict.exit_code == 5


def test_one_user_needs_one_refusal() -> None:
    tally = Tally(users=1)
    tally.add(record("failed", "http_401", message="Unauthorized"))
    verdict = tally.verdict(0.0)
    assert isinstance(verdict, Refused)
    assert "--api-key" in verdict.hint


@pytest.mark.parametrize(
    ("failure", "hint"),
    [("http_307", "the address it redirects to"), ("http_407", "HTTP_PROXY"), ("http_413", "bodies of this size")],
)
def test_what_every_further_request_would_meet_too_ends_the_run_with_what_to_do(failure: str, hint: str) -> None:
    tally = Tally(users=1)
    tally.add(record("failed", failure, message="the server redirects to https://gpu7/"))
    verdict = tally.verdict(0.0)
    assert isinstance(verdict, Refused)
    assert failure in verdict.message
    assert hint in verdict.hint


def test_an_overloaded_server_is_not_hopeless() -> None:
    tally = Tally(users=1)
    for _ in range(50):
        tally.add(record("failed", "http_503"))
    assert tally.verdict(1e6) is None


def test_a_server_that_went_away_ends_the_run_after_a_while() -> None:
    tally = Tally(users=4)
    tally.add(record())
    for at_ms in (1000.0, 1100.0, 1200.0, 1300.0):
        tally.add(record("failed", "connection", at_ms, message="refused"))
    assert tally.verdict(1000.0 + GONE_S * 1e3 + 1) is None, "four failures are not enough"
    tally.add(record("failed", "connection", 1400.0, message="refused"))
    assert tally.verdict(2000.0) is None, "nor is a moment"
    verdict = tally.verdict(1000.0 + GONE_S * 1e3 + 1)
    assert isinstance(verdict, Unreachable)
    assert "refused" in verdict.message


def test_streams_lost_at_once_do_not_mean_that_the_server_was_gone_while_they_ran() -> None:
    """A gateway that restarts drops long streams together: the server answered them until that moment."""
    tally = Tally(users=8)
    for _ in range(8):
        tally.add(record("failed", "connection", 1000.0, stream_end_ms=60_000.0, message="reset"))
    assert tally.verdict(61_500.0) is None
    assert isinstance(tally.verdict(61_000.0 + GONE_S * 1e3 + 1), Unreachable)


def test_short_answers_are_counted() -> None:
    tally = Tally(users=1)
    tally.add(record(output_tokens=3, asked_output_tokens=5))
    tally.add(record(output_tokens=5, asked_output_tokens=5))
    assert (tally.ok, tally.short) == (2, 1)


def test_a_success_between_failures_means_the_server_lives() -> None:
    tally = Tally(users=4)
    for at_ms in range(0, 9000, 1000):
        tally.add(record("failed", "connection", float(at_ms)))
    tally.add(record())
    assert tally.verdict(60_000.0) is None
