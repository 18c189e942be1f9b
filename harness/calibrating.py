"""What `calibrate` needs of the world: which deployment a probe means, a design as a profile, finished runs as stages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from calibration.calibrate import FinishedRun, calibrate
from calibration.calibration_file import (
    UNKNOWN_GPU,
    Calibration,
    DeploymentRecord,
    RunRecord,
    gpu_named,
    record_deployment,
)
from calibration.catalog import find_model
from calibration.deployment import resolve_deployment
from calibration.design import DesignedStage
from calibration.errors import InputError
from calibration.families import read_config
from harness.clock import wall_time
from harness.errors import UsageError
from harness.formats.imported import as_run
from harness.formats.read import is_result, read_files
from harness.observe.probe import ProbeResult
from harness.store import RunData, read_run
from loadprofiles.pauses import mean_pause_s
from loadprofiles.profile import Profile, parse_profile

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the user says of a server beside what it shows; None: taken from the server, else vLLM's default."""

    model_config: str | None = None
    gpu: str | None = None
    device: str | None = None
    tp: int = 1
    pp: int = 1
    weights: str = "auto"
    dtype: str | None = None
    dp: int | None = None
    kv: str | None = None
    vllm_version: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    enforce_eager: bool = False


def record_of(probed: ProbeResult, told: Told) -> DeploymentRecord:
    """The deployment that a probe and its user describe.

    Raises:
        InputError: the model or the pool is not known, or values that do not go together.
    """
    model = _model(probed, told)
    architecture = find_model(model) if isinstance(model, str) else read_config(model, _source(probed, told))
    pool = probed.pool
    blocks = _first(told.num_gpu_blocks, None if pool is None else pool.num_blocks)
    on_cpu = told.device == "cpu"
    if blocks is None and (on_cpu or told.gpu is None):
        said = f"the KV pool of {_first(probed.model, probed.base_url)} is not known: nothing shows it"
        if on_cpu:
            raise InputError(f"{said}, and on a CPU it follows from no datasheet", "give --num-gpu-blocks")
        raise InputError(
            f"{said}, and no GPU was named to reckon it from",
            "give --gpu or --num-gpu-blocks; of a live server, open its /metrics (--metrics-url)",
        )
    deployment = resolve_deployment(
        architecture,
        gpu=None if on_cpu else gpu_named(told.gpu or UNKNOWN_GPU.name),
        device=told.device,
        vllm_version=_first(told.vllm_version, probed.vllm_version),
        tp=told.tp,
        pp=told.pp,
        dp=_first(told.dp, probed.engines) or 1,
        dtype=told.dtype,
        weights=told.weights,
        kv=_first(told.kv, pool.kv_cache_dtype if pool else None) or "auto",
        max_model_len=_first(told.max_model_len, probed.max_model_len),
        max_num_seqs=_first(told.max_num_seqs, probed.max_num_seqs),
        max_num_batched_tokens=_first(told.max_num_batched_tokens, probed.max_num_batched_tokens),
        gpu_memory_utilization=told.gpu_memory_utilization,
        block_size=_first(told.block_size, pool.block_size if pool else None),
        num_gpu_blocks_override=blocks,
        enable_prefix_caching=pool.prefix_caching if pool else None,
        enforce_eager=told.enforce_eager,
    )
    return record_deployment(deployment, model, probed.model)


def _first(*values: T | None) -> T | None:
    return next((value for value in values if value is not None), None)


def _source(probed: ProbeResult, told: Told) -> str:
    return told.model_config or str(Path(probed.model_root or probed.model) / "config.json")


def _model(probed: ProbeResult, told: Told) -> str | Mapping[str, Any]:
    """A catalog name, or the content of a config.json: what was told, else what the server loaded."""
    if told.model_config is not None:
        path = Path(told.model_config)
        path = path / "config.json" if path.is_dir() else path
        return _config(path) if path.suffix == ".json" or path.is_file() else told.model_config
    root = Path(probed.model_root or "") / "config.json"
    if probed.model_root and root.is_file():
        return _config(root)
    names = [name for name in (probed.model_root, probed.model) if name]
    if not names:
        raise InputError(
            "the result does not say which model it measured", "give --model as `vllm-harness models` lists it"
        )
    for name in names:
        try:
            find_model(name)
        except InputError:
            continue
        return name
    raise InputError(
        f"the architecture of {names[0]!r} is not known: it is not in the catalog, and its config.json is not readable here",
        "give --model-config with its config.json or a name that `vllm-harness models` lists; of finished runs also --model",
    )


