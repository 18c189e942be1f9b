"""The ``server`` block of a stage in ``summary.json``: what the server says of the stage, from its scrapes. Pure.

Two spans, and every number says in its comment which one it is of:

* **window**: the steady part. Gauges are time-weighted means of the scrapes inside it: each scrape stands for the time
  that is nearer to it than to its neighbours. Counters grow between the two scrapes nearest the window's edges.
* **stage**: everything from the last scrape before the stage's first request to the first one after its last, so that
  the fill phase, its preemptions and short stages are not lost, and so that counts can be held against our records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from harness.observe.deltas import Delta, delta_over
from harness.observe.names import VersionFamily
from harness.observe.scrape import Scrape
from harness.observe.snapshot import Snapshot

Span = tuple[float, float]
#: share of our own tokens by which the server may exceed them before other clients are suspected: a stage's span can
#: hold the end of its neighbour's
TRAFFIC_TOLERANCE = 0.01

#: the endpoints that generate tokens
GENERATING_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class OurTraffic:
    """What the stage's own requests account for, from their records.

    ``output_tokens`` is None where some request's count is unknown. ``ended`` counts requests with outcome ok, ``cut``
    those that failed or were broken off: the server may have finished or half-served any of them.
    """

    output_tokens: int | None
    ended: int
    cut: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSummary:
    """Times in ms, shares 0..1; None where the server did not say or the span held no scrape."""

    # --- of the window ---
    running_mean: float | None = None
    waiting_mean: float | None = None
    #: waiting for room in batch or pool, told apart since vLLM 0.32
    waiting_capacity_mean: float | None = None
    kv_cache_usage_mean: float | None = None
    #: engine steps that gave an output (see Counters.steps)
    steps: float | None = None
    #: engine time per step: time with running > 0, summed over engines, by steps. Steps that only compute a part of a
    #: prompt are not counted by vLLM, so with long prompts in chunks this is longer than one forward pass
    step_ms_mean: float | None = None
    #: computed prompt tokens and generated tokens of one step
    tokens_per_step_mean: float | None = None
    itl_ms_mean: float | None = None
    generation_tokens_per_s: float | None = None
    # --- of the stage ---
    kv_cache_usage_max: float | None = None
    running_max: float | None = None
    waiting_max: float | None = None
    waiting_capacity_max: float | None = None
    preemptions: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    finished_requests: float | None = None
    rejections: float | None = None
    prefix_hit_ratio: float | None = None
    #: means per request: ttft of every request that had a first token, the others of finished requests
    ttft_ms_mean: float | None = None
    queue_ms_mean: float | None = None
    prefill_ms_mean: float | None = None
    decode_ms_mean: float | None = None
    e2e_ms_mean: float | None = None
    #: 1 + accepted / drafts of speculative decoding
    accepted_tokens_per_draft_mean: float | None = None
    #: the server began anew inside the stage: every count is a lower bound
    restarted: bool | None = None
    #: generation tokens of the server beyond our own; None where either is unknown or a request of ours was cut
    unaccounted_tokens: float | None = None
    #: what makes these numbers suspect, each "kind: sentence"
    contamination: tuple[str, ...] = ()
    scrapes: int = 0
    scrape_errors: int = 0
    #: the longest time without a good scrape
    scrape_gap_s_max: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "contamination": list(self.contamination)}


def summarise_server(
    scrapes: Sequence[Scrape],
    window: Span | None,
    stage: Span,
    *,
    ours: OurTraffic | None = None,
    prompts_unique: bool = False,
) -> ServerSummary:
    """Summarise what the server said of one stage.

    Args:
        scrapes: of the whole run or of the stage, in order of time; failed ones among them.
        window: start and end of the steady part, seconds since the run's start; None where the stage has none.
        stage: when its first request was sent and its last one ended.
        ours: the stage's own traffic; without it other clients' traffic is not looked for.
        prompts_unique: no two prompts share a prefix, so every prefix-cache hit is contamination.
    """
    good = [Point(s.at_s, s.duration_s / 2, s.snapshot) for s in scrapes if s.snapshot is not None]
    around = _around(good, stage)
    within = [point for point in good if stage[0] <= point.at_s <= stage[1]]
    grown = delta_over([point.snapshot for point in around])
    attempts = [scrape for scrape in scrapes if stage[0] <= scrape.at_s <= stage[1]]
    values: dict[str, Any] = {
        "kv_cache_usage_max": _max(within, lambda s: s.kv_cache_usage_max),
        "running_max": _max(within, lambda s: s.running),
        "waiting_max": _max(within, lambda s: s.waiting),
        "waiting_capacity_max": _max(within, _waiting_capacity),
        "scrapes": len(attempts),
        "scrape_errors": sum(scrape.error is not None for scrape in attempts),
        "scrape_gap_s_max": max((b.at_s - a.at_s for a, b in pairwise(around)), default=None),
    }
    if window is not None:
        values |= _of_window(good, window)
    if grown is not None:
        values |= _of_stage(grown)
        values["unaccounted_tokens"] = _unaccounted(grown, ours)
        values["contamination"] = tuple(_contamination(around, grown, ours, prompts_unique))
    return ServerSummary(**values)


class Point(NamedTuple):
    """A good scrape: its middle, half its length, what it read."""

    at_s: float
    half_s: float
    snapshot: Snapshot


def _around(good: Sequence[Point], span: Span) -> list[Point]:
    """The good scrapes of a span with the last one that ended before it and the first one that began after it, where
    there are such: the server read its numbers at some moment of the call, and that must not lie inside the span."""
    first = max((i for i, p in enumerate(good) if p.at_s + p.half_s <= span[0]), default=0)
    last = min((i for i, p in enumerate(good) if p.at_s - p.half_s >= span[1]), default=len(good) - 1)
    return list(good[first : last + 1])


def _nearest(good: Sequence[Point], span: Span) -> list[Point]:
    """The good scrapes from the one nearest the span's start to the one nearest its end."""
    if not good:
        return []
    first, last = (min(range(len(good)), key=lambda i: abs(good[i].at_s - edge)) for edge in span)
    return list(good[first : last + 1])


