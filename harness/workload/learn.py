"""How many tokens a text holds, asked of the server itself: no tokenizer is shipped, and none would be the server's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from harness.errors import HarnessError
from harness.http_get import Getter
from harness.workload.text import WORDS

#: the two text lengths asked, in words
SHORT, LONG = 20, 100
ASK_S = 5.0


@dataclass(frozen=True, slots=True)
class TextLaw:
    """tokens = ``offset`` + words * ``tokens_per_word`` for texts of :data:`WORDS` in one user message."""

    offset: float = 0.0
    tokens_per_word: float = 1.0
    #: False: the server has no /tokenize; the first answers' usage will tell
    asked: bool = False


async def learn_text(getter: Getter, base_url: str, model: str) -> TextLaw:
    """Ask ``/tokenize`` for two lengths of chat message; without it, the law that usage will correct."""
    short = await _tokens(getter, base_url, model, SHORT)
    long = await _tokens(getter, base_url, model, LONG) if short is not None else None
    if short is None or long is None or long <= short:
        return TextLaw()
    per_word = (long - short) / (LONG - SHORT)
    return TextLaw(offset=short - SHORT * per_word, tokens_per_word=per_word, asked=True)


async def learn_rate(getter: Getter, base_url: str, model: str, texts: Sequence[str]) -> float | None:
    """Tokens of a character in these texts, as ``/tokenize`` counts them; None where it does not answer."""
    tokens = characters = 0
    for text in texts:
        count = await _count(getter, base_url, {"model": model, "prompt": text, "add_special_tokens": False})
        if count is None:
            return None
        tokens, characters = tokens + count, characters + len(text)
    return tokens / characters if tokens and characters else None


async def _tokens(getter: Getter, base_url: str, model: str, words: int) -> int | None:
    text = " ".join(WORDS[i % len(WORDS)] for i in range(words))
    messages = [{"role": "user", "content": text}]
    return await _count(getter, base_url, {"model": model, "messages": messages, "add_generation_prompt": True})


async def _count(getter: Getter, base_url: str, body: dict[str, Any]) -> int | None:
    try:
        answer = await getter.post_json(f"{base_url}/tokenize", body, timeout_s=ASK_S)
        count = orjson.loads(answer.body).get("count") if answer.ok else None
    except (HarnessError, ValueError, AttributeError):
        return None  # a server without /tokenize may answer anything to it; usage will tell
    return count if isinstance(count, int) else None
