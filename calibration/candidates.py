"""Deployments side by side: every combination asked for, and the smallest one that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from calibration.deployment import Deployment
from calibration.errors import CalibrationError, InputError
from calibration.factors import FactorSet
from calibration.limits import Limits, Slo, limits_of, shape_of
from calibration.plan import Load, Plan, make_plan
from calibration.priors import physics_of, prior_factors
from calibration.queueing import OperatingPoint, closed_loop
from calibration.serving import Serving

#: GPUs of one node; more are reached by a pipeline over nodes
NODE_GPUS = 8
MOST_GPUS = 64


class Choice(NamedTuple):
    """One combination of what may vary."""

    gpu: str | None
    tp: int
    pp: int
    weights: str
    kv: str


class Candidate(NamedTuple):
    """A combination with its plan. ``reason`` says why there is none, or why it does not fit; ``limits`` and ``point`` (at
    the binding limit) are there where it fits and a step can be timed."""

    choice: Choice
    plan: Plan | None
    limits: Limits | None
    point: OperatingPoint | None
    reason: str

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.memory.fits

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        if self.point is None or self.plan is None:
            return None
        return self.point.output_tokens_per_s / self.plan.deployment.gpus


#: (gpu, tp, pp, weights, kv) -> deployment
Build = Callable[[str | None, int, int, str, str], Deployment]
LoadOf = Callable[[Deployment], Load]


def choices(
    gpus: Sequence[str | None], tps: Sequence[int], pps: Sequence[int], weights: Sequence[str], kvs: Sequence[str]
) -> Iterator[Choice]:
    """All combinations, the last varying fastest."""
    return (Choice(*each) for each in product(gpus, tps, pps, weights, kvs))


def candidate(choice: Choice, build: Build, load_of: LoadOf, slo: Slo, factors: FactorSet | None = None) -> Candidate:
    """One combination planned; what vLLM or the model refuses is its reason."""
    try:
        deployment = build(choice.gpu, choice.tp, choice.pp, choice.weights, choice.kv)
        plan = make_plan(deployment, load_of(deployment))
        if not plan.memory.fits or plan.memory.pool is None:
            return Candidate(choice, plan, None, None, plan.memory.reason)
        served = Serving(deployment, physics_of(deployment), plan.memory.pool)
    except CalibrationError as error:
        return Candidate(choice, None, None, None, error.message)
    known = factors if factors is not None else prior_factors(deployment, served.physics)
    shape = shape_of(plan.load)
    limits = limits_of(served, known, shape, slo, intervals=False)
    point = closed_loop(served.server(known, shape), shape, max(1.0, limits.users))
    return Candidate(choice, plan, limits, point, "")


def compare(
    options: Iterable[Choice], build: Build, load_of: LoadOf, slo: Slo, factors: FactorSet | None = None
) -> list[Candidate]:
    """Every combination, in order."""
    return [candidate(choice, build, load_of, slo, factors) for choice in options]


def fitting_sizes() -> Iterator[tuple[int, int]]:
    """(tp, pp) by number of GPUs: powers of two in a node, then whole nodes in a pipeline."""
    tp = 1
    while tp <= NODE_GPUS:
        yield tp, 1
        tp *= 2
    for nodes in range(2, MOST_GPUS // NODE_GPUS + 1):
        yield NODE_GPUS, nodes


def smallest_fit(gpu: str | None, weights: str, kv: str, build: Build, load_of: LoadOf) -> Plan:
    """The plan with the fewest GPUs that starts and holds at least one stream of the load at once.

    Raises:
        InputError: none does, up to 64 GPUs; with what stops the largest.
    """
    reason = ""
    for tp, pp in fitting_sizes():
        try:
            deployment = build(gpu, tp, pp, weights, kv)
            plan = make_plan(deployment, load_of(deployment))
        except CalibrationError as error:
            reason = error.message
            continue
        if plan.memory.fits and plan.kv_full >= 1:
            return plan
        reason = plan.memory.reason
    raise InputError(f"nothing up to {MOST_GPUS} x {gpu} fits: {reason}", "try smaller weights or another GPU")
