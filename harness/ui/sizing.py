"""One sizing: what the page asks, strictly read, through the functions that ``plan`` calls, to what the page shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from calibration.architecture import Architecture
from calibration.artifacts import SCRIPT_NAME, compose_file, launch_script, plan_launch, served_model
from calibration.calibration_file import Calibration, calibration_from_json, mismatches
from calibration.catalog import find_gpu, gpu_entries, model_entries, model_entry
from calibration.deployment import Deployment, resolve_deployment
from calibration.errors import InputError
from calibration.factors import FactorSet
from calibration.families import read_config
from calibration.kv_cache import Pool
from calibration.limits import Sizing, Slo, shape_of, size
from calibration.plan import Plan, make_plan, resolve_load
from calibration.prediction import Estimate
from calibration.priors import physics_of, prior_factors
from calibration.serving import Serving
from calibration.transfer import factors_for
from harness.cli.plan import PRESETS
from harness.cli.plan_view import document
from harness.cli.plan_write import COMPOSE_NAME
from harness.export.charts import Axis, Chart, Mark
from harness.export.report_curves import METRICS, predicted, predicted_series, spread

WEIGHTS = ("auto", "bf16", "fp16", "fp8", "int8", "int4", "mxfp4", "nvfp4")
KV = ("auto", "bf16", "fp8", "fp8_e5m2", "fp8_ds_mla")

#: points of a curve, and how far beyond the first hard limit it goes
_POINTS = 11
_BEYOND = 1.5

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]


class Asked(BaseModel):
    """A sizing as the page asks for it; names as of ``plan``'s options. None is vLLM's default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: Annotated[str, Field(max_length=200)] | None = None
    #: the content of a config.json instead of a name, and what to call it
    config: dict[str, Any] | None = None
    config_name: Annotated[str, Field(max_length=200)] = "config.json"
    gpu: Annotated[str, Field(max_length=100)]
    weights: Annotated[str, Field(max_length=40)] = "auto"
    kv: Annotated[str, Field(max_length=40)] = "auto"
    tp: Count = 1
    pp: Count = 1
    dp: Count = 1
    max_model_len: Count | None = None
    prompt_tokens: Count
    output_tokens: Count
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    slo_ttft_ms: Annotated[float, Field(gt=0, le=1e9)] | None = None
    slo_tpot_ms: Annotated[float, Field(gt=0, le=1e9)] | None = None
    #: a run in results/ that was calibrated, or the content of a calibration file
    calibration_run: Annotated[str, Field(max_length=300)] | None = None
    calibration: dict[str, Any] | None = None
    #: use its factors for another deployment on the same GPU, as wide priors
    transfer: bool = False


@dataclass(frozen=True)
class Sized:
    """A plan and what follows from it; ``sizing`` is None where it does not fit."""

    asked: Asked
    plan: Plan
    sizing: Sizing | None
    notes: tuple[str, ...]

    @cached_property
    def document(self) -> dict[str, Any]:
        """The document of ``plan --json``."""
        return document(self.plan, self.sizing)


def asked_of(content: object) -> Asked:
    """What the page asks.

    Raises:
        InputError: a key that is unknown, missing or holds something else; names it.
    """
    try:
        return Asked.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the request"
        raise InputError(f"{key}: {first['msg'].lower()}, not {first['input']!r:.80}") from error


def plan_of(asked: Asked) -> Plan:
    """What memory says of a deployment: all that its launch files and the ends of its curves need.

    Raises:
        InputError: a value that cannot be, or that vLLM refuses at start.
        Unsupported: a model, format or combination that is not known.
    """
    deployment = resolve_deployment(
        _architecture(asked),
        gpu=find_gpu(asked.gpu),
        tp=asked.tp,
        pp=asked.pp,
        dp=asked.dp,
        weights=asked.weights,
        kv=asked.kv,
        max_model_len=asked.max_model_len,
        max_num_seqs=asked.max_num_seqs,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        gpu_memory_utilization=asked.gpu_memory_utilization,
    )
    return make_plan(deployment, resolve_load(deployment.max_model_len, None, asked.prompt_tokens, asked.output_tokens))


def size_up(asked: Asked, calibration_of_run: Callable[[str], Calibration]) -> Sized:
    """Size a deployment.

    Args:
        calibration_of_run: the calibration of a run in results/, by name.

    Raises:
        InputError, Unsupported: as :func:`plan_of`.
        UsageError: the run is not there or was not calibrated.
    """
    plan = plan_of(asked)
    factors, notes = _factors(asked, plan.deployment, calibration_of_run)
    seconds = {key: None if ms is None else ms / 1e3 for key, ms in _limits(asked).items()}
    return Sized(asked, plan, size(plan, Slo(**seconds), factors), notes)


