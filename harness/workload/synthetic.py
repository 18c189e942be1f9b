"""Synthetic prompts of known length, unique in every request, so that no prefix cache can answer for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import orjson

Endpoint = Literal["chat", "completions"]

#: token ids drawn from: below 1,000 tokenizers keep their control and byte tokens, above 10,000 small ones end
TOKEN_IDS = (1_000, 10_000)

#: short, common words that nearly every tokenizer knows whole (with a space before them)
WORDS = ["time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law", "car", "city", "community", "name", "president", "team", "minute", "idea", "kid", "body", "information", "back", "parent", "face", "others", "level", "office", "door", "health", "person", "art", "war", "history", "party", "result", "change", "morning", "reason", "research", "girl", "guy", "moment", "air", "teacher", "force", "education"]


@dataclass(slots=True)
class TextPrompts:
    """Text of about a wanted number of tokens, learned from what the server counted.

    A text of n common words is taken to hold n + ``offset`` tokens; the offset (chat template, word splits) starts at
    what ``/tokenize`` said, or at 0, and follows the prompt tokens that usage reports.
    """

    words: Sequence[str] = field(default_factory=lambda: WORDS)
    tokens_per_word: float = 1.0
    offset: float = 0.0

    def text(self, tokens: int, rng: np.random.Generator) -> tuple[str, int]:
        """A text of about ``tokens`` tokens, and its number of words."""
        count = max(1, round((tokens - self.offset) / self.tokens_per_word))
        return " ".join(self.words[i] for i in rng.integers(0, len(self.words), count)), count

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
        rng = np.random.default_rng((self._seed, stage, number))
        common = {"model": self._model, **sampling(output_tokens)}
        if self._endpoint == "completions":
            ids = rng.integers(*TOKEN_IDS, size=prompt_tokens).tolist()
            return Asked("/v1/completions", orjson.dumps({**common, "prompt": ids}), prompt_tokens, None)
        text, words = self.text.text(prompt_tokens, rng)
        messages = [{"role": "user", "content": text}]
        return Asked("/v1/chat/completions", orjson.dumps({**common, "messages": messages}), None, words)
