"""guidellm's ``benchmarks.json`` (guidellm 0.8.1, ``metadata.version`` 2: ``guidellm/schemas/request_stats.py``,
``benchmark/schemas/generative``).

Its words and ours: ``time_to_first_token_ms`` is our TTFT, ``inter_token_latency_ms`` our TPOT (its mean weighs every
token alike: our token-weighted one). Its ``time_per_output_token_ms`` contains the time to the first token: it is no TPOT
of ours and is only held against e2e over tokens. ``request_latency`` ends with the stream: our stream_end. Its clock is
wall time. Failed requests are kept apart, so are those that its end cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from harness.errors import UsageError
from harness.formats.checks import Printed
from harness.formats.failures import failure_of, one_line_of
from harness.formats.imported import ImportedRun, ImportedStage, Row, row_with, slots

FORMAT = "guidellm"
_MS = 1000.0
_PRINTED = (
    ("time_to_first_token_ms", "ttft_ms.mean"),
    ("time_to_first_output_token_ms", "ttfa_ms.mean"),
    ("inter_token_latency_ms", "tpot_ms_token_weighted"),
    ("time_per_output_token_ms", "e2e_ms_per_token"),
)
_WALL_CLOCK = "guidellm stamps with the wall clock: a correction of that clock during the run is in its times"
_TPOT = (
    "guidellm's time_per_output_token_ms contains the time to the first token; our TPOT is its inter_token_latency_ms"
)
_SOURCE = "guidellm does not say whether a token count is the server's or a tokenizer's: output_tokens_source is null"


def is_result(document: Any) -> bool:
    return isinstance(document, dict) and isinstance(document.get("benchmarks"), list) and "metadata" in document


def read(name: str, document: Mapping[str, Any]) -> ImportedRun:
    """The run in a result, one stage for each of its benchmarks.

    Raises:
        UsageError: it has another shape than version 2; names the file.
    """
    metadata = document["metadata"]
    if metadata.get("version") != 2:
        raise UsageError(
            f"{name}: guidellm results of version {metadata.get('version')!r}, this reads 2",
            "run guidellm 0.7 or later",
        )
    spec = (document.get("config") or {}).get("spec") or {}
    backend = spec.get("backend") or {}
    try:
        stages = [_stage(name, benchmark) for benchmark in document["benchmarks"]]
        started = document["benchmarks"][0].get("start_time") if document["benchmarks"] else None
    except (KeyError, TypeError) as error:
        raise UsageError(f"{name}: not what guidellm 0.8 writes: {type(error).__name__}: {error}") from error
    if not stages:
        raise UsageError(f"{name}: no benchmark in it")
    return ImportedRun(
        format=FORMAT,
        tool_version=metadata.get("guidellm_version"),
        model=str(backend.get("model") or ""),
        base_url=str(backend.get("target") or ""),
        endpoint="chat" if "chat" in str(backend.get("request_format")) else "completions",
        started=_iso(started),
        stages=stages,
        warnings=(_TPOT, _WALL_CLOCK, _SOURCE),
    )


def _iso(seconds: Any) -> str | None:
    return (
        datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if isinstance(seconds, int | float) else None
    )


def _stage(name: str, benchmark: Mapping[str, Any]) -> ImportedStage:
    strategy = benchmark["config"]["strategy"]
    users, rate, warnings = _level(name, strategy, benchmark)
    requests = benchmark["requests"]
    kept = {kind: requests.get(kind) or [] for kind in ("successful", "incomplete", "errored")}
    made = benchmark["metrics"]["request_totals"]
    lacking = sum(made[kind] - len(kept[kind]) for kind in kept)
    if lacking > 0:
        warnings.append(
            f"{name}: {lacking} of {made['total']} requests are not in the file (sampled): the rest is measured"
        )
    rows = any(kept.values())
    return ImportedStage(
        file=name,
        users=users,
        request_rate=rate,
        rows=_rows(kept) if rows else None,
        printed=[] if lacking > 0 else _printed(benchmark["metrics"]),
        aggregates=_aggregates(benchmark),
        warnings=tuple(warnings),
    )


def _level(
    name: str, strategy: Mapping[str, Any], benchmark: Mapping[str, Any]
) -> tuple[int | None, float | None, list[str]]:
    kind = strategy["type_"]
    if kind == "synchronous":
        return 1, None, []
    if kind == "concurrent":
        return int(strategy["streams"]), None, []
    if kind in ("constant", "poisson"):
        return strategy.get("max_concurrency"), float(strategy["rate"]), []
    peak = max(1, round(benchmark["metrics"]["request_concurrency"]["total"]["max"]))
    users = strategy.get("max_concurrency") or peak
    return users, None, [f"{name}: strategy {kind}: read as a level of {users} users, the most that were in flight"]


def _printed(metrics: Mapping[str, Any]) -> list[Printed]:
    """Means and totals; its percentiles are those of a step function, ours are interpolated."""
    found = []
    for theirs, ours in _PRINTED:
        stats = (metrics.get(theirs) or {}).get("successful")
        if stats and stats["count"]:
            found.append(Printed(f"{theirs}.mean", float(stats["mean"]), ours))
    latency = metrics["request_latency"]["successful"]
    if latency["count"]:
        found.append(Printed("request_latency.mean (ms)", latency["mean"] * _MS, "stream_end_ms.mean"))
    for theirs, ours in (("prompt_token_count", "prompt_tokens"), ("output_token_count", "output_tokens")):
        found.append(Printed(f"{theirs}.total_sum", metrics[theirs]["successful"]["total_sum"], ours))
    found.append(Printed("request_totals.successful", metrics["request_totals"]["successful"], "ok"))
    return found


def _aggregates(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    metrics, made = benchmark["metrics"], benchmark["metrics"]["request_totals"]
    tokens = metrics["output_token_count"]["successful"]
    prompts = metrics["prompt_token_count"]["successful"]
    duration_s = float(benchmark["duration"])
    itl = metrics["inter_token_latency_ms"]["successful"]
    return {
        "ttft_ms": _stats(metrics["time_to_first_token_ms"]["successful"]),
        "tpot_ms_token_weighted": itl["mean"] if itl["count"] else None,
        "window": {"start_s": 0.0, "end_s": duration_s, "steady": False},
        "requests": {
            "ok": made["successful"],
            "failed": made["errored"],
            "by_failure": {},
            "incomplete": made["incomplete"],
        },
        "output_tokens_per_s": tokens["total_sum"] / duration_s if duration_s else None,
        "requests_per_s": made["successful"] / duration_s if duration_s else None,
        "totals": {
            "output_tokens": tokens["total_sum"],
            "prompt_tokens": prompts["total_sum"],
            "output_tokens_mean": tokens["mean"] if tokens["count"] else None,
            "prompt_tokens_mean": prompts["mean"] if prompts["count"] else None,
            "duration_s": duration_s,
        },
    }


def _stats(theirs: Mapping[str, Any]) -> dict[str, Any]:
    if not theirs["count"]:
        return {}
    percentiles = {key: theirs["percentiles"][key] for key in ("p50", "p90", "p95", "p99")}
    return {
        "n": theirs["count"],
        "mean": theirs["mean"],
        "std": theirs["std_dev"],
        "min": theirs["min"],
        "max": theirs["max"],
    } | percentiles


def _rows(kept: Mapping[str, list[dict[str, Any]]]) -> Iterator[Row]:
    everything = [(kind, request) for kind, requests in kept.items() for request in requests]
    timings = [request["info"]["timings"] for _, request in everything]
    # a request that was never sent has no start
    starts = [_first(t, "request_start", "resolve_start", "dequeued", "queued") for t in timings]
    ends = [
        _first(t, "request_end", "resolve_end", "finalized") or start for t, start in zip(timings, starts, strict=True)
    ]
    origin = min(starts, default=0.0)
    users = slots(starts, ends)
    for (kind, request), timing, start, user in zip(everything, timings, starts, users, strict=True):
        sent = timing.get("request_start")
        meant = timing.get("targeted_start") or start
        known: Row = {
            "request_id": str(request["request_id"]),
            "user": user,
            "scheduled_ms": (meant - origin) * _MS,
            "sent_ms": None if sent is None else (sent - origin) * _MS,
            "prompt_tokens": request.get("prompt_tokens"),
            "asked_output_tokens": _asked(request.get("request_args")),
        }
        yield row_with(known | _OUTCOMES[kind](request, timing, sent))


def _first(timing: Mapping[str, Any], *names: str) -> float:
    return next((float(timing[name]) for name in names if timing.get(name) is not None), 0.0)


def _streamed(request: Mapping[str, Any], timing: Mapping[str, Any], sent: float | None) -> Row:
    if sent is None:
        return {}
    names = {
        "ttft_ms": "first_token_iteration",
        "ttfa_ms": "first_output_token_iteration",
        "e2e_ms": "last_token_iteration",
    }
    known: Row = {
        ours: (timing[theirs] - sent) * _MS for ours, theirs in names.items() if timing.get(theirs) is not None
    }
    if timing.get("request_end") is not None:
        known["stream_end_ms"] = (timing["request_end"] - sent) * _MS
    return known | {"chunks": timing.get("token_iterations") or 0, "output_tokens": request.get("output_tokens")}


def _good(request: Mapping[str, Any], timing: Mapping[str, Any], sent: float | None) -> Row:
    known = _streamed(request, timing, sent)
    tokens = known.get("output_tokens")
    if tokens is not None and tokens > 1 and known.get("e2e_ms") is not None and known.get("ttft_ms") is not None:
        known["tpot_ms"] = (known["e2e_ms"] - known["ttft_ms"]) / (tokens - 1)
    return known | {"outcome": "ok", "http_status": 200}


def _cut(request: Mapping[str, Any], timing: Mapping[str, Any], sent: float | None) -> Row:
    return _streamed(request, timing, sent) | {"outcome": "incomplete", "output_tokens": None}


def _errored(request: Mapping[str, Any], timing: Mapping[str, Any], sent: float | None) -> Row:
    text = str(request["info"].get("error") or request["info"].get("traceback") or "")
    kind, status = failure_of(text)
    return {
        "outcome": "failed",
        "failure": kind,
        "http_status": status,
        "message": one_line_of(text) or "no reason given",
    }


_OUTCOMES = {"successful": _good, "incomplete": _cut, "errored": _errored}


def _asked(arguments: Any) -> int | None:
    """The answer's length that the request body asked for."""
    try:
        body = orjson.loads(arguments)["body"]
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
    return asked if isinstance(asked, int) else None
