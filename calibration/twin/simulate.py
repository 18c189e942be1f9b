"""Users on the virtual clock: a load in, what a ramp would have measured out.

A user's request leaves at ``sent``, reaches the engine ``overhead_s`` later (HTTP, tokenizer), and its tokens reach the
user the moment their step ends. A closed-loop user sends again ``think_s`` after its last token; an open-loop load
sends at times set before. Nothing here is random but what the caller's requests are.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial

import numpy as np

from calibration.trace import Floats, Ints, RequestTrace
from calibration.twin.engine import Engine, Output, Stretch
from calibration.twin.kernel import Kernel
from calibration.twin.routing import Router
from calibration.twin.sequence import Sequence, Status

#: makes the n-th request of a user (both from 0)
MakeRequest = Callable[[int, int], Sequence]


@dataclass(frozen=True, slots=True)
class Watch:
    """Look at the engines every ``every_s`` from ``start_s`` on, as long as anything is to come; ``look`` gets the time."""

    every_s: float
    look: Callable[[float, Many[Engine]], None]
    start_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeries:
    """The steps of one engine as columns of equal length; the state is that at each step's end, as gauges show it."""

    engine: int
    end_s: Floats
    #: seconds since the step before ended (or this one began, after a pause): the gap between tokens of those decoding
    length_s: Floats
    decode_seqs: Ints
    prefill_tokens: Ints
    running: Ints
    waiting: Ints
    kv_cache_usage: Floats
    #: counter, preemptions as they happen
    preemptions: Ints
    generation_tokens: Ints

    def __len__(self) -> int:
        return len(self.end_s)

    def mean(self, column: Floats | Ints, start_s: float, end_s: float) -> float | None:
        """Time average of a state column from ``start_s`` to ``end_s``; None where no step ended before the end."""
        upto = int(np.searchsorted(self.end_s, end_s, side="right"))
        if not upto or end_s <= start_s:
            return None
        edges = np.clip(np.append(self.end_s[:upto], end_s), start_s, end_s)
        held = np.diff(edges)
        return float(held @ column[:upto] / (end_s - start_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a simulated load gave. Times are seconds on the virtual clock.

    In ``trace`` a request that was cut has what had come of it: its tokens, and its last one's time as ``e2e_s``.
    """

    trace: RequestTrace
    steps: tuple[StepSeries, ...]
    engines: tuple[Engine, ...]
    #: when the clock stopped
    end_s: float

    def chunk_gaps_s(self, start_s: float, end_s: float) -> tuple[Floats, Ints]:
        """(gap, how many sequences had it) of each step that ended in the time given: the gaps between chunks of
        decoding sequences. Gaps over a preemption are in the trace's e2e alone."""
        gaps, counts = [], []
        for series in self.steps:
            inside = (series.end_s >= start_s) & (series.end_s <= end_s) & (series.decode_seqs > 0)
            gaps.append(series.length_s[inside])
            counts.append(series.decode_seqs[inside])
        return np.concatenate(gaps), np.concatenate(counts)


class _Recorder:
    """Collects the steps of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._counters = engine.counters
        self._rows: list[tuple[float, ...]] = []
        self._end_s = 0.0
        self._preemptions = 0

    def add(self, output: Output) -> None:
        step, counters = output.step, self._counters
        self._preemptions += len(step.preempted)
        began_s = step.start_s if step.start_s > self._end_s else self._end_s
        self._end_s = output.at_s
        self._rows.append(
            (
                output.at_s,
                output.at_s - began_s,
                counters.kv_cache_usage,
                step.decode_seqs,
                step.prefill_tokens,
                counters.num_requests_running,
                counters.num_requests_waiting,
                self._preemptions,
                counters.generation_tokens,
            )
        )

    def add_stretch(self, stretch: Stretch) -> None:
        counters, began_s = self._counters, stretch.began_s
        state = (counters.num_requests_running, counters.num_requests_waiting, self._preemptions)
        generated = counters.generation_tokens - len(stretch.ends_s) * stretch.decode_seqs
        for end_s, usage in zip(stretch.ends_s, stretch.usages, strict=True):
            generated += stretch.decode_seqs
            self._rows.append((end_s, end_s - began_s, usage, stretch.decode_seqs, 0, *state, generated))
            began_s = end_s
        self._end_s = began_s

    def series(self, index: int) -> StepSeries:
        columns = np.array(self._rows, dtype=np.float64).reshape(-1, 9).T
        end_s, length_s, usage = columns[:3]
        # whole numbers, exact in a float up to 2**53
        decode, prefill, running, waiting, preemptions, generated = columns[3:].astype(np.int64)
        return StepSeries(
            engine=index,
            end_s=end_s,
            length_s=length_s,
            decode_seqs=decode,
            prefill_tokens=prefill,
            running=running,
            waiting=waiting,
            kv_cache_usage=usage,
            preemptions=preemptions,
            generation_tokens=generated,
        )


class _Load:
    """What open and closed loops share: requests on their way, and the trace of them."""

    def __init__(self, engines: Many[Engine], make: MakeRequest, overhead_s: float, sends_until_s: float) -> None:
        self.kernel = Kernel(engines, self._take, self._take_stretch)
        self._sends_until_s = sends_until_s
        #: requests that were sent and have not ended
        self.in_flight = 0
        self._recorders = [_Recorder(engine) for engine in engines]
        self._router = Router(engines)
        self._make = make
        self._overhead_s = overhead_s
        self._made: dict[int, int] = {}
        #: user, time and sequence of each request
        self._sent: list[tuple[int, float, Sequence]] = []
        #: when each was meant to be sent
        self._scheduled_s: list[float] = []

    def send(self, user: int, sent_s: float, scheduled_s: float | None = None) -> None:
        """``user`` sends its next request at ``sent_s``; it was meant for ``scheduled_s``, if that is another time."""
        nth = self._made.get(user, 0)
        self._made[user] = nth + 1
        seq = self._make(user, nth)
        seq.payload = user
        self.in_flight += 1
        self._sent.append((user, sent_s, seq))
        self._scheduled_s.append(sent_s if scheduled_s is None else scheduled_s)
        self.kernel.at(sent_s + self._overhead_s, lambda _: self.kernel.submit(self._router.choose(), seq))

    def _take(self, index: int, output: Output) -> None:
        self._recorders[index].add(output)
        for seq in output.finished:
            self.in_flight -= 1
            self.finished(seq.payload, output.at_s)

    def _take_stretch(self, index: int, stretch: Stretch) -> None:
        self._recorders[index].add_stretch(stretch)

    def finished(self, user: int, now_s: float) -> None:
        """A request of ``user`` had its last token."""

    def watch(self, watch: Watch) -> None:
        """Have it looked at, from now on."""

        def look(now_s: float) -> None:
            watch.look(now_s, self.kernel.engines)
            if not self.kernel.idle:
                self.kernel.at(now_s + watch.every_s, look)

        self.kernel.at(watch.start_s, look)

    def run(self, until_s: float) -> Run:
        """Let it happen. Nothing made on the way refers to itself, so the search for cycles, a tenth of the time, rests."""
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self.kernel.run(until_s)
        finally:
            if was_enabled:
                gc.enable()
        return Run(
            trace=self._trace(),
            steps=tuple(recorder.series(index) for index, recorder in enumerate(self._recorders)),
            engines=tuple(self.kernel.engines),
            end_s=self.kernel.now_s,
        )

    def _trace(self) -> RequestTrace:
        sent_s = _column(time_s for _, time_s, _ in self._sent)
        seqs = [seq for _, _, seq in self._sent]
        done = np.array([seq.status is Status.FINISHED for seq in seqs], dtype=np.bool_)
        ttft_s = _column(seq.first_token_s for seq in seqs) - sent_s
        progress = [self._progress(seq) for seq in seqs]
        last_s = _column(last_s for _, last_s in progress) - sent_s
        outputs = _column(tokens or None for tokens, _ in progress)
        with np.errstate(divide="ignore", invalid="ignore"):
            tpot_s = np.where(outputs > 1, (last_s - ttft_s) / (outputs - 1), np.nan)
        return RequestTrace(
            source="twin",
            user=np.array([user for user, _, _ in self._sent], dtype=np.int64),
            scheduled_s=np.array(self._scheduled_s, dtype=np.float64),
            sent_s=sent_s,
            ttft_s=ttft_s,
            ttfa_s=ttft_s,
            e2e_s=last_s,
            stream_end_s=np.where(done, last_s, np.nan),
            tpot_s=tpot_s,
            prompt_tokens=_column(seq.prompt_tokens for seq in seqs),
            output_tokens=outputs,
            ok=done,
            incomplete=~done,
            failure=np.full(len(seqs), "", dtype=object),
        )

    def _progress(self, seq: Sequence) -> tuple[int, float | None]:
        """What a request had when the clock stopped."""
        for engine in self.kernel.engines:
            if seq in engine.scheduler.running or engine.scheduler.is_owed(seq):
                return engine.progress(seq)
        return seq.outputs, seq.last_token_s


def _column(values: Iterable[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


class _ClosedLoop(_Load):
    def __init__(
        self,
        engines: Many[Engine],
        make: MakeRequest,
        overhead_s: float,
        think_s: float | Callable[[], float],
        last_send_s: float,
        max_requests: float,
    ) -> None:
        super().__init__(engines, make, overhead_s, last_send_s)
        self._think: Callable[[], float] = think_s if callable(think_s) else partial(float, think_s)
        self._left = max_requests

    def plan(self, user: int, time_s: float) -> None:
        """``user`` sends at ``time_s``, if the load lasts so long."""
        if time_s <= self._sends_until_s and self._left > 0:
            self._left -= 1
            self.send(user, time_s)

    def finished(self, user: int, now_s: float) -> None:
        self.plan(user, now_s + self._think())


class _OpenLoop(_Load):
    def __init__(
        self, engines: Many[Engine], make: MakeRequest, overhead_s: float, last_send_s: float, max_in_flight: float
    ) -> None:
        super().__init__(engines, make, overhead_s, last_send_s)
        self._max_in_flight = max_in_flight
        #: due and not sent, for as many as may be are in flight
        self._held: deque[tuple[int, float]] = deque()

    def due(self, user: int, due_s: float) -> None:
        """A request is due: it leaves unless too many are in flight."""
        if self.in_flight < self._max_in_flight:
            self.send(user, due_s)
        else:
            self._held.append((user, due_s))

    def finished(self, user: int, now_s: float) -> None:
        if self._held and now_s <= self._sends_until_s:
            held, due_s = self._held.popleft()
            self.send(held, now_s, due_s)


def closed_loop(
    engines: Many[Engine],
    make: MakeRequest,
    starts_s: Many[float],
    duration_s: float,
    *,
    think_s: float | Callable[[], float] = 0.0,
    overhead_s: float = 0.0,
    max_requests: int | None = None,
    grace_s: float = 0.0,
    drain: bool = False,
    watch: Watch | None = None,
) -> Run:
    """Users who send, read to the end, and send again.

    Args:
        engines: idle ones; requests go to the least loaded.
        make: requests.
        starts_s: when each user sends its first request; one entry a user.
        duration_s: nothing is sent after this moment.
        think_s: from a user's last token to its next request, or who says how long, each time. 0 still misses the step that
            starts at that moment.
        overhead_s: from the client to the engine.
        max_requests: of all users together; None for no limit.
        grace_s: requests under way may go on so long after ``duration_s``; then they are cut and count as incomplete.
        drain: let all of them end, however long it takes.
        watch: looks at the engines at times of its own.
    """
    limit = np.inf if max_requests is None else max_requests
    load = _ClosedLoop(engines, make, overhead_s, think_s, duration_s, limit)
    if watch is not None:
        load.watch(watch)
    for user, start_s in enumerate(starts_s):
        load.plan(user, start_s)
    return load.run(np.inf if drain else duration_s + grace_s)


def open_loop(
    engines: Many[Engine],
    make: MakeRequest,
    arrivals_s: Iterable[float],
    duration_s: float,
    *,
    overhead_s: float = 0.0,
    max_in_flight: int | None = None,
    grace_s: float = 0.0,
    drain: bool = False,
    watch: Watch | None = None,
) -> Run:
    """Requests at times set before, each from a user of its own; arguments as of :func:`closed_loop`.

    Args:
        max_in_flight: what is due beyond it waits at the client, in order; what still waits at ``duration_s`` is not sent.
    """
    if max_in_flight is None:
        load = _Load(engines, make, overhead_s, duration_s)
        for user, arrival_s in enumerate(arrivals_s):
            if arrival_s <= duration_s:
                load.send(user, arrival_s)
    else:
        load = capped = _OpenLoop(engines, make, overhead_s, duration_s, max_in_flight)
        for user, arrival_s in enumerate(arrivals_s):
            if arrival_s <= duration_s:
                capped.kernel.at(arrival_s, partial(capped.due, user))
    if watch is not None:
        load.watch(watch)
    return load.run(np.inf if drain else duration_s + grace_s)
