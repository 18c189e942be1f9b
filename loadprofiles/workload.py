"""What is asked: the ``workload`` section of a profile, by its ``kind``.

synthetic      prompts of known length, unique but for a shared prefix where one is asked
dataset        prompts (and answers' lengths) of a file
conversation   several turns, each with the history before it
trace          requests of a recorded trace, with their lengths and, where the stage says ``replay``, their times
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from loadprofiles.lengths import Distribution, Lengths, Tokens
from loadprofiles.units import Strict

Endpoint = Literal["completions", "chat"]
Path = Annotated[str, Field(min_length=1, max_length=4096)]


class OfContext(Strict):
    """This share of the model's maximum length."""

    of_context: float = Field(gt=0, lt=1)


def _prompt_shape(value: Any) -> str:
    if isinstance(value, OfContext) or (isinstance(value, dict) and "of_context" in value):
        return "<share>"
    return "<distribution>" if isinstance(value, dict | Strict) else "<tokens>"


#: a number, a distribution, or a share of the model's context
PromptLengths = Annotated[
    Annotated[Tokens, Tag("<tokens>")]
    | Annotated[Distribution, Tag("<distribution>")]
    | Annotated[OfContext, Tag("<share>")],
    Discriminator(_prompt_shape),
]


class SharedPrefix(Strict):
    """Beginnings that prompts have in common, for the server's prefix cache to hit.

    The prefix is part of the prompt: ``prompt_tokens`` counts it. At most ``share * tokens / prompt_tokens *
    (1 - 1 / reuse)`` of the prompt tokens can come from the cache.
    """

    tokens: Tokens
    """Length of the common beginning, in tokens; a shorter prompt is all prefix but for its last token."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the requests that begin with a shared prefix; the others are unique."""
    prefixes: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """How many different ones are in use at a time; a request draws one of them."""
    reuse: Annotated[int, Field(ge=1)] | None = None
    """After so many requests a prefix is replaced by a new one; without it, never."""


class Synthetic(Strict):
    """Prompts made up, of the lengths asked; every request's content is its own."""

    kind: Literal["synthetic"] = "synthetic"
    endpoint: Endpoint = "completions"
    """completions sends token ids (exact lengths), chat text whose length is learned from the server."""
    prompt_tokens: PromptLengths = 256
    output_tokens: Lengths = 128
    shared_prefix: SharedPrefix | None = None

    @model_validator(mode="after")
    def _prefix_fits(self) -> Synthetic:
        prefix, prompt = self.shared_prefix, self.prompt_tokens
        if prefix is not None and isinstance(prompt, int) and prefix.tokens >= prompt:
            raise ValueError(f"shared_prefix.tokens ({prefix.tokens}) leaves nothing of the prompt_tokens ({prompt})")
        return self


class Dataset(Strict):
    """Prompts of a file: ShareGPT-like JSON, or JSONL with a prompt a line."""

    kind: Literal["dataset"]
    endpoint: Endpoint = "chat"
    file: Path
    """Relative to the profile's own folder."""
    format: Literal["sharegpt", "jsonl"] = "jsonl"
    prompt_field: Annotated[str, Field(min_length=1)] = "prompt"
    """jsonl: where the prompt stands."""
    output_field: Annotated[str, Field(min_length=1)] | None = None
    """jsonl: where the answer, or its length in tokens, stands."""
    output_tokens: Lengths | None = None
    """Length of each answer; without it, that of the file's answer; without that, what the model gives."""
    order: Literal["shuffled", "as_written"] = "shuffled"
    max_rows: Annotated[int, Field(ge=1)] | None = None


class Conversation(Strict):
    """Several turns of one user, each sent with the history before it; a user starts a new one when the last has ended."""

    kind: Literal["conversation"]
    endpoint: Endpoint = "chat"
    turns: Lengths = 4
    """User turns of a conversation."""
    prompt_tokens: Lengths = 128
    """Of each user turn, without the history."""
    output_tokens: Lengths = 128
    system_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """A system prompt that all conversations share."""
    history: Literal["answers", "made_up", "none"] = "answers"
    """answers: what the server said; made_up: text of the same length, so that runs can be compared; none: each turn
    alone."""
    max_history_tokens: Tokens | None = None
    """The oldest turns are left out beyond it; without it, the conversation ends when the context is full."""
    file: Path | None = None
    """A ShareGPT-like file whose conversations are used in place of made-up ones; then turns is their most, and the
    lengths are theirs."""
    order: Literal["shuffled", "as_written"] = "shuffled"


class Trace(Strict):
    """Requests of a recorded trace, in its order: their lengths, and their times where the stage says ``replay``."""

    kind: Literal["trace"]
    endpoint: Endpoint = "completions"
    file: Path
    """Relative to the profile's own folder."""
    format: Literal["mooncake", "burstgpt", "columns"] = "mooncake"
    """mooncake: JSONL with timestamp (ms), input_length, output_length, hash_ids; burstgpt: CSV with Timestamp (s),
    Request tokens, Response tokens; columns: CSV with the columns named below."""
    timestamp_column: Annotated[str, Field(min_length=1)] = "timestamp_s"
    prompt_tokens_column: Annotated[str, Field(min_length=1)] = "prompt_tokens"
    output_tokens_column: Annotated[str, Field(min_length=1)] = "output_tokens"
    speed: Annotated[float, Field(gt=0, le=10_000)] = 1.0
    """2 replays twice as fast."""
    hash_block_tokens: Annotated[int, Field(ge=1)] = 512
    """mooncake: tokens of the block that a hash id stands for; prompts share what their hashes share."""
    max_rows: Annotated[int, Field(ge=1)] | None = None


def _with_kind(value: Any) -> Any:
    """``synthetic`` where no kind is said."""
    return {"kind": "synthetic", **value} if isinstance(value, dict) else value


Workload = Annotated[
    Annotated[Synthetic | Dataset | Conversation | Trace, Field(discriminator="kind")], BeforeValidator(_with_kind)
]
