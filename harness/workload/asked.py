"""One request as it will be sent, and what every kind of workload can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson

Endpoint = Literal["chat", "completions"]
PATHS: dict[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it will be sent."""

    path: str
    body: bytes
    #: exact for token ids; None for text, whose count the server tells
    prompt_tokens: int | None
    #: words of a text made of :data:`harness.workload.text.WORDS`, to learn its tokens from; None for anything else
    words: int | None
    #: what the answer is asked to be; None: as long as the model likes
    output_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a request, as far as a workload may want to know."""

    stage: int
    user: int
    good: bool
    #: as the server counted them; None where it did not say
    prompt_tokens: int | None
    output_tokens: int | None
    #: only where the workload remembers
    text: str | None


class Workload(Protocol):
    """What a worker asks. The same seed, stage, user and number give the same request in any worker, but for text whose
    length is learned from the server and for conversations, which the server's answers enter."""

    #: the next request of a user needs the answer to the one before
    remembers: bool

    def begin(
        self,
        stage: int,
        prompt_tokens: Any,
        output_tokens: Any,
        *,
        replay: bool = False,
        takes_over: bool = False,
    ) -> None:
        """A stage is coming; its lengths where they are its own, else None.

        Args:
            replay: it keeps a trace's times.
            takes_over: the users of the stage before go on in it.
        """

    def ask(self, stage: int, number: int, user: int) -> Asked:
        """The ``number``-th request of a stage, which ``user`` sends."""

    def heard(self, asked: Asked, answer: Answer) -> None:
        """The answer to a request has ended."""


def body_of(model: str, endpoint: Endpoint, prompt: Any, output_tokens: int | None) -> bytes:
    """The request's body. ``prompt``: token ids or text (completions), messages (chat)."""
    key = "messages" if endpoint == "chat" else "prompt"
    return orjson.dumps({"model": model, **sampling(output_tokens), key: prompt})


def sampling(output_tokens: int | None) -> dict[str, Any]:
    """Fields that make an answer exactly ``output_tokens`` long, streamed, with usage (vLLM 0.32
    ``entrypoints/openai``: unknown fields are ignored silently, so the names matter). None leaves its end to the model."""
    exact = {"max_tokens": output_tokens, "min_tokens": output_tokens, "ignore_eos": True}
    return {
        **(exact if output_tokens is not None else {}),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
