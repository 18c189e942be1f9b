"""One step of an engine: what the scheduler decides, and the engine applies."""

from __future__ import annotations

from dataclasses import dataclass

from calibration.twin.sequence import Sequence


@dataclass(slots=True)
class Step:
    """One scheduled forward pass."""

    index: int
    #: when it began to run, set by the engine
    start_s: float = 0.0
    #: sequences that decode, and the KV tokens resident for them
    decode_seqs: int = 0
    kv_tokens: int = 0
    #: prompt (and recomputed) tokens computed
    prefill_tokens: int = 0
    #: of each of them, the tokens of its own prompt before it, summed
    prefill_pairs: float = 0.0
    #: sequences taken from the waiting queue, and those whose prefill ends here: they put out a token
    admitted: tuple[Sequence, ...] = ()
    completed: tuple[Sequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    #: those of the preempted that were decoding
    interrupted: tuple[Sequence, ...] = ()
    #: decoding ones that sit the step out (policy priority), and the KV tokens resident for each
    held: tuple[tuple[Sequence, int], ...] = ()
    #: tokens put out by each decoding sequence; None where each puts out one
    tokens: dict[Sequence, int] | None = None
    #: those that decode, where the engine was asked to keep them
    members: list[Sequence] | None = None
    #: ends that were known before the step ran (asynchronous scheduling)
    ending: tuple[Sequence, ...] = ()
    #: tokens of the budget taken by decoding, drafts included, and by empty drafts beside a prompt's last token
    decode_tokens: int = 0
    padding: int = 0
    #: sequences of this step whose output nobody takes any more
    dropped: int = 0

    def holds(self, seq: Sequence) -> bool:
        """Whether ``seq`` sits this step out."""
        return any(other is seq for other, _ in self.held)

    @property
    def scheduled_tokens(self) -> int:
        return self.decode_tokens + self.prefill_tokens + self.padding
