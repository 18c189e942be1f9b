"""One request's life as a table of states, and the frozen record it ends as.

A request is *planned*, then *sent*, then *streaming*; it ends in exactly one terminal state: ok, failed or incomplete.
The keys of :class:`Record` are the keys of ``requests.jsonl`` (DESIGN section 7); tools outside this repository read
them. Times are milliseconds relative to ``sent``, but for ``scheduled_ms`` and ``sent_ms``, which count from the run's
start. ``None`` means not measured, and never stands for zero.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import orjson

SCHEMA_VERSION = 1


class State(StrEnum):
    PLANNED = "planned"
    SENT = "sent"
    STREAMING = "streaming"
    OK = "ok"
    FAILED = "failed"
    INCOMPLETE = "incomplete"


#: state -> the states that may follow; terminal states have none
TRANSITIONS: dict[State, frozenset[State]] = {
    State.PLANNED: frozenset({State.SENT, State.FAILED, State.INCOMPLETE}),
    State.SENT: frozenset({State.STREAMING, State.OK, State.FAILED, State.INCOMPLETE}),
    State.STREAMING: frozenset({State.OK, State.FAILED, State.INCOMPLETE}),
    State.OK: frozenset(),
    State.FAILED: frozenset(),
    State.INCOMPLETE: frozenset(),
}


class IllegalTransition(AssertionError):
    """A request was asked to do what its state does not allow: a bug of ours."""


class Lifecycle:
    """The state of one request. An illegal step raises and changes nothing."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state = State.PLANNED

    def to(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self.state} -> {state}")
        self.state = state

    @property
    def ended(self) -> bool:
        return not TRANSITIONS[self.state]


class Outcome(StrEnum):
    OK = "ok"
    FAILED = "failed"
    #: cut by the end of the stage or by Ctrl-C: neither good nor bad
    INCOMPLETE = "incomplete"


class Failure(StrEnum):
    """Kinds of failure; an HTTP status gives ``http_<status>`` besides (:func:`http_failure`)."""

    SERVER_ERROR_IN_STREAM = "server_error_in_stream"
    TRUNCATED = "truncated"
    STALLED = "stalled"
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    ABORTED = "aborted"
    PROTOCOL = "protocol"
    CLIENT = "client"


def http_failure(status: int) -> str:
    return f"http_{status}"


class TokenSource(StrEnum):
    """Where ``output_tokens`` comes from; a count of chunks is never one."""

    USAGE = "usage"
    TOKEN_IDS = "token_ids"
    TOKENIZER = "tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything known of one request. Field order is the order in the file."""

    request_id: str
    stage: int
    user: int
    scheduled_ms: float
    sent_ms: float | None
    outcome: str
    failure: str | None = None
    http_status: int | None = None
    message: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_source: str | None = None
    asked_output_tokens: int | None = None
    ttft_ms: float | None = None
    ttfa_ms: float | None = None
    e2e_ms: float | None = None
    tpot_ms: float | None = None
    stream_end_ms: float | None = None
    chunks: int = 0
    finish_reason: str | None = None
    warnings: tuple[str, ...] = ()
    #: only with --save-content
    content: str | None = None
    #: only with --save-gaps
    chunk_gaps_ms: tuple[float, ...] | None = None

    def to_json(self) -> bytes:
        """One line of ``requests.jsonl``, newline included."""
        row: dict[str, Any] = {name: getattr(self, name) for name in _ALWAYS}
        if self.content is not None:
            row["content"] = self.content
        if self.chunk_gaps_ms is not None:
            row["chunk_gaps_ms"] = self.chunk_gaps_ms
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_json(cls, line: bytes | str) -> Record:
        """Read a line back.

        Raises:
            ValueError: the line is not JSON, lacks a key or has an unknown one.
        """
        row = row_of(line)
        row["warnings"] = tuple(row["warnings"])
        if row.get("chunk_gaps_ms") is not None:
            row["chunk_gaps_ms"] = tuple(row["chunk_gaps_ms"])
        return cls(**row)


#: keys only written with --save-content and --save-gaps
OPTIONAL_KEYS = ("content", "chunk_gaps_ms")
_KNOWN = frozenset(f.name for f in fields(Record))
_ALWAYS = tuple(f.name for f in fields(Record) if f.name not in OPTIONAL_KEYS)
_ALWAYS_SET = frozenset(_ALWAYS)


def row_of(line: bytes | str) -> dict[str, Any]:
    """A line of ``requests.jsonl`` as the dictionary it is: what to read where a :class:`Record` each would cost too
    much.

    Raises:
        ValueError: the line is not JSON, lacks a key or has an unknown one.
    """
    row = orjson.loads(line)
    if not isinstance(row, dict):
        raise ValueError("a record is a JSON object")
    if row.keys() != _ALWAYS_SET:
        if unknown := row.keys() - _KNOWN:
            raise ValueError(f"unknown key {sorted(unknown)[0]!r}")
        if missing := _ALWAYS_SET - row.keys():
            raise ValueError(f"missing key {sorted(missing)[0]!r}")
    return row
