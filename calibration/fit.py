"""Observations -> factors: the terms of the step by TPOT, then what stands in front of the first token by TTFT.

Both are linear in the factors once the number running is known, which Little's law gives from the measurement itself.
Every factor takes part with its prior, so that what one cannot tell widens the others as far as it is like them. A factor
that the data hardly narrow is not identified: it stays near its prior, about as wide, and says which stage would tell it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from calibration.errors import NotIdentifiable
from calibration.factors import REQUEST_FACTORS, STEP_FACTORS, Covariance, Domain, FactorSet
from calibration.observation import Observation
from calibration.queueing import (
    Mix,
    bunch_of,
    first_token_amounts,
    launched_s,
    mean_step,
    mix_of,
    mixed_s,
    others_of,
)
from calibration.regression import SCATTER_WEIGHT, condition, inflation, solve
from calibration.serving import Serving
from calibration.steptime import step_time

Floats = npt.NDArray[np.float64]

#: a factor is told by the data where they narrow its prior to this share
_NARROWED = 0.7
#: a fit of fewer observations is no test of what it predicts: nearly all of it is the priors
FEWEST_OBSERVATIONS = 3
_STEP_ROUNDS = 3

TTFT_FACTORS = REQUEST_FACTORS

#: what would tell a factor
ADVICE: Mapping[str, str] = {
    "step_overhead": "one user at a short prompt",
    "expert_read_factor": "1, 4, 16 and 64 users at a short prompt: more users choose more experts",
    "per_sequence": "64 users or more at a short prompt and output",
    "kv_read_factor": "many users with long contexts and long outputs",
    "prefill_factor": "long prompts with short outputs",
    "attention_factor": "prompts of 16,000 tokens and more",
    "mixed_step_overhead": "short prompts with very short outputs",
    "request_overhead": "one user at prompts of several lengths",
    "request_token": "one user at prompts of several lengths",
    "wait_steps": "one user at a short prompt, and many users at the same",
    "prompt_factor": "one user at prompts of several lengths",
    "ahead_factor": "many users at long prompts",
}


@dataclass(frozen=True, slots=True)
class FactorReport:
    """What the data say of one factor. ``narrowed``: its spread over the prior's; ``inflation`` by likeness to others."""

    name: str
    identified: bool
    narrowed: float
    inflation: float
    advice: str


@dataclass(frozen=True)
class Fit:
    """Factors, and how good they are: condition number of the design over the step's identified factors, a report on every
    factor, relative errors of the fit by label."""

    factors: FactorSet
    condition: float
    reports: Mapping[str, FactorReport]
    tpot_errors: Mapping[str, float]
    ttft_errors: Mapping[str, float]
    used: int


class Scatter(NamedTuple):
    """Expected log sd of a measurement about the model, and how many observations that expectation weighs."""

    tpot: float
    ttft: float
    weight: float = SCATTER_WEIGHT


#: of stages measured here, one after another on one server: the model's own misfit, no differences between benchmarks
OWN_STAGES = Scatter(tpot=0.01, ttft=0.05, weight=2.0)


