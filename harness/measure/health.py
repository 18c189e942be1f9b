"""Did the client measure the server, or itself? The verdict on a stage and on a run.

A stage that the client limited is invalid: its numbers are of this machine, not of the server. The limits:

* *delivered concurrency* under 98 % of asked: 2 % is what the model's best throughput fits are off by; a stage that ran
  fewer streams than its label says must not be read under that label. Thinking users make in-flight fluctuate, so
  three standard errors of its mean are allowed besides.
* *event-loop lag* p99 over 25 ms: stamps are taken on the loop, so lag goes straight into TTFT and gaps, and 25 ms is
  about one decode step of a large model.
* *CPU* of the busiest process over 90 % of a core: an event loop has one core, and queueing before a server that is 90 %
  busy is tenfold its service time.
* *schedule delay* p99 over 100 ms: what was sent is no longer the load that was planned. A new TLS connection over a
  slow link (three round trips of 30 ms) has to stay within it.

A number that was not measured gives no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """Beyond these a stage says more of the client than of the server."""

    concurrency_ratio: float = 0.98
    loop_lag_ms_p99: float = 25.0
    cpu: float = 0.90
    schedule_delay_ms_p99: float = 100.0
    standard_errors: float = 3.0


LIMITS = HealthLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientReadings:
    """What the client saw of itself in a stage; None means not measured.

    ``cpu``: fraction of one core, the largest of the processes. ``asked``: streams the load means to have in flight
    (None with a rate), ``asked_se`` the standard error with which a perfect client's mean would scatter about it.
    """

    loop_lag_ms_p99: float | None = None
    cpu: float | None = None
    schedule_delay_ms_p99: float | None = None
    concurrency_mean: float | None = None
    asked: float | None = None
    asked_se: float = 0.0


def client_verdict(readings: ClientReadings, limits: HealthLimits = LIMITS) -> tuple[bool, list[str]]:
    """Whether the stage stands, and if not, every reason why."""
    reasons = [*_concurrency_faults(readings, limits), *_load_faults(readings, limits)]
    return not reasons, reasons


def _concurrency_faults(readings: ClientReadings, limits: HealthLimits) -> Iterator[str]:
    delivered, asked = readings.concurrency_mean, readings.asked
    if delivered is None or asked is None:
        return
    if delivered < limits.concurrency_ratio * asked - limits.standard_errors * readings.asked_se:
        yield f"client: {delivered:.4g} of {asked:.4g} streams asked were in flight ({delivered / asked:.1%})"


def _load_faults(readings: ClientReadings, limits: HealthLimits) -> Iterator[str]:
    measured = (
        ("event-loop lag p99", readings.loop_lag_ms_p99, limits.loop_lag_ms_p99, "ms"),
        ("CPU of the busiest process", readings.cpu, limits.cpu, "of a core"),
        ("schedule delay p99", readings.schedule_delay_ms_p99, limits.schedule_delay_ms_p99, "ms"),
    )
    for name, value, limit, unit in measured:
        if value is not None and value > limit:
            yield f"client: {name} is {value:.3g} {unit}, more than {limit:g}"


def asked_standard_error(users: int, residence_s: float, think_s: float, length_s: float) -> float:
    """Standard error of mean in-flight over a window, of users who alternate between streaming and thinking.

    Each user as a two-state Markov process: share in flight p = R / (R + Z), correlation time R * Z / (R + Z), so the
    variance of the mean over a long window L is ``2 * N * p * (1 - p) * (R * Z / (R + Z)) / L`` (time-average of an
    exponentially correlated process: Papoulis, Probability, Random Variables and Stochastic Processes, ch. on
    ergodicity). Fixed times scatter less. 0 without think time or without a known residence.
    """
    if not think_s or math.isnan(residence_s) or residence_s <= 0:
        return 0.0
    cycle = residence_s + think_s
    share = residence_s / cycle
    return math.sqrt(2 * users * share * (1 - share) * (residence_s * think_s / cycle) / length_s)


def run_fault(stages: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a run means nothing (exit 4), from its stages as in ``summary.json``; None when it means something."""
    if not stages:
        return "the run has no stage"
    if not any(stage["totals"]["output_tokens"] or stage["ttft_ms"]["n"] for stage in stages):
        return "no output token was received in the whole run" + _first_reason(stages)
    if not any(stage["valid"] for stage in stages):
        return f"every stage is invalid ({len(stages)} of {len(stages)})" + _first_reason(stages)
    return None


def _first_reason(stages: Sequence[Mapping[str, Any]]) -> str:
    reasons = [reason for stage in stages for reason in stage["reasons"]]
    return f": {reasons[0]}" if reasons else ""
