"""The steady part of a stage: in-flight as a step function, and the span of it that is summarised.

The rule (DESIGN section 4), the same for users and for rates:

1. The *level* is how many streams the load means: with users N, ``N * R / (R + Z)`` for a residence R and a think time
   Z (so N without thinking); with a rate, the mean in-flight over the second half of the arrivals.
2. The *held* span begins when in-flight first reaches 95 % of the level. With users it ends when in-flight last falls
   below that (a dip between a user's stream and its next send ends nothing); with a rate, at the last send. It never
   goes past the stage's planned end: what drains after that is no load.
3. Warm-up is cut by :func:`harness.measure.steady.warm_up` on time to first token, request time and token rate (and on
   in-flight, with a rate), each averaged over slices of half a median residence, at most 200; the latest cut counts.
   A held span of under five residences is too short to tell warm-up from noise and stays whole.
4. What is left must last two median residences and see as many good requests end as there are users (with a rate: ten),
   and must not trend (:func:`harness.measure.steady.trend`) over slices of a residence or more, at most 20; under eight
   residences no trend can be told. With a rate, the level must be reached in the first half of the arrivals: later
   means that in-flight still rises. Else ``steady`` is false, with the reasons, and the span stays as it is.
5. A stage that never reaches the level has its whole activity as window and is not steady. A stage without activity
   (nothing was sent, or all ended at once) has no window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from calibration.trace import Floats, Ints, RequestTrace
from harness.measure.steady import trend, warm_up
from harness.measure.tokens import ONE_READ_S, TokenFlow

HOLD = 0.95
RESIDENCES = 2.0
#: good requests that have to end inside, when the load is a rate: fewer tell a rate to no better than a third
OPEN_REQUESTS = 10
WARM_UP_SLICES = 200
TREND_SLICES = 20
#: room for rounding where a span is compared with a multiple of itself
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """What a stage asked for: ``users``, or ``request_rate`` in requests per second; exactly one of them.

    ``think_s`` is the mean think time of a user. ``planned_end_s``: when no more was to be sent, from the run's start;
    ``not_before_s``: what came earlier is warm-up by the profile's own word, and is left out before anything is looked at.
    """

    users: int | None = None
    request_rate: float | None = None
    think_s: float = 0.0
    planned_end_s: float | None = None
    not_before_s: float | None = None

    def __post_init__(self) -> None:
        if (self.users is None) == (self.request_rate is None):
            raise ValueError(f"a stage has users or a request_rate, not {self.users} and {self.request_rate}")
        for name in ("users", "request_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, expected more than 0")
        if not self.think_s >= 0:
            raise ValueError(f"think_s is {self.think_s}, expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Seconds from the run's start. ``level`` is the in-flight that the load means; NaN where it cannot be told."""

    start_s: float
    end_s: float
    steady: bool
    reasons: tuple[str, ...] = ()
    level: float = math.nan

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class InFlight:
    """``counts[i]`` streams are in flight from ``times_s[i]`` to ``times_s[i + 1]``; none before the first, and 0 last.

    A stream that ends at the very moment another begins is no dip.
    """

    times_s: Floats
    counts: Ints

    @classmethod
    def of(cls, start_s: Floats, end_s: Floats) -> InFlight:
        """From when each stream was sent and when it ended, shape (n,) each; n >= 1, no NaN."""
        times, where = np.unique(np.concatenate([start_s, end_s]), return_inverse=True)
        steps = np.repeat([1.0, -1.0], [len(start_s), len(end_s)])
        counts = np.rint(np.cumsum(np.bincount(where, weights=steps))).astype(np.int64)
        return cls(times, counts)

    def mean(self, start_s: float, end_s: float) -> float:
        """Time-weighted mean between two moments, ``end_s`` later than ``start_s``."""
        return float(self.means(np.array([start_s, end_s]))[0])

    def means(self, edges_s: Floats) -> Floats:
        """Time-weighted means between consecutive edges, ascending; shape (len(edges) - 1,)."""
        area = np.concatenate([[0.0], np.cumsum(self.counts[:-1] * np.diff(self.times_s))])
        areas: Floats = np.interp(edges_s, self.times_s, area)
        return np.diff(areas) / np.diff(edges_s)

    def held(self, level: float) -> tuple[float, float] | None:
        """From the first moment at or above ``level`` to the end of the last time there; None if never.

        Moments shorter than a microsecond do not count: two stamps of one moment may cross by rounding.
        """
        lasts = np.diff(self.times_s, append=np.inf)
        at = np.flatnonzero((self.counts >= level - _ROUNDING) & (lasts > ONE_READ_S))
        return (float(self.times_s[at[0]]), float(self.times_s[at[-1] + 1])) if len(at) else None


