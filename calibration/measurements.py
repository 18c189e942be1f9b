"""Published serving measurements as deployments and loads: one row of the table in, one :class:`Measurement` out.

Columns: ``source, url_or_path, gpu, num_gpus, tp, model, weight_dtype, kv_dtype, isl, osl, concurrency, request_rate,
ttft_ms_mean, ttft_ms_p50, tpot_ms_mean, output_tok_s, total_tok_s, req_s, vllm_version, notes``; a blank cell is unknown.
What the table leaves unsaid and the source's own scripts say stands in ``catalog/sources.yaml``. A row that cannot be used
comes out as :class:`Unusable`, with the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from calibration.architecture import Architecture
from calibration.catalog import find_gpu, find_model, table
from calibration.deployment import Deployment, resolve_deployment
from calibration.errors import CalibrationError, InputError
from calibration.gpu import Gpu
from calibration.physics import expected_share
from calibration.priors import physics_of
from calibration.queueing import Shape

Row = Mapping[str, str]

#: spellings of a checkpoint's format at the end of its name
_FORMAT_SUFFIX = re.compile(
    r"[-_.](?:fp8|fp8[-_]dynamic|fp8[-_]block|nvfp4|fp4|mxfp4|awq|gptq|gptq[-_]int[48]|int[48]|w[48]a(?:8|16)|bf16"
    r"|quantized[-_.]w[48]a(?:8|16))$",
    re.IGNORECASE,
)
_VENDORS = (
    "meta-llama", "Qwen", "mistralai", "google", "openai", "deepseek-ai", "moonshotai", "MiniMaxAI", "zai-org",
    "microsoft", "01-ai", "codellama", "HuggingFaceTB",
)  # fmt: skip
#: endings of GPU names that say what the catalog's name implies
_GPU_NOISE = re.compile(
    r"^(?:nvidia|amd|instinct)\s+|[\s-]*\b\d+\s*-?gi?b\b.*$|[\s-]+(?:sxm\d?|hbm\de?)$", re.IGNORECASE
)

_FLAG_WORDS = {
    "mbt": ("max_num_batched_tokens", int),
    "max_num_seqs": ("max_num_seqs", int),
    "gpu_mem_util": ("gpu_memory_utilization", float),
    "gpu-memory-utilization": ("gpu_memory_utilization", float),
    "max-model-len": ("max_model_len", int),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row: what served, under which load, what was measured. Times in seconds, None where not measured.

    Exactly one of ``users`` (closed loop) and ``requests_per_s`` (open loop) is set.
    """

    row: int
    source: str
    gpu: str
    model: str
    family: str
    tp: int
    deployment: Deployment
    shape: Shape
    users: float | None
    requests_per_s: float | None
    tpot_s: float | None
    ttft_s: float | None
    output_tokens_per_s: float | None
    nominal_shape: tuple[float, float]
    stated_version: str

    @property
    def server_key(self) -> tuple[object, ...]:
        """What serves: rows with equal keys come from equal servers."""
        d = self.deployment
        return (self.source, self.gpu, self.model, d.weights.name, self.tp, d.expert_parallel, self.stated_version)

    @property
    def sweep_key(self) -> tuple[object, ...]:
        """Rows of one sweep over users: the same server and shape."""
        return (*self.server_key, *self.nominal_shape)

    @property
    def deployment_key(self) -> tuple[str, str, str, int]:
        """The unit that is left out when priors are scored: GPU, model, weight format and TP, whatever the version."""
        return (self.gpu, self.model, self.deployment.weights.name, self.tp)


@dataclass(frozen=True, slots=True)
class Unusable:
    """A row that cannot be scored, and why."""

    row: int
    source: str
    model: str
    gpu: str
    reason: str


