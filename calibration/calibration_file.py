"""What a calibration file holds: the factors of one deployment, what they were fitted on, and where they hold.

    calibration_to_json(calibration)  <->  calibration_from_json(content)
    calibration.rebuild_deployment()   the deployment they belong to, every field as it was
    mismatches(calibration, other)     why they may not hold for another one, in words

Reading is strict: a key that is missing, unknown or holds something else is refused by name. Files are the business of
:mod:`harness.calibration_file`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from calibration.catalog import find_gpu, model_entry
from calibration.deployment import Deployment, resolve_deployment
from calibration.errors import InputError
from calibration.factors import FACTORS, FactorSet, factors_from_json
from calibration.families import read_config
from calibration.gpu import Gpu
from calibration.memory import plan_memory
from calibration.observation import Observation
from calibration.queueing import Shape

SCHEMA_VERSION = 1

#: stands for a GPU that nobody named: a server does not tell. Its rates only give the factors their units
UNKNOWN_GPU = Gpu(
    name="unknown",
    title="unknown GPU",
    memory_bytes=80 << 30,
    usable_bytes=79 << 30,
    usable_is_measured=True,
    bandwidth_bytes_per_s=2.0e12,
    flops_per_s={"bf16": 500e12, "fp16": 500e12, "fp8": 1000e12, "int8": 1000e12},
    link_bytes_per_s=100e9,
    link="unknown",
    compute_capability="",
    watts=0.0,
    sources=("between an A100 and an H200",),
)

#: what scatters: the keys of ``residual_log_sd``
QUANTITIES = ("tpot", "ttft", "throughput", "per_user")

#: fields of a deployment that are kept as they are, by the name ``resolve_deployment`` takes
_PLAIN: Mapping[str, tuple[type, ...]] = {
    "device": (str,),
    "vllm_version": (str,),
    "tp": (int,),
    "pp": (int,),
    "dp": (int,),
    "expert_parallel": (bool,),
    "dtype": (str,),
    "max_model_len": (int,),
    "max_num_seqs": (int,),
    "max_num_batched_tokens": (int,),
    "gpu_memory_utilization": (float, int),
    "block_size": (int, type(None)),
    "num_gpu_blocks_override": (int, type(None)),
    "kv_cache_memory_bytes": (int, type(None)),
    "enable_prefix_caching": (bool,),
    "hybrid_kv_cache_manager": (bool,),
    "enforce_eager": (bool,),
    "mamba_ssm_cache_dtype": (str,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where an architecture is read from again: a catalog name or Hugging Face id, or a config.json's content with the
    ``source`` it came from; exactly one of the two."""

    catalog: str | None = None
    config: Mapping[str, Any] | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRecord:
    """A deployment as plain values. ``served_model`` is the name in requests, where it is known."""

    model: ModelSource
    gpu: str | None
    weights: str
    kv: str
    plain: Mapping[str, Any]
    given: tuple[str, ...]
    served_model: str | None = None

    def rebuild(self) -> Deployment:
        """The deployment, every field as it was.

        Raises:
            InputError: a value that cannot be, or a model or GPU that the catalog no longer knows.
        """
        if self.model.config is not None:
            architecture = read_config(self.model.config, self.model.source)
        else:
            assert self.model.catalog is not None
            architecture = model_entry(self.model.catalog).architecture
        plain = dict(self.plain)
        if "mamba_ssm_cache_dtype" not in self.given:
            # told by the model and the device; asked for, it would silence a warning
            plain["mamba_ssm_cache_dtype"] = None
        built = resolve_deployment(
            architecture,
            gpu=gpu_named(self.gpu),
            weights=self.weights,
            kv=self.kv,
            **plain,
        )
        return replace(built, given=frozenset(self.given))


def gpu_named(name: str | None) -> Gpu | None:
    """The catalog's GPU of this name, the one that stands for an unknown GPU, or none.

    Raises:
        InputError: the catalog has none of this name.
    """
    if name is None:
        return None
    return UNKNOWN_GPU if name == UNKNOWN_GPU.name else find_gpu(name)


