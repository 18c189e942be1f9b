"""Stages of finished runs -> a calibration: the priors of a server nobody measured, the fit, and what to mind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from calibration.calibration_file import (
    UNKNOWN_GPU,
    Calibration,
    DeploymentRecord,
    FactorFinding,
    FitRecord,
    HeldOut,
    LeftOut,
    RunRecord,
    UsedStage,
)
from calibration.deployment import Deployment
from calibration.errors import NotIdentifiable
from calibration.factors import REQUEST_FACTORS, STEP_FACTORS, FactorSet
from calibration.fit import FEWEST_OBSERVATIONS, OWN_STAGES, Fit, fit
from calibration.observation import Observation
from calibration.prediction import propagate
from calibration.priors import prior_factors
from calibration.queueing import Shape, closed_loop
from calibration.serving import Serving, serving
from calibration.stages import Reading, read_stage

#: least spread of what stands in front of the first token: client, proxy and front end differ more than GPUs do
_LEAST_LOG_SD: Mapping[str, float] = {
    "request_overhead": 1.0,
    "request_token": 1.0,
    "wait_steps": 0.6,
    "prompt_factor": 0.3,
    "ahead_factor": 0.7,
}
#: what is added, in squares, where nobody says which GPU it is: devices in use differ by a factor of ten in bandwidth
#: and in operations
_UNKNOWN_LOG_SD = 0.9
#: by how much Little's law may miss a stage before it is worth a word
LITTLE_TOLERANCE = 0.05


def prior_of(deployment: Deployment, served: Serving) -> FactorSet:
    """The factors of a server before its first stage, as wide as servers differ."""
    prior = prior_factors(deployment, served.physics)
    unknown = _UNKNOWN_LOG_SD if deployment.gpu is not None and deployment.gpu.name == UNKNOWN_GPU.name else 0.0
    changed = []
    for name in (*STEP_FACTORS, *REQUEST_FACTORS):
        factor = prior[name]
        spread = max(factor.log_sd, _LEAST_LOG_SD.get(name, 0.0))
        if name in STEP_FACTORS:
            spread = math.hypot(spread, unknown)
        changed.append(replace(factor, log_sd=spread, prior_log_sd=spread))
    return prior.with_factors(*changed)


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run to fit: what names it, its stages as in ``summary.json``, and as they were planned in its profile."""

    record: RunRecord
    stages: Sequence[Mapping[str, Any]]
    planned: Sequence[Mapping[str, Any]]
    #: its stages were meant short: they are used though they are too short to be called steady
    is_scout: bool = False


def read_run_stages(deployment: Deployment, served: Serving, run: FinishedRun) -> list[Reading]:
    """Every stage of a run as a reading, in order."""
    readings = []
    for stage, planned in zip(run.stages, run.planned, strict=True):
        readings.append(
            read_stage(
                stage,
                planned,
                max_num_seqs=deployment.max_num_seqs * deployment.dp,
                wall_users=_wall_users(served, stage),
                unsteady_is_used=run.is_scout,
            )
        )
    return readings


def _wall_users(served: Serving, stage: Mapping[str, Any]) -> float | None:
    """Users at which the pool is full on average, at the stage's measured lengths."""
    prompt, output = stage["totals"]["prompt_tokens_mean"], stage["totals"]["output_tokens_mean"]
    if prompt is None or output is None or prompt + output > served.deployment.max_model_len:
        return None
    wall = served.wall(Shape(prompt_tokens=prompt, output_tokens=output))
    return None if wall is None else wall[1]


def calibrate(
    record: DeploymentRecord, runs: Sequence[FinishedRun], *, harness_version: str, created: str
) -> Calibration:
    """The calibration of a deployment from finished runs.

    Raises:
        NotIdentifiable: no usable stage; says why each was left out.
    """
    deployment = record.rebuild()
    served = serving(deployment)
    read = [(number, r) for number, run in enumerate(runs) for r in read_run_stages(deployment, served, run)]
    used = [(number, r, r.observation) for number, r in read if r.observation is not None]
    left_out = [
        LeftOut(number, r.label, r.users, r.prompt_tokens, r.output_tokens, r.reason)
        for number, r in read
        if r.observation is None
    ]
    prior = prior_of(deployment, served)
    try:
        found = fit(served, prior, [_named(number, o, len(runs)) for number, _, o in used], OWN_STAGES)
    except NotIdentifiable as error:
        why = "; ".join(f"{stage.label}: {stage.reason}" for stage in left_out[:4])
        raise NotIdentifiable(error.message + (f"; left out: {why}" if why else ""), error.hint) from error
    stages = tuple(_used(number, r, _named(number, o, len(runs)), found) for number, r, o in used)
    return Calibration(
        deployment=record,
        factors=found.factors,
        used=stages,
        left_out=tuple(left_out),
        held_out=tuple(_held_out(served, prior, [stage.observation for stage in stages])),
        fit=_fit_record(found),
        runs=tuple(run.record for run in runs),
        notes=tuple(_notes(found, stages)),
        harness_version=harness_version,
        created=created,
    )


