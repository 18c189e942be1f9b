"""When output tokens arrived: the count of them up to any moment, from what is known of each request.

Where the deltas' own times are not kept, a request's tokens are spread evenly from its first content delta to its
last; the first delta's tokens arrive at once, with it. For evenly paced streams that is at most one token off a stream
and edge of the window; a stream that pauses or slows down is off by what it deviates from its own mean pace at the edge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from calibration.trace import Bools, Floats, Ints, RequestTrace
from harness.measure.from_records import Deltas

#: first and last content closer than this came in one read; a rate over less would drown in rounding
ONE_READ_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Output tokens by request; NaN where unknown and not to be guessed; shape (n,)."""

    #: of the first content delta, and of all later ones together
    first: Floats
    rest: Floats
    #: the count is chunks times the tokens per chunk of the stage's good requests: only of streams that were cut
    estimated: Bools


def first_delta_tokens(trace: RequestTrace) -> Floats:
    """Tokens of each request's first content delta, read back from tpot = (e2e - ttft) / (output_tokens - first).

    A request whose tpot is null has all its tokens in its first delta (DESIGN section 4); so, in effect, has one whose
    deltas all came in one read.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.rint((trace.e2e_s - trace.ttft_s) / trace.tpot_s)
    paced = np.isfinite(rest)
    return np.where(paced, trace.output_tokens - np.where(paced, rest, 0.0), trace.output_tokens)


def count_tokens(trace: RequestTrace, deltas: Deltas | None = None) -> TokenCounts:
    """Tokens of the requests that count: good ones, and streams cut by the end of the stage. Failed ones are NaN.

    A stream that was cut has no usage yet. Its tokens are its chunks times the tokens per chunk that the good requests
    of the stage had, and it is marked as estimated; without ``deltas`` or without a good request it stays NaN.
    """
    first = np.where(trace.failed, np.nan, first_delta_tokens(trace))
    rest = np.where(trace.failed, np.nan, trace.output_tokens - first)
    if deltas is None:
        return TokenCounts(first=first, rest=rest, estimated=np.zeros(len(trace), dtype=np.bool_))
    estimated = trace.incomplete & np.isnan(trace.output_tokens) & (deltas.chunks > 0)
    known = trace.ok & ~np.isnan(trace.output_tokens) & (deltas.chunks > 0)
    chunks = deltas.chunks[known].sum()
    per_chunk = trace.output_tokens[known].sum() / chunks if chunks else np.nan
    return TokenCounts(
        first=np.where(estimated, per_chunk, first),
        rest=np.where(estimated, per_chunk * (deltas.chunks - 1), rest),
        estimated=estimated & ~np.isnan(per_chunk),
    )


@dataclass(frozen=True, slots=True)
class TokenFlow:
    """Tokens arrived up to a moment: steps of some tokens at once, and slopes of tokens per second between two moments.

    Each pair is (moments ascending, running sums up to and with each moment).
    """

    steps: tuple[Floats, Floats]
    #: sums of the rates that begin (end) up to a moment, and of rate * moment
    begins: tuple[Floats, Floats, Floats]
    ends: tuple[Floats, Floats, Floats]

    def until(self, moments_s: Floats) -> Floats:
        """Tokens that arrived at or before each moment, seconds from the run's start."""
        return self._count(moments_s, "right")

    def between(self, start_s: float, end_s: float) -> float:
        """Tokens that arrived from ``start_s`` to ``end_s``, both included."""
        return float(self._count(np.array([end_s]), "right")[0] - self._count(np.array([start_s]), "left")[0])

    def _count(self, moments_s: Floats, side: Literal["left", "right"]) -> Floats:
        """``side`` tells whether a step at the very moment is still to come or is there: left or right."""
        times, tokens = self.steps
        arrived = _running(tokens, np.searchsorted(times, moments_s, side=side))
        for sign, (edges, rates, products) in ((1.0, self.begins), (-1.0, self.ends)):
            passed = np.searchsorted(edges, moments_s, side="right")
            arrived = arrived + sign * (moments_s * _running(rates, passed) - _running(products, passed))
        return arrived


def _running(sums: Floats, passed: Ints) -> Floats:
    """The sum after so many entries; 0 before the first."""
    return np.concatenate([[0.0], sums])[passed]


def spread_evenly(trace: RequestTrace, counts: TokenCounts, rows: Bools | None = None) -> TokenFlow:
    """The flow of requests (of ``rows`` only, if given) whose tokens are known, spread as the module says."""
    use = ~np.isnan(counts.first) & ~np.isnan(trace.ttft_s) & ~np.isnan(trace.sent_s)
    use = use if rows is None else use & rows
    first_at = (trace.sent_s + trace.ttft_s)[use]
    last_at = np.fmax((trace.sent_s + trace.e2e_s)[use], first_at)
    first, rest = counts.first[use], counts.rest[use]
    paced = last_at - first_at > ONE_READ_S
    rate = rest[paced] / (last_at - first_at)[paced]
    at_once = first + np.where(paced, 0.0, rest)
    return TokenFlow(_steps(first_at, at_once), _slopes(first_at[paced], rate), _slopes(last_at[paced], rate))


def by_delta(trace: RequestTrace, counts: TokenCounts, deltas: Deltas) -> TokenFlow:
    """The flow with each delta at its own time; a request's tokens after the first delta are shared by its later deltas.

    Requests without saved gaps are spread evenly.
    """
    if deltas.times_s is None or deltas.offsets is None:
        return spread_evenly(trace, counts)
    lengths = np.diff(deltas.offsets)
    owner = np.repeat(np.arange(len(trace)), lengths)
    is_first = np.zeros(len(deltas.times_s), dtype=np.bool_)
    is_first[deltas.offsets[:-1][lengths > 0]] = True
    share = counts.rest / np.maximum(lengths - 1, 1)
    # a lone delta brings everything
    opening = counts.first + np.where(lengths == 1, counts.rest, 0.0)
    tokens = np.where(is_first, opening[owner], share[owner])
    moments = trace.sent_s[owner] + deltas.times_s
    use = ~np.isnan(tokens) & ~np.isnan(moments)
    evenly = spread_evenly(trace, counts, rows=lengths == 0)
    times, sums = evenly.steps
    steps = _steps(np.concatenate([moments[use], times]), np.concatenate([tokens[use], np.diff(sums, prepend=0.0)]))
    return TokenFlow(steps, evenly.begins, evenly.ends)


def _steps(moments: Floats, tokens: Floats) -> tuple[Floats, Floats]:
    order = np.argsort(moments, kind="stable")
    return moments[order], np.cumsum(tokens[order])


def _slopes(moments: Floats, rates: Floats) -> tuple[Floats, Floats, Floats]:
    order = np.argsort(moments, kind="stable")
    return moments[order], np.cumsum(rates[order]), np.cumsum((rates * moments)[order])