def fit(served: Serving, prior: FactorSet, observations: Sequence[Observation], scatter: Scatter | None = None) -> Fit:
    """The factors of a server from stages below its wall; those held out are left alone.

    Args:
        scatter: expected; None takes that of the priors, which holds between published benchmarks.

    Raises:
        NotIdentifiable: no observation at all; what a few do not tell stays at its prior, as wide.
    """
    known = [o for o in observations if not o.held_out]
    if not known:
        raise NotIdentifiable("no usable stage: there is nothing to fit", "run a few levels below the wall")
    names = [
        name
        for name in STEP_FACTORS
        # what has no prior value is no part of this device's model
        if prior.value(name) > 0 and (name != "expert_read_factor" or served.physics.experts)
    ]
    expected = scatter or Scatter(prior.residual_log_sd.get("tpot", 0.05), prior.residual_log_sd.get("ttft", 0.1))
    step = _step_stage(served, names, prior, prior, known, expected)
    for _ in range(_STEP_ROUNDS):
        # how many decode beside a stream depends a little on how long a prompt's own step is
        step = _step_stage(served, names, step.updated(prior), prior, known, expected)
    factors = step.updated(prior)
    timed = [o for o in known if o.ttft_s is not None]
    last = _Stage(list(TTFT_FACTORS), *_ttft_design(served, factors, timed), prior, expected.ttft, expected.weight)
    factors = last.updated(factors)
    first, second = step.solution, last.solution
    found_scatter = {
        "tpot": first.scatter,
        "throughput": first.scatter,
        "per_user": first.scatter,
        "ttft": second.scatter,
    }
    users = [o.users for o in known]
    shapes = tuple(dict.fromkeys((o.shape.prompt_tokens, o.shape.output_tokens) for o in known))
    return Fit(
        factors=replace(factors, residual_log_sd=found_scatter, domain=Domain((min(users), max(users)), shapes)),
        condition=condition(first.sensitivities[:, step.narrowed <= _NARROWED]),
        reports={**step.reports(), **last.reports()},
        tpot_errors={o.label: float(np.expm1(-r)) for o, r in zip(known, first.residuals, strict=True)},
        ttft_errors={o.label: float(np.expm1(-r)) for o, r in zip(timed, second.residuals, strict=True)},
        used=len(known),
    )


class _Stage:
    """One of the two regressions."""

    def __init__(
        self,
        names: Sequence[str],
        amounts: Floats,
        offset: Floats,
        measured: Floats,
        own_sd: Floats,
        prior: FactorSet,
        scatter: float,
        scatter_weight: float,
        common_sd: Floats | None = None,
    ) -> None:
        self.names = tuple(names)
        self.prior_sd = np.array([max(prior[name].log_sd, 1e-6) for name in names])
        centre = np.array([max(prior.value(name), 1e-12) for name in names])
        self.solution = solve(
            amounts, offset, measured, own_sd, centre, self.prior_sd, scatter, scatter_weight, common_sd
        )
        self.sd = np.sqrt(np.diag(self.solution.covariance))
        self.narrowed = self.sd / self.prior_sd
        self.count = len(measured)

    def updated(self, base: FactorSet) -> FactorSet:
        """The set with this regression's factors and their covariance."""
        changed = [
            replace(
                base[name],
                value=float(np.exp(self.solution.log_factors[i])),
                log_sd=float(self.sd[i]),
                source=f"fitted to {self.count} stages"
                if self.told(i)
                else f"hardly moved from its {base[name].source}",
                identified=self.told(i),
            )
            for i, name in enumerate(self.names)
        ]
        matrix = tuple(tuple(map(float, row)) for row in self.solution.covariance)
        return replace(base.with_factors(*changed), covariances=(*base.covariances, Covariance(self.names, matrix)))

    def told(self, index: int) -> bool:
        return bool(self.narrowed[index] <= _NARROWED)

    def reports(self) -> dict[str, FactorReport]:
        likeness = inflation(self.solution.sensitivities)
        return {
            name: FactorReport(
                name=name,
                identified=self.told(i),
                narrowed=float(self.narrowed[i]),
                inflation=float(likeness[i]),
                advice="" if self.told(i) else f"not identifiable from this run: add {ADVICE[name]}",
            )
            for i, name in enumerate(self.names)
        }


def _step_stage(
    served: Serving,
    names: Sequence[str],
    factors: FactorSet,
    prior: FactorSet,
    known: Sequence[Observation],
    expected: Scatter,
) -> _Stage:
    """The regression of TPOT on the step's factors, what decodes beside a stream taken from ``factors``."""
    mixes = [_mix(served, factors, o, others_beside(served, factors, o)) for o in known]
    rows = [_amounts(served, o, mix) for o, mix in zip(known, mixes, strict=True)]
    amounts = np.array([[row[name] for name in names] for row in rows])
    order_sd = np.array([_order_sd(served, factors, o, mix) for o, mix in zip(known, mixes, strict=True)])
    own_sd = np.hypot(np.array([o.tpot_log_sd for o in known]), order_sd)
    measured = np.array([o.tpot_s for o in known])
    return _Stage(
        names, amounts, np.zeros(len(known)), measured, own_sd, prior, expected.tpot, expected.weight, order_sd
    )


