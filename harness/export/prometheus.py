"""The harness's own Prometheus metrics, live while a run goes on (names: DESIGN section 8).

A registry of its own, so that a second run in one process registers nothing twice and no process metric of Python
leaks in. A value that is not known is absent, never 0: gauges are exported only while they are known, and the counter of
the server's preemptions begins with the first scrape that shows it. Label sets are bounded: outcomes, failure kinds,
limits and factors, no request and no user. Counters never go down, not when a stage is run again and not when the
server restarts.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from threading import Lock, Thread
from types import TracebackType
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from harness.errors import UsageError
from harness.observe.deltas import delta
from harness.observe.scrape import Scrape
from harness.observe.snapshot import Snapshot
from harness.record import Record

#: seconds, eight a decade from 1 ms to 10 minutes: neighbours differ by a factor of 1.2 to 1.5, so a token time of 5 ms
#: and one of 6 ms are told apart (vLLM's smallest token bucket is 10 ms)
BUCKETS_S: tuple[float, ...] = tuple(
    round(mantissa * 10.0**decade, 4)
    for decade in range(-3, 3)
    for mantissa in (1, 1.5, 2, 3, 4, 5, 6, 8)
    if mantissa * 10.0**decade <= 600
)

_GAUGES: Mapping[str, tuple[str, str | None]] = {
    "vllm_harness_users": ("Closed-loop users of the stage that runs.", None),
    "vllm_harness_streams_in_flight": ("Requests in flight.", None),
    "vllm_harness_stage": ("Index of the stage that runs, from 0.", None),
    "vllm_harness_client_loop_lag_seconds": ("How late the client's event loops wake, at worst.", None),
    "vllm_harness_server_kv_cache_usage_ratio": (
        "Share of the server's KV pool in use, mean over engines, 0..1.",
        None,
    ),
    "vllm_harness_predicted_users": ("Users the model predicts up to a limit.", "limit"),
    "vllm_harness_measured_users": ("Users measured up to a limit.", "limit"),
    "vllm_harness_correction_factor": ("A correction factor of the calibration in use.", "factor"),
}
_PREEMPTIONS = "vllm_harness_server_preemptions"


class _Known(Collector):
    """The values that are known now. Written by the run, read by the serving thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._gauges: dict[str, dict[str, float]] = {name: {} for name in _GAUGES}
        self._preemptions: float | None = None

    def set(self, name: str, value: float | None, label: str = "") -> None:
        """Set a gauge; None removes it."""
        with self._lock:
            if value is None:
                self._gauges[name].pop(label, None)
            else:
                self._gauges[name][label] = value

    def preempted(self, more: float) -> None:
        with self._lock:
            self._preemptions = (self._preemptions or 0.0) + more

    def clear(self) -> None:
        with self._lock:
            for values in self._gauges.values():
                values.clear()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            gauges = {name: dict(values) for name, values in self._gauges.items() if values}
            preemptions = self._preemptions
        for name, values in gauges.items():
            text, label = _GAUGES[name]
            family = GaugeMetricFamily(name, text, labels=[label] if label else [])
            for key, value in values.items():
                family.add_metric([key] if label else [], value)
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
        self._output_tokens = Counter("vllm_harness_output_tokens", "Tokens received.", registry=self.registry)
        self._ttft = self._histogram("vllm_harness_ttft_seconds", "From sent to the first content, ok requests.")
        self._tpot = self._histogram("vllm_harness_tpot_seconds", "Per output token after the first, ok requests.")
        self._e2e = self._histogram("vllm_harness_e2e_seconds", "From sent to the last content, ok requests.")
        self._tokens_recorded = 0
        self._tokens_shown = 0
        self._last: Snapshot | None = None
        self._server, self._thread = self._serve(address, port, self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=BUCKETS_S, registry=self.registry)

    @staticmethod
    def _serve(address: str, port: int, registry: CollectorRegistry) -> tuple[WSGIServer, Thread]:
        try:
            return start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            where = f"{address}:{port}"
            if getattr(error, "errno", None) == errno.EADDRINUSE:
                raise UsageError(
                    f"port {where} for the Prometheus export is in use", "take another one, or 0"
                ) from error
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"cannot serve the Prometheus export on {where}: {reason}", "take another one") from error

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self._server.server_port)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the gauges and stop serving. May be called twice."""
        self._known.clear()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

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

    def on_stage(self, index: int) -> None:
        """A stage begins."""
        self._known.set("vllm_harness_stage", index)

    def on_scrape(self, scrape: Scrape) -> None:
        """The server was read, or could not be: then its KV usage is unknown, and the gauge goes."""
        now, before = scrape.snapshot, self._last
        self._known.set("vllm_harness_server_kv_cache_usage_ratio", None if now is None else now.kv_cache_usage)
        if now is None:
            return
        self._last = now
        if now.preemptions is not None:
            self._known.preempted((delta(before, now).preemptions or 0.0) if before is not None else 0.0)

    def predicted_users(self, limit: str, users: float | None) -> None:
        self._known.set("vllm_harness_predicted_users", users, limit)

    def measured_users(self, limit: str, users: float | None) -> None:
        self._known.set("vllm_harness_measured_users", users, limit)

    def correction_factor(self, factor: str, value: float | None) -> None:
        self._known.set("vllm_harness_correction_factor", value, factor)

    def _show_tokens(self, total: int) -> None:
        if total > self._tokens_shown:
            self._output_tokens.inc(total - self._tokens_shown)
            self._tokens_shown = total