def read_measurements(rows: Iterable[Row]) -> tuple[list[Measurement], list[Unusable]]:
    """All rows of a table; row numbers count from 1 below the header. A run that stands twice is used once."""
    used: list[Measurement] = []
    left: list[Unusable] = []
    seen: dict[tuple[object, ...], int] = {}
    for number, row in enumerate(rows, start=1):
        try:
            found = _measurement(number, row)
            twin = _same_run(found, seen)
        except CalibrationError as error:
            left.append(Unusable(number, _text(row, "source"), _text(row, "model"), _text(row, "gpu"), error.message))
            continue
        if twin is not None:
            reason = f"the same run as row {twin}"
            left.append(Unusable(number, found.source, found.model, found.gpu, reason))
            continue
        used.append(found)
    return used, left


def _same_run(found: Measurement, seen: dict[tuple[object, ...], int]) -> int | None:
    """The row that holds the same run: equal server, load, and TPOT and TTFT to a hundredth of a millisecond."""
    if found.tpot_s is None or found.ttft_s is None:
        return None
    load = (found.users, found.requests_per_s, found.nominal_shape)
    measured = (round(found.tpot_s * 1e3, 2), round(found.ttft_s * 1e3, 2))
    key = (found.gpu, found.model, found.deployment.weights.name, found.tp, load, measured)
    if key in seen:
        return seen[key]
    seen[key] = found.row
    return None


def _measurement(number: int, row: Row) -> Measurement:
    source = _source(row)
    architecture = _model(_text(row, "model"))
    gpu = _gpu(_text(row, "gpu"))
    tp, gpus = int(_needed(row, "tp")), int(_number(row, "num_gpus") or _needed(row, "tp"))
    prompt, output = _needed(row, "isl"), _needed(row, "osl")
    notes = _notes(row)
    _check_usable(row, architecture, notes, tp, gpus)
    users, rate = _load(row, source, tp, gpus)
    version = _version(row)
    shape = Shape(
        prompt_tokens=prompt * source.get("mean_length", 1.0),
        output_tokens=max(1.0, output * source.get("mean_length", 1.0)),
        requests_per_user=source.get("requests_per_user") if users is not None else None,
        cached_prompt_share=float(source.get("cached_prompt_share", 0.0)),
    )
    deployment = _deployment(row, architecture, gpu, tp, (prompt, output), notes, source, version, users)
    measured = {key: _number(row, key) for key in ("tpot_ms_mean", "ttft_ms_mean", "ttft_ms_p50")}
    ttft = measured["ttft_ms_mean"] if measured["ttft_ms_mean"] is not None else measured["ttft_ms_p50"]
    found = Measurement(
        row=number,
        source=_text(row, "source"),
        gpu=gpu.name,
        model=str(architecture.catalog_name),
        family="moe" if architecture.is_moe else "dense",
        tp=tp,
        deployment=deployment,
        shape=shape,
        users=users,
        requests_per_s=rate,
        tpot_s=_seconds(measured["tpot_ms_mean"]),
        ttft_s=_seconds(ttft),
        output_tokens_per_s=_output_rate(row, prompt, output),
        nominal_shape=(prompt, output),
        stated_version=_text(row, "vllm_version"),
    )
    if found.tpot_s is None and found.ttft_s is None and found.output_tokens_per_s is None:
        raise InputError("nothing was measured: no TPOT, TTFT or throughput")
    _check_possible(found)
    return found


def _text(row: Row, key: str) -> str:
    return (row.get(key) or "").strip()


def _number(row: Row, key: str) -> float | None:
    """A number, or None for a blank cell; infinite is none.

    Raises:
        InputError: something that is no number.
    """
    text = _text(row, key)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise InputError(f"{key} = {text!r}, expected a number") from error
    return value if math.isfinite(value) else None


def _needed(row: Row, key: str) -> float:
    value = _number(row, key)
    if value is None or value <= 0:
        raise InputError(f"{key} is not stated")
    return value


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _output_rate(row: Row, prompt: float, output: float) -> float | None:
    """Output tokens a second: as stated, else from requests or total tokens a second."""
    stated = _number(row, "output_tok_s")
    if stated is not None:
        return stated
    requests = _number(row, "req_s")
    if requests is not None:
        return requests * output
    total = _number(row, "total_tok_s")
    return None if total is None else total * output / (prompt + output)


