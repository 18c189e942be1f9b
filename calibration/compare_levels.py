"""Measured beside predicted, level by level: throughput, TPOT and TTFT of a run's stages against a calibration.

The error is predicted over measured, less one. A prediction's 90 % interval is for the stage's mean; whether the measured
value lies inside is told beside the error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from calibration.calibration_file import Calibration
from calibration.errors import InputError
from calibration.predict import Load, Overloaded, Prediction, Predictor
from calibration.prediction import Estimate
from calibration.queueing import Shape
from calibration.serving import Serving

#: metric -> (mean of summary.json, field of a prediction, its scale to the unit of summary.json)
METRICS: Mapping[str, tuple[str, float]] = {
    "output_tokens_per_s": ("output_tokens_per_s", 1.0),
    "tpot_ms": ("tpot_s", 1e3),
    "ttft_ms": ("ttft_s", 1e3),
}


class Held(NamedTuple):
    """One metric of one stage. ``error``: predicted over measured, less one."""

    metric: str
    measured: float
    predicted: Estimate
    error: float
    inside: bool


@dataclass(frozen=True, slots=True)
class LevelComparison:
    """A stage, held against its prediction."""

    index: int
    load: Load
    method: str
    held: tuple[Held, ...]


@dataclass(frozen=True, slots=True)
class LevelsReport:
    """Every stage that could be held, and what was left out and why."""

    levels: tuple[LevelComparison, ...]
    left_out: tuple[str, ...]

    def missed(self, tolerance: float) -> str | None:
        """The worst error beyond a tolerance, in words; None where all are within.

        Nothing compared meets nothing.
        """
        rows = [(abs(held.error), level, held) for level in self.levels for held in level.held]
        if not rows:
            return "nothing to compare: no stage of the run could be predicted"
        error, level, held = max(rows, key=lambda row: row[0])
        if error <= tolerance:
            return None
        return f"{held.metric} at {_name(level.load)}: predicted {held.error:+.1%} of the measured, tolerance {tolerance:.0%}"


def _name(load: Load) -> str:
    return f"{load.users} users" if load.request_rate is None else f"{load.request_rate:g} requests/s"


class Asked(NamedTuple):
    """What a stage was told beside its level: think time, and the time over which its users started, seconds."""

    think_s: float = 0.0
    start_spread_s: float | None = None


def compare_levels(
    stages: Sequence[Mapping[str, Any]], predictor: Predictor, asked: Mapping[int, Asked] | None = None
) -> LevelsReport:
    """Hold the stages of ``summary.json`` against predictions.

    Args:
        asked: of each stage, by its index, where it is known.
    """
    levels, left_out = [], []
    for stage in stages:
        index = stage["index"]
        load = _load(stage, (asked or {}).get(index, Asked()))
        if isinstance(load, str):
            left_out.append(f"stage {index}: {load}")
            continue
        found = predictor.predict(load, percentiles=False)
        if isinstance(found, Overloaded):
            left_out.append(f"stage {index}: {_name(load)} is predicted to be more than can be served")
            continue
        levels.append(LevelComparison(index, load, found.method, tuple(_held(stage, found))))
    return LevelsReport(tuple(levels), tuple(left_out))


def _load(stage: Mapping[str, Any], asked: Asked) -> Load | str:
    """What a stage was, as a prediction is asked for; or why it cannot be."""
    if not stage["valid"]:
        return f"invalid: {'; '.join(stage['reasons'])}"
    prompt, output = stage["totals"]["prompt_tokens_mean"], stage["totals"]["output_tokens_mean"]
    if prompt is None or output is None:
        return "no token counts"
    shape = Shape(prompt_tokens=prompt, output_tokens=max(1.0, output), think_s=asked.think_s)
    if stage["request_rate"] is not None:
        return Load(shape=shape, request_rate=stage["request_rate"], max_in_flight=stage["users"])
    return Load(shape=shape, users=stage["users"], start_spread_s=asked.start_spread_s)


def _held(stage: Mapping[str, Any], found: Prediction) -> list[Held]:
    rows = []
    for metric, (name, scale) in METRICS.items():
        measured = stage[metric] if metric == "output_tokens_per_s" else stage[metric]["mean"]
        if not measured:
            continue
        estimate: Estimate = getattr(found, name)
        scaled = estimate._replace(**{key: getattr(estimate, key) * scale for key in ("value", "low", "high")})
        rows.append(Held(metric, measured, scaled, scaled.value / measured - 1, scaled.holds(measured)))
    return rows


def run_differences(calibration: Calibration, served: Serving, deployment: Mapping[str, Any]) -> list[str]:
    """Where a run's server, as it was probed, is not the calibrated one; what the server did not show is not judged."""
    calibrated = served.deployment
    pool = deployment.get("pool") or {}
    ours = served.pool
    pairs = [
        ("vllm_version", calibrated.vllm_version, deployment.get("vllm_version")),
        ("max_model_len", calibrated.max_model_len, deployment.get("max_model_len")),
        ("max_num_seqs", calibrated.max_num_seqs, deployment.get("max_num_seqs")),
        ("max_num_batched_tokens", calibrated.max_num_batched_tokens, deployment.get("max_num_batched_tokens")),
        ("engines", calibrated.dp, deployment.get("engines")),
        ("num_gpu_blocks", None if ours is None else ours.num_blocks, pool.get("num_blocks")),
        ("block_size", None if ours is None else ours.block_size, pool.get("block_size")),
    ]
    name = calibration.deployment.served_model
    pairs.append(("model", name, deployment.get("model")))
    return [
        f"{key}: {then} when calibrated, {now} in the run"
        for key, then, now in pairs
        if then is not None and now is not None and then != now
    ]


def check_run(calibration: Calibration, served: Serving, deployment: Mapping[str, Any], *, transfer: bool) -> list[str]:
    """The differences of a run's server, where they are wanted.

    Raises:
        InputError: there are some, and they are not.
    """
    found = run_differences(calibration, served, deployment)
    if found and not transfer:
        raise InputError(
            f"the calibration is of another deployment: {'; '.join(found)}",
            "give --transfer to compare all the same, or calibrate this one",
        )
    return found
