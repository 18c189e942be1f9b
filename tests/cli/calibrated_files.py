"""A calibration of an 8B model on one H100, as `calibrate` writes it, made without measuring anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from calibration.calibration_file import (
    Calibration,
    FactorFinding,
    FitRecord,
    RunRecord,
    UsedStage,
    record_deployment,
)
from calibration.catalog import find_gpu, find_model
from calibration.deployment import Deployment, resolve_deployment
from calibration.factors import FACTORS, Covariance, Domain
from calibration.observation import Observation
from calibration.priors import prior_factors
from calibration.queueing import Shape
from harness.calibration_file import write_calibration

MODEL, GPU = "llama-3.1-8b", "h100-sxm"
#: what the file's deployment is told
FLAGS = ("--max-model-len", "2048", "--num-gpu-blocks-override", "513", "--block-size", "16")
SHAPE = Shape(prompt_tokens=192, output_tokens=96)
USERS = (1, 8, 24)


def deployment() -> Deployment:
    return resolve_deployment(
        find_model(MODEL), gpu=find_gpu(GPU), max_model_len=2048, num_gpu_blocks_override=513, block_size=16
    )


def calibration(slower: float = 1.2, log_sd: float = 0.02) -> Calibration:
    """Every factor identified and sharp; a step's overhead is ``slower`` times its prior."""
    prior = prior_factors(deployment())
    factors = {
        name: replace(factor, log_sd=log_sd, identified=True, source="fitted to 3 stages")
        for name, factor in prior.factors.items()
    }
    factors["step_overhead"] = replace(factors["step_overhead"], value=factors["step_overhead"].value * slower)
    together = ("step_overhead", "per_sequence")
    matrix = ((log_sd**2, -0.5 * log_sd**2), (-0.5 * log_sd**2, log_sd**2))
    return Calibration(
        deployment=record_deployment(deployment(), MODEL, "the-model"),
        factors=type(prior)(
            factors,
            {"tpot": 0.01, "throughput": 0.01, "per_user": 0.01, "ttft": 0.05},
            Domain((1.0, 24.0), ((192.0, 96.0),)),
            (Covariance(together, matrix),),
        ),
        used=tuple(
            UsedStage(run=0, observation=Observation(label=f"stage {n}", shape=SHAPE, users=users, tpot_s=0.009))
            for n, users in enumerate(USERS, 1)
        ),
        left_out=(),
        held_out=(),
        fit=FitRecord(
            condition=3.0, scatter={"tpot": 0.01}, findings={n: FactorFinding(True, 0.1, 1.5, "") for n in FACTORS}
        ),
        runs=(RunRecord("results/a", "2026-11-30T18:00:00+00:00", "http://127.0.0.1:8000"),),
        notes=(),
        harness_version="0.1.0",
        created="2026-11-30T18:10:00+00:00",
    )


def write(path: Path, slower: float = 1.2, log_sd: float = 0.02) -> Path:
    write_calibration(path, calibration(slower, log_sd))
    return path
