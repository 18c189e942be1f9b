"""The controller's side of the load: starts worker processes, keeps their stages in step, hears their records.

Workers get a session of their own, so that Ctrl-C in the terminal reaches only the controller, which then decides.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import orjson

from harness.clock import NS_PER_MS, NS_PER_S, now_ns
from harness.errors import LocalFault
from harness.load.orders import Gaps, Progress, Setup, StageEnd, StageOrder, Tag, line, split
from harness.measure.gaps import GapHistogram
from harness.record import Failure, Outcome, Record

#: a line may hold a whole answer's text or every gap of it
LINE_BYTES = 256 * 2**20
START_S = 30.0
#: after kill_ns the workers have this long to hand in their last records
HAND_IN_S = 15.0
LOOK_S = 1.0
#: clocks of two processes of one machine that differ by more than this are not one clock
CLOCK_SKEW_NS = 50 * NS_PER_MS


@dataclass(slots=True, kw_only=True)
class StageOutcome:
    """What the workers said of a stage, put together."""

    #: by worker; to be merged
    gaps: list[GapHistogram] = field(default_factory=list)
    #: CPU seconds a wall second, of the busiest worker
    cpu: float | None = None
    #: of all workers together
    cpu_s: float = 0.0
    loop_lag_ms_p99: float | None = None
    #: the longest time a worker was away: far beyond any load, it was suspended
    away_s: float = 0.0
    not_sent: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, end: StageEnd) -> None:
        cpu = end.cpu_s / end.wall_s if end.wall_s > 0 else None
        self.cpu_s += end.cpu_s
        self.cpu = max((c for c in (self.cpu, cpu) if c is not None), default=None)
        lags = [lag for lag in (self.loop_lag_ms_p99, end.loop_lag_ms_p99) if lag is not None]
        self.loop_lag_ms_p99 = max(lags, default=None)
        self.away_s = max(self.away_s, (end.loop_lag_ms_max or 0.0) / 1e3)
        self.not_sent += end.not_sent


@dataclass(slots=True, eq=False)
class _Shift:
    """A stage as one worker runs it."""

    order: StageOrder
    outcome: StageOutcome
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Worker:
    number: int
    process: asyncio.subprocess.Process
    progress: Progress | None = None
    #: stages that have not ended, by index; two where one takes over the other's users
    shifts: dict[int, _Shift] = field(default_factory=dict)
    listener: asyncio.Task[None] | None = None
    dead: str | None = None

    def tell(self, message: bytes) -> None:
        assert self.process.stdin is not None
        if self.dead is None and not self.process.stdin.is_closing():
            self.process.stdin.write(message)


class Fleet:
    """The worker processes of a run.

    Args:
        count: processes.
        loop_name: auto, uvloop or asyncio.
        on_record: called with every record's JSON line, newline included, as it comes in.
    """

    def __init__(self, count: int, loop_name: str, on_record: Callable[[bytes], None]) -> None:
        self._count = count
        self._loop_name = loop_name
        self._on_record = on_record
        self._workers: list[_Worker] = []
        self._run_start_ns = 0
        self._closing = False

    async def start(self, setup: Setup) -> None:
        """Start the workers and hand them the setup.

        Raises:
            LocalFault: one does not come up, or its clock is another.
        """
        self._run_start_ns = setup.run_start_ns
        for number in range(self._count):
            self._workers.append(await self._spawn(number))
        for worker in self._workers:
            await self._greet(worker)
            worker.tell(line(Tag.SETUP, setup))
            worker.listener = asyncio.ensure_future(self._listen(worker))

    async def _spawn(self, number: int) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "harness.load.worker",
            self._loop_name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            start_new_session=os.name == "posix",
        )
        return _Worker(number, process)

    async def _greet(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        before = now_ns()
        try:
            message = await asyncio.wait_for(worker.process.stdout.readline(), START_S)
        except TimeoutError:
            raise LocalFault(f"load worker {worker.number} did not start within {START_S:g} s") from None
        if not message:
            raise LocalFault(f"load worker {worker.number} ended at once", "its own message stands above")
        tag, payload = split(message)
        theirs = int(orjson.loads(payload)["now_ns"]) if tag is Tag.HELLO else 0
        # it said hello between our two looks at the clock; `before` may be later than its hello when it started fast
        if not before - int(START_S * NS_PER_S) <= theirs <= now_ns() + CLOCK_SKEW_NS:
            raise LocalFault(f"load worker {worker.number} does not share this process's monotonic clock")

    async def _listen(self, worker: _Worker) -> None:
        """Hear a worker out. Whatever ends this, nobody waits for the worker any longer."""
        try:
            await self._hear(worker)
            if worker.dead is None and not self._closing:
                worker.dead = f"load worker {worker.number} died ({_how(await worker.process.wait())})"
            if worker.dead is not None:
                self._bury(worker)
        finally:
            for index in list(worker.shifts):
                worker.shifts.pop(index).done.set()

    async def _hear(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        while message := await worker.process.stdout.readline():
            tag, payload = split(message)
            if tag is Tag.RECORD:
                self._on_record(payload)
            elif tag is Tag.PROGRESS:
                worker.progress = Progress(**orjson.loads(payload))
            elif tag is Tag.GAPS:
                counted = Gaps(**orjson.loads(payload))
                worker.shifts[counted.stage].outcome.gaps.append(GapHistogram.from_dict(counted.gaps))
            elif tag is Tag.STAGE_END:
                self._ended_on(worker, StageEnd(**orjson.loads(payload)))
            elif tag is Tag.FAULT:
                worker.dead = f"load worker {worker.number}: {orjson.loads(payload)['message']}"
                return

    @staticmethod
    def _ended_on(worker: _Worker, end: StageEnd) -> None:
        shift = worker.shifts.pop(end.stage)
        shift.outcome.add(end)
        if not worker.shifts:
            worker.progress = None
        shift.done.set()

    def _bury(self, worker: _Worker) -> None:
        """A dead worker's users are counted failed: what they had in flight is lost, and that is ours to say. The load
        is no longer what was asked, so the others are told to come to an end."""
        assert worker.dead is not None
        for shift in worker.shifts.values():
            shift.outcome.faults.append(worker.dead)
        for record in self._lost(worker):
            self._on_record(record.to_json())
        worker.progress = None
        if worker.process.returncode is None:
            worker.process.kill()
        self.drain()

    def _lost(self, worker: _Worker) -> Iterator[Record]:
        """A failed record for each user of a dead worker; with arrivals, for each stream in flight when it last said."""
        counted: set[int] = set()
        for shift in worker.shifts.values():
            order = shift.order
            # a user of two stages has one request in flight: it is counted in the earlier
            lost = [user for user in order.users if user not in counted]
            counted.update(lost)
            if order.open_loop:
                sent = 0 if worker.progress is None else worker.progress.sent
                lost = list(range(sent - (0 if worker.progress is None else worker.progress.in_flight), sent))
                shift.outcome.not_sent += len(order.due_ns) - sent
            yield from (self._lost_request(worker, order, user) for user in lost)

    def _lost_request(self, worker: _Worker, order: StageOrder, user: int) -> Record:
        return Record(
            request_id=f"{order.index}-worker{worker.number}-user{user}",
            stage=order.index,
            user=user,
            scheduled_ms=(order.start_ns - self._run_start_ns) / NS_PER_MS,
            sent_ms=None,
            outcome=Outcome.FAILED,
            failure=Failure.CLIENT,
            message=worker.dead,
            asked_output_tokens=order.output_tokens if isinstance(order.output_tokens, int) else None,
        )

    async def stage(self, orders: Sequence[StageOrder]) -> StageOutcome:
        """Run one stage on all workers and wait for the last of their records. A worker that dies, or says nothing
        until :data:`HAND_IN_S` past the stage's hard end, is a fault of the outcome. A stage that takes over the users of
        the one before may be begun while that still runs."""
        outcome = StageOutcome()
        busy: list[tuple[_Worker, _Shift]] = []
        for worker, order in zip(self._workers, orders, strict=True):
            if worker.dead is None:
                shift = worker.shifts[order.index] = _Shift(order, outcome)
                worker.tell(line(Tag.STAGE, order))
                busy.append((worker, shift))
        if not await self._ended([shift for _, shift in busy], max(order.kill_ns for order in orders)):
            for worker, shift in busy:
                if not shift.done.is_set():
                    worker.dead = f"load worker {worker.number} did not end its stage in time"
                    worker.process.kill()
            await asyncio.gather(*(shift.done.wait() for _, shift in busy))
        for worker, _ in busy:
            if worker.listener is not None and worker.listener.done():
                worker.listener.result()
        return outcome

    @staticmethod
    async def _ended(busy: Sequence[_Shift], kill_ns: int) -> bool:
        """Whether all have ended their stage HAND_IN_S after its hard end. Time in which this process was suspended does
        not count: the workers were then too, and have as much to hand in."""
        ends = asyncio.ensure_future(asyncio.gather(*(shift.done.wait() for shift in busy)))
        left_s, looked_ns = HAND_IN_S, now_ns()
        while left_s > 0:
            await asyncio.wait({ends}, timeout=LOOK_S)
            if ends.done():
                return True
            past_s, looked_ns = (now_ns() - max(kill_ns, looked_ns)) / NS_PER_S, now_ns()
            left_s -= min(max(past_s, 0.0), 2 * LOOK_S)
        ends.cancel()
        return False

    @property
    def dead(self) -> str | None:
        """What happened to the first worker that is dead; None while all live."""
        return next((worker.dead for worker in self._workers if worker.dead is not None), None)

    def in_flight(self) -> int:
        return sum(worker.progress.in_flight for worker in self._workers if worker.progress is not None)

    def loop_lag_ms(self) -> float:
        return max(
            (worker.progress.loop_lag_ms_max for worker in self._workers if worker.progress is not None), default=0.0
        )

    def drain(self) -> None:
        """No new requests; those in flight may end."""
        for worker in self._workers:
            worker.tell(line(Tag.DRAIN))

    def abort(self) -> None:
        """No new requests, and those in flight are cut."""
        for worker in self._workers:
            worker.tell(line(Tag.ABORT))

    async def close(self) -> None:
        """End all workers, whatever they are doing."""
        self._closing = True
        for worker in self._workers:
            worker.tell(line(Tag.QUIT))
            if worker.process.stdin is not None:
                worker.process.stdin.close()
        for worker in self._workers:
            try:
                await asyncio.wait_for(worker.process.wait(), 5.0)
            except TimeoutError:
                worker.process.kill()
                await worker.process.wait()
            if worker.listener is not None:
                await worker.listener


def _how(code: int) -> str:
    """How a process ended, from its exit code; a negative one is the number of a signal."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (", by the system for want of memory?" if name == "SIGKILL" else "")
    return f"exit code {code}"


def share(order: StageOrder, count: int) -> list[StageOrder]:
    """Split a stage over ``count`` workers: users and arrivals round robin, so that every share spans the whole stage;
    a count of requests in proportion to the users. A request's number follows from its user or its place among the
    arrivals, so the same are asked by any number of workers, and never one twice. Where there are fewer users, or fewer may be in flight, than workers, the last workers have nothing to do.
    """
    most = order.max_in_flight or count if order.open_loop else len(order.users)
    active = min(count, most)
    shares, before = [], 0
    for part in range(count):
        mine = slice(part, None, active) if part < active else slice(0)
        users, requests, cap = order.users[mine], order.requests, order.max_in_flight
        upto = before + len(users)
        if requests is not None:
            requests = requests * upto // len(order.users) - requests * before // len(order.users)
        if cap is not None:
            cap = cap // active + (part < cap % active) if part < active else 0
        shares.append(
            replace(
                order,
                first_number=part if order.open_loop else 0,
                number_step=active if order.open_loop else len(order.users),
                users=users,
                user_start_ns=order.user_start_ns[mine],
                due_ns=order.due_ns[mine],
                requests=requests,
                max_in_flight=cap,
            )
        )
        before = upto
    return shares