def record_deployment(
    deployment: Deployment, model: str | Mapping[str, Any], served_model: str | None = None
) -> DeploymentRecord:
    """The record of a deployment.

    Args:
        model: what its architecture was read from: a catalog name or Hugging Face id, or a config.json's content.

    Raises:
        InputError: the record would not rebuild it: another model, or a GPU that is not in the catalog.
    """
    source = (
        ModelSource(catalog=model)
        if isinstance(model, str)
        else ModelSource(config=model, source=deployment.architecture.source)
    )
    for weights in ("auto", deployment.weights.name):
        record = DeploymentRecord(
            model=source,
            gpu=None if deployment.gpu is None else deployment.gpu.name,
            weights=weights,
            kv=deployment.kv_asked,
            plain={name: getattr(deployment, name) for name in _PLAIN},
            given=tuple(sorted(deployment.given)),
            served_model=served_model,
        )
        if _rebuilds(record, deployment):
            return record
    raise InputError(
        f"the deployment of {deployment.architecture.name} cannot be kept: its record would rebuild another one",
        "expected a model and a GPU as the catalog or the config.json has them",
    )


def _rebuilds(record: DeploymentRecord, deployment: Deployment) -> bool:
    try:
        return record.rebuild() == deployment
    except InputError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedStage:
    """A stage that was fitted: its observation, how far the fit missed it (relative, fitted over measured less one; None
    where not measured), and by how much Little's law missed its throughput. ``run`` is the number of its run in ``runs``.
    """

    run: int
    observation: Observation
    output_tokens_per_s: float | None = None
    tpot_error: float | None = None
    ttft_error: float | None = None
    little_error: float | None = None


class LeftOut(NamedTuple):
    """A stage that was not fitted, and why."""

    run: int
    label: str
    users: float | None
    prompt_tokens: float | None
    output_tokens: float | None
    reason: str


class HeldOut(NamedTuple):
    """A prediction for a stage that the fit did not see. ``metric``: tpot (s), ttft (s) or throughput (tokens/s)."""

    label: str
    metric: str
    measured: float
    predicted: float
    low: float
    high: float


class FactorFinding(NamedTuple):
    """What the data said of a factor (:class:`calibration.fit.FactorReport`); infinite inflation is None."""

    identified: bool
    narrowed: float
    inflation: float | None
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRecord:
    """How good a fit is: condition number of the design over the identified factors (None: singular), log sd of a
    measurement about the model by quantity, and a finding on every factor that took part."""

    condition: float | None
    scatter: Mapping[str, float]
    findings: Mapping[str, FactorFinding]