def spans(trace: RequestTrace) -> tuple[Floats, Floats]:
    """When each request that was sent began and ended, seconds from the run's start.

    The end is the stream's; without one, the last that is known of the request: a cut stream ends with the last event
    of the trace, another with its last content, or as it began.
    """
    sent = trace.where(~np.isnan(trace.sent_s))
    known = np.fmax(np.fmax(sent.stream_end_s, sent.e2e_s), np.fmax(sent.ttft_s, 0.0))
    ends = sent.sent_s + known
    cut = sent.incomplete & np.isnan(sent.stream_end_s)
    return sent.sent_s, np.where(cut, ends.max(initial=-np.inf), ends)


def residence_s(trace: RequestTrace) -> float:
    """Median seconds from sent to the end of the stream, of good requests; NaN without any."""
    lasted = np.fmax(trace.stream_end_s, trace.e2e_s)[trace.ok]
    lasted = lasted[~np.isnan(lasted)]
    return float(np.median(lasted)) if len(lasted) else math.nan


def find_window(trace: RequestTrace, load: StageLoad, flow: TokenFlow) -> Window | None:
    """The window of a stage by the rule of this module; None when nothing was in flight for any time.

    Args:
        trace: the requests of the stage.
        load: what the stage asked for.
        flow: its tokens over time (:mod:`harness.measure.tokens`).
    """
    starts, ends = spans(trace)
    whole = _clipped(float(starts.min(initial=np.inf)), float(ends.max(initial=-np.inf)), load)
    if whole is None:
        return None
    in_flight = InFlight.of(starts, ends)
    level = _level(load, residence_s(trace), in_flight, whole, float(starts.max()))
    held = _held(in_flight, level, load, float(starts.max()))
    if held is None:
        peak = int(in_flight.counts.max())
        reason = f"not steady: in-flight never held {HOLD:.0%} of the level of {level:g}: at most {peak}"
        return Window(start_s=whole[0], end_s=whole[1], steady=False, reasons=(reason,), level=level)
    start_s, end_s = _without_warm_up(trace, load, flow, in_flight, held)
    reasons = tuple(_faults(trace, load, flow, in_flight, (start_s, end_s)))
    if load.users is None and held[0] > (whole[0] + held[1]) / 2:
        reasons += ("not steady: in-flight rose until the second half of the arrivals",)
    return Window(start_s=start_s, end_s=end_s, steady=not reasons, reasons=reasons, level=level)


def _clipped(start_s: float, end_s: float, load: StageLoad) -> tuple[float, float] | None:
    """The span from the end of the asked warm-up to the planned end; None if nothing is left of it."""
    start_s = start_s if load.not_before_s is None else max(start_s, load.not_before_s)
    end_s = end_s if load.planned_end_s is None else min(end_s, load.planned_end_s)
    return (start_s, end_s) if end_s > start_s else None


def _level(
    load: StageLoad, residence: float, in_flight: InFlight, whole: tuple[float, float], last_sent_s: float
) -> float:
    if load.users is not None:
        return expected_in_flight(load.users, residence, load.think_s)
    start_s, end_s = whole
    end_s = min(end_s, last_sent_s) if last_sent_s > start_s else end_s
    return in_flight.mean((start_s + end_s) / 2, end_s)