def _of_window(good: Sequence[Point], window: Span) -> dict[str, Any]:
    def mean(gauge: Callable[[Snapshot], float | None]) -> float | None:
        return time_weighted_mean(((point.at_s, gauge(point.snapshot)) for point in good), window)

    values: dict[str, Any] = {
        "running_mean": mean(lambda s: s.running),
        "waiting_mean": mean(lambda s: s.waiting),
        "waiting_capacity_mean": mean(_waiting_capacity),
        "kv_cache_usage_mean": mean(lambda s: s.kv_cache_usage),
    }
    between = _nearest(good, window)
    grown = delta_over([point.snapshot for point in between])
    if grown is None:
        return values
    return values | {
        "steps": grown.steps,
        "step_ms_mean": _ms(_busy_engine_s(between), grown.steps),
        "tokens_per_step_mean": _ratio(grown.step_tokens, grown.steps),
        "itl_ms_mean": _ms(grown.itl_sum_s, grown.itl_count),
        "generation_tokens_per_s": _ratio(grown.generation_tokens, between[-1].at_s - between[0].at_s),
    }


def _of_stage(grown: Delta) -> dict[str, Any]:
    accepted = _ratio(grown.spec_decode_accepted_tokens, grown.spec_decode_drafts)
    return {
        "preemptions": grown.preemptions,
        "prompt_tokens": grown.prompt_tokens,
        "generation_tokens": grown.generation_tokens,
        "finished_requests": grown.success,
        "rejections": None if grown.rejections_by_reason is None else sum(grown.rejections_by_reason.values()),
        "prefix_hit_ratio": _ratio(grown.prefix_cache_hits, grown.prefix_cache_queries),
        "ttft_ms_mean": _ms(grown.ttft_sum_s, grown.ttft_count),
        "queue_ms_mean": _ms(grown.queue_sum_s, grown.queue_count),
        "prefill_ms_mean": _ms(grown.prefill_sum_s, grown.prefill_count),
        "decode_ms_mean": _ms(grown.decode_sum_s, grown.decode_count),
        "e2e_ms_mean": _ms(grown.e2e_sum_s, grown.e2e_count),
        "accepted_tokens_per_draft_mean": None if accepted is None else 1 + accepted,
        "restarted": grown.restarted,
    }