def _order_sd(served: Serving, factors: FactorSet, o: Observation, mix: Mix) -> float:
    """Relative error of TPOT for not knowing how many prompts fell into one step."""
    step, shape = step_time(served.physics, factors), o.shape
    one_more = mixed_s(step, mix.beside, shape.computed_tokens / mix.chunks)
    own = step.prompt_chunk_s(shape.computed_tokens, shape.prompt_tokens - shape.computed_tokens)
    return math.hypot(mix.mixed_sd * one_more, mix.prompts_sd * own) / o.tpot_s


def others_beside(served: Serving, factors: FactorSet, o: Observation) -> float:
    """Sequences of one replica that decoded beside a stream, by its measured times; the factors tell how long a prompt's
    own step is."""
    # the stages ran below the wall, so the pool has no say
    server = served._replace(pool=None).server(factors, o.shape)
    users, decoding = o.users / server.replicas, o.decoding / server.replicas
    step = mean_step(server, o.shape, max(0.0, users - 1.0) * min(1.0, decoding / users), users)
    ttft_s = o.ttft_s
    if ttft_s is None:
        ttft_s = max(0.0, (users / decoding - 1.0) * o.shape.decode_steps * o.tpot_s - o.shape.think_s)
    return others_of(o.shape, users, step._replace(mean_s=o.tpot_s), ttft_s)


def step_amounts(served: Serving, factors: FactorSet, observation: Observation) -> dict[str, float]:
    """What each factor of the step multiplies in the mean step of an observation; who is beside whom depends a little on
    the factors themselves."""
    others = others_beside(served, factors, observation)
    return _amounts(served, observation, _mix(served, factors, observation, others))


def _mix(served: Serving, factors: FactorSet, o: Observation, others: float) -> Mix:
    d, users = served.deployment, o.users / served.deployment.dp
    bunch = bunch_of(served._replace(pool=None).server(factors, o.shape), o.shape, users)
    return mix_of(o.shape, others, users, budget=d.max_num_batched_tokens, micro_batches=d.pp, bunch=bunch)


def _amounts(served: Serving, observation: Observation, mix: Mix) -> dict[str, float]:
    p, shape = served.physics, observation.shape
    tokens, cached = shape.computed_tokens, shape.prompt_tokens - shape.computed_tokens
    chunk = tokens / mix.chunks
    hit = p.expert_bytes_hit(mix.seen) * (1 - mix.mixed) + p.expert_bytes_hit(mix.seen + chunk) * mix.mixed
    ideal = p.compute_s_per_token + p.expert_compute_s_per_token
    return {
        "step_overhead": 1.0,
        "expert_read_factor": hit / p.bandwidth_bytes_per_s,
        "per_sequence": mix.seen,
        "kv_read_factor": p.kv_bytes(mix.seen, mix.seen * shape.mean_context) / p.bandwidth_bytes_per_s,
        "prefill_factor": mix.prompts * tokens * ideal,
        "attention_factor": mix.prompts * p.attention_flops(tokens, cached + tokens / 2) / p.attention_flops_per_s,
        "mixed_step_overhead": mix.mixed,
    }


def _ttft_design(
    served: Serving, factors: FactorSet, timed: Sequence[Observation]
) -> tuple[Floats, Floats, Floats, Floats]:
    """Amounts of the factors in front of the first token; the offset is what the step's factors already say."""
    amounts, offset = np.zeros((len(timed), len(TTFT_FACTORS))), np.zeros(len(timed))
    # the stages ran below the wall, so the pool has no say
    without_pool = served._replace(pool=None)
    for i, o in enumerate(timed):
        server = without_pool.server(factors, o.shape)
        users = o.users / server.replicas
        step = mean_step(server, o.shape, others_beside(served, factors, o), users)
        amounts[i] = first_token_amounts(o.shape, users, step)
        offset[i] = launched_s(server, step, follows=o.shape.think_s == 0)
    measured = np.array([o.ttft_s for o in timed], dtype=np.float64)
    return amounts, offset, measured, np.array([o.ttft_log_sd for o in timed], dtype=np.float64)
