"""Reading /metrics again and again on the run's clock, beside the load and never in its way.

A scrape is stamped with the middle of its call: the server read its numbers somewhere between the question and the
answer, and on a busy server that span is long. A scrape that fails is kept as one, with its error; nothing is raised.

Cost: one text of a vLLM 0.32 engine (46 KB) takes 3 to 5 ms of this process to parse (2-core Xeon, CPython 3.11), so
0.6 to 1 % of one core at two scrapes a second; it runs in the parent, not in the processes that carry the load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from harness.clock import NS_PER_S, Clock, MonotonicClock
from harness.errors import HarnessError
from harness.observe.deltas import COUNTER_FIELDS, delta
from harness.observe.snapshot import Snapshot, read, sharing
from harness.wire.prom import BadMetrics

if TYPE_CHECKING:
    from harness.http_get import Answer

#: seconds one scrape may take
TIMEOUT_S = 5.0
#: statuses that have a plain reason
_STATUS = {401: "a key is needed", 403: "forbidden", 404: "no /metrics there"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """One reading of /metrics, or why there was none: exactly one of ``snapshot`` and ``error`` is set.

    ``at_s``: middle of the call, seconds since the run's start. ``duration_s``: length of the call.
    """

    at_s: float
    duration_s: float
    snapshot: Snapshot | None = None
    error: str | None = None

    def to_row(self) -> dict[str, Any]:
        """The row of ``scrapes.jsonl``: JSON values only."""
        row: dict[str, Any] = {"at_ms": round(self.at_s * 1e3, 3), "duration_ms": round(self.duration_s * 1e3, 3)}
        if self.snapshot is not None:
            return row | {"snapshot": self.snapshot.to_row()}
        return row | {"error": self.error}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """A row back. Raises ValueError for an unknown, missing or contradictory key."""
        if row.keys() not in ({"at_ms", "duration_ms", "snapshot"}, {"at_ms", "duration_ms", "error"}):
            raise ValueError(f"a scrape has at_ms, duration_ms and either snapshot or error, not {sorted(row)}")
        snapshot = Snapshot.from_row(row["snapshot"]) if "snapshot" in row else None
        return cls(
            at_s=row["at_ms"] / 1e3, duration_s=row["duration_ms"] / 1e3, snapshot=snapshot, error=row.get("error")
        )


def from_rows(rows: Iterable[Mapping[str, Any]], before: Scrape | None = None) -> list[Scrape]:
    """Scrapes of ``scrapes.jsonl`` again, ``before`` the first of them: equal parts are one object, so that each takes
    about 2 KB."""
    scrapes = [] if before is None else [before]
    latest = None if before is None else before.snapshot
    for row in rows:
        scrape = Scrape.from_row(row)
        if scrape.snapshot is not None:
            latest = sharing(latest, scrape.snapshot)
            scrape = replace(scrape, snapshot=latest)
        scrapes.append(scrape)
    return scrapes


class Asks(Protocol):
    """What a scrape needs of :class:`harness.http_get.Getter`."""

    async def get(self, url: str, *, timeout_s: float | None = None) -> Answer: ...


class ScrapeLoop:
    """Scrapes at a fixed interval while its ``async with`` is open, and on demand. One scrape is in flight at a time.

    Args:
        getter: asks; open for as long as the loop.
        url: of /metrics.
        run_start_ns: the run's start on ``clock``.
        interval_s: seconds between the starts of two scrapes. Deadlines are absolute; one missed by a slow scrape is
            passed over, not made up for.
        model: the ``model_name`` to read, as the probe found it (``ProbeResult.metrics_model``).
        sink: called with each scrape as it is made (the store's writer, the Prometheus export). What it raises ends
            the loop and is raised from ``scrape_now`` and at the end of the ``async with``.
    """

    def __init__(
        self,
        getter: Asks,
        url: str,
        *,
        run_start_ns: int,
        interval_s: float = 0.5,
        model: str | None = None,
        sink: Callable[[Scrape], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        if interval_s <= 0:
            raise ValueError(f"interval_s {interval_s} must be positive")
        self._getter = getter
        self._url = url
        self._clock: Clock = clock or MonotonicClock()
        self._run_start_ns = run_start_ns
        self._interval_ns = round(interval_s * NS_PER_S)
        self._model = model
        self._sink = sink
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        #: the latest one that could be read; the loop keeps no other
        self.last_good: Scrape | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="scrape-loop")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        due_ns = self._clock.now_ns()
        while True:
            await self._scrape()
            due_ns += self._interval_ns
            missed = max(0, (self._clock.now_ns() - due_ns + self._interval_ns - 1) // self._interval_ns)
            due_ns += missed * self._interval_ns
            await self._clock.sleep_until(due_ns)

    async def scrape_now(self) -> Scrape:
        """Scrape at once (after one that is in flight), beside the interval: at the borders of a stage."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()
        return await self._scrape()

    async def _scrape(self) -> Scrape:
        async with self._one_at_a_time:
            started_ns = self._clock.now_ns()
            snapshot, error, ended_ns = None, None, None
            try:
                answer = await self._getter.get(self._url, timeout_s=TIMEOUT_S)
                started_ns, ended_ns = answer.started_ns, answer.ended_ns
                if answer.status == 200:
                    snapshot = read(answer.body, self._model)
                else:
                    error = f"HTTP {answer.status}: {_STATUS.get(answer.status, 'no metrics')}"
            except HarnessError as failure:
                error = failure.message
            except BadMetrics as failure:
                error = failure.message
            scrape = self._stamped(started_ns, ended_ns or self._clock.now_ns(), snapshot, error)
            if snapshot is not None:
                self.last_good = scrape
            if self._sink is not None:
                self._sink(scrape)
            return scrape

    def _stamped(self, started_ns: int, ended_ns: int, snapshot: Snapshot | None, error: str | None) -> Scrape:
        middle_ns = (started_ns + ended_ns) // 2
        return Scrape(
            at_s=(middle_ns - self._run_start_ns) / NS_PER_S,
            duration_s=(ended_ns - started_ns) / NS_PER_S,
            snapshot=snapshot,
            error=error,
        )

    async def settle(
        self, *, timeout_s: float = 30.0, interval_s: float = 0.25, stale_after_s: float = 3.0
    ) -> str | None:
        """Wait until the server is idle and its counters stand still, so that what grows afterwards is ours.

        Idle by the rules of :class:`Stillness`. The last scrape is the baseline.

        Returns:
            None where it is idle; after ``timeout_s`` what keeps it from being idle, one sentence.
        """
        deadline_ns = self._clock.now_ns() + round(timeout_s * NS_PER_S)
        stillness = Stillness(stale_after_s)
        while not stillness.look(await self.scrape_now()):
            if self._clock.now_ns() >= deadline_ns:
                return f"the server is not idle: {stillness.reason}"
            await self._clock.sleep_until(self._clock.now_ns() + round(interval_s * NS_PER_S))
        return None


class Stillness:
    """Whether a server is idle, told from scrapes in a row.

    Idle: two scrapes with running == waiting == 0 and not one counter moved between them. V1 sets its gauges only when
    the engine steps, so after requests were broken off they may keep their last value for ever (seen on vLLM 0.32.0):
    where counters, gauges and KV usage have all stood still for ``stale_after_s``, the server counts as idle too. That
    can mistake one engine step longer than this for idleness, so it must exceed the longest step.
    """

    def __init__(self, stale_after_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._before: Snapshot | None = None
        self._still_since_s: float | None = None
        #: why the last look said what it said, one sentence
        self.reason = "not looked yet"

    def look(self, scrape: Scrape) -> bool:
        """Take the next scrape; True where the server is idle."""
        before, self._before = self._before, scrape.snapshot
        moved = what_moved(before, scrape.snapshot)
        if moved is not None:
            self._still_since_s, self.reason = None, moved
            return False
        assert scrape.snapshot is not None
        if not scrape.snapshot.running and not scrape.snapshot.waiting:
            self.reason = "idle: nothing runs or waits, and the counters stand still"
            return True
        if self._still_since_s is None:
            self._still_since_s = scrape.at_s
        self.reason = _busy(scrape.snapshot)
        if scrape.at_s - self._still_since_s < self._stale_after_s:
            return False
        self.reason = (
            f"idle: {self.reason} by the gauges, but nothing moved for {self._stale_after_s:g} s (stale gauges)"
        )
        return True


def what_moved(before: Snapshot | None, now: Snapshot | None) -> str | None:
    """What changed between two scrapes, as a sentence; None where nothing did."""
    if now is None:
        return "the metrics could not be read"
    if before is None:
        return _busy(now)
    grown = delta(before, now)
    if grown.restarted:
        return "the server restarted"
    if grown.generation_tokens:
        return f"{grown.generation_tokens:,.0f} output tokens came of requests that are not ours"
    if moved := [name for name in COUNTER_FIELDS if _any(getattr(grown, name))]:
        return f"{moved[0]} still grows"
    return _busy(now) if any(getattr(before, gauge) != getattr(now, gauge) for gauge in _GAUGES) else None


_GAUGES = ("running", "waiting", "kv_cache_usage")


def _any(grown: float | Mapping[str, float] | None) -> bool:
    return any(grown.values()) if isinstance(grown, Mapping) else bool(grown)


def _busy(now: Snapshot) -> str:
    return f"{now.running} running, {now.waiting} waiting"
