"""Records to columns: milliseconds become seconds, null becomes NaN.

A run may hold millions of records, so they are read once and kept as numbers only: about 150 bytes a record, and 3 to 4
microseconds of a core, the parsing of its line included (``tests/bench/million.py`` measures it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from calibration.trace import Floats, Ints, RequestTrace, Source
from harness.record import Outcome, Record

_MS = 1000.0
#: column of the trace -> attribute of the record, both without their unit
_TIMES = ("scheduled", "sent", "ttft", "ttfa", "e2e", "stream_end", "tpot")
_TOKENS = ("prompt_tokens", "output_tokens")
_NUMBERS = (*(f"{name}_ms" for name in _TIMES), *_TOKENS, "asked_output_tokens", "user", "chunks")
#: rows turned into arrays at a time
_BLOCK = 4096


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


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one stage as columns."""

    trace: RequestTrace
    deltas: Deltas
    #: what each request asked for, shape (n,); NaN where that is not known
    asked_output_tokens: Floats


def trace_of(records: Iterable[Record], source: Source) -> RequestTrace:
    """The columns of these records, in their order."""
    return columns_of(records, source)[0]


def columns_of(records: Iterable[Record], source: Source) -> tuple[RequestTrace, Deltas]:
    """The columns of these records, and what is known of their deltas beside. The records are read once, not kept."""
    found = requests_of(records, source)
    return found.trace, found.deltas


def requests_of(records: Iterable[Record], source: Source) -> Requests:
    """The columns of these records and all that is kept beside. The records are read once, not kept."""
    columns = Columns(attrgetter(*_NUMBERS), attrgetter("outcome", "failure", "ttft_ms", "chunk_gaps_ms"))
    for record in records:
        columns.append(record)
    return columns.requests(source)


def _words_of_row(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["outcome"], row["failure"], row["ttft_ms"], row.get("chunk_gaps_ms")


def by_stage(rows: Iterable[Mapping[str, Any]], source: Source) -> dict[int, Requests]:
    """The columns of each stage's requests from rows of ``requests.jsonl`` (:meth:`harness.store.RunData.rows`), by
    stage number, ascending. The rows are read once, not kept.

    Raises:
        TypeError, ValueError: a value is not of its key's kind.
    """
    stages: dict[int, Columns] = {}
    numbers = itemgetter(*_NUMBERS)
    for row in rows:
        index = row["stage"]
        columns = stages.get(index)
        if columns is None:
            columns = stages[index] = Columns(numbers, _words_of_row)
        columns.append(row)
    return {index: stages[index].requests(source) for index in sorted(stages)}


class Columns:
    """Columns that grow by a request at a time.

    Args:
        numbers_of: request -> the values of :data:`_NUMBERS`, None where not measured.
        words_of: request -> outcome, failure, ttft_ms, chunk_gaps_ms.
    """

    def __init__(
        self, numbers_of: Callable[[Any], tuple[Any, ...]], words_of: Callable[[Any], tuple[Any, ...]]
    ) -> None:
        self._numbers_of, self._words_of = numbers_of, words_of
        self._rows: list[tuple[Any, ...]] = []
        self._blocks: list[Floats] = []
        self._outcome: list[str] = []
        self._failure: list[str] = []
        #: one string for each kind of outcome and failure, not one for each request
        self._kinds: dict[str, str] = {}
        self._delta_rows: list[Floats] = []
        self._delta_blocks: list[Floats] = []
        self._lengths: list[int] = []
        self._has_gaps = False

    def append(self, request: Any) -> None:
        self._rows.append(self._numbers_of(request))
        outcome, failure, ttft_ms, gaps_ms = self._words_of(request)
        self._outcome.append(self._kinds.setdefault(outcome, outcome))
        self._failure.append(self._kinds.setdefault(failure, failure) if failure else "")
        if len(self._rows) >= _BLOCK:
            self._pack()
        if gaps_ms is None or ttft_ms is None:
            self._lengths.append(0)
        else:
            # first content delta and the gaps after it; nothing where either is unknown
            self._has_gaps = True
            self._delta_rows.append(np.cumsum([ttft_ms, *gaps_ms]))
            self._lengths.append(len(gaps_ms) + 1)

    def _pack(self) -> None:
        """None becomes NaN here (numpy's own rule for floats made of objects)."""
        self._blocks.append(np.array(self._rows, dtype=np.float64).reshape(-1, len(_NUMBERS)))
        self._rows = []
        if self._delta_rows:
            self._delta_blocks.append(np.concatenate(self._delta_rows))
            self._delta_rows = []

    def requests(self, source: Source) -> Requests:
        """Everything appended so far."""
        self._pack()
        table = np.concatenate(self._blocks)
        self._blocks = [table]
        column = {name: table[:, position] for position, name in enumerate(_NUMBERS)}
        outcome = np.array(self._outcome, dtype=np.object_)
        trace = RequestTrace(
            source=source,
            user=column["user"].astype(np.int64),
            ok=outcome == Outcome.OK,
            incomplete=outcome == Outcome.INCOMPLETE,
            failure=np.array(self._failure, dtype=np.object_),
            **{f"{name}_s": column[f"{name}_ms"] / _MS for name in _TIMES},
            **{name: column[name].copy() for name in _TOKENS},
        )
        return Requests(trace, self._deltas(column["chunks"].astype(np.int64)), column["asked_output_tokens"].copy())

    def _deltas(self, chunks: Ints) -> Deltas:
        if not self._has_gaps:
            return Deltas(chunks=chunks)
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        return Deltas(chunks=chunks, times_s=np.concatenate(self._delta_blocks) / _MS, offsets=offsets)