def time_weighted_mean(points: Iterable[tuple[float, float | None]], span: Span) -> float | None:
    """Mean of a gauge over a span; each reading inside stands for the time nearer to it than to its neighbours.

    None where no reading lies inside. Readings that are None are left out, and their time falls to their neighbours.
    """
    start_s, end_s = span
    inside = [(at_s, value) for at_s, value in points if value is not None and start_s <= at_s <= end_s]
    if not inside:
        return None
    middles = [(a + b) / 2 for (a, _), (b, _) in pairwise(inside)]
    edges = [start_s, *middles, end_s]
    if edges[-1] == edges[0]:
        return sum(value for _, value in inside) / len(inside)
    weighed = math.fsum(value * (b - a) for (_, value), (a, b) in zip(inside, pairwise(edges), strict=True))
    return weighed / (end_s - start_s)


def _busy_engine_s(points: Sequence[Point]) -> float | None:
    """Seconds with running > 0, summed over engines: between two scrapes the mean of what both say."""
    if any(point.snapshot.running_by_engine is None for point in points):
        return None
    return math.fsum(
        (b.at_s - a.at_s) * (_busy_engines(a.snapshot) + _busy_engines(b.snapshot)) / 2 for a, b in pairwise(points)
    )


def _busy_engines(snapshot: Snapshot) -> int:
    return sum(running > 0 for running in (snapshot.running_by_engine or {}).values())


def _waiting_capacity(snapshot: Snapshot) -> float | None:
    return (snapshot.waiting_by_reason or {}).get("capacity")


def _max(points: Iterable[Point], gauge: Callable[[Snapshot], float | None]) -> float | None:
    return max((value for p in points if (value := gauge(p.snapshot)) is not None), default=None)


def _ratio(upper: float | None, lower: float | None) -> float | None:
    return upper / lower if upper is not None and lower else None


def _ms(total_s: float | None, count: float | None) -> float | None:
    mean_s = _ratio(total_s, count)
    return None if mean_s is None else mean_s * 1e3


# --- contamination -------------------------------------------------------------------------------------------------


def _unaccounted(grown: Delta, ours: OurTraffic | None) -> float | None:
    if ours is None or ours.output_tokens is None or ours.cut or grown.generation_tokens is None or grown.restarted:
        return None
    return grown.generation_tokens - ours.output_tokens


def _contamination(
    around: Sequence[Point], grown: Delta, ours: OurTraffic | None, prompts_unique: bool
) -> Iterable[str]:
    if grown.restarted:
        yield "restart: the server began anew inside the stage; its counts are lower bounds"
    if any(point.snapshot.asleep for point in around):
        yield "asleep: an engine slept during the stage"
    if prompts_unique and grown.prefix_cache_hits and not _own_readmissions(around[-1].snapshot, grown):
        share = _ratio(grown.prefix_cache_hits, grown.prefix_cache_queries)
        part = "" if share is None else f" ({share:.1%} of the queries)"
        yield f"prefix_hits: {grown.prefix_cache_hits:,.0f} hits of the prefix cache{part}, with prompts meant unique"
    yield from _other_traffic(grown, ours)


def _own_readmissions(last: Snapshot, grown: Delta) -> bool:
    """Before 0.32 a preempted request may hit its own blocks when it comes back, and is counted."""
    return bool(grown.preemptions) and last.version_family != VersionFamily.V1


def _other_traffic(grown: Delta, ours: OurTraffic | None) -> Iterable[str]:
    if ours is None:
        return
    tokens = _unaccounted(grown, ours)
    if tokens is not None and ours.output_tokens is not None and tokens > TRAFFIC_TOLERANCE * ours.output_tokens:
        yield f"other_traffic: the server generated {tokens:,.0f} tokens more than our {ours.output_tokens:,}"
    requests = _requests_served(grown)
    more = None if requests is None else requests - ours.ended - ours.cut
    if more is not None and more > TRAFFIC_TOLERANCE * (ours.ended + ours.cut):
        yield f"other_traffic: the server served {more:,.0f} requests more than our {ours.ended + ours.cut:,}"


def _requests_served(grown: Delta) -> float | None:
    """Requests for tokens that ended: the larger of what the engine finished and what the HTTP layer answered (which
    counts requests their client broke off too, and those of a LoRA adapter or an alias)."""
    posts = grown.http_requests
    answered = None if posts is None else sum(posts.get(path, 0) for path in GENERATING_PATHS)
    return max((count for count in (grown.success, answered) if count is not None), default=None)