def _notes(row: Row) -> dict[str, str]:
    """``key=value`` and ``known-key value`` words of the notes."""
    text = _text(row, "notes")
    found = dict(re.findall(r"([\w-]+)=([^;,\s]*)", text))
    for key in ("gpu-memory-utilization", "max-model-len"):
        match = re.search(rf"{key} ([\d.]+)", text)
        if match:
            found[key] = match[1]
    return found


def _model(name: str) -> Architecture:
    """The catalog's model: by its id, without the format at the end of the name, or under another vendor's name."""
    names = [name, _FORMAT_SUFFIX.sub("", name)]
    base = names[1].rsplit("/", 1)[-1]
    names += [base, *(f"{vendor}/{base}" for vendor in _VENDORS)]
    for candidate in names:
        try:
            return find_model(candidate)
        except InputError:
            continue
    raise InputError(f"model = {name!r} is not in the catalog")


def _gpu(name: str) -> Gpu:
    bare = _GPU_NOISE.sub("", name)
    for candidate in (name, bare, _GPU_NOISE.sub("", bare), f"{bare}-sxm"):
        try:
            return find_gpu(candidate)
        except InputError:
            continue
    raise InputError(f"gpu = {name!r} is not in the catalog")


def _source(row: Row) -> Mapping[str, Any]:
    """What is known of the row's source; nothing for others."""
    text = f"{_text(row, 'source')} {_text(row, 'notes')}"
    found: list[Mapping[str, Any]] = [
        s for s in table("sources.yaml")["sources"] if any(word in text for word in s["words"])
    ]
    return found[0] if found else {}


def _version(row: Row) -> str:
    """The stated version; for a blank or a nightly the release of its day, or the newest the table knows."""
    stated = _text(row, "vllm_version")
    if re.match(r"v?\d+\.\d+", stated):
        return stated
    by_date: dict[str, str] = table("sources.yaml")["versions_by_date"]
    day = re.search(r"measured=(\d{4}-\d\d-\d\d)", _text(row, "notes"))
    if day is None:
        return str(by_date[max(by_date)])
    earlier = [date for date in by_date if date <= day[1]]
    return str(by_date[max(earlier)] if earlier else by_date[min(by_date)])


def _check_usable(row: Row, architecture: Architecture, notes: Mapping[str, str], tp: int, gpus: int) -> None:
    """Refuse what the row itself says not to use, and labels that contradict one another."""
    text = _text(row, "notes")
    if "do not use" in text:
        raise InputError("its notes say not to use it")
    if "over network" in text:
        raise InputError("tensor parallelism over a network: the link's rate is not known")
    if architecture.is_moe and "moe_tp" in notes:
        ranks = int(notes["moe_tp"]) * int(notes.get("moe_ep") or 1)
        if ranks not in (0, tp, gpus):
            raise InputError(f"its labels disagree: experts over {ranks} ranks, but tp = {tp} and {gpus} GPUs")


def _load(row: Row, source: Mapping[str, Any], tp: int, gpus: int) -> tuple[float | None, float | None]:
    """(users, requests a second), one of them None."""
    users, rate = _number(row, "concurrency"), _number(row, "request_rate")
    if users is not None:
        times = gpus / tp if source.get("users_times_gpus_over_tp") else 1.0
        return users * times, None
    if rate is not None:
        return None, rate
    raise InputError("neither concurrency nor a finite request rate is stated")


