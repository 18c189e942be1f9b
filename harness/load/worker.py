"""A load worker: one process, one event loop, a share of the users. Started by the controller, told what to do over
stdin, answering over stdout (:mod:`harness.load.orders`); it ends when the controller is gone.

Nothing is drawn or scraped here, so that nothing stands between a socket and its stamp.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from asyncio_throttle.throttler import Throttler

from harness.client import StreamClient
from harness.clock import NS_PER_MS, NS_PER_S, MonotonicClock, now_ns, process_cpu_s, wall_time
from harness.decode import Plan, StreamDecoder, StreamEnd
from harness.exchange import Exchange
from harness.load.flight import Flight, Hangar
from harness.load.orders import Progress, Setup, StageEnd, StageOrder, Tag, line, split
from harness.measure.gaps import GapHistogram
from harness.record import Outcome, Record
from harness.wire.retry import seconds_of
from harness.workload.asked import Answer, Asked
from harness.workload.prepare import build
from harness.workload.text import TextPrompts

PROGRESS_S = 0.25
LAG_PROBE_S = 0.02
#: connections opened a second by one worker at most, counted over a tenth of a second
OPEN_RATE = 50
OPEN_PERIOD_S = 0.1
#: wait after a failed request, doubled for each further failure in a row: a dead server is not hammered
BACKOFF_S = 0.1
BACKOFF_MAX_S = 2.0

#: arrivals whose requests are made ahead of their time
AHEAD = 64
#: pause while no request is to be made
MAKE_S = 0.005
#: gaps held until they are counted together, so that a call per request stays cheap
GAPS_HELD = 8192

Send = Callable[[bytes], None]


class Stage:
    """One stage as this worker runs it."""

    def __init__(self, order: StageOrder, worker: Worker) -> None:
        self.order = order
        self._worker = worker
        self._clock = MonotonicClock()
        self.draining = False
        self.sent = 0
        self.ended = 0
        self.chunks = 0
        self.not_sent = 0
        self._left = order.requests
        self._throttle = Throttler(rate_limit=OPEN_RATE, period=OPEN_PERIOD_S, retry_interval=0.005)
        self._tasks: set[asyncio.Task[None]] = set()

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

    async def _user(self, user: int, start_ns: int) -> None:
        """A closed-loop user: sends, reads the whole stream, thinks, sends again."""
        failures, scheduled_ns, number = 0, start_ns, user
        while self._may_send():
            self._worker.make_ahead(self.order.index, number + self.order.number_step, user)
            exchange = await self._fly(user, number, scheduled_ns)
            number += self.order.number_step
            failed = exchange.end is not StreamEnd.EOF or exchange.status != 200
            failures = failures + 1 if failed else 0
            wait_s = self.order.think_s
            if failures:
                wait_s += min(BACKOFF_S * 2 ** (failures - 1), BACKOFF_MAX_S)
                wait_s = max(wait_s, self._worker.retry_after_s(exchange))
            # back to back, the next request is meant for the moment the last stream ended
            scheduled_ns = max(exchange.end_ns, start_ns) + int(wait_s * NS_PER_S)
            if wait_s:
                # who would wake after the stage's end need not be waited for
                await self._sleep_until(min(scheduled_ns, self.order.end_ns or scheduled_ns))

    async def _sleep_until(self, due_ns: int) -> None:
        """Sleep in steps short enough to notice a drain."""
        while not self.draining and (left := due_ns - now_ns()) > 0:
            await self._clock.sleep_until(now_ns() + min(left, NS_PER_S // 4))

    async def _closed(self) -> None:
        for user, start_ns in zip(self.order.users, self.order.user_start_ns, strict=True):
            await self._sleep_until(start_ns)
            if not self._may_send():
                break
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
        """Cut what is in flight; it counts as incomplete."""
        self.draining = True
        self._worker.cut()


class Worker:
    """The process's state: client, hangar, counters, the line to the controller."""

    def __init__(self, setup: Setup, client: StreamClient, send: Send) -> None:
        self.setup = setup
        self._client = client
        self._send = send
        text = TextPrompts(offset=setup.text_offset, tokens_per_word=setup.text_tokens_per_word)
        self.workload = build(setup.workload, model=setup.model, endpoint=setup.endpoint, seed=setup.seed, text=text)
        #: requests made before they are needed, by stage and number; and those still to make
        self._made: dict[tuple[int, int], Asked] = {}
        self._to_make: dict[tuple[int, int], int] = {}
        self._gaps = GapHistogram(0.0)
        self.hangar = Hangar(
            run_start_ns=setup.run_start_ns,
            stall_timeout_s=setup.stall_timeout_s,
            request_timeout_s=setup.request_timeout_s,
            on_record=self._landed,
        )
        #: stamps and lengths of gaps that are not in the histogram yet, nanoseconds
        self._gap_ends_ns, self._gaps_ns = array("q"), array("q")
        self.stage: Stage | None = None
        self._lags_ms = array("d")
        self._worst_lag_ms = 0.0

    async def fly(self, order: StageOrder, user: int, number: int, scheduled_ns: int) -> Exchange:
        setup = self.setup
        asked = self._made.pop((order.index, number), None)
        if asked is None:
            self._to_make.pop((order.index, number), None)
            asked = self.workload.ask(order.index, number, user)
        remembers = self.workload.remembers
        flight = Flight(
            plan=Plan(
                request_id=f"{order.index}-{number}",
                stage=order.index,
                user=user,
                scheduled_ns=scheduled_ns,
                asked_output_tokens=asked.output_tokens,
                prompt_tokens=asked.prompt_tokens,
            ),
            exchange=Exchange(started_ns=now_ns()),
            decoder=StreamDecoder(
                setup.endpoint, save_content=setup.save_content or remembers, save_gaps=setup.save_gaps
            ),
            asked=asked,
        )
        self.hangar.take_off(flight)
        try:
            await self._client.send(asked.path, asked.body, flight.exchange)
        finally:
            self.hangar.land(flight, at_once=remembers)
        return flight.exchange

    def make_ahead(self, stage: int, number: int, user: int) -> None:
        """Have a request made in slack time, so that building it delays nobody's send. A conversation's next turn cannot
        be: the answer before it is part of it."""
        if not self.workload.remembers:
            self._to_make[stage, number] = user

    async def make(self) -> None:
        """Make requests ahead, one between two looks at the sockets."""
        while True:
            if not self._to_make:
                await asyncio.sleep(MAKE_S)
                continue
            stage, number = key = next(iter(self._to_make))
            self._made[key] = self.workload.ask(stage, number, self._to_make.pop(key))
            await asyncio.sleep(0)

    def _landed(self, flight: Flight, record: Record) -> None:
        self.workload.heard(
            flight.asked,
            Answer(
                stage=record.stage,
                user=record.user,
                good=record.outcome == Outcome.OK,
                prompt_tokens=record.prompt_tokens,
                output_tokens=record.output_tokens,
                text=record.content,
            ),
        )
        if record.content is not None and not self.setup.save_content:
            record = replace(record, content=None)
        ends_ns, gaps_ns = flight.decoder.drain_gaps()
        self._gap_ends_ns.extend(ends_ns)
        self._gaps_ns.extend(gaps_ns)
        if len(self._gaps_ns) >= GAPS_HELD:
            self._fold_gaps()
        if self.stage is not None:
            self.stage.chunks += record.chunks
        self._send(Tag.RECORD.value + record.to_json())

    def _fold_gaps(self) -> None:
        ends_ns, gaps_ns = np.array(self._gap_ends_ns), np.array(self._gaps_ns)
        self._gap_ends_ns, self._gaps_ns = array("q"), array("q")
        self._gaps.add((ends_ns - self.setup.run_start_ns) / NS_PER_S, gaps_ns / NS_PER_MS)

    def retry_after_s(self, exchange: Exchange) -> float:
        if not self.setup.honour_retry_after or exchange.retry_after is None:
            return 0.0
        return seconds_of(exchange.retry_after, wall_time())

    def cut(self) -> None:
        for flight in list(self.hangar.flying):
            flight.exchange.stop(StreamEnd.CANCELLED)

    async def watch_lag(self) -> None:
        """How late the loop wakes a sleeper: what every stamp may be late by."""
        while True:
            due_ns = now_ns() + int(LAG_PROBE_S * NS_PER_S)
            await asyncio.sleep(LAG_PROBE_S)
            lag_ms = max(0.0, (now_ns() - due_ns) / NS_PER_MS)
            self._lags_ms.append(lag_ms)
            self._worst_lag_ms = max(self._worst_lag_ms, lag_ms)

    async def report(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            if self.stage is not None:
                self._send(line(Tag.PROGRESS, self._progress(self.stage)))

    def _progress(self, stage: Stage) -> Progress:
        worst, self._worst_lag_ms = self._worst_lag_ms, 0.0
        return Progress(
            stage=stage.order.index,
            in_flight=len(self.hangar.flying),
            sent=stage.sent,
            ended=stage.ended,
            output_chunks=stage.chunks,
            loop_lag_ms_max=worst,
        )

    async def run_stage(self, order: StageOrder) -> None:
        self._lags_ms = array("d")
        self._gaps = GapHistogram((order.start_ns - self.setup.run_start_ns) / NS_PER_S)
        self.workload.begin(order.index, order.prompt_tokens, order.output_tokens, replay=order.replay)
        self._made.clear()
        self._to_make.clear()
        cpu_s, began_ns = process_cpu_s(), now_ns()
        stage = self.stage = Stage(order, self)
        await stage.run()
        self.hangar.flush()
        self._fold_gaps()
        self.stage = None
        lag = float(np.percentile(self._lags_ms, 99)) if self._lags_ms else None
        wall_s = (now_ns() - began_ns) / NS_PER_S
        self._send(line(Tag.GAPS, self._gaps.to_dict()))
        self._send(
            line(
                Tag.STAGE_END,
                StageEnd(
                    stage=order.index,
                    cpu_s=process_cpu_s() - cpu_s,
                    wall_s=wall_s,
                    loop_lag_ms_p99=lag,
                    loop_lag_ms_max=max(self._lags_ms, default=None),
                    not_sent=stage.not_sent,
                ),
            )
        )


async def _messages() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=64 * 2**20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    return reader


async def _outlet() -> Send:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_write_pipe(asyncio.Protocol, sys.stdout.buffer)
    return transport.write


async def serve() -> None:
    """Take orders until told to quit or until the controller's end of the pipe closes."""
    reader, send = await _messages(), await _outlet()
    send(line(Tag.HELLO, {"now_ns": now_ns()}))
    tag, payload = split(await reader.readline())
    if tag is not Tag.SETUP:
        return
    setup = Setup(**orjson.loads(payload))
    async with StreamClient(
        setup.base_url, headers=setup.headers, connect_timeout_s=setup.connect_timeout_s, verify_tls=setup.verify_tls
    ) as client:
        worker = Worker(setup, client, send)
        forever = (worker.hangar.run(), worker.watch_lag(), worker.report(), worker.make())
        background = [asyncio.ensure_future(_guarded(work, send)) for work in forever]
        try:
            await _obey(reader, worker, send)
        finally:
            worker.cut()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)