def _factors(
    asked: Asked, deployment: Deployment, of_run: Callable[[str], Calibration]
) -> tuple[FactorSet | None, tuple[str, ...]]:
    """The factors of the calibration that is named, and what they rest on; None and nothing without one.

    Raises:
        InputError: it is of another deployment and no transfer was asked for, or none is possible.
    """
    calibration = _calibration(asked, of_run)
    if calibration is None:
        return None, ()
    factors = factors_for(calibration, deployment, transfer=asked.transfer)
    said = f"Corrected by a calibration of {len(calibration.used)} stages, {calibration.created[:10]}."
    other = "; ".join(mismatches(calibration, deployment))
    if factors is not calibration.factors:
        return factors, (f"{said} Carried over as wide priors, for here are {other}.",)
    return factors, (f"{said} The factors hold, the bounds are other ones: {other}." if other else said,)


def _limits(asked: Asked) -> dict[str, float | None]:
    return {"ttft_s": asked.slo_ttft_ms, "tpot_s": asked.slo_tpot_ms}


def _architecture(asked: Asked) -> Architecture:
    """From the catalog or the given content; a path is never opened."""
    if (asked.model is None) == (asked.config is None):
        raise InputError("expected either model, a name of the catalog, or config, the content of a config.json")
    if asked.config is not None:
        return read_config(asked.config, asked.config_name)
    assert asked.model is not None
    return model_entry(asked.model).architecture


def _calibration(asked: Asked, of_run: Callable[[str], Calibration]) -> Calibration | None:
    if asked.calibration is not None and asked.calibration_run is not None:
        raise InputError("calibration and calibration_run, expected one of them")
    if asked.calibration is not None:
        return calibration_from_json(asked.calibration)
    return None if asked.calibration_run is None else of_run(asked.calibration_run)


def curves(
    asked: Sequence[Asked], names: Sequence[str], calibration_of_run: Callable[[str], Calibration]
) -> list[Chart]:
    """Throughput, TTFT and TPOT over users, a curve with its interval for each deployment that fits.

    Raises:
        InputError, Unsupported, UsageError: as :func:`size_up`.
    """
    drawn: list[tuple[str, int, list[float], Mapping[str, list[Estimate]]]] = []
    marks: list[Mark] = []
    for look, (one, name) in enumerate(zip(asked, names, strict=True), 1):
        plan = plan_of(one)
        factors, _ = _factors(one, plan.deployment, calibration_of_run)
        if plan.memory.fits and plan.memory.pool is not None:
            drawn.append((name, look, *_over_users(plan, plan.memory.pool, factors)))
            # where the pool fills: from all streams at their end to spread evenly
            marks.append(Mark(label="the pool fills", low=plan.kv_full, high=plan.kv_staggered))
    if not drawn:
        return []
    return [
        Chart(
            key=f"size-{metric.key}",
            title=metric.title,
            x=Axis(label="users", log=True),
            y=Axis(label=metric.unit),
            series=[
                predicted_series(name, users, found[metric.key], metric.scale, look)
                for name, look, users, found in drawn
            ],
            marks=marks if len(drawn) == 1 else [],
        )
        for metric in METRICS
    ]


def _over_users(plan: Plan, pool: Pool, factors: FactorSet | None) -> tuple[list[float], Mapping[str, list[Estimate]]]:
    served = Serving(plan.deployment, physics_of(plan.deployment), pool)
    known = factors if factors is not None else prior_factors(plan.deployment, served.physics)
    users = spread(1.0, max(2.0, _BEYOND * min(plan.kv_staggered, plan.max_num_seqs)), _POINTS)
    return users, predicted(served, known, shape_of(plan.load), users)


def launch_files(asked: Asked) -> dict[str, Any]:
    """The launch script and the compose file of a plan, as ``plan --write`` leaves them.

    Raises:
        InputError: it does not fit, or this vLLM version refuses a flag that the plan means; and as :func:`plan_of`.
        Unsupported: as :func:`plan_of`.
    """
    plan = plan_of(asked)
    if not plan.memory.fits:
        raise InputError(f"no launch files: the plan does not fit, {plan.memory.reason}")
    # of a config.json that was dropped here, whoever starts it names the checkpoint
    model = None if asked.model is None else served_model(asked.model)
    launch = plan_launch(plan.deployment, model)
    files = {SCRIPT_NAME: launch_script(launch), COMPOSE_NAME: compose_file(launch)}
    return {"files": files, "notes": list(launch.notes)}


def catalog() -> dict[str, Any]:
    """What the controls offer."""
    return {
        "models": [{"name": m.name, "context": m.architecture.context} for m in model_entries()],
        "gpus": [{"name": gpu.name, "title": gpu.title} for gpu in gpu_entries()],
        "weights": list(WEIGHTS),
        "kv": list(KV),
        "presets": [
            {"name": name, "model": model, "gpu": gpu, "tp": tp, "weights": weights}
            for name, (model, gpu, tp, weights) in PRESETS.items()
        ],
    }