def _deployment(
    row: Row,
    architecture: Architecture,
    gpu: Gpu,
    tp: int,
    shape: tuple[float, float],
    notes: Mapping[str, str],
    source: Mapping[str, Any],
    version: str,
    users: float | None,
) -> Deployment:
    flags = _flags(source, gpu, architecture, _text(row, "weight_dtype"), version, shape, users)
    for word, (key, kind) in _FLAG_WORDS.items():
        if notes.get(word):
            flags[key] = kind(notes[word])
    kv = _text(row, "kv_dtype") or flags.pop("kv", "auto")
    flags.pop("kv", None)
    longest = max(architecture.context, architecture.max_position_embeddings)
    flags.setdefault("max_model_len", min(longest, int(sum(shape)) + 256))
    moe_ep = int(notes.get("moe_ep") or 1)
    asynchronous = bool(flags.pop("async_scheduling", False))
    deployment = resolve_deployment(
        architecture,
        gpu=gpu,
        tp=tp,
        expert_parallel=architecture.is_moe and moe_ep > 1,
        weights=_weights(_text(row, "weight_dtype"), architecture),
        kv=kv,
        vllm_version=version,
        **flags,
    )
    return replace(deployment, concurrent_batches=2) if asynchronous else deployment


def _weights(stated: str, architecture: Architecture) -> str:
    """The format's name; "fp4" of a checkpoint that is MXFP4 already is its own."""
    own = str((architecture.quantization or {}).get("quant_method", ""))
    if not stated or (stated in ("fp4", "mxfp4") and own == "mxfp4"):
        return "auto"
    return {"fp4": "nvfp4"}.get(stated, stated)


def _flags(
    source: Mapping[str, Any],
    gpu: Gpu,
    architecture: Architecture,
    weights: str,
    version: str,
    shape: tuple[float, float],
    users: float | None,
) -> dict[str, Any]:
    """Engine flags that the source's scripts set."""
    found: dict[str, Any] = {}
    for entry in source.get("servers", ()):
        if _holds(entry, gpu.name, str(architecture.catalog_name), weights, version):
            found.update({k: v for k, v in entry.items() if k not in _CONDITIONS})
    prompts = found.pop("prompts_a_step", None)
    if prompts is not None:
        found["max_num_batched_tokens"] = max(2048, int(prompts * shape[0]))
    if found.get("max_num_seqs") == "users":
        found["max_num_seqs"] = max(1, round(users)) if users is not None else None
    return {key: value for key, value in found.items() if value is not None}


_CONDITIONS = ("gpu", "model", "weights", "from_version", "before_version")


def _holds(entry: Mapping[str, Any], gpu: str, model: str, weights: str, version: str) -> bool:
    number = numbers(version)
    return (
        gpu.startswith(entry.get("gpu", ""))
        and model.startswith(entry.get("model", ""))
        and weights == entry.get("weights", weights)
        and number >= numbers(entry.get("from_version", "0.0"))
        and number < numbers(entry.get("before_version", "999.0"))
    )


def numbers(version: str) -> tuple[int, int]:
    """Major and minor of a version.

    Raises:
        InputError: it does not begin with them.
    """
    match = re.match(r"v?(\d+)\.(\d+)", version)
    if match is None:
        raise InputError(f"version = {version!r}, expected numbers such as 0.18")
    return int(match[1]), int(match[2])


def _check_possible(found: Measurement) -> None:
    """Refuse a row that contradicts itself: by its own TTFT and TPOT (Little's law) so many sequences ran that reading the
    weights they need takes longer than the step, at the datasheet's bandwidth."""
    if found.tpot_s is None or found.ttft_s is None or found.users is None:
        return
    physics = physics_of(found.deployment)
    decoding = found.tpot_s * found.shape.output_tokens
    running = found.users * decoding / (decoding + found.ttft_s)
    # two in three of the experts that even routing would choose, and an 8-bit cache: a bound, not an estimate
    experts = sum(group.bytes * expected_share(group.total, group.per_token, running) for group in physics.experts) * (
        2 / 3
    )
    cache_bytes = physics.kv_bytes(running, running * found.shape.mean_context) / 2
    floor = (physics.weight_bytes + experts + cache_bytes) / physics.bandwidth_bytes_per_s
    if found.tpot_s < floor:
        raise InputError(
            f"it contradicts itself: by its TTFT and TPOT {running:.0f} sequences ran, and reading their weights and cache "
            f"takes {floor * 1e3:.1f} ms at the memory's peak, more than its TPOT of {found.tpot_s * 1e3:.1f} ms"
        )
