"""``vllm bench serve --save-result``: read, with ``--save-detailed`` and without (vLLM 0.32.0,
``vllm/benchmarks/serve.py`` ``benchmark`` and ``main_async``; ``lib/endpoint_request_func.py``).

Its words and ours: ``ttfts`` are ours on /v1/completions; on chat it stamps the first chunk with ``choices``, which may be
a role alone. ``latencies`` end with the last such chunk: our e2e. TPOT is ours with one token in the first delta. Its "ITL"
are gaps between chunks: our chunk_gap. Start is the call, before the connection. It says nothing of the stream's end, of
finish reasons, or of where a token count comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from harness.formats.checks import Printed
from harness.formats.failures import failure_of, one_line_of
from harness.formats.imported import ImportedRun, ImportedStage, Row, row_with, slots

FORMAT = "vllm-bench"
_MS = 1000.0
#: keys that every result has, of every version since 0.5
NEEDED = ("duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput")
_NAMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "chunk_gap_ms", "e2el": "e2e_ms"}
_ALWAYS_UNKNOWN = (
    "vllm bench serve keeps no finish reasons, no end of the stream, and not where token counts come from: null"
)
_ROLE_CHUNK = "on chat, vllm bench serve stamps TTFT at the first chunk, which may be a role without content"


def is_result(document: Any) -> bool:
    """Whether a JSON document is one."""
    return isinstance(document, dict) and all(key in document for key in NEEDED)


def read(files: Sequence[tuple[str, Mapping[str, Any]]]) -> ImportedRun:
    """The run in these results, one stage each.

    Args:
        files: name and JSON document of each.
    """
    first = files[0][1]
    endpoint = "chat" if "chat" in str(first.get("endpoint_type") or first.get("backend") or "") else "completions"
    return ImportedRun(
        format=FORMAT,
        tool_version=None,
        model=str(first.get("model_id") or ""),
        base_url="(not in the file)",
        endpoint="chat" if endpoint == "chat" else "completions",
        started=_date(first.get("date")),
        stages=[_stage(name, document) for name, document in files],
        warnings=(_ALWAYS_UNKNOWN, *((_ROLE_CHUNK,) if endpoint == "chat" else ())),
    )


def _date(text: Any) -> str | None:
    """``20261130-144317``, local time of that machine -> ISO 8601 without a zone."""
    try:
        return datetime.strptime(str(text), "%Y%m%d-%H%M%S").replace(tzinfo=UTC).replace(tzinfo=None).isoformat()
    except ValueError:
        return None


def _stage(name: str, document: Mapping[str, Any]) -> ImportedStage:
    rate = document.get("request_rate")
    request_rate = float(rate) if isinstance(rate, int | float) else None
    users, warnings = document.get("max_concurrency"), []
    if users is None and request_rate is None:
        users = max(1, int(document["completed"]) + int(document.get("failed") or 0))
        warnings.append(f"{name}: all {users} requests were sent at once: a level of as many users, one request each")
    if document.get("ramp_up_strategy"):
        warnings.append(f"{name}: the rate was ramped ({document['ramp_up_strategy']}); our stages hold one rate")
    detailed = all(key in document for key in ("ttfts", "output_lens", "input_lens"))
    if not detailed:
        warnings.append(f"{name}: saved without --save-detailed: no requests, only the numbers it printed")
    elif "start_times" not in document:
        warnings.append(f"{name}: no start_times (an older vLLM): when requests were sent is unknown, so no rates")
    return ImportedStage(
        file=name,
        users=users,
        request_rate=request_rate,
        rows=_rows(document) if detailed else None,
        printed=_printed(document),
        aggregates=_aggregates(document),
        warnings=tuple(warnings),
    )


def _printed(document: Mapping[str, Any]) -> list[Printed]:
    found = []
    for short, ours in _NAMES.items():
        for theirs, key in ((f"mean_{short}_ms", "mean"), (f"median_{short}_ms", "p50"), (f"p99_{short}_ms", "p99")):
            if isinstance(document.get(theirs), int | float):
                found.append(Printed(theirs, float(document[theirs]), f"{ours}.{key}"))
    for theirs, ours in (
        ("total_input_tokens", "prompt_tokens"),
        ("total_output_tokens", "output_tokens"),
        ("completed", "ok"),
    ):
        found.append(Printed(theirs, float(document[theirs]), ours))
    if "output_throughput" in document and "start_times" in document:
        why = "its duration also counts the time before the first send and after the last chunk"
        found.append(
            Printed("output_throughput", float(document["output_throughput"]), "output_tokens_per_s", 0.02, why)
        )
    return found


def _aggregates(document: Mapping[str, Any]) -> dict[str, Any]:
    """Its printed numbers under our keys; what it did not print stays null."""
    completed, duration_s = int(document["completed"]), float(document["duration"])
    stats: dict[str, Any] = {}
    for short, ours in _NAMES.items():
        known = {key: document.get(f"{prefix}_{short}_ms") for prefix, key in _STATS.items()}
        known = {key: value for key, value in known.items() if value is not None}
        if known:
            # the gaps of its "ITL" were never counted in the file
            stats[ours] = known | ({} if short == "itl" else {"n": completed})
    mean = {f"{ours}_mean": document[theirs] / completed if completed else None for theirs, ours in _TOTALS.items()}
    return {
        **stats,
        "window": {"start_s": 0.0, "end_s": duration_s, "steady": False},
        "requests": {"ok": completed, "failed": int(document.get("failed") or 0), "by_failure": {}, "incomplete": 0},
        "output_tokens_per_s": document.get("output_throughput"),
        "output_tokens_per_s_per_user": _per_user(document),
        "total_tokens_per_s": document.get("total_token_throughput"),
        "requests_per_s": document.get("request_throughput"),
        "totals": {**{ours: document[theirs] for theirs, ours in _TOTALS.items()}, **mean, "duration_s": duration_s},
    }


_STATS = {"mean": "mean", "std": "std", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
_TOTALS = {"total_output_tokens": "output_tokens", "total_input_tokens": "prompt_tokens"}


def _per_user(document: Mapping[str, Any]) -> float | None:
    rate, users = document.get("output_throughput"), document.get("max_concurrency")
    return rate / users if rate is not None and users else None


def _rows(document: Mapping[str, Any]) -> Iterator[Row]:
    ttfts, tokens, prompts = document["ttfts"], document["output_lens"], document["input_lens"]
    n = len(ttfts)
    itls = document.get("itls") or [None] * n
    errors = document.get("errors") or [""] * n
    latencies = document.get("latencies") or [ttft + sum(gaps or ()) for ttft, gaps in zip(ttfts, itls, strict=True)]
    starts = document.get("start_times")
    origin = min(starts, default=0.0) if starts else 0.0
    users = slots(starts, [at + took for at, took in zip(starts, latencies, strict=True)]) if starts else range(n)
    waits = document.get("queue_times") if isinstance(document.get("request_rate"), int | float) else None
    for i in range(n):
        sent_ms = None if starts is None else (starts[i] - origin) * _MS
        known: Row = {
            "user": users[i],
            # closed loop: a request is meant for the moment its place is free, which is when it was sent
            "scheduled_ms": (sent_ms or 0.0) - (waits[i] * _MS if waits else 0.0),
            "sent_ms": sent_ms,
            "prompt_tokens": prompts[i],
        }
        # a failed request has output length 0 (calculate_metrics), whether or not its reason phrase is empty
        if errors[i] or not tokens[i]:
            yield row_with(known | _failed(errors[i]))
        else:
            yield row_with(known | _good(ttfts[i], latencies[i], tokens[i], itls[i]))


def _failed(error: str) -> Row:
    kind, status = failure_of(error)
    return {
        "outcome": "failed",
        "failure": kind,
        "http_status": status,
        "message": one_line_of(error) or "no reason given",
    }


def _good(ttft_s: float, latency_s: float, tokens: int, gaps_s: Sequence[float] | None) -> Row:
    known: Row = {
        "outcome": "ok",
        "http_status": 200,
        "output_tokens": tokens,
        "ttft_ms": ttft_s * _MS,
        "e2e_ms": latency_s * _MS,
        "tpot_ms": (latency_s - ttft_s) * _MS / (tokens - 1) if tokens > 1 else None,
    }
    if gaps_s is not None:
        known |= {"chunks": len(gaps_s) + 1, "chunk_gaps_ms": [gap * _MS for gap in gaps_s]}
    return known
