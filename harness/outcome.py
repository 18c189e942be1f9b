"""How a request can end: the ends, the warnings, the failures an end means; and the record of one that never streamed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from harness.clock import NS_PER_MS
from harness.record import Failure, Lifecycle, Outcome, Record, State
from harness.wire.openai import one_line


class StreamEnd(StrEnum):
    """Why no more bytes will come."""

    #: the HTTP body ended as its framing said, or the server closed a body without framing
    EOF = "eof"
    #: the connection was lost in the middle of the answer
    RESET = "reset"
    STALLED = "stalled"
    TIMEOUT = "timeout"
    #: we ended it: the stage was over, or Ctrl-C
    CANCELLED = "cancelled"
    #: what came was not HTTP, or its framing broke
    PROTOCOL = "protocol"
    #: there never was a connection
    CONNECT = "connect"
    #: a fault of ours
    CLIENT = "client"


class Warn(StrEnum):
    """What may be said of a record besides its outcome; ``<end>_after_finish`` is made of a :class:`StreamEnd`."""

    MISSING_DONE = "missing_done"
    #: the server says it finished and sent no content delta
    NO_CONTENT = "no_content"
    NO_USAGE = "no_usage"
    #: usage and the token ids that came disagree
    TOKEN_COUNTS_DIFFER = "token_counts_differ"
    #: the stream stopped inside an event, which is discarded as the event-stream standard says
    UNFINISHED_EVENT = "unfinished_event"
    UNKNOWN_EVENT = "unknown_event"
    DATA_AFTER_DONE = "data_after_done"
    INVALID_UTF8 = "invalid_utf8"


#: an end that leaves an answer incomplete -> failure and what to say when nobody said more
FAILURES: Final[dict[StreamEnd, tuple[Failure, str]]] = {
    StreamEnd.EOF: (Failure.TRUNCATED, "the stream ended without finish_reason and usage"),
    StreamEnd.RESET: (Failure.CONNECTION, "the connection was lost in the middle of the answer"),
    StreamEnd.STALLED: (Failure.STALLED, "no content came within the stall timeout"),
    StreamEnd.TIMEOUT: (Failure.TIMEOUT, "the answer took longer than the request timeout"),
    StreamEnd.PROTOCOL: (Failure.PROTOCOL, "the answer is not HTTP or its framing is broken"),
    StreamEnd.CONNECT: (Failure.CONNECTION, "no connection"),
    StreamEnd.CLIENT: (Failure.CLIENT, "the client failed"),
}
#: finish reasons that are no success. vLLM 0.32.0: vllm/v1/engine/__init__.py FINISH_REASON_STRINGS
BAD_FINISH: Final[dict[str, tuple[Failure, str]]] = {
    "abort": (Failure.ABORTED, "the server aborted the request (finish_reason abort)"),
    "error": (Failure.SERVER_ERROR_IN_STREAM, "the server failed while generating (finish_reason error)"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a record says of its request that the answer cannot tell."""

    request_id: str
    stage: int
    user: int
    scheduled_ns: int
    asked_output_tokens: int | None
    #: as asked; exact only where the prompt was sent as token ids
    prompt_tokens: int | None = None


def ms_after(start_ns: int | None, stamp_ns: int | None) -> float | None:
    """Milliseconds from one stamp to another; None where either is missing."""
    return None if start_ns is None or stamp_ns is None else (stamp_ns - start_ns) / NS_PER_MS


def failed_record(
    plan: Plan,
    *,
    run_start_ns: int,
    sent_ns: int | None,
    failure: str,
    http_status: int | None,
    message: str | None,
    end_ns: int,
) -> Record:
    """The record of a request that got no stream: an HTTP error, no connection, a fault of ours before the send.

    Args:
        failure: a :class:`~harness.record.Failure` or :func:`~harness.record.http_failure`.
        sent_ns: None when nothing was sent.
    """
    life = Lifecycle()
    if sent_ns is not None:
        life.to(State.SENT)
    life.to(State.FAILED)
    return Record(
        request_id=plan.request_id,
        stage=plan.stage,
        user=plan.user,
        scheduled_ms=(plan.scheduled_ns - run_start_ns) / NS_PER_MS,
        sent_ms=ms_after(run_start_ns, sent_ns),
        outcome=Outcome.FAILED.value,
        failure=str(failure),
        http_status=http_status,
        message=one_line(message) if message else None,
        asked_output_tokens=plan.asked_output_tokens,
        stream_end_ms=ms_after(sent_ns, end_ns),
    )
