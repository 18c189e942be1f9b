"""The harness's own Prometheus metrics, live while a run goes on (names: DESIGN section 8; label values:
:mod:`harness.export.prometheus_names`).

    with Exporter(port=9400) as exporter:           a command that runs something
        Run(options, view, exporter).execute()      tells it everything there is to tell
        exporter.on_calibration(factors, users)     what a fit found, if it fits

A registry of its own, so that a second run in one process registers nothing twice and no process metric of Python
leaks in. A value that is not known is absent, never 0: gauges are exported only while they are known, and the counter of
the server's preemptions begins with the first scrape that shows it. What tells of a moment goes when the moment is over:
the gauges of a stage at its end, all of them and the port at the end of the run, so that Prometheus marks every series
stale at its next scrape. Counters never go down, not when a stage is run again and not when the server restarts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from harness.export.prometheus_names import (
    CORRECTION_FACTOR,
    MEASURED_LIMITS,
    MEASURED_USERS,
    PREDICTED_LIMITS,
    PREDICTED_USERS,
    SHARED,
    gauge,
    measured_users,
    predicted_users,
)
from harness.export.prometheus_server import MetricsServer
from harness.observe.deltas import delta
from harness.observe.scrape import Scrape
from harness.observe.snapshot import Snapshot
from harness.record import Outcome, Record

if TYPE_CHECKING:
    from calibration.compare import Prediction
    from calibration.factors import FactorSet

#: seconds, eight a decade from 1 ms to 10 minutes: neighbours differ by a factor of 1.2 to 1.5, so a token time of 5 ms
#: and one of 6 ms are told apart (vLLM's smallest token bucket is 10 ms)
BUCKETS_S: tuple[float, ...] = tuple(
    round(mantissa * 10.0**decade, 4)
    for decade in range(-3, 3)
    for mantissa in (1, 1.5, 2, 3, 4, 5, 6, 8)
    if mantissa * 10.0**decade <= 600
)

#: seconds that a command waits at its end for a last scrape: as often as the example of Prometheus scrapes
LAST_READ_S = 15.0

#: gauges of a moment
_GAUGES: Mapping[str, str] = {
    "vllm_harness_users": "Closed-loop users of the stage that runs.",
    "vllm_harness_streams_in_flight": "Requests in flight.",
    "vllm_harness_stage": "Index of the stage that runs, from 0.",
    "vllm_harness_client_loop_lag_seconds": "How late the client's event loops wake, at worst.",
    "vllm_harness_server_kv_cache_usage_ratio": "Share of the server's KV pool in use, mean over engines, 0..1.",
}
#: those of the stage that runs
_OF_A_STAGE = (
    "vllm_harness_users",
    "vllm_harness_streams_in_flight",
    "vllm_harness_stage",
    "vllm_harness_client_loop_lag_seconds",
)
_PREEMPTIONS = "vllm_harness_server_preemptions"


class _Known(Collector):
    """The values that are known now. Written by the run, read by the serving thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._gauges: dict[str, dict[str, float]] = {}
        self._preemptions: float | None = None

    def set(self, name: str, value: float | None) -> None:
        """Set a gauge without labels; None removes it."""
        self.replace(name, {} if value is None else {"": value})

    def replace(self, name: str, values: Mapping[str, float]) -> None:
        """Set all series of a gauge, by the value of its label; those not given are removed."""
        with self._lock:
            self._gauges[name] = dict(values)

    def preempted(self, more: float) -> None:
        with self._lock:
            self._preemptions = (self._preemptions or 0.0) + more

    def clear(self, *names: str) -> None:
        """Remove these gauges; without names, all."""
        with self._lock:
            for name in names or tuple(self._gauges):
                self._gauges.pop(name, None)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            gauges = dict(self._gauges)
            preemptions = self._preemptions
        for name, values in gauges.items():
            if name in SHARED:
                text, label = SHARED[name]
                family = gauge(name, text, values, label)
            else:
                family = gauge(name, _GAUGES[name], {(): values.get("")})
            if family is not None:
                yield family
        if preemptions is not None:
            yield CounterMetricFamily(_PREEMPTIONS, "Preemptions on the server since the run's start.", preemptions)


