"""Runs to report: the reference run with readings of /metrics beside it, and one that is hostile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson

from calibration.calibration_file import Calibration, FitRecord, record_deployment
from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.priors import physics_of, prior_factors

REFERENCE = Path(__file__).resolve().parents[2] / "results" / "reference" / "vllm-0.32.0-cpu-small-pool"
HOSTILE = '</style><script>document.title="owned"</script><img src=x onerror=alert(1)>&"\'\x00'


def scrape(at_s: float, **snapshot: Any) -> dict[str, Any]:
    return {"at_ms": at_s * 1e3, "duration_ms": 5.0, "snapshot": snapshot}


def scrapes(count: int = 700) -> list[dict[str, Any]]:
    """A pool that fills and empties; two preemptions a hundred readings, one moment that is full."""
    rows = []
    for i in range(count):
        usage = 1.0 if i == count // 2 else 0.5
        counted = {"preemptions": 2 * (i // 100), "generation_tokens": 10 * i}
        rows.append(scrape(i * 0.5, kv_cache_usage=0.4, kv_cache_usage_max=usage, running=4, waiting=i % 2, **counted))
    return rows


def run_folder(folder: Path, *, readings: bool = True) -> Path:
    """A copy of the reference run."""
    shutil.copytree(REFERENCE, folder, ignore=shutil.ignore_patterns("*.html", "*.png"))
    if readings:
        (folder / "scrapes.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in scrapes()))
    return folder


def hostile_folder(folder: Path) -> Path:
    """The same run, every text of it markup that would run."""
    run_folder(folder)
    for name in ("run.json", "summary.json"):
        document = orjson.loads((folder / name).read_bytes())
        (folder / name).write_bytes(orjson.dumps(_poisoned(document)))
    return folder


def _poisoned(value: Any) -> Any:
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, list):
        return [_poisoned(item) for item in value] or [HOSTILE]
    if isinstance(value, dict):
        return {key: _poisoned(item) for key, item in value.items()} if value else value
    return value


def calibration(max_model_len: int | None = None) -> Calibration:
    """Nothing but priors, of a deployment of the catalog."""
    deployment = resolve_deployment(find_model("llama-3.1-8b"), gpu=find_gpu("h100-sxm"), max_model_len=max_model_len)
    return Calibration(
        deployment=record_deployment(deployment, "llama-3.1-8b"),
        factors=prior_factors(deployment, physics_of(deployment)),
        used=(),
        left_out=(),
        held_out=(),
        fit=FitRecord(condition=None, scatter={}, findings={}),
        runs=(),
        notes=("one shape only",),
        harness_version="0.1.0",
        created="2026-11-30T12:00:00+00:00",
    )
