"""Who runs in the next step. Decides only: it looks at no clock and counts nothing.

Rules of vLLM 0.32.0 ``v1/core/sched/scheduler.py``, ``Scheduler.schedule`` and ``update_from_output``:

* Running requests first, in the order of their admission, one token each while they decode; then, if nobody was
  preempted, waiting ones from the head until one does not fit. All share ``max_num_batched_tokens``; a prompt that is
  larger than what is left is cut (chunked prefill), and is then the last of the running until it is through.
* Blocks are allocated for what is computed in this step. A running request that finds none preempts: under FCFS the
  last of the running, under the policy ``priority`` the one with the largest (priority, arrival), itself at worst.
* A preempted request gives all blocks back, starts again with its prompt and all it has put out, and waits at the head.
* A waiting request is admitted only if all it has to compute fits into the free blocks at that moment
  (``scheduler_reserve_full_isl``), its output to come not included.
"""

from __future__ import annotations

import random

from calibration.twin.blocks import NO_HIT, BlockPool, Hit
from calibration.twin.config import EngineConfig
from calibration.twin.decoders import Decoders, LockStep, Speculative
from calibration.twin.queues import FcfsQueue, PriorityQueue, WaitingQueue
from calibration.twin.sequence import Sequence, Status
from calibration.twin.step import Step


