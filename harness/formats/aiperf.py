"""aiperf's artifacts (aiperf 0.13.0, schema 1.4): ``profile_export.jsonl``, a request a line, and
``profile_export_aiperf.json``, the numbers it printed (``aiperf/metrics/types``, ``common/models/record_export_models.py``).

Its words and ours: ``time_to_first_token`` is our TTFT, ``time_to_first_output_token`` our TTFA, ``request_latency`` (to the
last content) our e2e, ``inter_token_latency`` our TPOT, ``inter_chunk_latency`` our chunk gaps. Token counts are its own
tokenizer's unless the server's usage is there too. The file keeps no end of the stream and no finish reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from harness.errors import UsageError
from harness.formats.checks import Printed
from harness.formats.failures import failure_of
from harness.formats.imported import ImportedRun, ImportedStage, Row, row_with
from harness.measure.window import InFlight

FORMAT = "aiperf"
_NS_PER_MS = 1e6
_PRINTED = (
    ("time_to_first_token", "ttft_ms"),
    ("time_to_first_output_token", "ttfa_ms"),
    ("inter_token_latency", "tpot_ms"),
    ("request_latency", "e2e_ms"),
    ("inter_chunk_latency", "chunk_gap_ms"),
)
_STATS = {
    "count": "n",
    "avg": "mean",
    "std": "std",
    "p50": "p50",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
    "min": "min",
    "max": "max",
}
#: lateness of the tool's own that is worth a word: the limit of harness.measure.health
LATE_MS = 100.0
_UNKNOWN = "aiperf keeps no finish reasons and no end of the stream: null"
_CLOCK = "when requests were sent is wall time in aiperf's records; latencies are of its monotonic clock"


def is_summary(document: Any) -> bool:
    return isinstance(document, dict) and "aiperf_version" in document


def is_record(document: Any) -> bool:
    return (
        isinstance(document, dict)
        and {"metadata", "metrics"} <= document.keys()
        and "x_request_id" in document["metadata"]
    )


def companions(path: Path) -> tuple[Path | None, Path | None]:
    """The records and the summary that belong together, from either or from their folder; None where one is missing."""
    if path.is_dir():
        records, summary = path / "profile_export.jsonl", path / "profile_export_aiperf.json"
    elif path.suffix == ".jsonl":
        records, summary = path, path.with_name(path.name.removesuffix("profile_export.jsonl") + "aiperf.json")
        if path.with_name(f"{path.stem}_aiperf.json").is_file():
            summary = path.with_name(f"{path.stem}_aiperf.json")
    else:
        records, summary = path.with_name(path.name.removesuffix("_aiperf.json") + ".jsonl"), path
        if path.name != "profile_export_aiperf.json":
            records = path.with_name(path.name.removesuffix("aiperf.json") + "profile_export.jsonl")
    return records if records.is_file() else None, summary if summary.is_file() else None


def read(path: Path) -> ImportedRun:
    """The run of which ``path`` is the records, the summary or the folder.

    Raises:
        UsageError: a file does not read, or neither is there.
    """
    records, summary = companions(path)
    document = _document(summary) if summary is not None else {}
    config = document.get("input_config") or {}
    endpoint = config.get("endpoint") or {}
    users, rate, warnings = _level(path, config)
    late = document.get("credit_to_start_latency") or {}
    if (late.get("p99") or 0.0) > LATE_MS:
        warnings.append(
            f"{path.name}: aiperf itself was late: {late['avg']:.0f} ms from a free place to the send on average, p99"
            f" {late['p99']:.0f} ms: its times are of the client as well as of the server"
        )
    counted_here = "usage_completion_tokens" not in document and summary is not None
    known = [_UNKNOWN, _CLOCK, *warnings]
    if counted_here:
        known.append("token counts are aiperf's own tokenizer's, not the server's usage")
    if records is None:
        known.append(f"{path.name}: no profile_export.jsonl beside it: no requests, only the numbers it printed")
    models = (config.get("models") or {}).get("items") or [{}]
    return ImportedRun(
        format=FORMAT,
        tool_version=document.get("aiperf_version"),
        model=str(models[0].get("name") or ""),
        base_url=str((endpoint.get("urls") or [""])[0]),
        endpoint="chat" if endpoint.get("type", "chat") == "chat" else "completions",
        started=document.get("start_time"),
        stages=[
            ImportedStage(
                file=(records or summary or path).name,
                users=users if users is not None or rate is not None else _users_in(records),
                request_rate=rate,
                rows=None if records is None else _rows(records, _asked(config), closed=rate is None),
                printed=_printed(document),
                aggregates=_aggregates(document),
            )
        ],
        warnings=tuple(known),
    )


def _document(path: Path) -> dict[str, Any]:
    try:
        document = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not is_summary(document):
        raise UsageError(f"{path}: not what aiperf writes: aiperf_version is missing")
    return dict(document)


def _level(path: Path, config: Mapping[str, Any]) -> tuple[int | None, float | None, list[str]]:
    phases = [phase for phase in config.get("phases") or [] if phase.get("kind", "profiling") == "profiling"]
    if not phases:
        return (
            None,
            None,
            [f"{path.name}: no word of the level asked: the most requests in flight at once are taken for it"],
        )
    phase = phases[0]
    more = [f"{path.name}: {len(phases)} profiling phases are read as one level"] if len(phases) > 1 else []
    users, rate = phase.get("concurrency"), phase.get("rate") or phase.get("request_rate")
    return (int(users) if users else None), (float(rate) if rate else None), more


def _asked(config: Mapping[str, Any]) -> int | None:
    """The one length of answers asked; None where lengths were drawn."""
    datasets = config.get("datasets") or [{}]
    asked = ((datasets[0].get("prompts") or {}).get("osl")) or {}
    mean = asked.get("mean")
    return int(mean) if mean and not asked.get("stddev") else None


def _printed(document: Mapping[str, Any]) -> list[Printed]:
    found = []
    for theirs, ours in _PRINTED:
        stats = document.get(theirs) or {}
        found += [
            Printed(f"{theirs}.{key}", float(stats[key]), f"{ours}.{_STATS[key]}")
            for key in ("avg", "p50", "p99")
            if stats.get(key) is not None
        ]
    for theirs, ours in (("total_isl", "prompt_tokens"), ("total_osl", "output_tokens"), ("request_count", "ok")):
        if theirs in document:
            found.append(Printed(theirs, float(document[theirs]["avg"]), ours))
    if "output_token_throughput" in document:
        why = "its time runs from the first send to the last response, the stream's end included"
        found.append(
            Printed(
                "output_token_throughput", document["output_token_throughput"]["avg"], "output_tokens_per_s", 0.02, why
            )
        )
    return found


def _aggregates(document: Mapping[str, Any]) -> dict[str, Any]:
    """Its printed numbers under our keys."""

    def mean(name: str) -> float | None:
        value = (document.get(name) or {}).get("avg")
        return None if value is None else float(value)

    stats = {
        ours: {_STATS[key]: value for key, value in document[theirs].items() if key in _STATS and value is not None}
        for theirs, ours in _PRINTED
        if theirs in document
    }
    duration_s = mean("benchmark_duration")
    return {
        **stats,
        "window": None if duration_s is None else {"start_s": 0.0, "end_s": duration_s, "steady": False},
        "requests": {
            "ok": int(mean("request_count") or 0),
            "failed": int(mean("error_request_count") or 0),
            "by_failure": {},
            "incomplete": 0,
        },
        "output_tokens_per_s": mean("output_token_throughput"),
        "total_tokens_per_s": mean("total_token_throughput"),
        "requests_per_s": mean("request_throughput"),
        "totals": {
            "output_tokens": mean("total_osl"),
            "prompt_tokens": mean("total_isl"),
            "output_tokens_mean": mean("output_sequence_length"),
            "prompt_tokens_mean": mean("input_sequence_length"),
            "duration_s": duration_s,
        },
    }


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise UsageError(f"{path}:{number}: not JSON: {error}") from error
            if not is_record(record):
                raise UsageError(f"{path}:{number}: not a record of aiperf: metadata or metrics are missing")
            if record["metadata"].get("benchmark_phase", "profiling") == "profiling":
                yield record


def _users_in(path: Path | None) -> int:
    """The most requests that were in flight at once."""
    if path is None:
        return 1
    spans = [(r["metadata"]["request_start_ns"], r["metadata"]["request_end_ns"]) for r in _lines(path)]
    if not spans:
        return 1
    starts, ends = np.array(spans, dtype=np.float64).T
    return max(1, int(InFlight.of(starts, ends).counts.max()))


def _rows(path: Path, asked: int | None, *, closed: bool) -> Iterator[Row]:
    origin_ns = min((record["metadata"]["request_start_ns"] for record in _lines(path)), default=0)
    for record in _lines(path):
        metadata, metrics = record["metadata"], record["metrics"]
        start_ns = metadata["request_start_ns"]
        known: Row = {
            "request_id": metadata["x_request_id"],
            "user": metadata.get("session_num") or 0,
            # a closed loop has no times to keep: what its lateness costs is seen in the streams in flight
            "scheduled_ms": ((start_ns if closed else metadata.get("credit_issued_ns") or start_ns) - origin_ns)
            / _NS_PER_MS,
            "sent_ms": (start_ns - origin_ns) / _NS_PER_MS,
            "prompt_tokens": _value(metrics, "usage_prompt_tokens", "input_sequence_length"),
            "asked_output_tokens": asked,
        }
        yield row_with(known | _outcome(record, metadata, metrics))


def _value(metrics: Mapping[str, Any], *names: str) -> Any:
    return next((metrics[name]["value"] for name in names if name in metrics), None)


def _outcome(record: Mapping[str, Any], metadata: Mapping[str, Any], metrics: Mapping[str, Any]) -> Row:
    error = record.get("error")
    if metadata.get("was_cancelled"):
        return {"outcome": "incomplete"}
    if error:
        kind, status = failure_of(f"{error.get('type') or ''}: {error.get('message') or ''}", error.get("code"))
        return {"outcome": "failed", "failure": kind, "http_status": status, "message": str(error.get("message"))[:300]}
    gaps = _value(metrics, "inter_chunk_latency")
    usage = _value(metrics, "usage_completion_tokens")
    return {
        "outcome": "ok",
        "http_status": 200,
        "output_tokens": usage if usage is not None else _value(metrics, "output_sequence_length"),
        "output_tokens_source": "usage" if usage is not None else "tokenizer",
        "ttft_ms": _value(metrics, "time_to_first_token"),
        "ttfa_ms": _value(metrics, "time_to_first_output_token"),
        "e2e_ms": _value(metrics, "request_latency"),
        "tpot_ms": _value(metrics, "inter_token_latency"),
        **({"chunks": len(gaps) + 1, "chunk_gaps_ms": gaps} if isinstance(gaps, list) else {}),
    }
