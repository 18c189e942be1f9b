"""How many tokens a text holds, asked of the server itself: no tokenizer is shipped, and none would be the server's."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from harness.errors import HarnessError
from harness.http_get import Getter
from harness.workload.synthetic import WORDS

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


async def _tokens(getter: Getter, base_url: str, model: str, words: int) -> int | None:
    text = " ".join(WORDS[i % len(WORDS)] for i in range(words))
    body = {"model": model, "messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
    try:
        answer = await getter.post_json(f"{base_url}/tokenize", body, timeout_s=ASK_S)
        count = orjson.loads(answer.body).get("count") if answer.ok else None
    except (HarnessError, ValueError, AttributeError):
        return None  # a server without /tokenize may answer anything to it; usage will tell
    return count if isinstance(count, int) else None
