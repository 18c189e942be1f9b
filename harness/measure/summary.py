"""What is said of a stage: the content of ``summary.json`` (DESIGN section 7), from the columns of its requests.

Which requests enter which number:

* ``requests`` and ``totals`` are of the whole stage; everything else is of the window, both ends included.
* TTFT counts a request whose first content came in the window, whether it then ended well or was cut by the end of the
  stage; TTFA the same by its first non-reasoning content; TPOT and E2E a good request whose last content came in the
  window. A failed request is in the failure counts and in nothing else.
* Throughput counts tokens by when they arrived (:mod:`harness.measure.tokens`), prompt tokens when the first content
  came; ``requests_per_s`` and goodput count good requests whose last content came in the window. A stream cut by the end
  of the stage counts with what it brought: where the server had not yet said how much that is, its chunks times the tokens
  per chunk of the good requests, and their mean prompt; ``output_tokens_estimated_share`` tells how much of the
  throughput that is.

Keys beyond those of DESIGN section 7: ``ttft_from_schedule_ms`` and ``e2e_from_schedule_ms`` (from when the profile
meant the request instead of when it was sent), ``tpot_ms_token_weighted`` (time between first and last content of all
requests over their tokens after the first delta), ``output_tokens_estimated_share``, ``totals``, and ``intervals`` and
``slo`` (:mod:`harness.measure.stage_intervals`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibration.trace import Bools, Floats, RequestTrace
from harness.measure.from_records import Deltas
from harness.measure.gaps import GapHistogram
from harness.measure.health import ClientReadings, asked_standard_error, client_verdict
from harness.measure.stage_intervals import SLO_KEYS, meets, slo_tiers, stage_intervals
from harness.measure.stats import Stats, describe, empty
from harness.measure.tokens import TokenCounts, TokenFlow, by_delta, count_tokens, first_delta_tokens, spread_evenly
from harness.measure.window import InFlight, StageLoad, Window, find_window, residence_s, spans

_MS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReadings:
    """What is known of a stage beside its requests; None means not measured.

    ``loop_lag_ms_p99`` and ``cpu`` (fraction of a core, the largest of the processes) of the client; ``server``: the
    stage's readings of ``/metrics``, passed through; ``gaps``: chunk gaps of requests that did not fail.
    """

    loop_lag_ms_p99: float | None = None
    cpu: float | None = None
    server: Mapping[str, Any] | None = None
    gaps: GapHistogram | None = None


def summarise(
    index: int,
    trace: RequestTrace,
    load: StageLoad,
    readings: StageReadings | None = None,
    deltas: Deltas | None = None,
    slo: Mapping[str, float] | None = None,
    window: Window | None = None,
    tiers: Sequence[Mapping[str, float]] = (),
) -> dict[str, Any]:
    """A stage as in ``summary.json``.

    Args:
        index: the stage's number in the run.
        trace: the requests of the stage.
        load: what it asked for.
        readings: what is known beside; all unknown by default.
        deltas: chunks by request, and their times where gaps were saved (:func:`columns_of`).
        slo: limits in ms by ``ttft``, ``tpot``, ``e2e``; without any, goodput is null.
        window: to summarise instead of the steady part (:func:`harness.measure.window.find_window`).
        tiers: further limits like ``slo``, for the key ``slo``.

    Raises:
        ValueError: an SLO of another name.
    """
    if unknown := {name for limits in (slo or {}, *tiers) for name in limits} - set(SLO_KEYS):
        raise ValueError(f"SLO {sorted(unknown)[0]!r}: expected one of {', '.join(SLO_KEYS)}")
    readings = readings or StageReadings()
    counts = count_tokens(trace, deltas)
    flow = spread_evenly(trace, counts) if deltas is None else by_delta(trace, counts, deltas)
    window = find_window(trace, load, flow) if window is None else window
    client = _client(trace, load, window, readings)
    healthy, faults = client_verdict(client)
    unsteady = window.reasons if window else ("no window: nothing was in flight before the planned end of the stage",)
    reasons = [*faults, *_empty_stage(trace), *unsteady, *_missing_counts(trace, counts)]
    return {
        "index": index,
        "users": load.users,
        "request_rate": load.request_rate,
        "valid": healthy and bool(trace.ok.any()) and window is not None,
        "reasons": reasons,
        "window": window and {"start_s": window.start_s, "end_s": window.end_s, "steady": window.steady},
        "requests": _requests(trace),
        **_latencies(trace, window),
        "chunk_gap_ms": _chunk_gaps(trace, window, readings.gaps, deltas),
        **_throughput(trace, load, window, counts, flow, slo),
        "intervals": stage_intervals(trace, window, flow, residence_s(trace)),
        "slo": slo_tiers(trace, window, [slo or {}, *tiers]),
        "client": {
            "loop_lag_ms_p99": client.loop_lag_ms_p99,
            "cpu": client.cpu,
            "schedule_delay_ms_p99": client.schedule_delay_ms_p99,
            "concurrency_mean": client.concurrency_mean,
        },
        "server": None if readings.server is None else dict(readings.server),
        "totals": _totals(trace),
    }


def _inside(moments_s: Floats, window: Window | None) -> Bools:
    """Which moments lie in the window; NaN never does."""
    if window is None:
        return np.zeros(len(moments_s), dtype=np.bool_)
    return (moments_s >= window.start_s) & (moments_s <= window.end_s)


def _client(trace: RequestTrace, load: StageLoad, window: Window | None, readings: StageReadings) -> ClientReadings:
    if window is None:
        return ClientReadings(loop_lag_ms_p99=readings.loop_lag_ms_p99, cpu=readings.cpu)
    delay_ms = (trace.sent_s - trace.scheduled_s)[_inside(trace.sent_s, window)] * _MS
    return ClientReadings(
        loop_lag_ms_p99=readings.loop_lag_ms_p99,
        cpu=readings.cpu,
        schedule_delay_ms_p99=_number(describe(delay_ms)["p99"]),
        concurrency_mean=InFlight.of(*spans(trace)).mean(window.start_s, window.end_s),
        asked=None if load.users is None else window.level,
        asked_se=asked_standard_error(load.users or 0, residence_s(trace), load.think_s, window.length_s),
    )


def _number(value: float | int | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _empty_stage(trace: RequestTrace) -> Iterator[str]:
    if trace.ok.any():
        return
    kinds = ", ".join(f"{kind} {n}" for kind, n in _by_failure(trace).items())
    failed = f"{int(trace.failed.sum())} failed" + (f" ({kinds})" if kinds else "")
    yield f"no request ended well: {failed}, {int(trace.incomplete.sum())} cut by the end of the stage"


def _missing_counts(trace: RequestTrace, counts: TokenCounts) -> Iterator[str]:
    unknown = np.isnan(counts.first)
    for rows, who in ((trace.ok, "good requests"), (trace.incomplete & ~np.isnan(trace.ttft_s), "cut streams")):
        if missing := int((rows & unknown).sum()):
            yield f"{missing} of {int(rows.sum())} {who} have no token count: token rates leave them out"


def _by_failure(trace: RequestTrace) -> dict[str, int]:
    return dict(sorted(Counter(trace.failure[trace.failed].tolist()).items()))


def _requests(trace: RequestTrace) -> dict[str, Any]:
    return {
        "ok": int(trace.ok.sum()),
        "failed": int(trace.failed.sum()),
        "by_failure": _by_failure(trace),
        "incomplete": int(trace.incomplete.sum()),
    }


def _latencies(trace: RequestTrace, window: Window | None) -> dict[str, Any]:
    counted = trace.ok | trace.incomplete
    begun = counted & _inside(trace.sent_s + trace.ttft_s, window)
    answered = counted & _inside(trace.sent_s + trace.ttfa_s, window)
    ended = trace.ok & _inside(trace.sent_s + trace.e2e_s, window)
    waited = trace.sent_s - trace.scheduled_s
    return {
        "ttft_ms": describe(trace.ttft_s[begun] * _MS),
        "ttfa_ms": describe(trace.ttfa_s[answered] * _MS),
        "tpot_ms": describe(trace.tpot_s[ended] * _MS),
        "e2e_ms": describe(trace.e2e_s[ended] * _MS),
        "ttft_from_schedule_ms": describe((waited + trace.ttft_s)[begun] * _MS),
        "e2e_from_schedule_ms": describe((waited + trace.e2e_s)[ended] * _MS),
        "tpot_ms_token_weighted": _token_weighted_tpot_ms(trace, ended),
    }


def _token_weighted_tpot_ms(trace: RequestTrace, rows: Bools) -> float | None:
    rows = rows & ~np.isnan(trace.tpot_s)
    later_tokens = (trace.output_tokens - first_delta_tokens(trace))[rows].sum()
    return float((trace.e2e_s - trace.ttft_s)[rows].sum() * _MS / later_tokens) if later_tokens else None


def _chunk_gaps(trace: RequestTrace, window: Window | None, gaps: GapHistogram | None, deltas: Deltas | None) -> Stats:
    """Exact where the gaps were saved, else from the histogram."""
    if window is None:
        return empty()
    if deltas is not None and deltas.times_s is not None and deltas.offsets is not None:
        owner = np.repeat(np.arange(len(trace)), np.diff(deltas.offsets))
        ends_s = (trace.sent_s[owner] + deltas.times_s)[1:]
        counted = (owner[1:] == owner[:-1]) & ~trace.failed[owner[1:]] & _inside(ends_s, window)
        return describe(np.diff(deltas.times_s)[counted] * _MS)
    return empty() if gaps is None else gaps.stats(window.start_s, window.end_s)


def _throughput(
    trace: RequestTrace,
    load: StageLoad,
    window: Window | None,
    counts: TokenCounts,
    flow: TokenFlow,
    slo: Mapping[str, float] | None,
) -> dict[str, Any]:
    rates = dict.fromkeys(
        ("output_tokens_per_s", "output_tokens_per_s_per_user", "output_tokens_estimated_share", "total_tokens_per_s")
    )
    if window is None:
        return {**rates, "requests_per_s": None, "goodput_per_s": None}
    ended = trace.ok & _inside(trace.sent_s + trace.e2e_s, window)
    good = ended & meets(trace, slo or {})
    return {
        **rates,
        **_token_rates(trace, load, window, counts, flow),
        "requests_per_s": float(ended.sum()) / window.length_s,
        "goodput_per_s": float(good.sum()) / window.length_s if slo else None,
    }


def _token_rates(
    trace: RequestTrace, load: StageLoad, window: Window, counts: TokenCounts, flow: TokenFlow
) -> dict[str, float | None]:
    """Nothing where no good request has a token count."""
    if not (trace.ok & ~np.isnan(counts.first)).any():
        return {}
    tokens = flow.between(window.start_s, window.end_s)
    guessed = spread_evenly(trace, counts, rows=counts.estimated).between(window.start_s, window.end_s)
    prompts = _prompt_tokens(trace)[_inside(trace.sent_s + trace.ttft_s, window) & ~trace.failed]
    return {
        "output_tokens_per_s": tokens / window.length_s,
        "output_tokens_per_s_per_user": tokens / window.length_s / load.users if load.users else None,
        "output_tokens_estimated_share": guessed / tokens if tokens else None,
        "total_tokens_per_s": None if np.isnan(prompts).any() else (tokens + float(prompts.sum())) / window.length_s,
    }


def _prompt_tokens(trace: RequestTrace) -> Floats:
    """As the server counted them; of a cut stream that has no count yet, the mean of the good requests."""
    known = trace.prompt_tokens[trace.ok & ~np.isnan(trace.prompt_tokens)]
    mean = known.mean() if len(known) else np.nan
    return np.where(trace.incomplete & np.isnan(trace.prompt_tokens), mean, trace.prompt_tokens)


def _totals(trace: RequestTrace) -> dict[str, float | None]:
    """Of the whole stage: tokens of every request that has a count, however it ended; means of the good ones."""
    starts, ends = spans(trace)
    return {
        "output_tokens": _sum(trace.output_tokens),
        "prompt_tokens": _sum(trace.prompt_tokens),
        "output_tokens_mean": _number(describe(trace.output_tokens[trace.ok])["mean"]),
        "prompt_tokens_mean": _number(describe(trace.prompt_tokens[trace.ok])["mean"]),
        "duration_s": float(ends.max() - starts.min()) if len(starts) else None,
    }


def _sum(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.sum()) if len(known) else None