def _config(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}", "expected a config.json") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}", "expected a Hugging Face config.json") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no JSON object", "expected a Hugging Face config.json")
    return content


def profile_of(name: str, stages: Sequence[DesignedStage], endpoint: str) -> Profile:
    """The stages as a profile."""
    return parse_profile(
        {
            "name": name,
            "about": "stages designed by vllm-harness calibrate",
            "workload": {
                "prompt_tokens": stages[0].prompt_tokens,
                "output_tokens": stages[0].output_tokens,
                "endpoint": endpoint,
            },
            "stages": [_stage(stage) for stage in stages],
        },
        "calibrate",
    )


def _stage(stage: DesignedStage) -> dict[str, Any]:
    bounds = {} if stage.requests is None else {"requests": stage.requests}
    return {
        "users": stage.users,
        "prompt_tokens": stage.prompt_tokens,
        "output_tokens": stage.output_tokens,
        "ramp_up": round(stage.ramp_up_s, 3),
        "warm_up": round(stage.warm_up_s, 3),
        "duration": round(stage.duration_s, 3),
        **bounds,
    }


def probe_of(run: RunData) -> ProbeResult:
    """What the server of a run showed.

    Raises:
        UsageError: run.json does not hold it.
    """
    try:
        return ProbeResult.from_dict(run.run["deployment"])
    except (KeyError, ValidationError) as error:
        raise UsageError(f"{run.folder}/run.json: deployment: not what a probe gives: {error}") from error


def finished_run(run: RunData, *, is_scout: bool = False) -> FinishedRun:
    """A run's stages as the fit takes them."""
    profile = run.run.get("profile", {}).get("stages", [])
    planned = [_by_its_means(profile[s["index"]]) if s["index"] < len(profile) else {} for s in run.stages]
    record = RunRecord(
        folder=str(run.folder),
        started=str(run.run.get("started", "")),
        base_url=str(run.run.get("deployment", {}).get("base_url", "")),
    )
    return FinishedRun(record, run.stages, planned, is_scout)


def _by_its_means(stage: Mapping[str, Any]) -> Mapping[str, Any]:
    """A stage as it was run, with the mean of its think times in place of their distribution."""
    return {**stage, "think": mean_pause_s(stage["think"])} if "think" in stage else stage


#: what a probe shows of a server that makes it another one
_IDENTITY = ("model_root", "vllm_version", "max_model_len", "engines", "pool", "max_num_seqs", "max_num_batched_tokens")
#: what another tool's result says of a server
_IDENTITY_IMPORTED = ("model",)


def one_server(runs: Sequence[RunData]) -> ProbeResult:
    """The server of all these runs: what any of them shows of it.

    Raises:
        UsageError: they are of different ones; names what differs.
    """
    probes = [(run.folder, probe_of(run)) for run in runs]
    live = [probe for run, (_, probe) in zip(runs, probes, strict=True) if run.run.get("source") != "imported"]
    shown = {}
    for key in _IDENTITY if live else (*_IDENTITY, *_IDENTITY_IMPORTED):
        known = [(folder, value) for folder, probe in probes if (value := getattr(probe, key)) not in (None, "")]
        for folder, value in known[1:]:
            if value != known[0][1]:
                raise UsageError(
                    f"{known[0][0]} and {folder} are of different deployments: {key} is {_shown(known[0][1])} in the first "
                    f"and {_shown(value)} in the second",
                    "calibrate each by itself",
                )
        if known:
            shown[key] = known[0][1]
    return (live or [probe for _, probe in probes])[0].model_copy(update=shown)


def _shown(value: object) -> str:
    pool_blocks = getattr(value, "num_blocks", None)
    return f"{pool_blocks} blocks" if pool_blocks is not None else repr(value)


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Finished runs; a result of another tool is one too, of the steady part of each of its levels.

    Raises:
        UsageError: one holds no run, or none of its stages ended.
    """
    runs = [as_run(read_files([path]), path) if is_result(path) else read_run(path) for path in folders]
    for run in runs:
        if not run.stages:
            raise UsageError(f"{run.folder} has no finished stage: there is nothing to fit")
    return runs


def calibrate_runs(record: DeploymentRecord, runs: Sequence[RunData]) -> Calibration:
    """The calibration of a deployment from its finished runs.

    Raises:
        NotIdentifiable: too few usable stages.
    """
    return calibrate(
        record,
        [finished_run(run) for run in runs],
        harness_version=version("vllm-harness"),
        created=wall_time().isoformat(timespec="seconds"),
    )
