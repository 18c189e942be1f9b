"""The one clock of a run: monotonic nanoseconds, shared by every process of this machine. The only file that imports time.

``perf_counter_ns`` reads CLOCK_MONOTONIC on Linux, mach_absolute_time on macOS and QPC on Windows: one origin for all
processes, so stamps of the parent and of its workers compare. Wall time is read once a run, for labels only.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


class Clock(Protocol):
    """What the rest of the harness may know of time."""

    def now_ns(self) -> int:
        """Nanoseconds on the monotonic clock."""
        ...

    async def sleep_until(self, due_ns: int) -> None:
        """Return at or after ``due_ns``; at once when it is past."""
        ...


class MonotonicClock:
    """The real clock."""

    now_ns = staticmethod(time.perf_counter_ns)

    async def sleep_until(self, due_ns: int) -> None:
        # a loop that sleeps is meant: uvloop's timers have a resolution of 1 ms and may wake early
        while (left_ns := due_ns - time.perf_counter_ns()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_ns / NS_PER_S)


def now_ns() -> int:
    """Nanoseconds on the monotonic clock of this machine."""
    return time.perf_counter_ns()


def process_cpu_s() -> float:
    """CPU seconds (user + system) this process has used."""
    return time.process_time()


def wall_time() -> datetime:
    """The wall clock, in UTC: for the label of a run, never for an interval."""
    return datetime.now(UTC)


def sleep_s(seconds: float) -> None:
    """Block this thread; for process management outside any event loop."""
    time.sleep(seconds)
