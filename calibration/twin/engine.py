"""One engine core: steps are scheduled, take their time, and put tokens out. It is told the time, it never asks.

Whoever drives it (the virtual clock of :mod:`calibration.twin.kernel`, the real one of the server) calls
:meth:`Engine.add` and :meth:`Engine.abort` when something happens, and :meth:`Engine.advance` at :attr:`Engine.due_s`.
Every decision depends on the order and times of these calls alone, so both clocks give one run.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from calibration.errors import InputError
from calibration.steptime import StepModel
from calibration.twin.config import EngineConfig
from calibration.twin.counters import Counters
from calibration.twin.decoders import Speculative
from calibration.twin.scheduler import Scheduler
from calibration.twin.sequence import Sequence, Status
from calibration.twin.step import Step

#: steps after which values added to histograms are put into their buckets
_SETTLE_EVERY = 4_096


@dataclass(slots=True)
class Output:
    """What one step put out, at ``at_s``.

    Attributes:
        started: sequences with their first token.
        resumed: preempted ones whose prefill ended again: they put out one token too.
        decoded: the other sequences that put out tokens, where the engine keeps members (else None).
        tokens: tokens of each of ``decoded`` where it is not one each.
        finished: those of the above that ended, in running order.
    """

    at_s: float
    step: Step
    decoded: list[Sequence] | None = None
    tokens: dict[Sequence, int] | None = None
    started: tuple[Sequence, ...] = ()
    resumed: tuple[Sequence, ...] = ()
    finished: tuple[Sequence, ...] = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps in a row in which the same sequences decoded and nothing else happened.

    Attributes:
        began_s, ends_s: beginning of the first step, and the end of each.
        usages: KV usage at each end.
        decode_seqs: sequences that decoded in each.
    """

    began_s: float
    ends_s: list[float]
    usages: list[float]
    decode_seqs: int


