"""A stage's window in blocks of time, as the comparison of two runs wants it (:mod:`calibration.gate`). Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from calibration.gate import Blocked, LoadKey, Sample
from calibration.trace import Floats, RequestTrace
from harness.measure.from_records import Requests
from harness.measure.tokens import by_delta, count_tokens

#: of one stage: more only cost, fewer tell its noise badly, with fewer than two there is none to tell
MOST_BLOCKS, ENOUGH_BLOCKS, FEWEST_BLOCKS = 20, 8, 2
#: a block lasts so many lives of a request where the window has enough such: what one meets in its life it shares with
#: those before and after it
LIVES = 2.0
_MS = 1000.0


def sample_of(stage: Mapping[str, Any], requests: Requests) -> Sample | str:
    """The steady part of a stage as in ``summary.json``, or why it cannot be compared."""
    trace, window = requests.trace, stage["window"]
    if not stage["valid"]:
        return f"invalid: {'; '.join(stage['reasons'])}"
    means = stage["totals"]["prompt_tokens_mean"], stage["totals"]["output_tokens_mean"]
    if window is None or None in means:
        return "no window, or no token counts"
    start_s, end_s = window["start_s"], window["end_s"]
    ended = trace.ok & _inside(trace.sent_s + trace.e2e_s, start_s, end_s)
    blocks = blocks_in(end_s - start_s, trace.e2e_s[ended])
    edges = np.linspace(start_s, end_s, blocks + 1)
    return Sample(
        load=LoadKey(stage["users"] if stage["request_rate"] is None else None, stage["request_rate"], *means),
        latencies=_latencies(trace, edges),
        rates=_rates(requests, edges),
        failed=int(trace.failed.sum()),
        ended=int((trace.failed | trace.ok).sum()),
        length_errors=(_error(trace.prompt_tokens[trace.ok]), _error(trace.output_tokens[trace.ok])),
    )


def _error(values: Floats) -> float:
    """Standard error of the mean of these draws; NaN is left out."""
    known = values[~np.isnan(values)]
    return float(known.std() / math.sqrt(len(known))) if len(known) else 0.0


def blocks_in(length_s: float, lives_s: Floats) -> int:
    """Blocks of a window, each at least one median life of a request long, and :data:`LIVES` where there are enough."""
    life_s = float(np.median(lives_s)) if len(lives_s) else 0.0
    if length_s <= 0 or life_s <= 0:
        return FEWEST_BLOCKS
    lives = length_s / life_s
    blocks = min(max(math.floor(lives / LIVES), min(math.floor(lives), ENOUGH_BLOCKS)), MOST_BLOCKS)
    return max(blocks, FEWEST_BLOCKS)


def _inside(moments_s: Floats, start_s: float, end_s: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return (moments_s >= start_s) & (moments_s <= end_s)


def _latencies(trace: RequestTrace, edges: Floats) -> dict[str, Blocked]:
    """As :func:`harness.measure.summary.summarise` counts them: TTFT by the first content, the others by the last."""
    first_s, last_s = trace.sent_s + trace.ttft_s, trace.sent_s + trace.e2e_s
    counted = trace.ok | trace.incomplete
    columns = {
        "ttft_ms": (first_s, trace.ttft_s, counted),
        "tpot_ms": (last_s, trace.tpot_s, trace.ok),
        "e2e_ms": (last_s, trace.e2e_s, trace.ok),
    }
    found = {}
    for name, (moments_s, values_s, rows) in columns.items():
        use = rows & _inside(moments_s, edges[0], edges[-1]) & (values_s > 0)
        block = np.clip(np.searchsorted(edges, moments_s[use], side="right") - 1, 0, len(edges) - 2)
        if use.any():
            found[name] = Blocked(values_s[use] * _MS, block, len(edges) - 1)
    return found


def _rates(requests: Requests, edges: Floats) -> dict[str, Floats]:
    trace = requests.trace
    counts = count_tokens(trace, requests.deltas)
    if not (trace.ok & ~np.isnan(counts.first)).any():
        return {}
    arrived = by_delta(trace, counts, requests.deltas).until(edges)
    return {"output_tokens_per_s": np.diff(arrived) / np.diff(edges)}