async def _obey(reader: asyncio.StreamReader, worker: Worker, send: Send) -> None:
    running: asyncio.Task[None] | None = None
    while message := await reader.readline():
        tag, payload = split(message)
        if tag is Tag.QUIT:
            break
        if tag is Tag.STAGE:
            running = asyncio.ensure_future(_guarded(worker.run_stage(StageOrder(**orjson.loads(payload))), send))
        elif worker.stage is not None:
            worker.stage.drain() if tag is Tag.DRAIN else worker.stage.abort()
    if worker.stage is not None:
        worker.stage.abort()
    if running is not None and not running.done():
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def _guarded(work: Awaitable[None], send: Send) -> None:
    """A bug in this worker reaches the controller as a message, not as silence."""
    try:
        await work
    except Exception as error:  # noqa: BLE001  reported to the controller, which ends the run
        send(line(Tag.FAULT, {"message": f"{type(error).__name__}: {error}"}))


def main(loop_name: str) -> None:
    """Entry of the process: ``python -m harness.load.worker auto|uvloop|asyncio``."""
    # Ctrl-C is the controller's to handle; it tells us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # a collection stops every stream: what is loaded by now is left out of it, and it comes seldom, yet often enough
    # that the cycles of dead connections do not pile up
    gc.freeze()
    gc.set_threshold(20_000, 10, 20)
    if loop_name != "asyncio" and sys.platform != "win32":
        import uvloop

        uvloop.run(serve())
    else:
        asyncio.run(serve())


if __name__ == "__main__":
    main(sys.argv[1])