def expected_in_flight(users: int, residence: float, think_s: float) -> float:
    """Streams in flight of users who think: ``N * R / (R + Z)``, all of them when nothing is known of R."""
    return float(users) if not think_s or math.isnan(residence) else users * residence / (residence + think_s)


def _held(in_flight: InFlight, level: float, load: StageLoad, last_sent_s: float) -> tuple[float, float] | None:
    held = in_flight.held(HOLD * level)
    if held is None:
        return None
    return _clipped(held[0], last_sent_s if load.users is None else held[1], load)


def _without_warm_up(
    trace: RequestTrace, load: StageLoad, flow: TokenFlow, in_flight: InFlight, held: tuple[float, float]
) -> tuple[float, float]:
    edges = _edges(held, residence_s(trace) / 2, WARM_UP_SLICES)
    cuts = [
        edges[slices[dropped]]
        for _, values, slices in _series(trace, load, flow, in_flight, edges)
        if (dropped := warm_up(values))
    ]
    return float(max(cuts, default=held[0])), held[1]


def _faults(
    trace: RequestTrace, load: StageLoad, flow: TokenFlow, in_flight: InFlight, span: tuple[float, float]
) -> Iterator[str]:
    """Why a span is not steady or cannot be told to be."""
    residence, length = residence_s(trace), span[1] - span[0]
    if math.isnan(residence):
        yield "not steady: no request ended well"
        return
    if length < RESIDENCES * residence * (1 - _ROUNDING):
        yield f"not steady: too short: {length:.3g} s for a median residence of {residence:.3g} s, {RESIDENCES:g} are needed"
    last = (trace.sent_s + trace.e2e_s)[trace.ok]
    ended, needed = int(((last >= span[0]) & (last <= span[1])).sum()), load.users or OPEN_REQUESTS
    if ended < needed:
        yield f"not steady: too short: {ended} good requests ended in it, {needed} are needed"
    for name, values, _ in _series(trace, load, flow, in_flight, _edges(span, residence, TREND_SLICES)):
        found = trend(values)
        if found and found.matters:
            yield f"not steady: {name} moves by {found.relative_change:+.0%} over the window"


def _edges(span: tuple[float, float], width_s: float, most: int) -> Floats:
    """Edges of equal slices of at least this width, at most so many; one slice where no width is known."""
    length = span[1] - span[0]
    slices = length / width_s if width_s > 0 else (1.0 if math.isnan(width_s) else math.inf)
    return np.linspace(span[0], span[1], max(1, int(min(slices, most))) + 1)


def _series(
    trace: RequestTrace, load: StageLoad, flow: TokenFlow, in_flight: InFlight, edges: Floats
) -> Iterator[tuple[str, Floats, Ints]]:
    """What has to be steady, by slice: (name, values of the slices that have one, the numbers of those slices)."""
    good = trace.ok
    yield "time to first token", *_means_by_slice((trace.sent_s + trace.ttft_s)[good], trace.ttft_s[good], edges)
    yield "request time", *_means_by_slice((trace.sent_s + trace.e2e_s)[good], trace.e2e_s[good], edges)
    every = np.arange(len(edges) - 1)
    yield "token rate", np.diff(flow.until(edges)) / np.diff(edges), every
    if load.users is None:
        yield "in-flight", in_flight.means(edges), every


def _means_by_slice(moments_s: Floats, values: Floats, edges: Floats) -> tuple[Floats, Ints]:
    known = (moments_s >= edges[0]) & (moments_s <= edges[-1]) & ~np.isnan(values)
    slices = np.minimum(np.searchsorted(edges, moments_s[known], side="right") - 1, len(edges) - 2)
    n = np.bincount(slices, minlength=len(edges) - 1)
    totals = np.bincount(slices, weights=values[known], minlength=len(edges) - 1)
    filled = np.flatnonzero(n)
    return totals[filled] / n[filled], filled
