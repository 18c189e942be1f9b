"""The twin's /metrics: the families of vLLM 0.32.0 by name, label, type and order, from the engines' counters. Pure.

Families were read off a live 0.32.0 (CPU build); what stays 0 in a server without LoRA, KV transfer, multi-modal input
or sleep mode stays 0 here. `_created` series are gauges, as there. One family is the twin's own:
`vllm_twin_write_lateness_seconds`, how long after its due time each write was handed to the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from calibration.twin.config import EngineConfig
from calibration.twin.counters import Counters, Histogram

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
LATENESS_BUCKETS_S = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)

_NO_SOURCES = ("host", "p2p", "disk", "external_unspecified")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """What a scrape shows. Wall-clock times are seconds since 1970."""

    model_name: str
    engines: Sequence[tuple[EngineConfig, Counters]]
    lateness: Histogram
    created_s: float
    cpu_s: float
    #: answered requests by (handler, method, status class such as "2xx")
    http_requests: Mapping[tuple[str, str, str], int]


class _Text:
    """Lines of the text format."""

    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape
        self.lines: list[str] = []

    def family(self, name: str, kind: str, about: str) -> None:
        self.lines.append(f"# HELP {name} {about}")
        self.lines.append(f"# TYPE {name} {kind}")

    def sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        inside = ",".join(f'{key}="{_escaped(labels[key])}"' for key in sorted(labels))
        self.lines.append(f"{name}{{{inside}}} {float(value)!r}" if inside else f"{name} {float(value)!r}")

    def each(self) -> Iterable[tuple[dict[str, str], Counters]]:
        for index, (_, counters) in enumerate(self._scrape.engines):
            yield {"engine": str(index), "model_name": self._scrape.model_name}, counters

    def gauge(self, name: str, about: str, rows: Callable[[Counters], Rows]) -> None:
        self.family(name, "gauge", about)
        for labels, counters in self.each():
            for more, value in rows(counters):
                self.sample(name, labels | more, value)

    def counter(self, name: str, about: str, rows: Callable[[Counters], Rows]) -> None:
        self.family(f"{name}_total", "counter", about)
        series = [(labels | more, value) for labels, counters in self.each() for more, value in rows(counters)]
        for labels, value in series:
            self.sample(f"{name}_total", labels, value)
        self.created(name, about, [labels for labels, _ in series])

    def created(self, name: str, about: str, series: Iterable[Mapping[str, str]]) -> None:
        self.family(f"{name}_created", "gauge", about)
        for labels in series:
            self.sample(f"{name}_created", labels, self._scrape.created_s)

    def histogram(self, name: str, about: str, pick: Callable[[Counters], Histogram]) -> None:
        self.family(name, "histogram", about)
        for labels, counters in self.each():
            self.buckets(name, labels, pick(counters))
        self.created(name, about, [labels for labels, _ in self.each()])

    def buckets(self, name: str, labels: Mapping[str, str], histogram: Histogram) -> None:
        below = 0
        for bound, count in zip([*map(float, histogram.bounds), float("inf")], histogram.counts, strict=True):
            below += count
            self.sample(f"{name}_bucket", {**labels, "le": "+Inf" if bound == float("inf") else repr(bound)}, below)
        self.sample(f"{name}_count", labels, below)
        self.sample(f"{name}_sum", labels, histogram.sum)


Rows = Iterable[tuple[dict[str, str], float]]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _one(value: float) -> Rows:
    return [({}, value)]


def render(scrape: Scrape) -> bytes:
    """The text of one scrape."""
    text = _Text(scrape)
    _process(text, scrape)
    _gauges(text)
    _counters(text)
    _rejections(text, scrape)
    _histograms(text)
    _cache_config(text, scrape)
    _http(text, scrape)
    _speculation(text, scrape)
    text.family("vllm_twin_write_lateness_seconds", "histogram", "How late the twin's writes were, in real seconds.")
    text.buckets("vllm_twin_write_lateness_seconds", {}, scrape.lateness)
    return ("\n".join(text.lines) + "\n").encode()


def _process(text: _Text, scrape: Scrape) -> None:
    text.family("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.")
    text.sample("process_start_time_seconds", {}, scrape.created_s)
    text.family("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds.")
    text.sample("process_cpu_seconds_total", {}, scrape.cpu_s)
    for unit in ("flops", "read_bytes", "write_bytes"):
        text.counter(f"vllm:estimated_{unit}_per_gpu", "Not enabled in the twin.", lambda _: _one(0))


def _gauges(text: _Text) -> None:
    text.gauge(
        "vllm:num_requests_running",
        "Number of requests in model execution batches.",
        lambda c: _one(c.num_requests_running),
    )
    text.gauge(
        "vllm:num_requests_waiting",
        "Number of requests waiting to be processed.",
        lambda c: _one(c.num_requests_waiting),
    )
    text.gauge(
        "vllm:num_requests_waiting_by_reason",
        "Number of waiting requests by reason.",
        lambda c: [({"reason": "capacity"}, c.num_requests_waiting), ({"reason": "deferred"}, 0)],
    )
    text.gauge(
        "vllm:engine_sleep_state",
        "Engine sleep state.",
        lambda _: [({"sleep_state": s}, s == "awake") for s in ("awake", "weights_offloaded", "discard_all")],
    )
    text.gauge(
        "vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", lambda c: _one(c.kv_cache_usage)
    )


def _counters(text: _Text) -> None:
    text.counter(
        "vllm:prefix_cache_queries", "Prefix cache queries, in tokens.", lambda c: _one(c.prefix_cache_queries)
    )
    text.counter("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.", lambda c: _one(c.prefix_cache_hits))
    for cache in ("external_prefix", "mm"):
        for event in ("queries", "hits"):
            text.counter(f"vllm:{cache}_cache_{event}", "Not present in the twin.", lambda _: _one(0))
    text.counter(
        "vllm:num_preemptions", "Cumulative number of preemption from the engine.", lambda c: _one(c.num_preemptions)
    )
    text.counter("vllm:prompt_tokens", "Number of prefill tokens processed.", lambda c: _one(c.prompt_tokens))
    text.counter(
        "vllm:prompt_tokens_by_source",
        "Number of prompt tokens by source.",
        lambda c: [
            ({"source": "local_compute"}, c.prompt_tokens - c.prompt_tokens_cached),
            ({"source": "local_cache_hit"}, c.prompt_tokens_cached),
            ({"source": "external_kv_transfer"}, 0),
        ],
    )
    text.counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens.", lambda c: _one(c.prompt_tokens_cached))
    text.counter(
        "vllm:prompt_tokens_cached_by_source",
        "Number of cached prompt tokens by source.",
        lambda c: [({"source": "device"}, c.prefix_cache_hits), *(({"source": s}, 0) for s in _NO_SOURCES)],
    )
    text.counter(
        "vllm:generation_tokens", "Number of generation tokens processed.", lambda c: _one(c.generation_tokens)
    )
    text.counter(
        "vllm:request_success",
        "Count of successfully processed requests.",
        lambda c: [({"finished_reason": reason}, count) for reason, count in c.request_success.items()],
    )


def _rejections(text: _Text, scrape: Scrape) -> None:
    about = "Number of requests rejected at admission."
    reasons = [
        {"model_name": scrape.model_name, "reason": reason}
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens")
    ]
    text.family("vllm:admission_rejections_total", "counter", about)
    for labels in reasons:
        text.sample("vllm:admission_rejections_total", labels, 0)
    text.created("vllm:admission_rejections", about, reasons)


#: family, what it is, counter; in the order vLLM shows them
_HISTOGRAMS: tuple[tuple[str, str, Callable[[Counters], Histogram]], ...] = (
    ("request_prompt_tokens", "Number of prefill tokens processed.", lambda c: c.request_prompt_tokens),
    ("request_generation_tokens", "Number of generation tokens processed.", lambda c: c.request_generation_tokens),
    ("iteration_tokens_total", "Number of tokens per engine step.", lambda c: c.iteration_tokens),
    (
        "request_max_num_generation_tokens",
        "Maximum number of requested generation tokens.",
        lambda c: c.request_max_num_generation_tokens,
    ),
    ("request_params_n", "The n request parameter.", lambda c: c.request_params_n),
    ("request_params_max_tokens", "The max_tokens request parameter.", lambda c: c.request_params_max_tokens),
    ("time_to_first_token_seconds", "Time to first token in seconds.", lambda c: c.time_to_first_token),
    ("inter_token_latency_seconds", "Inter-token latency in seconds.", lambda c: c.inter_token_latency),
    (
        "request_time_per_output_token_seconds",
        "Mean time per output token of a request in seconds.",
        lambda c: c.request_time_per_output_token,
    ),
    ("e2e_request_latency_seconds", "End to end request latency in seconds.", lambda c: c.e2e_request_latency),
    ("request_queue_time_seconds", "Time spent in WAITING phase.", lambda c: c.request_queue_time),
    ("request_inference_time_seconds", "Time spent in RUNNING phase.", lambda c: c.request_inference_time),
    ("request_prefill_time_seconds", "Time spent in PREFILL phase.", lambda c: c.request_prefill_time),
    ("request_decode_time_seconds", "Time spent in DECODE phase.", lambda c: c.request_decode_time),
    ("request_num_preemptions", "Number of preemptions of a request.", lambda c: c.request_num_preemptions),
    (
        "request_prefill_kv_computed_tokens",
        "Prompt tokens computed, cached ones excluded.",
        lambda c: c.request_prefill_kv_computed_tokens,
    ),
)


def _histograms(text: _Text) -> None:
    for name, about, pick in _HISTOGRAMS:
        text.histogram(f"vllm:{name}", about, pick)


def cache_config(config: EngineConfig, engines: int = 1) -> dict[str, str]:
    """Labels of ``vllm:cache_config_info`` but for ``engine``: every field of vLLM 0.32.0's CacheConfig as text.

    ``num_gpu_blocks`` is the sum over the data-parallel engines, the tokens are one engine's (seen on a live server).
    """
    size_tokens = config.num_gpu_blocks * config.block_size
    unset = (
        *("cache_hit_alignment_tokens", "hash_block_size", "kv_cache_layout", "kv_offloading_size"),
        *("mamba_block_size", "mamba_page_size_padded", "num_cpu_blocks", "prefix_match_unit"),
        *("skip_page_size_padded", "sliding_window", "kv_cache_memory_bytes"),
    )
    off = (
        *("enable_mamba_shared_prefix_checkpoint", "is_attention_free", "kv_sharing_fast_prefill"),
        *("use_kda_recoverssm", "use_replayssm"),
    )
    return {
        **dict.fromkeys(unset, "None"),
        **dict.fromkeys(off, "False"),
        "_block_size_resolved": "True",
        "block_size": str(config.block_size),
        "cache_dtype": "auto",
        "effective_attention_block_size": str(config.block_size),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": "0.92",
        "kv_cache_dtype_skip_layers": "[]",
        "kv_cache_max_concurrency": str(size_tokens / config.max_model_len),
        "kv_cache_size_tokens": str(size_tokens),
        "kv_offloading_backend": "native",
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_ssm_cache_dtype": "float32",
        "num_gpu_blocks": str(config.num_gpu_blocks * engines),
        "num_gpu_blocks_override": str(config.num_gpu_blocks),
        "prefix_cache_retention_interval": "0",
        "prefix_caching_hash_algo": "sha256",
        "replayssm_buffer_len": "16",
        "swa_bounded_replay": "True",
        "user_specified_block_size": "True",
    }


def _cache_config(text: _Text, scrape: Scrape) -> None:
    text.family("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
    for index, (config, _) in enumerate(scrape.engines):
        text.sample("vllm:cache_config_info", cache_config(config, len(scrape.engines)) | {"engine": str(index)}, 1)


def _http(text: _Text, scrape: Scrape) -> None:
    about = "Total number of requests by method, status and handler."
    labels = [dict(zip(("handler", "method", "status"), key, strict=True)) for key in scrape.http_requests]
    text.family("http_requests_total", "counter", about)
    for each, count in zip(labels, scrape.http_requests.values(), strict=True):
        text.sample("http_requests_total", each, count)
    text.created("http_requests", about, labels)


def _speculation(text: _Text, scrape: Scrape) -> None:
    if all(config.speculation is None for config, _ in scrape.engines):
        return
    text.counter(
        "vllm:spec_decode_num_drafts", "Number of spec decoding drafts.", lambda c: _one(c.spec_decode_num_drafts)
    )
    text.counter(
        "vllm:spec_decode_num_draft_tokens", "Number of draft tokens.", lambda c: _one(c.spec_decode_num_draft_tokens)
    )
    text.counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Number of accepted tokens.",
        lambda c: _one(sum(c.spec_decode_num_accepted_tokens_per_pos)),
    )
    text.counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens per draft position.",
        lambda c: [({"position": str(p)}, n) for p, n in enumerate(c.spec_decode_num_accepted_tokens_per_pos)],
    )
