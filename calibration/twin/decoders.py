"""The running sequences that get tokens in every step, and what a step takes of them.

Without speculation each gets exactly one token a step, all in step: a sequence's progress is a difference to one
counter, the ones that need a block are found by remainder, the ones that end by the step they end in. A step then
costs by blocks and ends, not by sequences. With speculation each has a pace of its own (:class:`Speculative`).
"""

from __future__ import annotations

import random
from typing import Protocol

from calibration.twin.config import Speculation
from calibration.twin.sequence import Sequence
from calibration.twin.step import Step


class Decoders(Protocol):
    """Sequences past their prefill. ``step`` is the number of the step being scheduled, counting up by one."""

    @property
    def tokens(self) -> int:
        """Tokens of the step's budget they take, without those that sit it out."""
        ...

    def __len__(self) -> int: ...

    def add(self, seq: Sequence, step: int) -> None:
        """``seq`` finishes its prefill in ``step``; it decodes from the next one on."""
        ...

    def drop(self, seq: Sequence) -> None:
        """Take ``seq`` out; its ``computed`` are the tokens the cache may keep, its ``blocks`` what it holds."""
        ...

    def hold(self, last: Sequence) -> list[tuple[Sequence, int]]:
        """Those behind ``last`` in the running order sit this step out; each with the KV tokens resident for it."""
        ...

    def growth(self) -> int:
        """Blocks that all of them need for this step."""
        ...

    def grow(self) -> None:
        """All have the blocks they need for this step; the pool has been asked for :meth:`growth`."""
        ...

    def grow_one(self, seq: Sequence, blocks: int) -> None:
        """``seq`` has the ``blocks`` it needs for this step."""
        ...

    def blocks(self, seq: Sequence) -> int:
        """Blocks ``seq`` holds."""
        ...

    def growing(self) -> list[tuple[Sequence, int]]:
        """(sequence, blocks) of those that need blocks for this step, in running order."""
        ...

    def run(self, step: Step) -> None:
        """Schedule ``step`` for all that do not sit it out, and say in it what they take and put out."""
        ...

    def cacheable(self, seq: Sequence) -> int:
        """Tokens of ``seq`` whose full blocks are in the prefix cache, those of the step scheduled last included."""
        ...

    def foreseen(self, step: int) -> list[Sequence]:
        """Those that get their last token in ``step``, in running order, as the scheduler can know beforehand."""
        ...

    def ends_in(self, step: int) -> bool:
        """Whether one of them is known to end in ``step``."""
        ...

    def members(self) -> list[Sequence]:
        """All of them, in order of joining."""
        ...

    def count_rejected(self, drafts: int) -> None:
        """Drafts that only filled the batch were rejected, and are counted."""
        ...


_NOBODY: dict[Sequence, None] = {}