def _named(number: int, observation: Observation, runs: int) -> Observation:
    """Labels that tell the stages of several runs apart."""
    return observation if runs == 1 else replace(observation, label=f"run {number + 1}, {observation.label}")


def _used(number: int, reading: Reading, observation: Observation, found: Fit) -> UsedStage:
    return UsedStage(
        run=number,
        observation=observation,
        output_tokens_per_s=reading.output_tokens_per_s,
        tpot_error=found.tpot_errors.get(observation.label),
        ttft_error=found.ttft_errors.get(observation.label),
        little_error=reading.little_error,
    )


def _fit_record(found: Fit) -> FitRecord:
    return FitRecord(
        condition=found.condition if math.isfinite(found.condition) else None,
        scatter=dict(found.factors.residual_log_sd),
        findings={
            name: FactorFinding(
                identified=report.identified,
                narrowed=report.narrowed,
                inflation=report.inflation if math.isfinite(report.inflation) else None,
                advice=report.advice,
            )
            for name, report in found.reports.items()
        },
    )


def _notes(found: Fit, stages: Sequence[UsedStage]) -> list[str]:
    notes = []
    domain = found.factors.domain
    if domain is not None and len(domain.shapes) == 1:
        ((prompt, output),) = domain.shapes
        notes.append(
            f"holds for one shape only: {prompt:.0f} prompt and {output:.0f} output tokens; for others the intervals are "
            "as wide as the priors, and a decode-heavy beside a prefill-heavy shape would narrow them"
        )
    if domain is not None and domain.users[0] == domain.users[1]:
        notes.append(
            f"fitted at one level, {domain.users[0]:g} users: what grows with users is told by its prior, and far from this "
            "level the intervals are as wide; one user and a level near the wall would narrow them"
        )
    odd = [stage for stage in stages if abs(stage.little_error or 0.0) > LITTLE_TOLERANCE]
    if odd:
        worst = max(odd, key=lambda stage: abs(stage.little_error or 0.0))
        notes.append(
            f"Little's law misses the throughput of {len(odd)} of {len(stages)} stages by more than "
            f"{LITTLE_TOLERANCE:.0%}, at worst {worst.little_error:+.0%} ({worst.observation.label}): a window that was "
            "not settled, or streams that waited where no time was taken"
        )
    return notes


def _held_out(served: Serving, prior: FactorSet, observations: Sequence[Observation]) -> Iterator[HeldOut]:
    """The top level of every shape that was run at several, predicted by a fit that did not see any of them; nothing
    where too few stages are left for one."""
    by_shape: dict[tuple[int, int, float], list[Observation]] = {}
    for o in observations:
        by_shape.setdefault(_shape_of(o), []).append(o)
    tops = [max(sweep, key=lambda o: o.users) for sweep in by_shape.values() if len({o.users for o in sweep}) > 1]
    rest = [o for o in observations if not any(_shape_of(o) == _shape_of(top) and o.users == top.users for top in tops)]
    if not tops or len(rest) < FEWEST_OBSERVATIONS:
        return
    factors = fit(served, prior, rest, OWN_STAGES).factors
    for top in tops:
        said = propagate(lambda f, o=top: _point(served, f, o), factors, "extrapolated")  # type: ignore[misc]
        for metric, measured in (("tpot", top.tpot_s), ("ttft", top.ttft_s)):
            if measured is not None:
                yield HeldOut(top.label, metric, measured, said[metric].value, said[metric].low, said[metric].high)


def _point(served: Serving, factors: FactorSet, o: Observation) -> dict[str, float]:
    # the stages ran below the wall, so the pool has no say
    point = closed_loop(served._replace(pool=None).server(factors, o.shape), o.shape, o.users)
    return {"tpot": point.tpot_s, "ttft": point.ttft_s}


def _shape_of(o: Observation) -> tuple[int, int, float]:
    """Lengths to the token: measured means of one shape differ by less."""
    return round(o.shape.prompt_tokens), round(o.shape.output_tokens), o.shape.think_s
