"""What a server said of itself over a run, from ``scrapes.jsonl``, thinned to what a drawing can show.

A bucket of time keeps what matters of its scrapes: the fullest pool, the most waiting, the last count of preemptions, and
the tokens that came in it. A peak is never thinned away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

#: points of a drawing
POINTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Columns over ``at_s``, seconds since the run's start; None where the server did not say.

    ``kv_cache_usage`` is the fullest engine's, 0 to 1. ``preemptions`` counts since the first scrape, over restarts of the
    server. ``output_tokens_per_s`` is the mean between this point and the one before it.
    """

    at_s: Sequence[float]
    kv_cache_usage: Sequence[float | None]
    running: Sequence[float | None]
    waiting: Sequence[float | None]
    preemptions: Sequence[float | None]
    output_tokens_per_s: Sequence[float | None]
    scrapes: int
    errors: int


@dataclass(frozen=True, slots=True)
class _Row:
    at_s: float
    kv: float | None
    running: float | None
    waiting: float | None
    preemptions: float | None
    tokens: float | None


def timeline(scrapes: Iterable[Mapping[str, Any]], points: int = POINTS) -> Timeline:
    """The timeline of rows as ``scrapes.jsonl`` holds them, in at most ``points`` buckets of equal length."""
    rows, errors = [], 0
    grown = _Grown()
    for scrape in scrapes:
        snapshot = scrape.get("snapshot")
        if snapshot is None:
            errors += 1
            continue
        rows.append(grown.row(float(scrape["at_ms"]) / 1e3, snapshot))
    buckets = _buckets(rows, points)
    ends = [bucket[-1] for bucket in buckets]
    return Timeline(
        at_s=[row.at_s for row in ends],
        kv_cache_usage=[_most(row.kv for row in bucket) for bucket in buckets],
        running=[_most(row.running for row in bucket) for bucket in buckets],
        waiting=[_most(row.waiting for row in bucket) for bucket in buckets],
        preemptions=[row.preemptions for row in ends],
        output_tokens_per_s=_rates(ends),
        scrapes=len(rows),
        errors=errors,
    )


class _Grown:
    """Counters since the first scrape; one that falls was reset, and counts on from there."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._sum: dict[str, float] = {}

    def row(self, at_s: float, snapshot: Mapping[str, Any]) -> _Row:
        usage = snapshot.get("kv_cache_usage_max")
        return _Row(
            at_s,
            snapshot.get("kv_cache_usage") if usage is None else usage,
            snapshot.get("running"),
            snapshot.get("waiting"),
            self._since("preemptions", snapshot.get("preemptions")),
            self._since("generation_tokens", snapshot.get("generation_tokens")),
        )

    def _since(self, name: str, value: float | None) -> float | None:
        if value is None:
            return None
        before = self._last.get(name, value)
        self._sum[name] = self._sum.get(name, 0.0) + (value - before if value >= before else value)
        self._last[name] = value
        return self._sum[name]


def _buckets(rows: Sequence[_Row], points: int) -> list[list[_Row]]:
    if len(rows) <= points:
        return [[row] for row in rows]
    start, width = rows[0].at_s, (rows[-1].at_s - rows[0].at_s) / points
    buckets: dict[int, list[_Row]] = {}
    for row in rows:
        buckets.setdefault(min(int((row.at_s - start) / width), points - 1), []).append(row)
    return list(buckets.values())


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _rates(ends: Sequence[_Row]) -> list[float | None]:
    first: list[float | None] = [None] if ends else []
    return first + [_rate(before, after) for before, after in pairwise(ends)]


def _rate(before: _Row, after: _Row) -> float | None:
    if before.tokens is None or after.tokens is None or after.at_s <= before.at_s:
        return None
    return (after.tokens - before.tokens) / (after.at_s - before.at_s)
