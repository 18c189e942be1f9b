"""Records to columns: milliseconds become seconds, null becomes NaN."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from calibration.trace import Floats, Ints, RequestTrace, Source
from harness.record import Outcome, Record

_MS = 1000.0
#: column of the trace -> attribute of the record, both without their unit
_TIMES = ("scheduled", "sent", "ttft", "ttfa", "e2e", "stream_end", "tpot")
_TOKENS = ("prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deltas:
    """When the content deltas of requests came, as far as it was kept.

    ``chunks`` has shape (n,): content deltas by request. ``times_s`` holds the deltas of all requests one after
    another, seconds from the request's own ``sent``; request i owns ``times_s[offsets[i]:offsets[i + 1]]``, none where
    its gaps were not saved. Both are None when no request has its gaps.
    """

    chunks: Ints
    times_s: Floats | None = None
    offsets: Ints | None = None


def trace_of(records: Iterable[Record], source: Source) -> RequestTrace:
    """The columns of these records, in their order."""
    return columns_of(records, source)[0]


def columns_of(records: Iterable[Record], source: Source) -> tuple[RequestTrace, Deltas]:
    """The columns of these records, and what is known of their deltas beside. The records are read once, not kept."""
    columns = _Columns()
    for record in records:
        columns.append(record)
    return columns.trace(source), columns.deltas()


class _Columns:
    """Columns that grow by a record at a time, 8 bytes a number."""

    def __init__(self) -> None:
        self.numbers = {f"{name}_ms": array("d") for name in _TIMES} | {name: array("d") for name in _TOKENS}
        self.user, self.chunks, self.offsets = array("q"), array("q"), array("q", [0])
        self.delta_ms = array("d")
        self.outcome: list[str] = []
        self.failure: list[str] = []
        self.has_gaps = False

    def append(self, record: Record) -> None:
        for name, column in self.numbers.items():
            value = getattr(record, name)
            column.append(math.nan if value is None else value)
        self.user.append(record.user)
        self.chunks.append(record.chunks)
        self.outcome.append(record.outcome)
        self.failure.append(record.failure or "")
        self._append_deltas(record)

    def _append_deltas(self, record: Record) -> None:
        """First content delta and the gaps after it; nothing where either is unknown."""
        if record.chunk_gaps_ms is not None and record.ttft_ms is not None:
            self.has_gaps = True
            self.delta_ms.extend(np.cumsum([record.ttft_ms, *record.chunk_gaps_ms]).tolist())
        self.offsets.append(len(self.delta_ms))

    def trace(self, source: Source) -> RequestTrace:
        times = {f"{name}_s": np.array(self.numbers[f"{name}_ms"]) / _MS for name in _TIMES}
        tokens = {name: np.array(self.numbers[name]) for name in _TOKENS}
        outcome = np.array(self.outcome, dtype=np.object_)
        return RequestTrace(
            source=source,
            user=np.array(self.user),
            ok=outcome == Outcome.OK,
            incomplete=outcome == Outcome.INCOMPLETE,
            failure=np.array(self.failure, dtype=np.object_),
            **times,
            **tokens,
        )

    def deltas(self) -> Deltas:
        if not self.has_gaps:
            return Deltas(chunks=np.array(self.chunks))
        return Deltas(
            chunks=np.array(self.chunks), times_s=np.array(self.delta_ms) / _MS, offsets=np.array(self.offsets)
        )
