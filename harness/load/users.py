"""One stage as a worker runs it: its users, or its arrivals, from the first request to the last one's end.

A stage may take over the users of the one before it, which goes on until its last stream has ended: each user passes its
baton (when its next request is meant, and how it fared so far) from stage to stage, and no user waits for another.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from asyncio_throttle.throttler import Throttler

from harness.clock import NS_PER_MS, NS_PER_S, MonotonicClock, now_ns
from harness.decode import StreamEnd
from harness.exchange import Exchange
from harness.load.orders import StageOrder
from harness.measure.gaps import GapHistogram
from harness.workload.lengths import Pause, pauser

if TYPE_CHECKING:
    from harness.load.worker import Worker

#: connections opened a second by one worker at most, counted over a tenth of a second
OPEN_RATE = 50
OPEN_PERIOD_S = 0.1
#: wait after a failed request, doubled for each further failure in a row: a dead server is not hammered
BACKOFF_S = 0.1
BACKOFF_MAX_S = 2.0
#: arrivals whose requests are made ahead of their time
AHEAD = 64
#: gaps held until they are counted together, so that a call per request stays cheap
GAPS_HELD = 8192


class Baton(NamedTuple):
    """What a user hands to itself in the next stage."""

    #: when its next request is meant
    scheduled_ns: int
    #: failures in a row so far
    failures: int


class Stage:
    """A worker's share of a stage.

    Args:
        before: the stage whose users this one takes over; None: all users are new.
    """

    def __init__(self, order: StageOrder, worker: Worker, before: Stage | None = None) -> None:
        self.order = order
        self._worker = worker
        self._clock = MonotonicClock()
        self.draining = False
        self.sent = 0
        self.ended = 0
        self.chunks = 0
        self.not_sent = 0
        #: how late the loop was while this stage ran
        self.lags_ms = array("d")
        self._left = order.requests
        self._throttle = Throttler(rate_limit=OPEN_RATE, period=OPEN_PERIOD_S, retry_interval=0.005)
        self._tasks: set[asyncio.Task[None]] = set()
        self._before = before
        loop = asyncio.get_running_loop()
        self.batons: dict[int, asyncio.Future[Baton]] = {user: loop.create_future() for user in order.users}
        self._pause: Pause = pauser(order.think)
        self._gaps = GapHistogram((order.start_ns - worker.setup.run_start_ns) / NS_PER_S)
        #: stamps and lengths of gaps that are not in the histogram yet, nanoseconds
        self._gap_ends_ns, self._gaps_ns = array("q"), array("q")

    def _may_send(self) -> bool:
        if self.draining or (self._left is not None and self._left <= 0):
            return False
        return self.order.end_ns is None or now_ns() < self.order.end_ns

    async def _fly(self, user: int, number: int, scheduled_ns: int) -> Exchange:
        if self._left is not None:
            self._left -= 1
        self.sent += 1
        try:
            return await self._worker.fly(self.order, user, number, scheduled_ns)
        finally:
            self.ended += 1

    async def _user(self, user: int, start_ns: int, failures: int = 0) -> None:
        """A closed-loop user: sends, reads the whole stream, thinks, sends again."""
        scheduled_ns, number = start_ns, user
        try:
            while self._may_send():
                self._worker.make_ahead(self.order.index, number + self.order.number_step, user)
                exchange = await self._fly(user, number, scheduled_ns)
                failed = exchange.end is not StreamEnd.EOF or exchange.status != 200
                failures = failures + 1 if failed else 0
                wait_s = self._pause(f"{self._worker.setup.seed}/think/{self.order.index}/{number}")
                number += self.order.number_step
                if failures:
                    wait_s += min(BACKOFF_S * 2 ** (failures - 1), BACKOFF_MAX_S)
                    wait_s = max(wait_s, self._worker.retry_after_s(exchange))
                # back to back, the next request is meant for the moment the last stream ended
                scheduled_ns = max(exchange.end_ns, start_ns) + int(wait_s * NS_PER_S)
                if wait_s:
                    # who would wake after the stage's end need not be waited for
                    await self._sleep_until(min(scheduled_ns, self.order.end_ns or scheduled_ns))
        finally:
            self._pass_on(user, Baton(scheduled_ns, failures))

    def _pass_on(self, user: int, baton: Baton) -> None:
        if not self.batons[user].done():
            self.batons[user].set_result(baton)

    async def _relieve(self, user: int, before: asyncio.Future[Baton]) -> None:
        """A user of the stage before goes on here once its stream there has ended, and its pause."""
        scheduled_ns, failures = await before
        scheduled_ns = max(scheduled_ns, self.order.start_ns)
        await self._sleep_until(min(scheduled_ns, self.order.end_ns or scheduled_ns))
        await self._user(user, scheduled_ns, failures)

    async def _sleep_until(self, due_ns: int) -> None:
        """Sleep in steps short enough to notice a drain."""
        while not self.draining and (left := due_ns - now_ns()) > 0:
            await self._clock.sleep_until(now_ns() + min(left, NS_PER_S // 4))

    async def _closed(self) -> None:
        taken = {} if self._before is None else self._before.batons
        self._before = None  # a chain of stages is not kept
        for user in self.order.users:
            if user in taken:
                self._start(self._relieve(user, taken[user]))
        for user, start_ns in zip(self.order.users, self.order.user_start_ns, strict=True):
            if user in taken:
                continue
            await self._sleep_until(min(start_ns, self.order.end_ns or start_ns))
            if not self._may_send():
                self._pass_on(user, Baton(now_ns(), 0))
                continue
            async with self._throttle:
                self._start(self._user(user, max(start_ns, now_ns())))

    async def _open(self) -> None:
        """Arrivals at their due times, whatever the server does; ``max_in_flight`` makes them wait, and it shows in
        the latency from schedule."""
        gate = asyncio.Semaphore(self.order.max_in_flight) if self.order.max_in_flight else None
        for position, due_ns in enumerate(self.order.due_ns):
            if (later := position + AHEAD) < len(self.order.due_ns):
                self._worker.make_ahead(self.order.index, self._number_of(later), later)
            await self._sleep_until(due_ns)
            if self.draining:
                self.not_sent += len(self.order.due_ns) - position
                break
            if gate is not None:
                await gate.acquire()
            self._start(self._one(position, due_ns, gate))

    def _number_of(self, position: int) -> int:
        """Of this worker's arrivals, which of all."""
        return self.order.first_number + position * self.order.number_step

    async def _one(self, user: int, due_ns: int, gate: asyncio.Semaphore | None) -> None:
        try:
            if self.draining:
                self.not_sent += 1
                return
            await self._fly(user, self._number_of(user), due_ns)
        finally:
            if gate is not None:
                gate.release()

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> None:
        """The stage from its start to its last request's end, or to ``kill_ns``."""
        self._make_first_ahead()
        await self._clock.sleep_until(self.order.start_ns)
        feeder = asyncio.get_running_loop().create_task(self._open() if self.order.open_loop else self._closed())
        killer = asyncio.get_running_loop().create_task(self._kill_at(self.order.kill_ns))
        try:
            await feeder
            while self._tasks:
                done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in (feeder, killer):
                task.cancel()
            await asyncio.gather(feeder, killer, return_exceptions=True)

    def _make_first_ahead(self) -> None:
        """Everybody's first request, before the stage starts."""
        for user in self.order.users:
            self._worker.make_ahead(self.order.index, user, user)
        for position in range(min(AHEAD, len(self.order.due_ns))):
            self._worker.make_ahead(self.order.index, self._number_of(position), position)

    async def _kill_at(self, kill_ns: int) -> None:
        await self._clock.sleep_until(kill_ns)
        self.abort()

    def drain(self) -> None:
        self.draining = True

    def abort(self) -> None:
        """Cut what is in flight of this stage; it counts as incomplete."""
        self.draining = True
        self._worker.cut(self.order.index)

    def count_gaps(self, ends_ns: array[int], gaps_ns: array[int]) -> None:
        """Gaps between content deltas of a request of this stage that ended."""
        self._gap_ends_ns.extend(ends_ns)
        self._gaps_ns.extend(gaps_ns)
        if len(self._gaps_ns) >= GAPS_HELD:
            self.gaps()

    def gaps(self) -> GapHistogram:
        """All gaps so far."""
        ends_ns, gaps_ns = np.array(self._gap_ends_ns), np.array(self._gaps_ns)
        self._gap_ends_ns, self._gaps_ns = array("q"), array("q")
        self._gaps.add((ends_ns - self._worker.setup.run_start_ns) / NS_PER_S, gaps_ns / NS_PER_MS)
        return self._gaps
