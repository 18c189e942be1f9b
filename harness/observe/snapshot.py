"""One scrape of /metrics as one value: every meaning the harness uses, whatever the vLLM version calls it. Pure.

``None`` means the server did not say; 0 means it said 0. Counters are summed over the engines of one model, gauges are
summed (requests) or averaged (shares of a pool), and kept per engine besides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from harness.observe import names
from harness.observe.cache_config import CacheConfig
from harness.wire.prom import BadMetrics, Sample, Samples, parse

PerLabel = Mapping[str, float]


class NoVllmMetrics(BadMetrics):
    """A /metrics text without one series of vLLM."""


class NoSuchModel(BadMetrics):
    """Several models are served and none was named, or the named one is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What only grows while the server lives, as read (:class:`Snapshot`) or as grown (:class:`harness.observe.deltas.Delta`).

    Tokens, requests and events are counts; ``*_sum_s`` are seconds. Gotchas (vllm 0.32.0):

    * ``prompt_tokens`` grows at a request's first output, by the whole prompt, cached tokens included;
    * ``generation_tokens`` counts tokens no client sees (aborted requests' too);
    * ``itl_count``: one sample per engine output after a request's first, so a step with several tokens counts once;
    * ``preemptions`` counts events: one request can add many;
    * ``queue_*, prefill_*, decode_*, inference_*, e2e_*, tpot_*, success_*`` know finished requests only, and requests
      their client broke off are no finished ones in V1;
    * ``steps`` is the count of iteration_tokens: engine steps that gave at least one output. A step that only computes
      a part of a prompt gives none and is not counted (v1/engine/async_llm.py, output_handler: no IterationStats
      without outputs). ``step_tokens`` = computed prompt tokens, booked at the first output, + generated tokens;
    * the ``estimated_*`` stay 0 unless the server runs with --enable-mfu-metrics.
    """

    preemptions: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    #: tokens in V1; blocks in vLLM 0.8
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    prompt_tokens_cached: float | None = None
    steps: float | None = None
    step_tokens: float | None = None
    ttft_count: float | None = None
    ttft_sum_s: float | None = None
    itl_count: float | None = None
    itl_sum_s: float | None = None
    tpot_count: float | None = None
    tpot_sum_s: float | None = None
    e2e_count: float | None = None
    e2e_sum_s: float | None = None
    queue_count: float | None = None
    queue_sum_s: float | None = None
    prefill_count: float | None = None
    prefill_sum_s: float | None = None
    decode_count: float | None = None
    decode_sum_s: float | None = None
    inference_count: float | None = None
    inference_sum_s: float | None = None
    spec_decode_drafts: float | None = None
    spec_decode_draft_tokens: float | None = None
    spec_decode_accepted_tokens: float | None = None
    estimated_flops_per_gpu: float | None = None
    estimated_read_bytes_per_gpu: float | None = None
    estimated_write_bytes_per_gpu: float | None = None
    #: stop, length, abort, error, repetition -> requests
    success_by_reason: PerLabel | None = None
    #: local_compute, local_cache_hit, external_kv_transfer -> tokens
    prompt_tokens_by_source: PerLabel | None = None
    #: max_num_queued_reqs, max_num_queued_tokens -> requests answered 503
    rejections_by_reason: PerLabel | None = None
    #: handler path -> POSTs answered; a stream counts at its end
    http_requests: PerLabel | None = None

    @property
    def success(self) -> float | None:
        """Finished requests, whatever the reason."""
        return None if self.success_by_reason is None else _number(sum(self.success_by_reason.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Counters):
    """One scrape. Shares (``kv_cache_usage``) are 0..1, though vLLM's name says ``perc``."""

    #: the model these numbers belong to; None where the server labels none
    model: str | None
    #: every model_name in the text
    model_names: tuple[str, ...]
    version_family: str | None
    #: engines of the model: label sets of engine, or of Ray replica and worker
    engines: int
    running: float | None = None
    waiting: float | None = None
    #: capacity (no room in batch or pool) and deferred (blocked by something else); vLLM 0.32
    waiting_by_reason: PerLabel | None = None
    #: V0 only: V1 recomputes instead of swapping
    swapped: float | None = None
    #: mean over engines: 1 - free blocks / (blocks - 1) (vllm 0.32.0, v1/core/block_pool.py, get_usage);
    #: blocks that are cached but unreferenced count as free
    kv_cache_usage: float | None = None
    #: the fullest engine's
    kv_cache_usage_max: float | None = None
    running_by_engine: PerLabel | None = None
    waiting_by_engine: PerLabel | None = None
    kv_cache_usage_by_engine: PerLabel | None = None
    #: V0 only, a moving share; None where prefix caching is off (vLLM says -1)
    prefix_cache_hit_rate: float | None = None
    #: awake = 1 or one of the sleeping states = 1
    sleep_state: PerLabel | None = None
    process_start_time_s: float | None = None
    via_ray: bool = False
    cache_config: CacheConfig | None = None

    @property
    def asleep(self) -> bool | None:
        """Whether an engine sleeps, its weights away: nothing can be measured then."""
        awake = (self.sleep_state or {}).get("awake")
        return None if awake is None else awake < self.engines

    def contract(self) -> dict[str, Any]:
        """The document of ``metrics --json``: first the keys of DESIGN section 7, then everything else that was read."""
        config = self.cache_config or CacheConfig()
        keys = {
            "running": self.running,
            "waiting": self.waiting,
            "swapped": self.swapped,
            "kv_cache_usage": self.kv_cache_usage,
            "kv_cache_usage_max": self.kv_cache_usage_max,
            "preemptions": self.preemptions,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "prefix_cache_queries": self.prefix_cache_queries,
            "prefix_cache_hits": self.prefix_cache_hits,
            "ttft_count": self.ttft_count,
            "itl_count": self.itl_count,
            "success": self.success,
            "block_size": config.block_size,
            "num_gpu_blocks": config.num_gpu_blocks,
            "kv_cache_size_tokens": config.kv_cache_size_tokens,
            "engines": self.engines,
            "version_family": self.version_family,
        }
        return keys | {key: value for key, value in asdict(self).items() if key not in keys}

    def to_row(self) -> dict[str, Any]:
        """The row of ``scrapes.jsonl``: JSON values, what the server did not say left out."""
        row = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        if self.cache_config is not None:
            row["cache_config"] = {k: v for k, v in asdict(self.cache_config).items() if v not in (None, ())}
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """A row back. Raises ValueError for an unknown or missing key."""
        if unknown := row.keys() - _FIELDS:
            raise ValueError(f"unknown key {min(unknown)!r} in a snapshot")
        if missing := _REQUIRED - row.keys() - {"model", "version_family"}:
            raise ValueError(f"missing key {min(missing)!r} in a snapshot")
        values: dict[str, Any] = {"model": None, "version_family": None, **row}
        values["model_names"] = tuple(values["model_names"])
        if (config := values.get("cache_config")) is not None:
            values["cache_config"] = CacheConfig(**{**config, "unread": tuple(config.get("unread", ()))})
        return cls(**values)


_FIELDS = frozenset(f.name for f in fields(Snapshot))
_REQUIRED = frozenset({"model", "model_names", "version_family", "engines"})


def read(text: str | bytes, model: str | None = None) -> Snapshot:
    """Read one /metrics text of any vLLM since 0.4.

    Args:
        text: the whole body.
        model: the ``model_name`` to read; needed where the text has several (several servers behind one target, Ray).

    Raises:
        BadMetrics: not a /metrics text (:mod:`harness.wire.prom`).
        NoVllmMetrics: no series of vLLM in it.
        NoSuchModel: ``model`` is not there, or is needed.
    """
    raw = parse(text, keep=names.WANTED)
    samples: Samples = {}
    for name, rows in raw.items():
        samples.setdefault(names.canonical(name), []).extend(rows)
    if not any(name.startswith("vllm:") for name in samples):
        raise NoVllmMetrics(
            "no vllm: series in this /metrics text",
            "another kind of server, or a vLLM started with --disable-log-stats",
        )
    chosen, all_names = _model_of(samples, model)
    reader = _Reader(samples, chosen)
    return Snapshot(
        model=chosen,
        model_names=all_names,
        version_family=names.version_family(samples),
        via_ray=any(name.startswith("ray_vllm") for name in raw),
        engines=reader.engines(),
        process_start_time_s=_sum(samples.get(names.PROCESS_START)),
        http_requests=_sums_by(
            [s for s in samples.get(names.HTTP_REQUESTS, []) if s.labels.get("method") == "POST"], "handler"
        ),
        cache_config=reader.cache_config(),
        **reader.gauges(),
        **reader.counters(),
    )


def _model_of(samples: Samples, asked: str | None) -> tuple[str | None, tuple[str, ...]]:
    there = sorted(
        {s.labels[names.MODEL_LABEL] for rows in samples.values() for s in rows if names.MODEL_LABEL in s.labels}
    )
    if asked is not None and there and asked not in there:
        raise NoSuchModel(f"no metrics of model {asked!r}", f"there are: {', '.join(there)}")
    if asked is None and len(there) > 1:
        raise NoSuchModel("metrics of several models and none was named", f"--model one of: {', '.join(there)}")
    return asked if there and asked else (there[0] if there else None), tuple(there)


def sharing(earlier: Snapshot | None, later: Snapshot) -> Snapshot:
    """``later`` again, made of ``earlier``'s objects wherever both are equal: a long run keeps thousands of them."""
    if earlier is None:
        return later
    same = {name: old for name in _FIELDS if (old := getattr(earlier, name)) == getattr(later, name)}
    return replace(later, **same)


class _Reader:
    """The samples of one model, by meaning."""

    def __init__(self, samples: Samples, model: str | None) -> None:
        self._samples = {
            name: mine
            for name, rows in samples.items()
            if (mine := [s for s in rows if s.labels.get(names.MODEL_LABEL, model) == model])
        }

    def _first(self, aliases: Iterable[str]) -> list[Sample] | None:
        return next((self._samples[name] for name in aliases if name in self._samples), None)

    def engines(self) -> int:
        """Engines that report any gauge or counter. A text without engine labels is one engine's."""
        every = (aliases for table in (names.GAUGES, names.COUNTERS) for aliases in table.values())
        return len({_engine(s) for aliases in every for s in self._first(aliases) or []})

    def gauges(self) -> dict[str, Any]:
        usage = self._by_engine("kv_cache_usage")
        shares = list(usage.values()) if usage else []
        hit_rate = self._by_engine("prefix_cache_hit_rate")
        values: dict[str, Any] = {
            field: _sum(self._first(names.GAUGES[field])) for field in ("running", "waiting", "swapped")
        }
        values |= {field: self._by_label(*how) for field, how in names.GAUGES_BY_LABEL.items()}
        return values | {
            "kv_cache_usage": _mean(shares),
            "kv_cache_usage_max": max(shares, default=None),
            "running_by_engine": self._by_engine("running"),
            "waiting_by_engine": self._by_engine("waiting"),
            "kv_cache_usage_by_engine": usage,
            "prefix_cache_hit_rate": _mean([rate for rate in (hit_rate or {}).values() if rate >= 0]),
        }

    def counters(self) -> dict[str, Any]:
        values: dict[str, Any] = {field: _sum(self._first(how)) for field, how in names.COUNTERS.items()}
        for (count, total), families in names.HISTOGRAMS.items():
            values[count] = _sum(self._first(f"{family}_count" for family in families))
            values[total] = _sum(self._first(f"{family}_sum" for family in families))
        return values | {field: self._by_label(*how) for field, how in names.COUNTERS_BY_LABEL.items()}

    def cache_config(self) -> CacheConfig | None:
        rows = self._samples.get(names.CACHE_CONFIG)
        return CacheConfig.from_labels(min(rows, key=_engine).labels) if rows else None

    def _by_engine(self, field: str) -> dict[str, float] | None:
        rows = self._first(names.GAUGES[field])
        if rows is None:
            return None
        return {_engine(s): value for s in rows if (value := _number(s.value)) is not None} or None

    def _by_label(self, aliases: Iterable[str], label: str) -> dict[str, float] | None:
        rows = self._first(aliases)
        return None if rows is None else _sums_by(rows, label)


def _engine(sample: Sample) -> str:
    """Which engine wrote a sample; "0" where only one can have (no engine label)."""
    return "/".join(sample.labels[label] for label in names.ENGINE_LABELS if sample.labels.get(label)) or "0"


def _number(value: float) -> float | None:
    """A finite number, whole ones as int; NaN and the infinities are no measurement."""
    if not math.isfinite(value):
        return None
    return int(value) if abs(value) < 2**53 and value == int(value) else float(value)


def _sum(rows: list[Sample] | None) -> float | None:
    """The sum over engines; None where there is none or one of them is no number."""
    return _number(sum(s.value for s in rows)) if rows else None


def _mean(values: list[float]) -> float | None:
    return _number(sum(values) / len(values)) if values else None


def _sums_by(rows: list[Sample], label: str) -> dict[str, float] | None:
    keys = {s.labels.get(label, "") for s in rows}
    sums = {key: _sum([s for s in rows if s.labels.get(label, "") == key]) for key in sorted(keys)}
    return {key: value for key, value in sums.items() if value is not None} or None