class Engine:
    """vLLM's engine core with a step-time model for a GPU.

    Args:
        config: its flags.
        step_time: seconds of a step.
        seed: of the noise and of the acceptance of drafts.
        noise: standard deviation of the logarithm of a step's time around the model's (mean kept); 0 for none.
        keep_members: list the decoding sequences of every step in its :class:`Output`.
    """

    def __init__(
        self,
        config: EngineConfig,
        step_time: StepModel,
        *,
        seed: int = 0,
        noise: float = 0.0,
        keep_members: bool = False,
    ) -> None:
        if not noise >= 0:
            raise InputError(f"noise is {noise}: expected a standard deviation >= 0")
        self.config = config
        self.counters = Counters(config.max_model_len)
        self._step_s = step_time.step_s
        self._noise = noise
        self._noise_rng = random.Random(f"{seed}/noise")
        self.scheduler = Scheduler(config, random.Random(f"{seed}/acceptance"), keep_members)
        #: when the step under way ends, or when it was woken; None when idle
        self.due_s: float | None = None
        #: arrived while a step runs; the scheduler sees them when it ends (EngineCoreProc._process_input_queue)
        self._inbox: dict[Sequence, None] = {}
        self._running: Step | None = None
        self._ahead: Step | None = None
        #: end of the last step: when every decoding sequence had its last token
        self._last_end_s = 0.0
        self._unsettled = 0

    @property
    def unfinished(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self.scheduler.running) + len(self.scheduler.waiting) + len(self._inbox)

    def add(self, seq: Sequence, now_s: float) -> None:
        """A request arrives. An idle engine wakes: it is due at once, with whatever else arrives at this moment.

        Raises:
            InputError: prompt and output do not fit into the model's length, so it could never end.
        """
        if seq.prompt_tokens + seq.output_tokens > self.config.max_model_len:
            raise InputError(
                f"prompt and output are {seq.prompt_tokens} + {seq.output_tokens} tokens: expected at most max_model_len"
                f" ({self.config.max_model_len})"
            )
        seq.arrived_s = now_s
        self._inbox[seq] = None
        if self.due_s is None:
            self.due_s = now_s

    @property
    def waking(self) -> bool:
        """Due, but with no step under way."""
        return self.due_s is not None and self._running is None

    def _read_inbox(self, now_s: float) -> None:
        for seq in self._inbox:
            seq.queued_s = now_s
            self.scheduler.add(seq)
        self._inbox.clear()

    def abort(self, seq: Sequence, now_s: float) -> None:
        """A client has gone. Whatever the step under way computes for it is lost."""
        if seq.ended:
            return
        seq.finished_s = now_s
        if seq in self._inbox:
            del self._inbox[seq]
            seq.status = Status.ABORTED
            return
        self.scheduler.abort(seq, [step for step in (self._running, self._ahead) if step is not None])

    def progress(self, seq: Sequence) -> tuple[int, float | None]:
        """Tokens ``seq`` has put out by now, and when the last of them came; (0, None) before the first."""
        running = self._running
        if seq.ended or running is None:
            return seq.outputs, seq.last_token_s
        if self.scheduler.is_owed(seq):
            return seq.outputs - 1, self._last_end_s
        joins_now = seq in running.completed
        if self.config.speculation is not None:
            under_way = [step for step in (running, self._ahead) if step is not None]
            coming = sum((step.tokens or {}).get(seq, 0) + (seq in step.completed) for step in under_way)
            return seq.outputs - coming, self._last_end_s if seq.decoding and not joins_now else seq.last_token_s
        if not seq.decoding and seq not in running.ending:
            return seq.outputs, seq.last_token_s
        # its prompt may end in the step ahead: until then it has put out nothing new
        ended_step = max(running.index, seq.joined_step) - 1
        outputs = seq.output_tokens - (seq.finish_step - ended_step)
        return outputs, self._last_end_s if seq.joined_step < running.index else seq.last_token_s

    def advance(self, now_s: float) -> Output | None:
        """End the step under way, if any, and start the next one; what was put out.

        Call it at ``due_s``; where it is waking, at or after it.
        """
        output = None
        if self._running is not None:
            output = self._finish(self._running, now_s)
            self._running, self._ahead = self._ahead, None
        if self._inbox:
            self._read_inbox(now_s)
        if self._running is None:
            self._running = self._schedule(None, now_s)
        if self._running is None:
            self.due_s = None
            return output
        self._running.start_s = now_s
        self.due_s = now_s + self._duration_s(self._running)
        if self.config.async_scheduling:
            self._ahead = self._schedule(self._running, now_s)
        return output

    def skip(self, limit_s: float) -> Stretch | None:
        """End every step due by ``limit_s`` as long as each is like the one before; None where the first is not.

        What :meth:`advance` would do one by one, for runs of steps in which nobody comes, ends or is short of blocks.
        """
        step, scheduler, due_s = self._running, self.scheduler, self.due_s
        if step is None or due_s is None or self._inbox or not scheduler.repeats(step):
            return None
        stretch = Stretch(max(self._last_end_s, step.start_s), [], [], step.decode_seqs)
        add_times = self.counters.inter_token_latency.add_times
        while due_s <= limit_s:
            usage = scheduler.pool.usage
            if not scheduler.repeat(step):
                break
            stretch.ends_s.append(due_s)
            stretch.usages.append(usage)
            add_times(due_s - self._last_end_s, step.decode_seqs)
            self._last_end_s = step.start_s = due_s
            due_s += self._duration_s(step)
        if not stretch.ends_s:
            return None
        self.due_s = due_s
        self._count_stretch(stretch)
        return stretch

    def _count_stretch(self, stretch: Stretch) -> None:
        steps = len(stretch.ends_s)
        self.counters.steps += steps
        self.counters.generation_tokens += steps * stretch.decode_seqs
        self.counters.iteration_tokens.add_times(stretch.decode_seqs, steps)
        self._set_gauges()
        self.counters.kv_cache_usage = stretch.usages[-1]

    def _schedule(self, foreseen: Step | None, now_s: float) -> Step | None:
        step = self.scheduler.schedule(foreseen)
        if step is None:
            return None
        for seq in step.admitted:
            if seq.scheduled_s is None:
                seq.scheduled_s = now_s
        if step.preempted:
            for seq in step.interrupted:
                # under asynchronous scheduling the token of the step still running is delivered all the same
                seq.last_token_s = self._last_end_s if foreseen is None else self.due_s
            if foreseen is None and not step.scheduled_tokens:
                # it did nothing but preempt: an engine core with work left tries again
                return self._schedule(None, now_s)
        return step if step.decode_tokens or step.prefill_tokens else None

    def _duration_s(self, step: Step) -> float:
        prompt = step.prefill_tokens
        if prompt:
            seconds = self._step_s(step.decode_seqs, step.kv_tokens, prompt, step.prefill_pairs / prompt)
        else:
            seconds = self._step_s(step.decode_seqs, step.kv_tokens, 0)
        if self._noise:
            seconds *= math.exp(self._noise_rng.gauss(-self._noise * self._noise / 2, self._noise))
        return seconds

    # ------------------------------------------------------------------ the end of a step

    def _finish(self, step: Step, now_s: float) -> Output:
        counters = self.counters
        output = Output(now_s, step, step.members, step.tokens)
        finished = self.scheduler.update(step, self._ahead)
        decoded = step.decode_seqs - step.dropped
        computed_prompt_tokens = 0
        if step.completed:
            decoded += len(step.completed)
            computed_prompt_tokens = self._count_completed(step, output, finished, now_s)
            decoded -= len(output.started) + len(output.resumed)
        if decoded:
            counters.inter_token_latency.add_times(now_s - self._last_end_s, decoded)
        generated = len(output.started) + len(output.resumed)
        generated += decoded if step.tokens is None else sum(step.tokens.values())
        if generated:
            counters.generation_tokens += generated
            counters.iteration_tokens.add(computed_prompt_tokens + generated)
        if finished:
            self._count_finished(finished, now_s)
            output.finished = tuple(finished)
        self._last_end_s = now_s
        counters.steps += 1
        self._unsettled += 1
        if self._unsettled == _SETTLE_EVERY:
            self._unsettled = 0
            counters.settle()
        self._set_gauges()
        return output

    def _count_completed(self, step: Step, output: Output, finished: list[Sequence], now_s: float) -> int:
        """Sequences whose prefill ended; the computed prompt tokens of those that put out their first token."""
        computed = 0
        for seq in step.completed:
            if seq.ended and seq not in finished:
                continue
            self.counters.count_preemptions(seq)
            if seq.first_token_s is None:
                seq.first_token_s = seq.last_token_s = now_s
                computed += self.counters.count_first_output(seq, now_s)
                output.started += (seq,)
            else:
                assert seq.last_token_s is not None
                self.counters.inter_token_latency.add(now_s - seq.last_token_s)
                output.resumed += (seq,)
        return computed

    def _count_finished(self, finished: list[Sequence], now_s: float) -> None:
        for seq in finished:
            seq.last_token_s = seq.finished_s = now_s
            self.counters.count_preemptions(seq)
            self.counters.count_finished(seq)

    def _count_drafts(self) -> None:
        decoders = self.scheduler.decoders
        assert isinstance(decoders, Speculative)
        self.counters.spec_decode_num_drafts = decoders.drafts
        self.counters.spec_decode_num_draft_tokens = decoders.draft_tokens
        self.counters.spec_decode_num_accepted_tokens_per_pos = tuple(decoders.accepted_by_position)

    def _set_gauges(self) -> None:
        scheduler, counters = self.scheduler, self.counters
        pool = scheduler.pool
        counters.num_requests_running = len(scheduler.running)
        counters.num_requests_waiting = len(scheduler.waiting)
        counters.kv_cache_usage = 1.0 - pool.free / pool.total
        counters.prefix_cache_queries = scheduler.prefix_queries
        counters.prefix_cache_hits = scheduler.prefix_hits
        if self.config.speculation is not None:
            self._count_drafts()
