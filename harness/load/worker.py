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
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import orjson

from harness.client import StreamClient
from harness.clock import NS_PER_MS, NS_PER_S, now_ns, process_cpu_s, wall_time
from harness.decode import Plan, StreamDecoder, StreamEnd
from harness.exchange import Exchange
from harness.load.flight import Flight, Hangar
from harness.load.orders import Gaps, Progress, Setup, StageEnd, StageOrder, Tag, line, split
from harness.load.users import Stage
from harness.record import Outcome, Record
from harness.wire.retry import seconds_of
from harness.workload.asked import Answer, Asked
from harness.workload.prepare import build
from harness.workload.text import TextPrompts

PROGRESS_S = 0.25
LAG_PROBE_S = 0.02
#: pause while no request is to be made
MAKE_S = 0.005

Send = Callable[[bytes], None]


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
        self.hangar = Hangar(
            run_start_ns=setup.run_start_ns,
            stall_timeout_s=setup.stall_timeout_s,
            request_timeout_s=setup.request_timeout_s,
            on_record=self._landed,
        )
        #: those that have not ended, by index; two at a time where one takes over from the other
        self.stages: dict[int, Stage] = {}
        #: the latest begun, ended or not
        self._latest: Stage | None = None
        self._worst_lag_ms = 0.0

    @property
    def stage(self) -> Stage | None:
        """The latest stage, until it has ended."""
        return None if self._latest is None else self.stages.get(self._latest.order.index)

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
        stage = self.stages.get(record.stage)
        if stage is not None:
            stage.count_gaps(*flight.decoder.drain_gaps())
            stage.chunks += record.chunks
        self._send(Tag.RECORD.value + record.to_json())

    def retry_after_s(self, exchange: Exchange) -> float:
        if not self.setup.honour_retry_after or exchange.retry_after is None:
            return 0.0
        return seconds_of(exchange.retry_after, wall_time())

    def cut(self, stage: int | None = None) -> None:
        """Cut the streams of a stage, or all."""
        for flight in list(self.hangar.flying):
            if stage is None or flight.plan.stage == stage:
                flight.exchange.stop(StreamEnd.CANCELLED)

    async def watch_lag(self) -> None:
        """How late the loop wakes a sleeper: what every stamp may be late by."""
        while True:
            due_ns = now_ns() + int(LAG_PROBE_S * NS_PER_S)
            await asyncio.sleep(LAG_PROBE_S)
            lag_ms = max(0.0, (now_ns() - due_ns) / NS_PER_MS)
            for stage in self.stages.values():
                stage.lags_ms.append(lag_ms)
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
        """A stage to its end. Others may still run: those it takes its users over from, and one that takes over its own."""
        before = self._latest if order.takes_over else None
        if not self.stages:
            self._made.clear()
            self._to_make.clear()
        self.workload.begin(
            order.index, order.prompt_tokens, order.output_tokens, replay=order.replay, takes_over=order.takes_over
        )
        cpu_s, began_ns = process_cpu_s(), now_ns()
        stage = self._latest = self.stages[order.index] = Stage(order, self, before)
        await stage.run()
        await self._landed_all(order.index)
        del self.stages[order.index]
        self._forget_made(order.index)
        lag = float(np.percentile(stage.lags_ms, 99)) if stage.lags_ms else None
        wall_s = (now_ns() - began_ns) / NS_PER_S
        self._send(line(Tag.GAPS, Gaps(stage=order.index, gaps=stage.gaps().to_dict())))
        self._send(
            line(
                Tag.STAGE_END,
                StageEnd(
                    stage=order.index,
                    cpu_s=process_cpu_s() - cpu_s,
                    wall_s=wall_s,
                    loop_lag_ms_p99=lag,
                    loop_lag_ms_max=max(stage.lags_ms, default=None),
                    not_sent=stage.not_sent,
                ),
            )
        )

    async def _landed_all(self, stage: int) -> None:
        """The records of a stage that has ended are made: at once where nothing else runs, else in slack time."""
        while len(self.stages) > 1 and self.hangar.holds(stage):  # noqa: ASYNC110  the hangar works on its own
            await asyncio.sleep(LAG_PROBE_S)
        if len(self.stages) == 1:
            self.hangar.flush()

    def _forget_made(self, stage: int) -> None:
        for made in (self._made, self._to_make):
            for key in [key for key in made if key[0] == stage]:
                del made[key]


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
    running: set[asyncio.Task[None]] = set()
    while message := await reader.readline():
        tag, payload = split(message)
        if tag is Tag.QUIT:
            break
        if tag is Tag.STAGE:
            task = asyncio.ensure_future(_guarded(worker.run_stage(StageOrder(**orjson.loads(payload))), send))
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.sleep(0)  # it is begun before the next order is read: a drain finds it
        else:
            for stage in worker.stages.values():
                stage.drain() if tag is Tag.DRAIN else stage.abort()
    for stage in worker.stages.values():
        stage.abort()
    left = list(running)
    for task in left:
        task.cancel()
    for task in left:
        with contextlib.suppress(asyncio.CancelledError):
            await task


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
