"""Servers whose factors are known: a random factor set, the designed stages played by the twin on the virtual clock, read
and fitted as a live run's are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from calibration.calibrate import FinishedRun, calibrate, prior_of
from calibration.calibration_file import Calibration, DeploymentRecord, RunRecord, record_deployment
from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.design import DesignedStage, Wish, design
from calibration.factors import STEP_FACTORS, FactorSet
from calibration.predict import Load, Prediction, Predictor
from calibration.queueing import Shape, closed_loop
from calibration.serving import Serving, serving
from harness.calibrating import profile_of
from harness.simulated import Simulation
from loadprofiles.profile import resolve

#: factors that the twin has by itself; how its requests wait is its scheduler's doing
KNOWN = (*STEP_FACTORS, "request_overhead")


@dataclass(frozen=True)
class _Known(Predictor):
    """Its requests stand in front of the engine for their overhead, and nothing else."""

    def overhead_s(self, load: Load) -> float:
        return self.factors.value("request_overhead")


class Server(NamedTuple):
    record: DeploymentRecord
    served: Serving
    truth: FactorSet
    seed: int
    noise: float


def server_of(model: str, seed: int, *, gpu: str = "h100-sxm", noise: float = 0.02, **flags: Any) -> Server:
    """A server that is not the prior, but as likely as any."""
    deployment = resolve_deployment(find_model(model), gpu=find_gpu(gpu), **{"max_model_len": 8192, **flags})
    served = serving(deployment)
    rng = np.random.default_rng(seed)
    truth = prior_of(deployment, served)
    for name in KNOWN:
        truth = truth.scaled(name, math.exp(rng.normal(0.0, truth[name].log_sd)))
    return Server(record_deployment(deployment, model), served, truth, seed, noise)


def play(server: Server, stages: tuple[DesignedStage, ...], noise: float) -> list[dict[str, Any]]:
    """Summaries of these stages against the server."""
    profile = resolve(profile_of("known", stages, "completions"), max_model_len=None, pool_tokens=None)
    simulation = Simulation(_Known(server.served, server.truth), "known", seed=server.seed, noise=noise, grace_s=1e4)
    return [simulation.stage(index, stage) for index, stage in enumerate(profile.stages)]


def calibrated(server: Server, wish: Wish) -> tuple[Calibration, tuple[DesignedStage, ...]]:
    """The calibration of the stages that are designed for this wish."""
    stages = design(server.served, prior_of(server.served.deployment, server.served), wish).stages
    planned = [stage.model_dump() for stage in profile_of("known", stages, "completions").stages]
    run = FinishedRun(RunRecord("known", "", "twin"), play(server, stages, server.noise), planned)
    return calibrate(server.record, [run], harness_version="test", created=""), stages


def simulated_tpot_s(server: Server, users: int, shape: tuple[int, int]) -> float:
    """TPOT of a load on the server, without noise; its users start over a request's life."""
    life_s = start_spread_s(server, users, shape)
    stage = DesignedStage(
        users=users,
        prompt_tokens=shape[0],
        output_tokens=shape[1],
        ramp_up_s=life_s,
        warm_up_s=2 * life_s,
        duration_s=8 * life_s,
        expected_s=9 * life_s,
        purpose="truth",
    )
    return float(play(server, (stage,), 0.0)[0]["tpot_ms"]["mean"]) / 1e3


def start_spread_s(server: Server, users: int, shape: tuple[int, int]) -> float:
    """Over how long the users of :func:`simulated_tpot_s` start."""
    load = Shape(prompt_tokens=shape[0], output_tokens=shape[1])
    point = closed_loop(server.served._replace(pool=None).server(server.truth, load), load, users)
    return point.ttft_s + point.tpot_s * load.decode_steps


def predicted_tpot_s(server: Server, factors: FactorSet, users: int, shape: tuple[int, int]) -> float:
    """TPOT that is predicted for this load, and for a run that starts its users so."""
    load = Shape(prompt_tokens=shape[0], output_tokens=shape[1])
    spread_s = start_spread_s(server, users, shape)
    found = Predictor(server.served, factors).predict(
        Load(shape=load, users=users, start_spread_s=spread_s), percentiles=False
    )
    assert isinstance(found, Prediction)
    return found.tpot_s.value