class Exporter:
    """Serves ``/metrics`` from its construction to :meth:`close`, in a thread of its own.

    Args:
        port: to listen on; 0 takes a free one (:attr:`port` says which).
        address: to bind; the default is reachable from this machine only.

    Raises:
        UsageError: the port is in use, or address and port cannot be bound.
    """

    def __init__(self, *, port: int, address: str = "127.0.0.1") -> None:
        self.registry = CollectorRegistry()
        self._known = _Known()
        self.registry.register(self._known)
        self._requests = Counter(
            "vllm_harness_requests", "Requests that ended.", ["outcome", "failure"], registry=self.registry
        )
        # a counter that is absent until it is 1 has lost that 1 for a rate; kinds of failure are known when they come
        for outcome in (Outcome.OK, Outcome.INCOMPLETE):
            self._requests.labels(outcome=outcome, failure="")
        self._output_tokens = Counter("vllm_harness_output_tokens", "Tokens received.", registry=self.registry)
        self._ttft = self._histogram("vllm_harness_ttft_seconds", "From sent to the first content, ok requests.")
        self._tpot = self._histogram("vllm_harness_tpot_seconds", "Per output token after the first, ok requests.")
        self._e2e = self._histogram("vllm_harness_e2e_seconds", "From sent to the last content, ok requests.")
        self._tokens_recorded = 0
        self._tokens_shown = 0
        #: the last scrape that told the preemptions
        self._last: Snapshot | None = None
        self._prediction: Prediction | None = None
        self._engines = 1
        self._server = MetricsServer(self.registry, port=port, address=address)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=BUCKETS_S, registry=self.registry)

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.port

    @property
    def address(self) -> str:
        return self._server.address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_for_a_read(self, most_s: float = LAST_READ_S) -> bool:
        """Wait until what is shown now has been scraped once, where anybody scrapes at all: what a command finds last would
        else be gone before it is seen. Whether it has been."""
        return self._server.wait_for_a_read(most_s)

    def close(self) -> None:
        """Remove the gauges and stop serving. May be called twice."""
        self._known.clear()
        self._server.close()

    def on_record(self, record: Record) -> None:
        """A request has ended. Latencies count for outcome ok only, as in the summary."""
        self._requests.labels(outcome=record.outcome, failure=record.failure or "").inc()
        self._tokens_recorded += record.output_tokens or 0
        self._show_tokens(self._tokens_recorded)
        if record.outcome != "ok":
            return
        for histogram, value_ms in (
            (self._ttft, record.ttft_ms),
            (self._tpot, record.tpot_ms),
            (self._e2e, record.e2e_ms),
        ):
            if value_ms is not None:
                histogram.observe(value_ms / 1e3)

    def on_progress(
        self,
        *,
        users: int | None,
        in_flight: int,
        output_tokens_total: int | None = None,
        loop_lag_s: float | None = None,
    ) -> None:
        """A few times a second.

        Args:
            users: of a closed-loop stage; None in an open-loop one.
            output_tokens_total: tokens of the whole run so far, those of unfinished requests included, where they are
                counted; the counter follows the larger of this and what the records say.
            loop_lag_s: how late the client's loops wake.
        """
        self._known.set("vllm_harness_users", users)
        self._known.set("vllm_harness_streams_in_flight", in_flight)
        self._show_tokens(output_tokens_total or 0)
        if loop_lag_s is not None:
            self.on_health(loop_lag_s)

    def on_health(self, loop_lag_s: float) -> None:
        self._known.set("vllm_harness_client_loop_lag_seconds", loop_lag_s)

    def on_run(self, prediction: Prediction | None, engines: int = 1) -> None:
        """A run begins; what an earlier one of this process measured is no longer shown.

        Args:
            prediction: the wall its server's pool shows for its lengths; None where that is unknown.
            engines: that share the users.
        """
        self._prediction, self._engines = prediction, engines
        self._known.replace(PREDICTED_USERS, predicted_users(prediction))
        self._known.clear(MEASURED_USERS)

    def on_stage(self, index: int) -> None:
        """A stage begins; nothing of the one before it is shown any longer."""
        self._known.clear(*_OF_A_STAGE)
        self._known.set("vllm_harness_stage", index)

    def on_stage_end(self, stages: Sequence[Mapping[str, Any]]) -> None:
        """A stage has ended: its gauges go, and what the sweep has measured so far is shown.

        Args:
            stages: those that ended, as in ``summary.json``.
        """
        from calibration.compare import compare, levels_of

        self._known.clear(*_OF_A_STAGE)
        prediction = self._prediction
        share = self._engines / prediction.kv_full if prediction is not None else None
        self._known.replace(MEASURED_USERS, measured_users(compare(levels_of(stages)[0], prediction, share)))

    def on_run_end(self) -> None:
        """A run has ended and another may follow: what is shown of a moment goes, what tells of the deployment stays."""
        self._known.clear(*_GAUGES)

    def on_scrape(self, scrape: Scrape) -> None:
        """The server was read, or could not be: then its KV usage is unknown, and the gauge goes."""
        now, before = scrape.snapshot, self._last
        self._known.set("vllm_harness_server_kv_cache_usage_ratio", None if now is None else now.kv_cache_usage)
        if now is None or now.preemptions is None:
            return
        self._last = now
        self._known.preempted((delta(before, now).preemptions or 0.0) if before is not None else 0.0)

    def on_calibration(self, factors: FactorSet, predicted: Mapping[str, float | None] | None = None) -> None:
        """A fit has ended: show the factors it identified, and the users they predict.

        Args:
            predicted: users by limit (:data:`PREDICTED_LIMITS`); None leaves those shown as they are.

        Raises:
            ValueError: an unknown limit.
        """
        identified = {name: factor.value for name, factor in factors.factors.items() if factor.identified}
        self._known.replace(CORRECTION_FACTOR, identified)
        if predicted is not None:
            self._known.replace(PREDICTED_USERS, _limits(predicted, PREDICTED_LIMITS))

    def on_measured(self, measured: Mapping[str, float | None]) -> None:
        """Show measured limits, users by limit (:data:`MEASURED_LIMITS`), in place of those shown.

        Raises:
            ValueError: an unknown limit.
        """
        self._known.replace(MEASURED_USERS, _limits(measured, MEASURED_LIMITS))

    def _show_tokens(self, total: int) -> None:
        if total > self._tokens_shown:
            self._output_tokens.inc(total - self._tokens_shown)
            self._tokens_shown = total


def _limits(users: Mapping[str, float | None], known: Sequence[str]) -> dict[str, float]:
    """Those that have a number. A label's values are a fixed few: another one is a mistake of the caller's."""
    if unknown := users.keys() - set(known):
        raise ValueError(f"limit {sorted(unknown)[0]!r}, expected one of {', '.join(known)}")
    return {limit: value for limit, value in users.items() if value is not None}
