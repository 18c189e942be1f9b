"""vLLM's metric names by version: one alias table per meaning, by exact name. Absent in all of them means unknown.

Three families of names are known:

* V0, vLLM 0.4-0.8: no engine label; swapping; prefix caching as a hit-rate gauge (-1 = off);
* V1, 0.8-0.11: ``gpu_cache_usage_perc`` and ``gpu_prefix_cache_*`` until 0.9.1, both old and new names until 0.11,
  ``time_per_output_token_seconds`` for the time between tokens until 0.10 and beside its successor in 0.11;
* V1, 0.12-0.32: ``kv_cache_usage_perc``, ``prefix_cache_*``, ``inter_token_latency_seconds``, waiting by reason.

Under Ray Serve the same families carry the prefix ``ray_`` and ``_`` for ``:`` (vllm 0.32.0, v1/metrics/ray_wrappers.py,
``_get_sanitized_opentelemetry_name``); older releases kept the colon.

Sources: vllm 0.6.6 engine/metrics.py; vllm 0.9, 0.10.2, 0.11 and 0.32.0 v1/metrics/loggers.py and perf.py.
Two names that look alike are two meanings: ``num_requests_waiting`` and ``num_requests_waiting_by_reason`` would count
twice under a prefix match, ``inter_token_latency_seconds`` and ``request_time_per_output_token_seconds`` differ in what
they average. So nothing is matched but the whole name.
"""

from __future__ import annotations

from collections.abc import Container
from enum import StrEnum
from typing import Final

Names = tuple[str, ...]

#: instantaneous values: field of Snapshot -> sample names; the first that is there speaks
GAUGES: Final[dict[str, Names]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "swapped": ("vllm:num_requests_swapped",),
    "kv_cache_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "prefix_cache_hit_rate": ("vllm:gpu_prefix_cache_hit_rate",),
}

#: what only grows while the server lives: field -> sample names
COUNTERS: Final[dict[str, Names]] = {
    "preemptions": ("vllm:num_preemptions_total",),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "generation_tokens": ("vllm:generation_tokens_total",),
    "prefix_cache_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_cache_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "prompt_tokens_cached": ("vllm:prompt_tokens_cached_total",),
    "spec_decode_drafts": ("vllm:spec_decode_num_drafts_total",),
    "spec_decode_draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
    "spec_decode_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
    "estimated_flops_per_gpu": ("vllm:estimated_flops_per_gpu_total",),
    "estimated_read_bytes_per_gpu": ("vllm:estimated_read_bytes_per_gpu_total",),
    "estimated_write_bytes_per_gpu": ("vllm:estimated_write_bytes_per_gpu_total",),
}

#: histograms, read as count and sum: (count field, sum field) -> family names. Buckets are not read: vLLM's smallest
#: latency bucket is 0.3 s and its smallest inter-token one 10 ms, so no percentile can be had from them
HISTOGRAMS: Final[dict[tuple[str, str], Names]] = {
    ("steps", "step_tokens"): ("vllm:iteration_tokens_total",),
    ("ttft_count", "ttft_sum_s"): ("vllm:time_to_first_token_seconds",),
    ("itl_count", "itl_sum_s"): ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ("tpot_count", "tpot_sum_s"): ("vllm:request_time_per_output_token_seconds",),
    ("e2e_count", "e2e_sum_s"): ("vllm:e2e_request_latency_seconds",),
    ("queue_count", "queue_sum_s"): ("vllm:request_queue_time_seconds", "vllm:time_in_queue_requests"),
    ("prefill_count", "prefill_sum_s"): ("vllm:request_prefill_time_seconds",),
    ("decode_count", "decode_sum_s"): ("vllm:request_decode_time_seconds",),
    ("inference_count", "inference_sum_s"): ("vllm:request_inference_time_seconds",),
}

#: families with one label that tells their parts: field -> (sample names, label)
GAUGES_BY_LABEL: Final[dict[str, tuple[Names, str]]] = {
    "waiting_by_reason": (("vllm:num_requests_waiting_by_reason",), "reason"),
    "sleep_state": (("vllm:engine_sleep_state",), "sleep_state"),
}
COUNTERS_BY_LABEL: Final[dict[str, tuple[Names, str]]] = {
    "success_by_reason": (("vllm:request_success_total",), "finished_reason"),
    "prompt_tokens_by_source": (("vllm:prompt_tokens_by_source_total",), "source"),
    "rejections_by_reason": (("vllm:admission_rejections_total",), "reason"),
}

CACHE_CONFIG: Final = "vllm:cache_config_info"
PROCESS_START: Final = "process_start_time_seconds"
#: prometheus-fastapi-instrumentator's counter; it leaves /metrics and /health out, and counts a stream at its end
HTTP_REQUESTS: Final = "http_requests_total"

#: labels that tell one engine from another; the last two are Ray's
ENGINE_LABELS: Final = ("engine", "ReplicaId", "WorkerId")
MODEL_LABEL: Final = "model_name"


class VersionFamily(StrEnum):
    V0 = "v0 0.4-0.8"
    V1_EARLY = "v1 0.8-0.11"
    V1 = "v1 0.12-0.32"


#: names that only one family has; asked in this order
_MARKERS: Final[tuple[tuple[VersionFamily, Names], ...]] = (
    (
        VersionFamily.V0,
        ("vllm:num_requests_swapped", "vllm:cpu_cache_usage_perc", "vllm:time_in_queue_requests_count"),
    ),
    (
        VersionFamily.V1,
        ("vllm:num_requests_waiting_by_reason", "vllm:prompt_tokens_by_source_total", "vllm:engine_sleep_state"),
    ),
    (
        VersionFamily.V1_EARLY,
        ("vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds_count"),
    ),
    (VersionFamily.V1, ("vllm:kv_cache_usage_perc", "vllm:inter_token_latency_seconds_count")),
)


def version_family(names: Container[str]) -> VersionFamily | None:
    """Which generation of vLLM writes these sample names; None where no telling name is there."""
    return next((family for family, markers in _MARKERS if any(name in names for name in markers)), None)


def canonical(name: str) -> str:
    """vLLM's own name of a sample that may come through Ray Serve."""
    for prefix in ("ray_vllm_", "ray_vllm:"):
        if name.startswith(prefix):
            return "vllm:" + name.removeprefix(prefix)
    return name


def _ray_forms(name: str) -> Names:
    """How Ray may spell a sample: sanitised or not, and a counter's TYPE line with or without ``_total``."""
    bare = name.removeprefix("vllm:")
    return tuple(
        prefix + spelled for prefix in ("ray_vllm_", "ray_vllm:") for spelled in {bare, bare.removesuffix("_total")}
    )


def _vllm_names() -> set[str]:
    names = {CACHE_CONFIG}
    for table in (GAUGES, COUNTERS):
        names.update(*table.values())
    for labelled in (GAUGES_BY_LABEL, COUNTERS_BY_LABEL):
        names.update(*(aliases for aliases, _ in labelled.values()))
    for families in HISTOGRAMS.values():
        names.update(f"{family}{end}" for family in families for end in ("_count", "_sum"))
    for _, markers in _MARKERS:
        names.update(markers)
    return names


#: every sample name a snapshot reads, in vLLM's spelling and in Ray's
WANTED: Final[frozenset[str]] = frozenset(
    {PROCESS_START, HTTP_REQUESTS} | _vllm_names() | {spelled for name in _vllm_names() for spelled in _ray_forms(name)}
)