class Scheduler:
    """The queues and the pool of one engine.

    Args:
        config: vLLM's flags.
        rng: draws the acceptance of drafts; unused without speculation.
        keep_members: list the decoding sequences in every step (the server writes to each).
    """

    def __init__(self, config: EngineConfig, rng: random.Random, keep_members: bool = False) -> None:
        self.config = config
        self.pool = BlockPool(config.num_gpu_blocks, config.enable_prefix_caching, self._full_blocks)
        self.waiting: WaitingQueue = PriorityQueue() if config.scheduling_policy == "priority" else FcfsQueue()
        self.running: dict[Sequence, None] = {}
        self.decoders: Decoders = (
            LockStep(config.block_size, lag=int(config.async_scheduling))
            if config.speculation is None
            else Speculative(config.speculation, config.block_size, config.max_model_len, rng)
        )
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._prefilling: dict[Sequence, None] = {}
        self._keep_members = keep_members
        speculation = config.speculation
        self._tokens_per_decode = 1 + (speculation.num_speculative_tokens if speculation is not None else 0)
        self._lookahead_tokens = speculation.lookahead_tokens if speculation is not None else 0
        self._block_size = config.block_size
        #: the step still running while one is scheduled; whose token of it is still to come though they were preempted
        self._under_way: Step | None = None
        self._stale: dict[Sequence, Step] = {}
        self._steps = 0
        self._admissions = 0
        self._watermark_blocks = int(config.watermark * config.num_gpu_blocks)

    def add(self, seq: Sequence) -> None:
        self.waiting.add(seq)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    # ------------------------------------------------------------------ one step

    def schedule(self, foreseen: Step | None = None) -> Step | None:
        """The next step, or None when nothing can run; a step without tokens only preempts.

        Args:
            foreseen: the step still running, under asynchronous scheduling: those known to end in it do not run again.
        """
        self._under_way = foreseen
        if foreseen is not None:
            self._set_aside_ends(foreseen)
        step = Step(self._steps + 1)
        growth = self.decoders.growth()
        if growth <= self.pool.free and not self._prefilling:
            if growth:
                self.pool.take(growth)
                self.decoders.grow()
            budget = self.config.max_num_batched_tokens - self.decoders.tokens
        else:
            budget = self._schedule_running(step, growth)
        if self._keep_members:
            step.members = [seq for seq in self.decoders.members() if not step.holds(seq)]
        self.decoders.run(step)
        if self.waiting and not step.preempted:
            self._admit(step, budget)
        if not step.decode_tokens and not step.prefill_tokens and not step.preempted:
            return None
        self._steps = step.index
        for seq in step.completed:
            self.decoders.add(seq, step.index)
        return step

    def repeats(self, step: Step) -> bool:
        """Whether all that can happen after ``step``, which runs, is that the same sequences decode again."""
        return (
            not step.prefill_tokens
            and not step.dropped
            and not step.held
            and (not self.waiting or len(self.running) >= self.config.max_num_seqs)
            and not self._keep_members
            and not self.config.async_scheduling
            and self.config.speculation is None
        )

    def repeat(self, step: Step) -> bool:
        """Make ``step``, which :meth:`repeats`, the one that follows it; False, and no change, where one would end or
        blocks are short."""
        decoders = self.decoders
        growth = decoders.growth()
        if decoders.ends_in(step.index) or growth > self.pool.free:
            return False
        if growth:
            self.pool.take(growth)
        step.index += 1
        self._steps = step.index
        decoders.run(step)
        return True

    def _schedule_running(self, step: Step, growth: int) -> int:
        """The running ones where blocks may run short; what is left of the budget."""
        if growth <= self.pool.free:
            self.pool.take(growth)
            self.decoders.grow()
        else:
            self._grow_in_order(step)
        budget = self.config.max_num_batched_tokens - self.decoders.tokens
        if not step.held:
            budget = self._schedule_prefilling(step, budget)
        return budget

    def _grow_in_order(self, step: Step) -> None:
        """Blocks are short. A sequence that has to preempt itself ends the pass: those behind it sit the step out.

        Under FCFS nobody is behind it. (vLLM's loop over the running requests breaks there.)
        """
        for seq, blocks in self.decoders.growing():
            if not seq.decoding:
                continue
            if not self._take_or_preempt(seq, blocks, step):
                step.held = tuple(self.decoders.hold(seq))
                return
            self.decoders.grow_one(seq, blocks)

    def _take_or_preempt(self, seq: Sequence, blocks: int, step: Step) -> bool:
        """Take ``blocks`` for ``seq`` out of the pool; False where ``seq`` itself had to go."""
        while blocks > self.pool.free:
            victim = self._victim()
            self._preempt(victim, step)
            if victim is seq:
                return False
        self.pool.take(blocks)
        return True

    def _victim(self) -> Sequence:
        if self.config.scheduling_policy == "priority":
            return max(self.running, key=lambda seq: (seq.priority, seq.arrived_s))
        return next(reversed(self.running))

    def _preempt(self, seq: Sequence, step: Step) -> None:
        if seq.decoding:
            step.interrupted += (seq,)
            if self._under_way is not None and not self._under_way.holds(seq):
                self._stale[seq] = self._under_way
            self.decoders.drop(seq)
            if self.config.speculation is None:
                seq.outputs = seq.output_tokens - (seq.finish_step - (step.index - 1))
        self._prefilling.pop(seq, None)
        self._let_go(seq, again=True)
        seq.status = Status.PREEMPTED
        seq.preemptions += 1
        seq.uncounted_preemptions += 1
        step.preempted += (seq,)
        self.waiting.put_back(seq)

    def _let_go(self, seq: Sequence, again: bool) -> None:
        del self.running[seq]
        self.pool.close(seq.chain, seq.blocks, again)
        seq.chain = None
        seq.blocks = 0
        seq.computed = 0

    def _schedule_prefilling(self, step: Step, budget: int) -> int:
        for seq in list(self._prefilling):
            if (chunk := min(seq.tokens - seq.computed, budget)) and seq in self._prefilling:
                needed = self._blocks_for(self._slots(seq.computed + chunk)) - seq.blocks
                if needed <= 0 or self._take_or_preempt(seq, needed, step):
                    seq.blocks += max(needed, 0)
                    self._compute(seq, chunk, step)
                    budget -= chunk
        return budget

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _compute(self, seq: Sequence, chunk: int, step: Step) -> None:
        step.prefill_pairs += chunk * (seq.computed + chunk / 2)
        seq.computed += chunk
        step.prefill_tokens += chunk
        if seq.computed == seq.tokens:
            self._prefilling.pop(seq, None)
            step.completed += (seq,)

    # ------------------------------------------------------------------ admission

    def _admit(self, step: Step, budget: int) -> None:
        mixed = step.prefill_tokens > 0
        while budget > 0 and self.waiting and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting.head()
            hit = self._lookup(seq)
            cached = hit.blocks * self.config.block_size
            chunk = seq.tokens - cached
            padding = self._padding(step, chunk, cached) if chunk == 1 and not mixed else 0
            if chunk + padding > budget and (padding or not self.config.enable_chunked_prefill):
                break
            if chunk > budget:
                chunk = budget
            blocks = self._blocks_for(self._slots(cached + chunk + padding))
            if not self._fits(seq, hit, blocks):
                break
            self.waiting.take()
            self._start(seq, hit, cached)
            self.pool.take(blocks - hit.blocks)
            seq.blocks = blocks
            step.admitted += (seq,)
            if padding:
                step.padding += padding
                self.decoders.count_rejected(padding)
            self._prefilling[seq] = None
            self._compute(seq, chunk, step)
            budget -= chunk + padding

    def _padding(self, step: Step, chunk: int, cached: int) -> int:
        """Empty drafts for a prompt with one token left to compute, so that the batch stays one of equal rows."""
        drafts = self._tokens_per_decode - 1
        room = cached + chunk + drafts + 1 <= self.config.max_model_len
        return drafts if room and (step.decode_seqs or cached) else 0

    def _slots(self, tokens: int) -> int:
        if not self._lookahead_tokens:
            return tokens
        return min(tokens + self._lookahead_tokens, self.config.max_model_len)

    def _lookup(self, seq: Sequence) -> Hit:
        """Cached leading blocks; the last token is always computed, for its logits (KVCacheManager)."""
        if not self.config.enable_prefix_caching or (not seq.preemptions and not seq.content.keys):
            return NO_HIT
        hit = self.pool.lookup(seq.content, (seq.tokens - 1) // self.config.block_size)
        if self._lookahead_tokens and hit.blocks:
            return self.pool.lookup(seq.content, hit.blocks - 1)
        return hit

    def _fits(self, seq: Sequence, hit: Hit, blocks: int) -> bool:
        reserve = self._watermark_blocks if self.running else 0
        if self.config.scheduler_reserve_full_isl and (whole := self._blocks_for(seq.tokens)) > blocks:
            blocks = whole
        return blocks - hit.blocks + hit.free + reserve <= self.pool.free

    def _start(self, seq: Sequence, hit: Hit, cached: int) -> None:
        seq.chain = self.pool.open(seq.content, hit, seq)
        self._admissions += 1
        seq.order = self._admissions
        seq.computed = cached
        seq.status = Status.RUNNING
        self.running[seq] = None
        if not seq.preemptions:
            seq.cached_tokens = cached
            if self.config.enable_prefix_caching:
                self.prefix_queries += seq.tokens
                self.prefix_hits += cached

    def _full_blocks(self, seq: Sequence) -> int:
        return (self.decoders.cacheable(seq) if seq.decoding else seq.computed) // self._block_size

    def is_owed(self, seq: Sequence) -> bool:
        """Whether ``seq`` was preempted while the step that runs still makes a token for it."""
        return seq in self._stale

    def blocks_of(self, seq: Sequence) -> int:
        """Blocks ``seq`` holds, shared ones included."""
        return self.decoders.blocks(seq) if seq.decoding else seq.blocks

    # ------------------------------------------------------------------ the end of a step

    def _set_aside_ends(self, running: Step) -> None:
        if self.config.speculation is None:
            running.ending = tuple(self.decoders.foreseen(running.index))
            for seq in running.ending:
                if seq.finish_reason == "length":
                    self.decoders.drop(seq)

    def update(self, step: Step, ahead: Step | None = None) -> list[Sequence]:
        """Apply a step that has run; those that end in it, in running order, their blocks free again.

        Args:
            ahead: the step scheduled meanwhile, under asynchronous scheduling.
        """
        if self._stale:
            self._stale.clear()
        if not self.config.async_scheduling or self.config.speculation is not None:
            step.ending = tuple(self.decoders.foreseen(step.index))
        ended = [seq for seq in step.ending if not seq.ended] if step.ending else []
        for seq in ended:
            if seq.decoding:
                self._drop_from(seq, ahead)
                self.decoders.drop(seq)
            seq.outputs = seq.output_tokens
            if self.config.speculation is None:
                seq.computed = seq.tokens - 1
            self._remove(seq)
            seq.status = Status.FINISHED
        return ended

    def _remove(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self._let_go(seq, again=False)
        else:
            self.waiting.remove(seq)

    def abort(self, seq: Sequence, in_flight: list[Step]) -> None:
        """Take ``seq`` out wherever it is; steps under way lose its output."""
        for step in in_flight:
            self._drop_from(seq, step)
        if seq in self._stale:
            self._stale.pop(seq).dropped += 1
        if seq.decoding:
            self.decoders.drop(seq)
        self._prefilling.pop(seq, None)
        self._remove(seq)
        seq.status = Status.ABORTED

    @staticmethod
    def _drop_from(seq: Sequence, step: Step | None) -> None:
        if step is None or step.holds(seq):
            return
        if (seq.decoding and seq.joined_step <= step.index) or seq in step.ending:
            step.dropped += 1
            if step.tokens is not None:
                step.tokens.pop(seq, None)
