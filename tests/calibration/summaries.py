"""Stages as a run summarises them, made from the closed form under a known factor set: no run needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from calibration.calibrate import FinishedRun, calibrate
from calibration.calibration_file import Calibration, RunRecord, record_deployment
from calibration.factors import FactorSet
from calibration.queueing import Shape, closed_loop
from calibration.serving import Serving

SHAPES = ((64, 64), (64, 256), (2048, 48), (64, 8))
LEVELS = (1, 2, 4, 8, 16)


def stage_of(
    served: Serving, truth: FactorSet, index: int, users: int, lengths: tuple[int, int], noise: float, rng: Any
) -> dict[str, Any]:
    """A steady stage of a minute; its means carry this relative error."""
    shape = Shape(prompt_tokens=lengths[0], output_tokens=lengths[1])
    point = closed_loop(served.server(truth, shape), shape, users)
    tpot_ms = point.tpot_s * 1e3 * math.exp(rng.normal(0, noise))
    ttft_ms = point.ttft_s * 1e3 * math.exp(rng.normal(0, 2 * noise))
    life_ms = ttft_ms + (lengths[1] - 1) * tpot_ms
    n = max(2, int(users * 60_000 / life_ms))
    rate = users * lengths[1] / life_ms * 1e3
    return {
        "index": index,
        "users": users,
        "request_rate": None,
        "valid": True,
        "reasons": [],
        "window": {"start_s": 0.0, "end_s": 60.0, "steady": True},
        "requests": {"ok": n, "failed": 0, "by_failure": {}, "incomplete": 0},
        "ttft_ms": {"n": n, "mean": ttft_ms, "std": 0.0},
        "tpot_ms": {"n": n, "mean": tpot_ms, "std": 0.0},
        "e2e_ms": {"n": n, "mean": life_ms, "std": 0.0},
        "chunk_gap_ms": {"n": n * (lengths[1] - 1), "mean": tpot_ms},
        "output_tokens_per_s": rate,
        "server": None,
        "totals": {"prompt_tokens_mean": float(lengths[0]), "output_tokens_mean": float(lengths[1])},
    }


def stages_of(
    served: Serving,
    truth: FactorSet,
    *,
    noise: float = 0.005,
    seed: int = 0,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    levels: Sequence[int] = LEVELS,
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    loads = [(users, lengths) for lengths in shapes for users in levels]
    return [stage_of(served, truth, i, users, lengths, noise, rng) for i, (users, lengths) in enumerate(loads)]


def run_of(stages: list[dict[str, Any]]) -> FinishedRun:
    return FinishedRun(
        RunRecord("results/known", "2026-11-30T18:00:00+00:00", "http://twin"), stages, [{}] * len(stages)
    )


def calibration_of(served: Serving, model: str, stages: list[dict[str, Any]]) -> Calibration:
    record = record_deployment(served.deployment, model)
    return calibrate(record, [run_of(stages)], harness_version="test", created="2026-11-30T18:00:00+00:00")