class LockStep:
    """One token a step for each. ``computed = steps + base`` with one ``base`` a sequence.

    Args:
        block_size: tokens of a block.
        lag: tokens at the end that are computed but not yet known, so that their block cannot be in the cache: 1
            under asynchronous scheduling (vLLM 0.32.0 AsyncScheduler._update_request_with_output), otherwise 0.
    """

    def __init__(self, block_size: int, lag: int) -> None:
        self._block_size = block_size
        self._lag = lag
        self._steps = 0
        self._base: dict[Sequence, int] = {}
        self._base_sum = 0
        #: sequences by base modulo block size: those of one entry need a block in the same step
        self._phase: list[dict[Sequence, None]] = [{} for _ in range(block_size)]
        self._ends: dict[int, dict[Sequence, None]] = {}
        #: those that have had their block for the step being scheduled, and how many sit it out
        self._grown: dict[Sequence, None] = _NOBODY
        self._held: list[tuple[Sequence, int]] = []

    def __len__(self) -> int:
        return len(self._base)

    @property
    def tokens(self) -> int:
        return len(self._base) - len(self._held)

    def add(self, seq: Sequence, step: int) -> None:
        seq.decoding = True
        seq.joined_step = step
        seq.prefilled = seq.computed
        self._enter(seq, seq.computed - self._steps, step + seq.output_tokens - seq.outputs - 1)

    def _enter(self, seq: Sequence, base: int, finish_step: int) -> None:
        self._base[seq] = base
        self._base_sum += base
        self._phase[base % self._block_size][seq] = None
        seq.finish_step = finish_step
        self._ends.setdefault(finish_step, {})[seq] = None

    def _leave(self, seq: Sequence) -> int:
        base = self._base.pop(seq)
        self._base_sum -= base
        del self._phase[base % self._block_size][seq]
        if (ends := self._ends.get(seq.finish_step)) is not None:
            ends.pop(seq, None)
        return base

    def drop(self, seq: Sequence) -> None:
        seq.computed = self.cacheable(seq)
        seq.blocks = self.blocks(seq)
        self._leave(seq)
        seq.decoding = False

    def hold(self, last: Sequence) -> list[tuple[Sequence, int]]:
        held = [(seq, self._steps + base) for seq, base in self._base.items() if seq.order > last.order]
        for seq, _ in held:
            self._enter(seq, self._leave(seq) - 1, seq.finish_step + 1)
        self._held = held
        return held

    def growth(self) -> int:
        return len(self._phase[-self._steps % self._block_size])

    def grow(self) -> None:
        self._grown = self._phase[-self._steps % self._block_size]

    def grow_one(self, seq: Sequence, blocks: int) -> None:
        if self._grown is _NOBODY:
            self._grown = {}
        self._grown[seq] = None

    def blocks(self, seq: Sequence) -> int:
        return -(-(self._steps + self._base[seq]) // self._block_size) + (seq in self._grown)

    def growing(self) -> list[tuple[Sequence, int]]:
        return [(seq, 1) for seq in sorted(self._phase[-self._steps % self._block_size], key=_order)]

    def run(self, step: Step) -> None:
        count = len(self._base)
        step.kv_tokens = self._steps * count + self._base_sum
        if self._held:
            # those held stand one step back already: what is resident for them is out of the sum but for that step
            count -= len(self._held)
            step.kv_tokens -= sum(tokens - 1 for _, tokens in self._held)
            self._held = []
        step.decode_seqs = step.decode_tokens = count
        self._steps += 1
        self._grown = _NOBODY

    def cacheable(self, seq: Sequence) -> int:
        return max(seq.prefilled, self._steps + self._base[seq] - self._lag)

    def foreseen(self, step: int) -> list[Sequence]:
        ends = self._ends.pop(step, None)
        return sorted(ends, key=_order) if ends else []

    def ends_in(self, step: int) -> bool:
        return bool(self._ends.get(step))

    def members(self) -> list[Sequence]:
        return list(self._base)

    def count_rejected(self, drafts: int) -> None:
        raise AssertionError("without speculation there are no drafts")


def _order(seq: Sequence) -> int:
    return seq.order


class Speculative:
    """``1 + drafts`` tokens scheduled for each, one plus the accepted ones put out.

    Rules: vLLM 0.32.0 ``Scheduler.schedule`` (``num_tokens_with_spec``, the cap at the model's length),
    ``allocate_slots`` (lookahead) and ``update_from_output`` (rejected tokens are taken back from what is computed;
    their blocks stay).
    """

    def __init__(self, speculation: Speculation, block_size: int, max_model_len: int, rng: random.Random) -> None:
        self._spec = speculation
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._rng = rng
        self._seqs: dict[Sequence, None] = {}
        self._ends: list[Sequence] = []
        self._held: dict[Sequence, None] = {}
        #: what the last step drafted and accepted, by position, for the counters
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_by_position = [0] * speculation.num_speculative_tokens

    def __len__(self) -> int:
        return len(self._seqs)

    @property
    def tokens(self) -> int:
        return sum(1 + self._drafted(seq) for seq in self._seqs if seq not in self._held)

    def _drafted(self, seq: Sequence) -> int:
        # the last position of the model's length is for the token that follows
        return min(self._spec.num_speculative_tokens, self._max_model_len - seq.computed - 2)

    def add(self, seq: Sequence, step: int) -> None:
        self._seqs[seq] = None
        seq.decoding = True
        seq.joined_step = step
        seq.prefilled = seq.computed
        seq.outputs += 1
        if seq.outputs == seq.output_tokens:
            self._ends.append(seq)

    def drop(self, seq: Sequence) -> None:
        del self._seqs[seq]
        self._held.pop(seq, None)
        seq.computed = seq.prefilled
        seq.decoding = False
        if seq in self._ends:
            self._ends.remove(seq)

    def hold(self, last: Sequence) -> list[tuple[Sequence, int]]:
        self._held = {seq: None for seq in self._seqs if seq.order > last.order}
        return [(seq, seq.computed) for seq in self._held]

    def growth(self) -> int:
        return sum(blocks for _, blocks in self.growing())

    def grow(self) -> None:
        for seq, blocks in self.growing():
            seq.blocks += blocks

    def grow_one(self, seq: Sequence, blocks: int) -> None:
        seq.blocks += blocks

    def blocks(self, seq: Sequence) -> int:
        return seq.blocks

    def growing(self) -> list[tuple[Sequence, int]]:
        needs = []
        for seq in sorted(self._seqs, key=_order):
            slots = min(seq.computed + 1 + self._drafted(seq) + self._spec.lookahead_tokens, self._max_model_len)
            if (blocks := -(-slots // self._block_size) - seq.blocks) > 0:
                needs.append((seq, blocks))
        return needs

    def run(self, step: Step) -> None:
        seqs = [seq for seq in self._seqs if seq not in self._held]
        step.decode_seqs, step.decode_tokens = len(seqs), self.tokens
        step.kv_tokens = sum(seq.computed for seq in seqs)
        step.tokens = {seq: self._verify(seq) for seq in seqs}
        self._held = {}

    def _verify(self, seq: Sequence) -> int:
        drafted = self._drafted(seq)
        accepted = 0
        while accepted < drafted and self._rng.random() < self._spec.acceptance[accepted]:
            self.accepted_by_position[accepted] += 1
            accepted += 1
        if drafted > 0:
            self.drafts += 1
            self.draft_tokens += drafted
        put_out = min(1 + accepted, seq.output_tokens - seq.outputs)
        # what is cached when a step is scheduled ends with the token known then (allocate_slots)
        seq.prefilled = seq.computed + 1
        seq.computed += 1 + accepted
        seq.outputs += put_out
        if seq.outputs == seq.output_tokens:
            self._ends.append(seq)
        return put_out

    def cacheable(self, seq: Sequence) -> int:
        return seq.prefilled

    def foreseen(self, step: int) -> list[Sequence]:
        ends, self._ends = self._ends, []
        return sorted(ends, key=_order)

    def ends_in(self, step: int) -> bool:
        return bool(self._ends)

    def members(self) -> list[Sequence]:
        return list(self._seqs)

    def count_rejected(self, drafts: int) -> None:
        self.drafts += 1
        self.draft_tokens += drafts
