"""What Prometheus is shown of a finished run or a calibration. Pure: content in, families of gauges out.

Nothing of it can be taken for something that goes on:

* every name but three begins with ``vllm_harness_finished_``, and none is a name of a live run;
* those three (predicted and measured users, correction factors) tell of a deployment and not of a moment;
* there is no counter and no histogram, so that a rate of it is never asked for: a request count is a gauge;
* beside it stands when it was, in seconds since 1970, so that a reader sees its age as
  ``time() - vllm_harness_finished_run_timestamp_seconds``.

Labels: ``stage`` is the index of a stage, as many as the profile has; ``quantile``, ``outcome``, ``limit``, ``factor`` and
``bound`` have a fixed few values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from harness.export.prometheus_names import (
    CORRECTION_FACTOR,
    MEASURED_USERS,
    PREDICTED_USERS,
    SHARED,
    gauge,
    measured_users,
    predicted_users,
)

if TYPE_CHECKING:
    from calibration.calibration_file import Calibration
    from calibration.compare import Comparison
    from calibration.limits import Limits
    from calibration.plan import Plan
    from calibration.prediction import Estimate
    from harness.store import RunData

PREFIX = "vllm_harness_finished_"
_QUANTILES = {"0.5": "p50", "0.9": "p90", "0.95": "p95", "0.99": "p99"}
_LATENCIES = {
    "ttft": ("ttft_ms", "From sent to the first content"),
    "tpot": ("tpot_ms", "Per output token after the first"),
    "e2e": ("e2e_ms", "From sent to the last content"),
}
#: name -> key of a stage of summary.json, what it is
_OF_STAGES = {
    "users": (("users",), "Users of a stage; of an open-loop one, its cap."),
    "request_rate_per_second": (("request_rate",), "Arrivals of an open-loop stage."),
    "valid": (("valid",), "Whether a stage tells of the server: 1, or 0."),
    "output_tokens_per_second": (("output_tokens_per_s",), "Tokens received in a stage's window."),
    "requests_per_second": (("requests_per_s",), "Good requests that ended in a stage's window."),
    "goodput_requests_per_second": (("goodput_per_s",), "Of those, the ones within the limits that were asked for."),
    "kv_cache_usage_ratio": (("server", "kv_cache_usage_max"), "Fullest moment of the server's KV pool, 0..1."),
    "requests_waiting": (("server", "waiting_mean"), "Requests waiting on the server, mean over a stage."),
    "preemptions": (("server", "preemptions"), "Preemptions on the server in a stage."),
}


class Finished(Collector):
    """Families that do not change, as a registry wants them."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def run_families(run: RunData, comparison: Comparison | None) -> list[Metric]:
    """Of a run: its stages, and the limits of its sweep where it was one."""
    began = datetime.fromisoformat(run.run["started"]).timestamp()
    found: list[GaugeMetricFamily | None] = [
        gauge(f"{PREFIX}run_timestamp_seconds", "When the run began, seconds since 1970.", {(): began})
    ]
    if comparison is not None:
        found.append(_shared(PREDICTED_USERS, predicted_users(comparison.prediction)))
        found.append(_shared(MEASURED_USERS, measured_users(comparison)))
    found += _stage_families(run.stages)
    return [family for family in found if family is not None]


def _stage_families(stages: Sequence[Mapping[str, Any]]) -> Iterator[GaugeMetricFamily | None]:
    for name, (path, text) in _OF_STAGES.items():
        rows = {stage["index"]: _at(stage, *path) for stage in stages}
        yield gauge(f"{PREFIX}stage_{name}", text, rows, "stage")
    counts = {
        (stage["index"], outcome): stage["requests"][outcome]
        for stage in stages
        for outcome in ("ok", "failed", "incomplete")
    }
    yield gauge(f"{PREFIX}stage_requests", "Requests of a stage, by how they ended.", counts, "stage", "outcome")
    for name, (key, text) in _LATENCIES.items():
        means = {stage["index"]: _seconds(stage[key]["mean"]) for stage in stages}
        yield gauge(f"{PREFIX}stage_{name}_mean_seconds", f"{text}, mean.", means, "stage")
        quantiles = {
            (stage["index"], quantile): _seconds(stage[key][percentile])
            for stage in stages
            for quantile, percentile in _QUANTILES.items()
        }
        yield gauge(f"{PREFIX}stage_{name}_seconds", f"{text}, quantiles.", quantiles, "stage", "quantile")


def calibration_families(calibration: Calibration, plan: Plan, limits: Limits | None) -> list[Metric]:
    """Of a calibration: the factors it identified, and the users they predict.

    Args:
        plan: of its deployment, for the lengths to predict for.
        limits: under its factors; None where no step can be timed, so that only the pool limits.
    """
    created = datetime.fromisoformat(calibration.created).timestamp()
    factors = {name: factor for name, factor in calibration.factors.factors.items() if factor.identified}
    estimates = {} if limits is None else {"tpot": limits.tpot, "ttft": limits.ttft, "knee": limits.knee}
    found = [
        gauge(f"{PREFIX}calibration_timestamp_seconds", "When the fit was made, seconds since 1970.", {(): created}),
        _shared(CORRECTION_FACTOR, {name: factor.value for name, factor in factors.items()}),
        gauge(
            f"{PREFIX}correction_factor_interval",
            "Ends of the 90 % interval of a correction factor.",
            {(name, bound): getattr(factor, bound) for name, factor in factors.items() for bound in ("low", "high")},
            "factor",
            "bound",
        ),
        _shared(PREDICTED_USERS, _planned(plan) | {name: at.value for name, at in estimates.items() if at is not None}),
        gauge(
            f"{PREFIX}predicted_users_interval",
            "Ends of the 90 % interval of the users predicted up to a limit.",
            _ends(estimates),
            "limit",
            "bound",
        ),
    ]
    return [family for family in found if family is not None]


def merged(first: Sequence[Metric], second: Sequence[Metric]) -> list[Metric]:
    """The families of both, one of each name. Where both tell the same series, the second does: a pool that a server
    showed over one that was reckoned."""
    families = {family.name: family for family in first}
    for family in second:
        if (old := families.get(family.name)) is not None:
            told = [sample.labels for sample in family.samples]
            family.samples = [s for s in old.samples if s.labels not in told] + family.samples
        families[family.name] = family
    return list(families.values())


def _shared(name: str, users: Mapping[str, float]) -> GaugeMetricFamily | None:
    text, label = SHARED[name]
    return gauge(name, text, users, label)


def _planned(plan: Plan) -> dict[str, float]:
    pool = {} if plan.memory.pool is None else {"kv_full": plan.kv_full, "kv_staggered": plan.kv_staggered}
    return pool | {"max_num_seqs": float(plan.max_num_seqs)}


def _ends(estimates: Mapping[str, Estimate | None]) -> dict[tuple[str, str], float]:
    return {
        (name, bound): getattr(at, bound)
        for name, at in estimates.items()
        if at is not None
        for bound in ("low", "high")
    }


def _at(stage: Mapping[str, Any], *path: str) -> float | None:
    value: Any = stage
    for key in path:
        value = None if value is None else value.get(key)
    return None if value is None else float(value)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
