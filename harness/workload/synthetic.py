"""Synthetic prompts of known length, unique in every request, so that no prefix cache can answer for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

Endpoint = Literal["chat", "completions"]

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

    def text(self, tokens: int, draw: Random) -> tuple[str, int]:
        """A text of about ``tokens`` tokens, and its number of words."""
        count = max(1, round((tokens - self.offset) / self.tokens_per_word))
        return " ".join(self.words[i] for i in numbers_below(len(self.words), count, draw)), count

    def learn(self, words: int, prompt_tokens: int) -> None:
        """Follow what the server counted for a text of ``words`` words."""
        self.offset = prompt_tokens - words * self.tokens_per_word


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it will be sent."""

    path: str
    body: bytes
    #: exact for token ids; None for text, whose count the server tells
    prompt_tokens: int | None
    words: int | None


def sampling(output_tokens: int) -> dict[str, Any]:
    """Fields that make an answer exactly ``output_tokens`` long, streamed, with usage (vLLM 0.32
    ``entrypoints/openai``: unknown fields are ignored silently, so the names matter)."""
    return {
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def numbers_below(bound: int, count: int, draw: Random) -> list[int]:
    """``count`` numbers of 0 .. ``bound`` - 1, ``bound`` at most 65,536. Some tens of microseconds less than a numpy
    generator made for the occasion, and this stands between a user's stream and its next send; that some numbers come up
    more often than others by up to 1 in 65,536 / bound is of no matter to a prompt."""
    drawn: npt.NDArray[np.uint16] = np.frombuffer(draw.randbytes(2 * count), dtype=np.uint16)
    below: list[int] = (drawn % np.uint16(bound) if bound < 65_536 else drawn).tolist()
    return below


class SyntheticWorkload:
    """Builds request bodies; the same seed, stage and request number always give the same prompt.

    Args:
        model: the name the server knows.
        endpoint: completions asks with token ids (exact lengths), chat with text.
        seed: of the run.
        text: how text lengths are learned; chat only.
    """

    def __init__(self, model: str, endpoint: Endpoint, seed: int, text: TextPrompts | None = None) -> None:
        self._model = model
        self._endpoint = endpoint
        self._seed = seed
        self.text = text or TextPrompts()

    def ask(self, stage: int, number: int, prompt_tokens: int, output_tokens: int) -> Asked:
        """The ``number``-th request of ``stage``."""
        draw = Random(f"{self._seed}/{stage}/{number}")
        common = {"model": self._model, **sampling(output_tokens)}
        if self._endpoint == "completions":
            low, high = TOKEN_IDS
            ids = [low + offset for offset in numbers_below(high - low, prompt_tokens, draw)]
            return Asked("/v1/completions", orjson.dumps({**common, "prompt": ids}), prompt_tokens, None)
        text, words = self.text.text(prompt_tokens, draw)
        messages = [{"role": "user", "content": text}]
        return Asked("/v1/chat/completions", orjson.dumps({**common, "messages": messages}), None, words)