class RunRecord(NamedTuple):
    """A run that was fitted: its folder, when it began (ISO 8601), and against which address."""

    folder: str
    started: str
    base_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The factors of one deployment, with what they were fitted on and where they hold.

    ``factors.domain`` says where predictions are interpolated; ``notes`` what else to mind, in sentences.
    ``created`` is ISO 8601, ``harness_version`` the version that fitted.
    """

    deployment: DeploymentRecord
    factors: FactorSet
    used: tuple[UsedStage, ...]
    left_out: tuple[LeftOut, ...]
    held_out: tuple[HeldOut, ...]
    fit: FitRecord
    runs: tuple[RunRecord, ...]
    notes: tuple[str, ...]
    harness_version: str
    created: str
    schema_version: int = SCHEMA_VERSION

    @property
    def single_shape(self) -> bool:
        """Were all stages of one prompt and output length? Then it holds for that shape only."""
        return self.factors.domain is not None and len(self.factors.domain.shapes) == 1

    def rebuild_deployment(self) -> Deployment:
        """The deployment the factors belong to.

        Raises:
            InputError: see :meth:`DeploymentRecord.rebuild`.
        """
        return self.deployment.rebuild()


class Difference(NamedTuple):
    """A field in which another deployment differs. ``key``: model, gpu, tp, ..., vllm_version, pool."""

    key: str
    calibrated: str
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.calibrated} when calibrated, {self.now} now"


#: what makes another server of a deployment, beside model, GPU, formats and pool
_COMPARED = tuple(
    name
    for name in _PLAIN
    # what they decide is in the pool
    if name not in ("gpu_memory_utilization", "num_gpu_blocks_override", "kv_cache_memory_bytes", "block_size")
)


def differences(calibration: Calibration, deployment: Deployment) -> list[Difference]:
    """Where a deployment is not the one that was calibrated; empty where the factors are its own.

    Raises:
        InputError: the calibrated deployment cannot be rebuilt.
    """
    old = calibration.rebuild_deployment()
    pairs = [
        ("model", _model(old), _model(deployment)),
        ("gpu", old.gpu and old.gpu.name, deployment.gpu and deployment.gpu.name),
        ("weights", old.weights.name, deployment.weights.name),
        ("kv", old.kv.name, deployment.kv.name),
        *((name, getattr(old, name), getattr(deployment, name)) for name in _COMPARED),
        ("pool", _pool(old), _pool(deployment)),
    ]
    return [Difference(key, str(a), str(b)) for key, a, b in pairs if a != b]


def mismatches(calibration: Calibration, deployment: Deployment) -> list[str]:
    """The same in words: "vllm_version: 0.31.0 when calibrated, 0.32.0 now"."""
    return [str(difference) for difference in differences(calibration, deployment)]


def _model(deployment: Deployment) -> str:
    """A name that tells architectures apart: two configurations of one shape are one model."""
    a = deployment.architecture
    return f"{a.name}, {a.num_layers} layers, {a.params_total / 1e9:.3g} B parameters"


def _pool(deployment: Deployment) -> str:
    pool = plan_memory(deployment).pool
    return "none" if pool is None else f"{pool.num_blocks} blocks of {pool.block_size} tokens"


# --- to and from JSON ------------------------------------------------------------------------------------------------


def calibration_to_json(calibration: Calibration) -> dict[str, Any]:
    """Plain values, no NaN: what :func:`calibration_from_json` reads."""
    c = calibration
    return {
        "schema_version": c.schema_version,
        "harness_version": c.harness_version,
        "created": c.created,
        "deployment": _deployment_json(c.deployment),
        "factors": c.factors.to_json(),
        "fit": {
            "condition": c.fit.condition,
            "scatter": dict(c.fit.scatter),
            "findings": {name: finding._asdict() for name, finding in c.fit.findings.items()},
        },
        "notes": list(c.notes),
        "runs": [run._asdict() for run in c.runs],
        "used": [_used_json(stage) for stage in c.used],
        "left_out": [stage._asdict() for stage in c.left_out],
        "held_out": [row._asdict() for row in c.held_out],
    }


def _deployment_json(record: DeploymentRecord) -> dict[str, Any]:
    return {
        "model": {"catalog": record.model.catalog, "config": record.model.config, "source": record.model.source},
        "served_model": record.served_model,
        "gpu": record.gpu,
        "weights": record.weights,
        "kv": record.kv,
        **record.plain,
        "given": list(record.given),
    }


_SHAPE = ("prompt_tokens", "output_tokens", "think_s", "requests_per_user", "cached_prompt_share")
_OBSERVED = tuple(f.name for f in fields(Observation) if f.name not in ("shape", "held_out"))
_ERRORS = ("output_tokens_per_s", "tpot_error", "ttft_error", "little_error")


def _used_json(stage: UsedStage) -> dict[str, Any]:
    return {
        "run": stage.run,
        **{name: getattr(stage.observation, name) for name in _OBSERVED},
        "shape": _shape_json(stage.observation.shape),
        **{name: getattr(stage, name) for name in _ERRORS},
    }


def _shape_json(shape: Shape) -> dict[str, float | None]:
    """A stage whose users were spread says nothing of their starts, as older files do."""
    found = {name: getattr(shape, name) for name in _SHAPE}
    return found if shape.start_gap_s is None else found | {"start_gap_s": shape.start_gap_s}


def calibration_from_json(content: object) -> Calibration:
    """What :func:`calibration_to_json` gave.

    Raises:
        InputError: it is no calibration, one of a newer version, or a key is missing, unknown or holds something else;
            names the key and what was expected.
    """
    top = _Table(content, "")
    version = top.take("schema_version", int)
    if version != SCHEMA_VERSION:
        newer = "a newer version wrote it: update vllm-harness" if version > SCHEMA_VERSION else "calibrate again"
        raise InputError(f"schema_version = {version}, this version reads {SCHEMA_VERSION}", newer)
    found = Calibration(
        harness_version=top.take("harness_version", str),
        created=top.take("created", str),
        deployment=_read_deployment(top.table("deployment")),
        factors=_read_factors(top.take("factors", dict)),
        fit=_read_fit(top.table("fit")),
        notes=tuple(top.texts("notes")),
        runs=tuple(
            RunRecord(t.take("folder", str), t.take("started", str), t.take("base_url", str))
            for t in top.tables("runs")
        ),
        used=tuple(_read_used(table) for table in top.tables("used")),
        left_out=tuple(_read_left_out(table) for table in top.tables("left_out")),
        held_out=tuple(_read_held_out(table) for table in top.tables("held_out")),
    )
    top.end()
    for key, numbers in (("used", [s.run for s in found.used]), ("left_out", [s.run for s in found.left_out])):
        for i, run in enumerate(numbers):
            if not 0 <= run < len(found.runs):
                raise InputError(f"{key}.{i}.run = {run}, expected the number of one of the {len(found.runs)} runs")
    return found


class _Table:
    """A JSON object that is read key by key; :meth:`end` refuses what was not asked for."""

    def __init__(self, content: object, path: str) -> None:
        if not isinstance(content, Mapping):
            raise InputError(f"{path or 'the file'}: expected an object, not {type(content).__name__}")
        self._content = dict(content)
        self.path = path

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def take(self, key: str, *kinds: type) -> Any:
        if key not in self._content:
            raise InputError(f"{self.at(key)} is missing", "expected what `vllm-harness calibrate` writes")
        value = self._content.pop(key)
        # a bool is an int to Python, to nobody else
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise InputError(f"{self.at(key)} = {value!r:.80}, expected {expected}")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{self.at(key)} = {value!r}, expected a finite number")
        return value

    def number(self, key: str) -> float:
        return float(self.take(key, float, int))

    def maybe(self, key: str) -> float | None:
        value = self.take(key, float, int, type(None))
        return None if value is None else float(value)

    def table(self, key: str) -> _Table:
        return _Table(self.take(key, dict), self.at(key))

    def tables(self, key: str) -> list[_Table]:
        return [_Table(item, f"{self.at(key)}.{i}") for i, item in enumerate(self.take(key, list))]

    def texts(self, key: str) -> list[str]:
        items: list[str] = self.take(key, list)
        for i, item in enumerate(items):
            if not isinstance(item, str):
                raise InputError(f"{self.at(key)}.{i} = {item!r:.80}, expected str")
        return items

    def numbers(self, key: str) -> dict[str, float]:
        table = self.table(key)
        return {name: table.number(name) for name in tuple(table._content)}

    def rest(self) -> tuple[str, ...]:
        return tuple(self._content)

    def end(self) -> None:
        if self._content:
            raise InputError(f"{self.at(next(iter(self._content)))} is not known here", "written by another version?")


def _read_deployment(table: _Table) -> DeploymentRecord:
    model = table.table("model")
    source = ModelSource(
        catalog=model.take("catalog", str, type(None)),
        config=model.take("config", dict, type(None)),
        source=model.take("source", str),
    )
    model.end()
    if (source.catalog is None) == (source.config is None):
        raise InputError(f"{model.path}: expected either catalog or config")
    record = DeploymentRecord(
        model=source,
        served_model=table.take("served_model", str, type(None)),
        gpu=table.take("gpu", str, type(None)),
        weights=table.take("weights", str),
        kv=table.take("kv", str),
        plain={name: table.take(name, *kinds) for name, kinds in _PLAIN.items()},
        given=tuple(table.texts("given")),
    )
    table.end()
    try:
        record.rebuild()
    except InputError as error:
        raise InputError(f"{table.path}: {error.message}", error.hint) from error
    return record


def _read_factors(content: Mapping[str, Any]) -> FactorSet:
    found = factors_from_json(content)
    _check_scatter(found.residual_log_sd, "factors.residual_log_sd")
    if found.domain is not None:
        for value in (*found.domain.users, *(length for shape in found.domain.shapes for length in shape)):
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"factors.domain has {value!r}, expected finite numbers above 0")
    for i, c in enumerate(found.covariances):
        where = f"factors.covariances.{i}"
        unknown = [name for name in c.names if name not in FACTORS]
        if unknown:
            raise InputError(f"{where}.names has {unknown[0]!r}, expected some of {', '.join(FACTORS)}")
        size = len(c.names)
        if len(c.matrix) != size or any(len(row) != size for row in c.matrix):
            raise InputError(f"{where}.matrix: expected {size} rows of {size} numbers, one a name")
        if not all(math.isfinite(value) for row in c.matrix for value in row):
            raise InputError(f"{where}.matrix: expected finite numbers")
    return found


def _read_fit(table: _Table) -> FitRecord:
    findings = table.table("findings")
    found = {}
    for name in findings.rest():
        if name not in FACTORS:
            raise InputError(f"{findings.at(name)} is no factor", f"known: {', '.join(FACTORS)}")
        item = findings.table(name)
        found[name] = FactorFinding(
            item.take("identified", bool), item.number("narrowed"), item.maybe("inflation"), item.take("advice", str)
        )
        item.end()
    fit = FitRecord(condition=table.maybe("condition"), scatter=table.numbers("scatter"), findings=found)
    table.end()
    _check_scatter(fit.scatter, "fit.scatter")
    return fit


def _check_scatter(scatter: Mapping[str, float], where: str) -> None:
    for name, value in scatter.items():
        if name not in QUANTITIES:
            raise InputError(f"{where}.{name} is not known here", f"known: {', '.join(QUANTITIES)}")
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{where}.{name} = {value!r}, expected a finite number >= 0")


def _read_used(table: _Table) -> UsedStage:
    shape = table.table("shape")
    lengths = {name: shape.maybe(name) if name == "requests_per_user" else shape.number(name) for name in _SHAPE}
    if "start_gap_s" in shape.rest():
        lengths["start_gap_s"] = shape.number("start_gap_s")
    shape.end()
    optional = {f.name for f in fields(Observation) if "None" in str(f.type)}
    observed: dict[str, Any] = {
        name: table.take(name, str)
        if name == "label"
        else table.maybe(name)
        if name in optional
        else table.number(name)
        for name in _OBSERVED
    }
    stage = UsedStage(
        run=table.take("run", int),
        observation=Observation(shape=Shape(**lengths), **observed),  # type: ignore[arg-type]  # by name, as read
        **{name: table.maybe(name) for name in _ERRORS},
    )
    table.end()
    return stage


def _read_left_out(table: _Table) -> LeftOut:
    row = LeftOut(
        table.take("run", int),
        table.take("label", str),
        table.maybe("users"),
        table.maybe("prompt_tokens"),
        table.maybe("output_tokens"),
        table.take("reason", str),
    )
    table.end()
    return row


def _read_held_out(table: _Table) -> HeldOut:
    numbers: Sequence[str] = ("measured", "predicted", "low", "high")
    row = HeldOut(table.take("label", str), table.take("metric", str), *(table.number(name) for name in numbers))
    table.end()
    return row
