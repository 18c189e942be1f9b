"""Gaps between content deltas, folded into counts: memory stays flat, percentiles keep a known error, windows can be cut.

Bins are spaced by a constant factor, so a bin's representative is off by at most ``RELATIVE_ERROR`` of the value
(the mapping of DDSketch: Masson, Rim and Lee, PVLDB 12(12), 2019). Counts are kept per slice of time as well, because
the window of a stage is known only after the stage. When a stage outgrows ``MAX_SLICES`` slices, slices are paired and
doubled in width: one histogram holds at most 256 x 2,074 counts of 4 bytes = 2.1 MB, at any rate and for any time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from calibration.trace import Floats, Ints
from harness.measure.stats import PERCENTILES, Stats, empty

SCHEMA_VERSION = 1
#: of a percentile, for gaps between FLOOR_MS and CEILING_MS
RELATIVE_ERROR = 0.005
#: shorter gaps (two deltas of one read have 0) share a bin that reads as 0: off by less than a microsecond
FLOOR_MS = 1e-3
#: longer gaps share the last bin, which reads as the largest gap seen
CEILING_MS = 1e6
SLICE_S = 0.125
MAX_SLICES = 256
#: gaps held back until they are folded together, so that a call per request stays cheap
BUFFER = 8192

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_BINS = math.ceil(math.log(CEILING_MS / FLOOR_MS) / math.log(_GROWTH)) + 2
_SUMS = 3  # columns: count, sum, sum of squares


def bin_of(gaps_ms: Floats) -> Ints:
    """Bin numbers: 0 below FLOOR_MS, the last from CEILING_MS on."""
    above = np.log(np.maximum(gaps_ms, FLOOR_MS) / FLOOR_MS) / math.log(_GROWTH)
    return np.where(gaps_ms < FLOOR_MS, 0, np.minimum(above.astype(np.int64) + 1, _BINS - 1))


def value_of(bins: Ints, largest_ms: float) -> Floats:
    """The value in ms that stands for a bin: equally far, in proportion, from both of its edges."""
    middle = FLOOR_MS * _GROWTH ** (bins - 1.0) * 2 * _GROWTH / (1 + _GROWTH)
    return np.where(bins == 0, 0.0, np.where(bins == _BINS - 1, largest_ms, middle))


class GapHistogram:
    """Counts by (slice of time, bin of length); add, merge, cut a window, write to plain lists.

    Args:
        origin_s: where the first slice begins, seconds from the run's start (the stage's start). Histograms of one
            stage from several processes share it.
    """

    def __init__(self, origin_s: float) -> None:
        self.origin_s = origin_s
        self.slice_s = SLICE_S
        self._reserve(16)
        self._pending: list[tuple[Floats, Floats]] = []
        self._pending_gaps = 0

    def _reserve(self, slices: int) -> None:
        """Room for so many slices, all empty."""
        self._counts: npt.NDArray[np.uint32] = np.zeros((slices, _BINS), dtype=np.uint32)
        self._sums: Floats = np.zeros((slices, _SUMS))
        self._min: Floats = np.full(slices, np.inf)
        self._max: Floats = np.full(slices, -np.inf)

    def add(self, end_s: Floats, gaps_ms: Floats) -> None:
        """Count gaps.

        Args:
            end_s: when each gap ended (the later delta arrived), seconds from the run's start; shape (n,).
            gaps_ms: how long each was; shape (n,).

        Raises:
            ValueError: a gap is negative or not finite, or ends before the origin or never.
        """
        if len(end_s) != len(gaps_ms):
            raise ValueError(f"{len(end_s)} ends for {len(gaps_ms)} gaps")
        if not len(gaps_ms):
            return
        if not (np.min(gaps_ms) >= 0 and np.max(gaps_ms) < np.inf):
            raise ValueError(f"a gap is a length in ms >= 0, not {gaps_ms[~(gaps_ms >= 0) | np.isinf(gaps_ms)][0]}")
        if not (np.min(end_s) >= self.origin_s and np.max(end_s) < np.inf):
            odd = end_s[~(end_s >= self.origin_s) | np.isinf(end_s)][0]
            raise ValueError(f"a gap ends at {odd} s, expected a time from the origin at {self.origin_s} s on")
        self._pending.append((end_s, gaps_ms))
        self._pending_gaps += len(gaps_ms)
        if self._pending_gaps >= BUFFER:
            self._fold()

    def _fold(self) -> None:
        """Move what is held back into the counts."""
        if not self._pending:
            return
        end_s = np.concatenate([end for end, _ in self._pending])
        gaps_ms = np.concatenate([gaps for _, gaps in self._pending])
        self._pending, self._pending_gaps = [], 0
        self._make_room(float(np.max(end_s)))
        rows = ((end_s - self.origin_s) / self.slice_s).astype(np.int64)
        np.add.at(self._counts.reshape(-1), rows * _BINS + bin_of(gaps_ms), 1)
        for column, values in enumerate((np.ones_like(gaps_ms), gaps_ms, gaps_ms**2)):
            self._sums[:, column] += np.bincount(rows, weights=values, minlength=len(self._sums))
        np.minimum.at(self._min, rows, gaps_ms)
        np.maximum.at(self._max, rows, gaps_ms)

    def _make_room(self, end_s: float) -> None:
        """Widen slices until ``end_s`` falls into one of MAX_SLICES, then hold enough rows for it."""
        while (needed := int((end_s - self.origin_s) / self.slice_s) + 1) > MAX_SLICES:
            self._pair_slices()
        if needed > len(self._counts):
            self._resize(1 << (needed - 1).bit_length(), *self._columns())

    def _columns(self) -> tuple[npt.NDArray[np.uint32], Floats, Floats, Floats]:
        return self._counts, self._sums, self._min, self._max

    def _resize(
        self, slices: int, counts: npt.NDArray[np.uint32], sums: Floats, least: Floats, largest: Floats
    ) -> None:
        """Hold these rows and empty ones after them, ``slices`` in all."""
        self._reserve(slices)
        rows = slice(0, len(counts))
        self._counts[rows], self._sums[rows], self._min[rows], self._max[rows] = counts, sums, least, largest

    def _pair_slices(self) -> None:
        """Double the width of a slice; the number of rows stays, and is a power of two. In place, row by row: arrays of
        this size, given back and asked for anew, leave holes in the heap that a run of many hours keeps."""
        self.slice_s *= 2
        half = len(self._counts) // 2
        for row in range(half):
            first, second = 2 * row, 2 * row + 1
            self._counts[row] = self._counts[first] + self._counts[second]
            self._sums[row] = self._sums[first] + self._sums[second]
            self._min[row] = min(self._min[first], self._min[second])
            self._max[row] = max(self._max[first], self._max[second])
        self._counts[half:], self._sums[half:] = 0, 0.0
        self._min[half:], self._max[half:] = np.inf, -np.inf

    def merge(self, other: GapHistogram) -> None:
        """Add another process's counts of the same stage; slices get the width of the wider of the two.

        Raises:
            ValueError: the origins differ.
        """
        if other.origin_s != self.origin_s:
            raise ValueError(f"origins differ: {self.origin_s} s and {other.origin_s} s")
        self._fold()
        other._fold()
        theirs = copy.deepcopy(other)
        for narrower in (self, theirs):
            while narrower.slice_s < max(self.slice_s, theirs.slice_s):
                narrower._pair_slices()
        rows = max(len(self._counts), len(theirs._counts))
        self._resize(rows, *self._columns())
        theirs._resize(rows, *theirs._columns())
        self._counts += theirs._counts
        self._sums += theirs._sums
        self._min = np.minimum(self._min, theirs._min)
        self._max = np.maximum(self._max, theirs._max)

    def stats(self, start_s: float = -math.inf, end_s: float = math.inf) -> Stats:
        """Of the gaps in slices whose middle lies in the window, so at most half a slice is off at either edge.

        Count, mean, standard deviation and extremes are exact for those slices, percentiles within RELATIVE_ERROR.
        """
        self._fold()
        middles = self.origin_s + (np.arange(len(self._counts)) + 0.5) * self.slice_s
        rows = (middles >= start_s) & (middles <= end_s)
        n, total, squares = self._sums[rows].sum(axis=0)
        if not n:
            return empty()
        least, largest = float(self._min[rows].min()), float(self._max[rows].max())
        mean = min(max(float(total / n), least), largest)
        return {
            "n": round(n),
            "mean": mean,
            "std": math.sqrt(max(float(squares / n) - mean**2, 0.0)),
            **_percentiles(self._counts[rows].sum(axis=0, dtype=np.int64), least, largest),
            "min": least,
            "max": largest,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, empty slices and bins left out: slice number, count, sum, sum of squares, min, max, bins, counts."""
        self._fold()
        return {
            "schema_version": SCHEMA_VERSION,
            "relative_error": RELATIVE_ERROR,
            "origin_s": self.origin_s,
            "slice_s": self.slice_s,
            "slices": [self._row(int(row)) for row in np.flatnonzero(self._sums[:, 0])],
        }

    def _row(self, row: int) -> list[Any]:
        bins = np.flatnonzero(self._counts[row])
        sums = self._sums[row].tolist()
        least, largest = float(self._min[row]), float(self._max[row])
        return [row, *sums, least, largest, bins.tolist(), self._counts[row, bins].tolist()]

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ValueError: another version or another bin width wrote it.
        """
        for key, expected in (("schema_version", SCHEMA_VERSION), ("relative_error", RELATIVE_ERROR)):
            if content.get(key) != expected:
                raise ValueError(f"gap histogram: {key} is {content.get(key)!r}, expected {expected!r}")
        histogram = cls(content["origin_s"])
        histogram.slice_s = content["slice_s"]
        for row, n, total, squares, least, largest, bins, counts in content["slices"]:
            histogram._make_room(histogram.origin_s + (row + 0.5) * histogram.slice_s)
            histogram._counts[row, bins] = counts
            histogram._sums[row] = n, total, squares
            histogram._min[row], histogram._max[row] = least, largest
        return histogram


def merged(histograms: Iterable[GapHistogram]) -> GapHistogram | None:
    """All of one stage as one; None when there is none. The arguments stay as they are."""
    total: GapHistogram | None = None
    for histogram in histograms:
        total = total or GapHistogram(histogram.origin_s)
        total.merge(histogram)
    return total


def _percentiles(counts: Ints, least: float, largest: float) -> Stats:
    """Linear interpolation between closest ranks, each rank read from its bin."""
    cumulated = np.cumsum(counts)

    def at_rank(rank: int) -> float:
        found = np.searchsorted(cumulated, rank, side="right")
        return float(np.clip(value_of(np.array([found]), largest)[0], least, largest))

    percentiles: Stats = {}
    for percent in PERCENTILES:
        rank = percent / 100 * (int(cumulated[-1]) - 1)
        below, above = at_rank(math.floor(rank)), at_rank(math.ceil(rank))
        percentiles[f"p{percent}"] = below + (above - below) * (rank - math.floor(rank))
    return percentiles
