"""How sure a stage's means are, and how many of its requests met a limit: the keys ``intervals`` and ``slo`` of a stage.

``intervals``: 90 % intervals of the means of the same requests that the stage's distributions hold, each ``{low, high,
n_effective, confidence}`` or null: ``ttft_ms``, ``tpot_ms``, ``e2e_ms``, ``output_tokens_per_s`` (of its slices of half a
residence).

``slo``: one entry a tier, in the order given: ``{limits_ms, met, of, attainment, low, high, n_effective, goodput_per_s}``.
A request counts where it ended in the window, well or not; a failed one has met nothing. ``low`` and ``high`` bound the
attainment with 90 % confidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibration.trace import Bools, Floats, RequestTrace
from harness.measure.intervals import effective_size, mean_interval, share_interval
from harness.measure.tokens import TokenFlow
from harness.measure.window import Window, spans

_MS = 1000.0
SLO_KEYS = ("ttft", "tpot", "e2e")
#: slices of the window over which the token rate is averaged: as many as half residences fit, within these
SLICES = (20, 400)


def stage_intervals(
    trace: RequestTrace, window: Window | None, flow: TokenFlow, residence_s: float
) -> dict[str, dict[str, float] | None]:
    """The key ``intervals`` of a stage."""
    if window is None:
        return dict.fromkeys(("ttft_ms", "tpot_ms", "e2e_ms", "output_tokens_per_s"))
    counted = trace.ok | trace.incomplete
    first, last = trace.sent_s + trace.ttft_s, trace.sent_s + trace.e2e_s
    return {
        "ttft_ms": _of(trace.ttft_s, first, counted, window),
        "tpot_ms": _of(trace.tpot_s, last, trace.ok, window),
        "e2e_ms": _of(trace.e2e_s, last, trace.ok, window),
        "output_tokens_per_s": _of_rate(window, flow, residence_s),
    }


def _of(values: Floats, moments_s: Floats, rows: Bools, window: Window) -> dict[str, float] | None:
    inside = rows & (moments_s >= window.start_s) & (moments_s <= window.end_s)
    order = np.argsort(moments_s[inside], kind="stable")
    found = mean_interval(values[inside][order])
    return None if found is None else found.to_dict(_MS)


def _of_rate(window: Window, flow: TokenFlow, residence_s: float) -> dict[str, float] | None:
    slices = 2 * window.length_s / residence_s if residence_s > 0 else SLICES[0]
    edges = np.linspace(window.start_s, window.end_s, int(np.clip(slices, *SLICES)) + 1)
    found = mean_interval(np.diff(flow.until(edges)) / np.diff(edges))
    return None if found is None else found.to_dict()


def meets(trace: RequestTrace, limits_ms: Mapping[str, float]) -> Bools:
    """Requests within every limit; one without a TPOT (a single token) cannot miss it."""
    return _worst(trace, limits_ms) <= 1.0


def _worst(trace: RequestTrace, limits_ms: Mapping[str, float]) -> Floats:
    """By request, the largest of its times over their limits; NaN of one that has none of them."""
    columns = {"ttft": trace.ttft_s, "tpot": np.nan_to_num(trace.tpot_s, nan=0.0), "e2e": trace.e2e_s}
    worst = np.zeros(len(trace))
    for name, limit in limits_ms.items():
        worst = np.maximum(worst, columns[name] * _MS / limit)
    return worst


def slo_tiers(
    trace: RequestTrace, window: Window | None, tiers: Sequence[Mapping[str, float]]
) -> list[dict[str, Any]] | None:
    """The key ``slo`` of a stage; null without tiers."""
    return [_tier(trace, window, limits) for limits in tiers if limits] or None


def _tier(trace: RequestTrace, window: Window | None, limits_ms: Mapping[str, float]) -> dict[str, Any]:
    unknown = dict.fromkeys(("attainment", "low", "high", "n_effective", "goodput_per_s"))
    tier: dict[str, Any] = {"limits_ms": dict(limits_ms), "met": 0, "of": 0, **unknown}
    if window is None:
        return tier
    ends = spans_of_all(trace)
    ended = ~trace.incomplete & (ends >= window.start_s) & (ends <= window.end_s)
    order = np.argsort(ends[ended], kind="stable")
    worst = np.where(trace.ok, _worst(trace, limits_ms), np.inf)[ended][order]
    met, of = int((worst <= 1).sum()), len(worst)
    if not of:
        return tier
    worth = _worth(worst)
    low, high = share_interval(met / of * worth, worth)
    return tier | {
        "met": met,
        "of": of,
        "attainment": met / of,
        "low": low,
        "high": high,
        "n_effective": worth,
        "goodput_per_s": met / window.length_s,
    }


def _worth(worst: Floats) -> float:
    """Independent requests that these are worth: the fewer of what their times say and what their verdicts say (verdicts
    that are all alike say nothing of how they hang together)."""
    finite = worst[np.isfinite(worst)]
    sizes = [float(len(worst))]
    if len(finite):
        sizes.append(effective_size(finite) * len(worst) / len(finite))
    met = (worst <= 1).astype(np.float64)
    if 0 < met.mean() < 1:
        sizes.append(effective_size(met))
    return min(sizes)


def spans_of_all(trace: RequestTrace) -> Floats:
    """When each request ended: good ones with their last content, failed ones with the last known of them; NaN of one
    that was never sent."""
    ends = np.full(len(trace), np.nan)
    sent = ~np.isnan(trace.sent_s)
    ends[sent] = spans(trace)[1]
    good = trace.ok & ~np.isnan(trace.e2e_s)
    ends[good] = (trace.sent_s + trace.e2e_s)[good]
    return ends
