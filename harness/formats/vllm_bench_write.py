"""A run as ``vllm bench serve --save-result --save-detailed`` would have saved it (vLLM 0.32.0,
``vllm/benchmarks/serve.py``), for whatever reads those files: a stage is one result.

Its definitions hold in it: every good request of the stage counts, fill and drain included; its "ITL" are our chunk gaps
(only there with ``--save-gaps``); lengths of failed requests are 0 as it leaves them. Streams that the stage's end cut are
left out: it knows none. What it has and we do not (``max_output_tokens_per_s``, ``max_concurrent_requests``) is null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib.metadata import version
from typing import Any

import numpy as np
import orjson

from calibration.trace import Bools, Floats
from harness.measure.from_records import Requests
from harness.measure.stats import percentile_of_sorted
from harness.store import RunData

_PERCENTILES = (50, 90, 95, 99)


def results(run: RunData) -> Iterator[bytes]:
    """The JSON document of each stage, in their order; none ends with a newline."""
    requests = run.requests()
    for stage in run.stages:
        index = stage["index"]
        if index in requests:
            yield orjson.dumps(_result(run, stage, requests[index]), option=orjson.OPT_SERIALIZE_NUMPY)


def _result(run: RunData, stage: Mapping[str, Any], requests: Requests) -> dict[str, Any]:
    trace = requests.trace
    rows = trace.ok | trace.failed
    ok = trace.ok[rows]
    # when a request that was never sent began is unknown: null
    sent, e2e, ttft = trace.sent_s[rows], trace.e2e_s[rows], trace.ttft_s[rows]
    prompts, tokens = trace.prompt_tokens[rows], trace.output_tokens[rows]
    began, ended = float(np.nanmin(sent, initial=np.inf)), float(np.nanmax((sent + e2e)[ok], initial=-np.inf))
    duration = ended - began if ended > began else None
    total_in, total_out = int(np.nansum(prompts[ok])), int(np.nansum(tokens[ok]))
    rate = None if duration is None else 1.0 / duration
    gaps = _gaps(requests, rows)
    known_gaps = np.concatenate([np.empty(0), *(g for g, good in zip(gaps, ok, strict=True) if good)]) if gaps else None
    profile_stage = _profile_stage(run, stage["index"])
    return {
        "date": datetime.fromisoformat(run.run["started"]).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if _endpoint(run) == "chat" else "openai",
        "backend": "openai-chat" if _endpoint(run) == "chat" else "openai",
        "label": None,
        "model_id": run.run["deployment"]["model"],
        "tokenizer_id": None,
        "num_prompts": int(rows.sum()),
        "exported_by": f"vllm-harness {version('vllm-harness')}",
        "stage": stage["index"],
        "request_rate": "inf" if stage["request_rate"] is None else stage["request_rate"],
        "burstiness": profile_stage.get("burstiness", 1.0),
        "max_concurrency": stage["users"],
        "duration": duration,
        "completed": int(ok.sum()),
        "failed": int((~ok).sum()),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": rate and int(ok.sum()) * rate,
        "request_goodput": None,
        "output_throughput": rate and total_out * rate,
        "total_token_throughput": rate and (total_in + total_out) * rate,
        "input_lens": _whole(prompts),
        "output_lens": _whole(np.where(ok, tokens, 0.0)),
        "ttfts": np.where(ok, ttft, 0.0),
        **({} if gaps is None else {"itls": gaps}),
        "latencies": np.where(ok, e2e, 0.0),
        "start_times": sent,
        "queue_times": sent - trace.scheduled_s[rows],
        "errors": trace.failure[rows].tolist(),
        "max_output_tokens_per_s": None,
        "max_concurrent_requests": None,
        **_stats("ttft", ttft[ok]),
        **_stats("tpot", trace.tpot_s[rows][ok]),
        **({} if known_gaps is None else _stats("itl", known_gaps)),
        **_stats("e2el", e2e[ok]),
    }


def _endpoint(run: RunData) -> str:
    return str(run.run.get("profile", {}).get("workload", {}).get("endpoint", "completions"))


def _profile_stage(run: RunData, index: int) -> Mapping[str, Any]:
    stages = run.run.get("profile", {}).get("stages", [])
    return stages[index] if index < len(stages) else {}


def _whole(values: Floats) -> list[int | None]:
    return [None if value != value else int(value) for value in values.tolist()]


def _gaps(requests: Requests, rows: Bools) -> list[Floats] | None:
    deltas = requests.deltas
    if deltas.times_s is None or deltas.offsets is None:
        return None
    times, offsets = deltas.times_s, deltas.offsets
    return [np.diff(times[offsets[i] : offsets[i + 1]]) for i in np.flatnonzero(rows).tolist()]


def _stats(name: str, seconds: Floats) -> dict[str, float | None]:
    values = np.sort(seconds[~np.isnan(seconds)]) * 1e3
    keys = (f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *(f"p{p}_{name}_ms" for p in _PERCENTILES))
    if not len(values):
        return dict.fromkeys(keys)
    percentiles = [percentile_of_sorted(values, p) for p in _PERCENTILES]
    return dict(zip(keys, (float(values.mean()), percentiles[0], float(values.std()), *percentiles), strict=True))
