"""What the controller tells a worker and what a worker answers: lines of JSON over the worker's stdin and stdout.

A line starts with one byte that says what it is. No line is sent for a token: records as they end, a few counters four
times a second, histograms at the end of a stage.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Literal

import orjson


class Tag(bytes, Enum):
    # controller -> worker
    SETUP = b"C"
    STAGE = b"S"
    DRAIN = b"D"
    ABORT = b"A"
    QUIT = b"Q"
    # worker -> controller
    HELLO = b"H"
    RECORD = b"R"
    PROGRESS = b"P"
    GAPS = b"G"
    STAGE_END = b"E"
    FAULT = b"X"


def line(tag: Tag, payload: Any = None) -> bytes:
    """One message, newline included. ``payload`` is a dataclass or JSON value."""
    return tag.value + orjson.dumps(payload, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)


def split(message: bytes) -> tuple[Tag, bytes]:
    """A message's tag and its JSON bytes."""
    return Tag(message[:1]), message[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What holds for the whole run."""

    base_url: str
    model: str
    endpoint: Literal["chat", "completions"]
    headers: dict[str, str] = field(default_factory=dict)
    verify_tls: bool = True
    seed: int = 0
    run_start_ns: int = 0
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 120.0
    request_timeout_s: float = 600.0
    save_content: bool = False
    save_gaps: bool = False
    honour_retry_after: bool = False
    text_offset: float = 0.0
    text_tokens_per_word: float = 1.0
    #: what is asked: :meth:`harness.workload.prepare.Prepared.for_workers`
    workload: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """One worker's share of a stage. Times are nanoseconds on the run's clock."""

    index: int
    start_ns: int
    #: no request starts after this; None: only the count ends the stage
    end_ns: int | None
    #: every request still in flight then is cut and counted incomplete
    kill_ns: int
    #: a number or a distribution's JSON form; None where the workload has lengths of its own
    prompt_tokens: Any = None
    output_tokens: Any = None
    #: numbers of requests, the same whoever sends them. Closed loop: the k-th of user u is u + k * step. Open loop: the
    #: k-th of this worker's arrivals is first + k * step
    first_number: int = 0
    number_step: int = 1
    #: closed loop: user numbers and when each starts
    users: list[int] = field(default_factory=list)
    user_start_ns: list[int] = field(default_factory=list)
    #: requests this worker may send; None: until end_ns
    requests: int | None = None
    #: seconds a user pauses between its requests, or a distribution's JSON form
    think: Any = 0.0
    #: open loop: when each request is due, and how many may be in flight
    due_ns: list[int] = field(default_factory=list)
    max_in_flight: int | None = None
    open_loop: bool = False
    #: the arrivals are those of the workload's trace
    replay: bool = False
    #: closed loop: users of the stage before go on as they are, each when its stream of that stage has ended
    takes_over: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A worker's counters since the start of its latest stage, four times a second; ``in_flight`` counts the streams of
    all its stages."""

    stage: int
    in_flight: int
    sent: int
    ended: int
    output_chunks: int
    loop_lag_ms_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """The gaps of a stage as one worker counted them."""

    stage: int
    #: :meth:`harness.measure.gaps.GapHistogram.to_dict`
    gaps: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnd:
    """A worker's own health over a stage."""

    stage: int
    cpu_s: float
    wall_s: float
    loop_lag_ms_p99: float | None
    loop_lag_ms_max: float | None = None
    #: due requests that the stage's end came before
    not_sent: int = 0
