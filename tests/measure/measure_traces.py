"""Traces to measure: by hand, and of a synthetic closed loop."""

from __future__ import annotations

from typing import Any

import numpy as np

from calibration.trace import RequestTrace

NAN = float("nan")


def make_trace(
    sent_s: Any,
    ttft_s: Any = 0.1,
    e2e_s: Any = 1.0,
    output_tokens: Any = 10,
    *,
    first: Any = 1,
    prompt_tokens: Any = 20,
    scheduled_s: Any = None,
    ttfa_s: Any = None,
    stream_end_s: Any = None,
    ok: Any = True,
    incomplete: Any = False,
    failure: Any = "",
) -> RequestTrace:
    """Columns from numbers or lists; TPOT by DESIGN section 4, with ``first`` tokens in the first delta."""
    sent = np.asarray(sent_s, dtype=float)

    def column(values: Any, dtype: Any = float) -> Any:
        return np.broadcast_to(np.asarray(values, dtype=dtype), sent.shape).copy()

    later = column(output_tokens) - column(first)
    tpot = np.where(later >= 1, (column(e2e_s) - column(ttft_s)) / np.where(later >= 1, later, 1), NAN)
    return RequestTrace(
        source="live",
        user=np.arange(len(sent)),
        scheduled_s=sent.copy() if scheduled_s is None else column(scheduled_s),
        sent_s=sent,
        ttft_s=column(ttft_s),
        ttfa_s=column(ttft_s if ttfa_s is None else ttfa_s),
        e2e_s=column(e2e_s),
        stream_end_s=column(e2e_s if stream_end_s is None else stream_end_s),
        tpot_s=tpot,
        prompt_tokens=column(prompt_tokens),
        output_tokens=column(output_tokens),
        ok=column(ok, bool),
        incomplete=column(incomplete, bool),
        failure=column(failure, object),
    )


def closed_loop(
    users: int,
    until_s: float,
    rng: np.random.Generator,
    *,
    ttft_s: float = 0.1,
    decode_s: float = 0.9,
    spread: float = 0.3,
    start_over_s: float = 0.0,
    slow_until_s: float = 0.0,
    slow_by: float = 1.0,
    think_s: float = 0.0,
    output_tokens: int = 10,
    drift_per_s: float = 0.0,
) -> RequestTrace:
    """Users who send, read and send again until ``until_s``; times are lognormal about their means with sigma ``spread``.

    They start evenly over ``start_over_s``. A request sent before ``slow_until_s`` takes ``slow_by`` times as long;
    every request grows by ``drift_per_s`` of itself a second. Think times are exponential.
    """
    sent, ttft, e2e = [], [], []
    for user in range(users):
        now = start_over_s * user / users
        while now < until_s:
            factor = (slow_by if now < slow_until_s else 1.0) * (1 + drift_per_s * now)
            first, rest = factor * rng.lognormal(-spread * spread / 2, spread, 2) * (ttft_s, decode_s)
            sent.append(now)
            ttft.append(first)
            e2e.append(first + rest)
            now += first + rest + (rng.exponential(think_s) if think_s else 0.0)
    return make_trace(sent, ttft, e2e, output_tokens)
