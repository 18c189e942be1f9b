"""Beginnings that prompts have in common, with a reuse that is kept exactly.

Which request begins with which prefix depends on its number alone: of ``n`` requests ``floor(n * share)`` share, they go
round the prefixes in turn, and a prefix is replaced after ``reuse`` requests. So at most ``share * tokens /
prompt_tokens * (1 - 1 / reuse)`` of the prompt tokens can come from a cache, in every stage: a stage begins with prefixes
that no stage before it had.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from random import Random

from harness.workload.text import TextPrompts, token_ids

#: prefixes kept made; those in use at a time come round again at once
KEPT = 256


@dataclass(frozen=True, slots=True)
class Shared:
    """One prefix: always the same content for the same key."""

    key: str
    tokens: int
    made: OrderedDict[str, list[int]]

    def ids(self) -> list[int]:
        if self.key not in self.made:
            self.made[self.key] = token_ids(self.tokens, Random(self.key))
            if len(self.made) > KEPT:
                self.made.popitem(last=False)
        return self.made[self.key]

    def words(self, count: int, text: TextPrompts) -> str:
        """Its ``count`` words."""
        return text.words_of(count, Random(self.key))


class Prefixes:
    """The shared prefixes of a run.

    Args:
        tokens: length of each.
        share: of the requests that begin with one, 0 < share <= 1.
        prefixes: in use at a time.
        reuse: requests after which one is replaced; None: never.
        seed: of the run.
    """

    def __init__(self, tokens: int, share: float, prefixes: int, reuse: int | None, seed: int) -> None:
        self.tokens = tokens
        self._share, self._prefixes, self._reuse, self._seed = share, prefixes, reuse, seed
        self._made: OrderedDict[str, list[int]] = OrderedDict()

    def of(self, stage: int, number: int) -> Shared | None:
        """The prefix that the ``number``-th request of a stage begins with; None where it is unique."""
        before, upto = math.floor(number * self._share), math.floor((number + 1) * self._share)
        if before == upto:
            return None
        slot, turn = before % self._prefixes, before // self._prefixes
        generation = 0 if self._reuse is None else turn // self._reuse
        return Shared(f"{self._seed}/{stage}/prefix/{slot}/{generation}", self.tokens, self._made)
