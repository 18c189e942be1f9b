"""Made-up prompts: token ids, or text of common words whose length in tokens is learned from the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt

#: token ids drawn from: below 1,000 tokenizers keep their control and byte tokens, above 10,000 small ones end
TOKEN_IDS = (1_000, 10_000)

#: short, common words that nearly every tokenizer knows whole (with a space before them)
WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "community",
    "name",
    "president",
    "team",
    "minute",
    "idea",
    "kid",
    "body",
    "information",
    "back",
    "parent",
    "face",
    "others",
    "level",
    "office",
    "door",
    "health",
    "person",
    "art",
    "war",
    "history",
    "party",
    "result",
    "change",
    "morning",
    "reason",
    "research",
    "girl",
    "guy",
    "moment",
    "air",
    "teacher",
    "force",
    "education",
]


@dataclass(slots=True)
class TextPrompts:
    """Text of about a wanted number of tokens, learned from what the server counted.

    A text of n common words is taken to hold n + ``offset`` tokens; the offset (chat template, word splits) starts at
    what ``/tokenize`` said, or at 0, and follows the prompt tokens that usage reports.
    """

    words: Sequence[str] = field(default_factory=lambda: WORDS)
    tokens_per_word: float = 1.0
    offset: float = 0.0

    def count(self, tokens: int) -> int:
        """Words of a whole prompt of about ``tokens`` tokens, at least one."""
        return max(1, round((tokens - self.offset) / self.tokens_per_word))

    def count_within(self, tokens: int) -> int:
        """Words of about ``tokens`` tokens within a longer text."""
        return max(1, round(tokens / self.tokens_per_word))

    def words_of(self, count: int, draw: Random) -> str:
        """A text of ``count`` words."""
        return " ".join([self.words[i] for i in numbers_below(len(self.words), count, draw)])

    def learn(self, words: int, prompt_tokens: int) -> None:
        """Follow what the server counted for a text of ``words`` words."""
        self.offset = prompt_tokens - words * self.tokens_per_word


def numbers_below(bound: int, count: int, draw: Random) -> list[int]:
    """``count`` numbers of 0 .. ``bound`` - 1, ``bound`` at most 65,536. Some tens of microseconds less than a numpy
    generator made for the occasion, and this stands between a user's stream and its next send; that some numbers come up
    more often than others by up to 1 in 65,536 / bound is of no matter to a prompt."""
    drawn: npt.NDArray[np.uint16] = np.frombuffer(draw.randbytes(2 * count), dtype=np.uint16)
    below: list[int] = (drawn % np.uint16(bound) if bound < 65_536 else drawn).tolist()
    return below


def token_ids(count: int, draw: Random) -> list[int]:
    """``count`` token ids that any tokenizer has."""
    low, high = TOKEN_IDS
    return [low + offset for offset in numbers_below(high - low, count, draw)]
