"""What ``predict`` shows: JSON of a prediction, tables for people. Pure: values in, values out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from calibration.predict import Overloaded
from harness.cli.plan_limits import estimate_json, limit_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from calibration.limits import Limits
    from calibration.predict import Load, Prediction
    from calibration.prediction import Estimate

#: how a basis is marked in a table
_MARKS = {"measured": "measured", "interpolated": "interpolated", "extrapolated": "extrapolated !"}


def _load_json(load: Load) -> dict[str, Any]:
    return {
        "users": load.users if load.request_rate is None else load.max_in_flight,
        "request_rate": load.request_rate,
        "prompt_tokens": load.shape.prompt_tokens,
        "output_tokens": load.shape.output_tokens,
        "think_s": load.shape.think_s,
    }


def prediction_json(found: Prediction | Overloaded) -> dict[str, Any]:
    """One entry of ``predictions``; latencies in ms, each ``{mean, p50, p90, p95, p99}`` of ``{value, low, high, basis}``.
    A load that cannot be served has ``most_requests_per_s`` and nothing else."""
    if isinstance(found, Overloaded):
        return {
            **_load_json(found.load),
            "served": False,
            "most_requests_per_s": estimate_json(found.most_requests_per_s),
        }
    return {
        **_load_json(found.load),
        "served": True,
        "method": found.method,
        "regime": found.regime,
        "basis": found.basis,
        "in_flight": found.in_flight,
        "running": found.running,
        "output_tokens_per_s": estimate_json(found.output_tokens_per_s),
        "output_tokens_per_s_per_user": estimate_json(found.output_tokens_per_s_per_user),
        "requests_per_s": estimate_json(found.requests_per_s),
        **{f"{name}_ms": _latency_json(found, name) for name in ("ttft", "tpot", "e2e")},
        "waiting": found.waiting,
        "kv_cache_usage": found.kv_cache_usage,
        "preemptions_per_request": found.preemptions_per_request,
        "notes": list(found.notes),
    }


def _latency_json(found: Prediction, name: str) -> dict[str, Any]:
    mean: Estimate = getattr(found, f"{name}_s")
    percentiles = found.percentiles.get(name, {})
    return {"mean": estimate_json(mean, 1e3)} | {
        key: estimate_json(percentiles.get(key), 1e3) for key in ("p50", "p90", "p95", "p99")
    }


def loads_table(found: Sequence[Prediction | Overloaded]) -> Table:
    """One row a load: means with their 90 % interval, the 99th percentiles beside them."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("users", justify="right", no_wrap=True)
    for name in ("tok/s", "TPOT ms", "p99", "TTFT ms", "p50", "p99", "waiting"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("basis", no_wrap=True)
    for one in found:
        table.add_row(*_cells(one))
    return table


def _cells(found: Prediction | Overloaded) -> list[str]:
    if isinstance(found, Overloaded):
        most = _spread(found.most_requests_per_s)
        return [_level(found.load), "", "", "", "", "", "", "", f"cannot be served: at most {most} requests/s"]
    tpot, ttft = (found.percentiles.get(name, {}) for name in ("tpot", "ttft"))
    return [
        _level(found.load),
        _spread(found.output_tokens_per_s),
        _spread(found.tpot_s, 1e3),
        _value(tpot.get("p99")),
        _spread(found.ttft_s, 1e3),
        _value(ttft.get("p50")),
        _value(ttft.get("p99")),
        "-" if found.waiting is None else f"{found.waiting:,.1f}",
        _MARKS[found.basis] + (", twin" if found.method == "twin" else ""),
    ]


def _level(load: Load) -> str:
    return str(load.users) if load.request_rate is None else f"{load.request_rate:g}/s"


def _spread(estimate: Estimate, scale: float = 1.0) -> str:
    value, low, high = (significant(x * scale) for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} - {high})"


def _value(estimate: Estimate | None) -> str:
    return "-" if estimate is None else significant(estimate.value * 1e3)


def significant(value: float) -> str:
    """Three digits that count."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def limits_table(limits: Limits) -> Table:
    """The saturation table: every limit on users, the binding one marked."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, justify in (("limit", "left"), ("users", "right"), ("meaning", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in limit_rows(limits, "sequences vLLM runs at once"):
        table.add_row(*row)
    return table


def slo_sentence(users: Estimate, slo: str) -> str:
    """How many users fit."""
    low, high = (math.floor(x) if math.isfinite(x) else x for x in (users.low, users.high))
    upto = f"{high:,}" if math.isfinite(high) else "more than any limit shows"
    return f"Within {slo} (means, ms) and every other limit fit {math.floor(users.value):,} users ({low:,} to {upto}, 90 %)."


def notes(found: Sequence[Prediction | Overloaded]) -> list[str]:
    """What was said of any load, each once."""
    said = [note for one in found if not isinstance(one, Overloaded) for note in one.notes]
    return list(dict.fromkeys(said))
