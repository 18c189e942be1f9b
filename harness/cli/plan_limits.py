"""The part of ``plan`` about time: limits on users, what they get, combinations side by side."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from calibration.errors import InputError, Unsupported
from calibration.knee import KNEE_SLOPE
from harness.cli.columns import columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibration.candidates import Candidate
    from calibration.limits import AtLimit, Limits, Sizing, Slo
    from calibration.plan import Plan
    from calibration.prediction import Estimate

#: limits in the order of the table, with what each means
_MEANINGS = {
    "kv_full": "all streams at their end at once: no preemption below it",
    "kv_staggered": "streams spread over their outputs: preemptions from about here",
    "max_num_seqs": "sequences vLLM runs at once",
    "tpot": "mean time per output token reaches --slo",
    "ttft": "mean time to first token reaches --slo",
    "knee": f"an added user brings under {KNEE_SLOPE:.0%} of what the first one brings; stops nobody",
}

_TITLES = {
    "kv_full": "pool full",
    "kv_staggered": "pool, staggered",
    "tpot": "TPOT",
    "ttft": "TTFT",
    "knee": "the knee",
}


def add_options(parser: ArgumentParser) -> None:
    """The options of ``plan`` about limits."""
    add = parser.add_argument_group("limits").add_argument
    add("--slo", metavar="ttft:MS,tpot:MS", help="limits on mean latencies, in milliseconds; either alone is fine")
    add("--fit", action="store_true", help="the smallest number of GPUs that fits, instead of --tp and --pp")


def parse_slo(text: str | None) -> Slo:
    """'ttft:500,tpot:50' (milliseconds) -> limits.

    Raises:
        InputError: another word, no number, or one that is not more than 0.
    """
    from calibration.limits import Slo

    found: dict[str, float] = {}
    for part in (text or "").split(","):
        match = re.fullmatch(r"\s*(ttft|tpot)\s*:\s*(\d+(?:\.\d+)?)\s*", part)
        if match is not None and match[1] not in found:
            found[match[1]] = float(match[2]) / 1e3
        elif text is not None:
            raise InputError(f"slo = {text!r}, expected milliseconds such as ttft:500,tpot:50")
    return Slo(ttft_s=found.get("ttft"), tpot_s=found.get("tpot"))


def several(text: str | None, default: str) -> list[str]:
    """'a,b' -> both."""
    return [part.strip() for part in (text or default).split(",") if part.strip()]


def several_numbers(key: str, text: str | None) -> list[int]:
    """'1,2,4' -> numbers; 1 where nothing is asked.

    Raises:
        InputError: something that is no whole number.
    """
    parts = several(text, "1")
    wrong = next((part for part in parts if not part.isdigit() or int(part) < 1), None)
    if wrong is not None or not parts:
        raise InputError(f"{key} = {text!r}, expected whole numbers such as 2, or several as 1,2,4")
    return [int(part) for part in parts]


def sizing_of(plan: Plan, asked: Namespace) -> Sizing | None:
    """Limits and operating point of the plan; None where it does not fit or no device is known."""
    from calibration.limits import size

    slo = parse_slo(asked.slo)
    try:
        return size(plan, slo)
    except Unsupported:
        # a pool without a GPU: how many streams it holds is known, how fast they run is not
        return None


def users_json(limits: Limits) -> dict[str, Any]:
    """``users`` of the contract; null where a limit is not asked for or not reached."""

    def value(at: Estimate | None) -> float | None:
        return None if at is None else at.value

    return {
        "kv_full": limits.kv_full,
        "kv_staggered": limits.kv_staggered,
        "max_num_seqs": int(limits.max_num_seqs),
        "tpot": value(limits.tpot),
        "ttft": value(limits.ttft),
        "knee": value(limits.knee),
        "binding": limits.binding,
        "next": limits.next,
    }


def sizing_json(sizing: Sizing) -> dict[str, Any]:
    """The timed part of the document: what the users at the binding limit get, and the spread of the limits."""
    return {
        **_at_json(sizing.at_binding),
        "at_hard_limit": None if sizing.at_hard_limit is None else _at_json(sizing.at_hard_limit),
        "user_limits": {
            name: estimate_json(at)
            for name, at in (("tpot", sizing.limits.tpot), ("ttft", sizing.limits.ttft), ("knee", sizing.limits.knee))
        },
        "why": sizing.why,
    }


def _at_json(at: AtLimit) -> dict[str, Any]:
    return {
        "at_limit": at.limit,
        "at_users": at.users,
        "throughput_tokens_per_s": estimate_json(at.throughput_tokens_per_s),
        "throughput_tokens_per_s_per_user": estimate_json(at.tokens_per_s_per_user),
        "tpot_ms": estimate_json(at.tpot_s, 1e3),
        "ttft_ms": estimate_json(at.ttft_s, 1e3),
    }


def estimate_json(estimate: Estimate | None, scale: float = 1.0) -> dict[str, Any] | None:
    """``{value, low, high, basis}``; an end that is not reached is null."""
    if estimate is None:
        return None
    ends = {key: getattr(estimate, key) * scale for key in ("value", "low", "high")}
    return {key: None if value == float("inf") else value for key, value in ends.items()} | {"basis": estimate.basis}


def limit_rows(limits: Limits, seqs_meaning: str) -> list[tuple[str, str, str]]:
    """(limit, users, meaning), the binding one marked."""
    values: dict[str, tuple[float, Estimate | None]] = {
        "kv_full": (limits.kv_full, None),
        "kv_staggered": (limits.kv_staggered, None),
        "max_num_seqs": (limits.max_num_seqs, None),
    }
    for name, at in (("tpot", limits.tpot), ("ttft", limits.ttft), ("knee", limits.knee)):
        if at is not None:
            values[name] = (at.value, at)
    rows = []
    for name, (value, at) in values.items():
        title = _TITLES.get(name, name).removeprefix("the ") + (" <-" if name == limits.binding else "")
        spread = "" if at is None or at.low == at.high else f"; {at.low:,.0f} to {at.high:,.0f}"
        meaning = seqs_meaning if name == "max_num_seqs" else _MEANINGS[name]
        rows.append((title, f"{value:,.1f}", meaning + spread))
    return rows


def points(sizing: Sizing, width: int) -> list[str]:
    """What users get at the binding limit, and at the first hard one where that is the knee: a line and its columns each."""
    shown = [at for at in (sizing.at_binding, sizing.at_hard_limit) if at is not None]
    return [part for at in shown for part in (_point_title(at), columns(_point_rows(at), width, right=(1,)), "")]


def _point_title(at: AtLimit) -> str:
    how = f"{at.tpot_s.basis}: nothing was measured here" if at.tpot_s.basis == "extrapolated" else at.tpot_s.basis
    return f"With {at.users:,} users, at {_TITLES.get(at.limit, at.limit)} ({how})"


def _point_rows(at: AtLimit) -> list[tuple[str, str, str]]:
    rows = [("", "", "90 % interval")]
    for name, estimate, scale, form in (
        ("output tokens/s, all streams", at.throughput_tokens_per_s, 1.0, ",.0f"),
        ("output tokens/s, one stream", at.tokens_per_s_per_user, 1.0, ",.1f"),
        ("time per output token, ms", at.tpot_s, 1e3, ",.1f"),
        ("time to first token, ms", at.ttft_s, 1e3, ",.0f"),
    ):
        value, low, high = (format(x * scale, form) for x in (estimate.value, estimate.low, estimate.high))
        rows.append((name, value, f"{low} to {high}"))
    return rows


def comparison_json(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """One document for several combinations."""
    return {"comparison": [_candidate_json(candidate) for candidate in candidates]}


def _candidate_json(c: Candidate) -> dict[str, Any]:
    plan, point = c.plan, c.point
    pool = None if plan is None else plan.memory.pool
    return {
        "gpu": c.choice.gpu,
        "tp": c.choice.tp,
        "pp": c.choice.pp,
        "weights": c.choice.weights if plan is None else plan.deployment.weights.name,
        "kv": c.choice.kv if plan is None else plan.deployment.kv.name,
        "gpus": None if plan is None else plan.deployment.gpus,
        "fits": c.fits,
        "reason": c.reason or None,
        "kv_pool_tokens": None if plan is None or pool is None else pool.size_tokens * plan.deployment.dp,
        "users": None if c.limits is None else users_json(c.limits),
        "throughput_tokens_per_s": None if point is None else point.output_tokens_per_s,
        "throughput_tokens_per_s_per_gpu": c.tokens_per_s_per_gpu,
        "tpot_ms": None if point is None else point.tpot_s * 1e3,
        "ttft_ms": None if point is None else point.ttft_s * 1e3,
    }


_HEADS = (
    "gpus",
    "weights / KV",
    "pool tokens",
    "pool users",
    "users",
    "tokens/s",
    "a GPU",
    "TPOT ms",
    "TTFT ms",
    "binding",
)


def comparison_table(candidates: Sequence[Candidate], width: int) -> str:
    """One row a combination; below them those that do not fit, each with its reason."""
    found = [c for c in candidates if c.point is not None]
    parts = [columns([_HEADS, *map(_candidate_cells, found)], width, right=range(2, len(_HEADS) - 1))] if found else []
    lost = [(*_candidate_head(c), c.reason) for c in candidates if c.point is None]
    if lost:
        parts.append(f"Does not fit\n{columns(lost, width)}")
    return "\n\n".join(parts)


def _candidate_head(c: Candidate) -> tuple[str, str]:
    ways = f"TP{c.choice.tp}" + (f" PP{c.choice.pp}" if c.choice.pp > 1 else "")
    weights, kv = (
        (c.choice.weights, c.choice.kv)
        if c.plan is None
        else (c.plan.deployment.weights.name, c.plan.deployment.kv.name)
    )
    return f"{c.choice.gpu or 'given pool'} {ways}", f"{weights} / {kv}"


def _candidate_cells(c: Candidate) -> list[str]:
    document = _candidate_json(c)
    assert c.limits is not None
    assert c.point is not None
    return [
        *_candidate_head(c),
        f"{document['kv_pool_tokens']:,}",
        f"{c.limits.kv_staggered:,.0f}",
        f"{c.limits.users:,.0f}",
        f"{c.point.output_tokens_per_s:,.0f}",
        f"{document['throughput_tokens_per_s_per_gpu']:,.0f}",
        f"{c.point.tpot_s * 1e3:.1f}",
        f"{c.point.ttft_s * 1e3:,.0f}",
        c.limits.binding,
    ]
