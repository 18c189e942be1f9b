"""Correction factors: numbers the analytical model is multiplied or shifted by, each with its interval and its origin.

A :class:`FactorSet` is all that tells one server from the datasheet. Fresh from :mod:`calibration.priors` every factor is
a prior; a fit replaces those the data identify and leaves the rest, with the prior's spread, so that predictions far from
the data stay honestly wide. It is also what a calibration file holds.

    step_overhead          s   launches of all layers' kernels, and the weights every step reads
    expert_read_factor         time of reading the chosen experts over their bytes / bandwidth (mixture of experts)
    per_sequence           s   each running sequence: sampling, bookkeeping, its share of all-reduce and of compute
    kv_read_factor             time of reading the cache over its bytes / bandwidth
    prefill_factor             time of a prompt token's matrix products over operations / peak
    attention_factor           the same for the attention of a prompt to itself
    mixed_step_overhead    s   what a step with a prompt in it costs more, whatever the prompt's length
    request_overhead       s   of every request, outside the steps: HTTP, tokenizer, first chunk
    request_token          s   each prompt token, outside the steps
    wait_steps                 steps between a request's arrival and its first token, besides its own prefill
    prompt_factor              time a prompt takes to its first token over what it adds to the steps of others
    ahead_factor               the same for prompts ahead of it
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from calibration.errors import InputError

Basis = Literal["measured", "interpolated", "extrapolated"]

#: a 90 % interval of a normal distribution, in standard deviations
Z90 = 1.6448536269514722

STEP_FACTORS = (
    "step_overhead",
    "expert_read_factor",
    "per_sequence",
    "kv_read_factor",
    "prefill_factor",
    "attention_factor",
    "mixed_step_overhead",
)
REQUEST_FACTORS = ("request_overhead", "request_token", "wait_steps", "prompt_factor", "ahead_factor")
FACTORS = STEP_FACTORS + REQUEST_FACTORS

#: unit of each factor: seconds, or a plain number
UNITS: Mapping[str, str] = {
    name: "s"
    if name in ("step_overhead", "per_sequence", "mixed_step_overhead", "request_overhead", "request_token")
    else ""
    for name in FACTORS
}


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor. ``log_sd`` is the standard deviation of its logarithm: the interval is log-normal.

    ``identified`` is False where the data could not tell it and it stayed at its prior; ``source`` says where the value
    comes from.

    Raises:
        InputError: an unknown name, a value or spread that cannot be.
    """

    name: str
    value: float
    log_sd: float
    source: str
    prior_value: float
    prior_log_sd: float
    identified: bool = False

    def __post_init__(self) -> None:
        if self.name not in FACTORS:
            raise InputError(f"factor {self.name!r} is unknown", f"known: {', '.join(FACTORS)}")
        for key in ("value", "prior_value"):
            number = getattr(self, key)
            if not (math.isfinite(number) and number >= 0):
                raise InputError(f"{self.name}: {key} is {number!r}, expected a finite number >= 0")
        for key in ("log_sd", "prior_log_sd"):
            number = getattr(self, key)
            if not (math.isfinite(number) and number >= 0):
                raise InputError(f"{self.name}: {key} is {number!r}, expected a finite number >= 0")

    @property
    def unit(self) -> str:
        return UNITS[self.name]

    @property
    def low(self) -> float:
        """Lower end of the 90 % interval."""
        return self.value * math.exp(-Z90 * self.log_sd)

    @property
    def high(self) -> float:
        return self.value * math.exp(Z90 * self.log_sd)


def prior(name: str, value: float, log_sd: float, source: str) -> Factor:
    """A factor that nobody measured yet."""
    return Factor(name, value, log_sd, source, prior_value=value, prior_log_sd=log_sd)


class Domain(NamedTuple):
    """Where a calibration was measured: users, prompt and output lengths; predictions outside are extrapolated.

    ``shapes`` are the (prompt, output) token pairs that were run.
    """

    users: tuple[float, float]
    shapes: tuple[tuple[float, float], ...]

    def basis(self, users: float, prompt_tokens: float, output_tokens: float) -> Basis:
        """Is this load inside what was measured? "interpolated" between the smallest and largest users, at a shape whose
        prompt and output lengths, and their ratio, lie between those that were run."""
        if not self.users[0] <= users <= self.users[1]:
            return "extrapolated"
        spans = (
            ([p for p, _ in self.shapes], prompt_tokens),
            ([o for _, o in self.shapes], output_tokens),
            ([p / o for p, o in self.shapes], prompt_tokens / output_tokens),
        )
        inside = all(min(values) * 0.999 <= asked <= max(values) * 1.001 for values, asked in spans)
        return "interpolated" if inside else "extrapolated"


class Covariance(NamedTuple):
    """Covariance of the logarithms of factors that were fitted together."""

    names: tuple[str, ...]
    matrix: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class FactorSet:
    """The factors of one deployment by name; every name of ``FACTORS`` is there.

    ``residual_log_sd`` is what single measurements scatter about the model beyond the factors' own spread, by quantity
    ("tpot", "ttft"). ``domain`` is None while nothing was measured. Factors that were fitted together are in one of
    ``covariances``; all others vary alone.
    """

    factors: Mapping[str, Factor]
    residual_log_sd: Mapping[str, float] = field(default_factory=dict)
    domain: Domain | None = None
    covariances: tuple[Covariance, ...] = ()

    def __post_init__(self) -> None:
        missing = [name for name in FACTORS if name not in self.factors]
        if missing:
            raise InputError(f"factors {', '.join(missing)} are missing", f"expected all of {', '.join(FACTORS)}")

    def __getitem__(self, name: str) -> Factor:
        return self.factors[name]

    def value(self, name: str) -> float:
        return self.factors[name].value

    def basis(self, users: float, prompt_tokens: float, output_tokens: float) -> Basis:
        """How a prediction at this load stands to the data; priors alone are an extrapolation."""
        return self.domain.basis(users, prompt_tokens, output_tokens) if self.domain else "extrapolated"

    def scaled(self, name: str, ratio: float) -> FactorSet:
        """The same set with one factor's value multiplied."""
        old = self.factors[name]
        moved = Factor(
            name, old.value * ratio, old.log_sd, old.source, old.prior_value, old.prior_log_sd, old.identified
        )
        return FactorSet({**self.factors, name: moved}, self.residual_log_sd, self.domain, self.covariances)

    def with_factors(self, *changed: Factor) -> FactorSet:
        return replace(self, factors={**self.factors, **{factor.name: factor for factor in changed}})

    def to_json(self) -> dict[str, Any]:
        """Plain values: ``{"factors": {name: {...}}, "residual_log_sd": {...}, "domain": {...} | None}``."""
        return {
            "factors": {
                f.name: {
                    "value": f.value,
                    "low": f.low,
                    "high": f.high,
                    "unit": f.unit,
                    "log_sd": f.log_sd,
                    "prior": {"value": f.prior_value, "log_sd": f.prior_log_sd},
                    "identified": f.identified,
                    "source": f.source,
                }
                for f in self.factors.values()
            },
            "residual_log_sd": dict(self.residual_log_sd),
            "domain": None
            if self.domain is None
            else {"users": list(self.domain.users), "shapes": [list(shape) for shape in self.domain.shapes]},
            "covariances": [{"names": list(c.names), "matrix": [list(r) for r in c.matrix]} for c in self.covariances],
        }


def factors_from_json(content: Mapping[str, Any]) -> FactorSet:
    """What :meth:`FactorSet.to_json` wrote.

    Raises:
        InputError: a key is missing or holds something else; names it.
    """
    try:
        factors = {name: _factor(name, item) for name, item in content["factors"].items()}
        residual = {str(key): float(value) for key, value in content["residual_log_sd"].items()}
        where = content["domain"]
        domain = None
        if where is not None:
            low, high = where["users"]
            domain = Domain((float(low), float(high)), tuple((float(p), float(o)) for p, o in where["shapes"]))
        covariances = tuple(
            Covariance(tuple(map(str, c["names"])), tuple(tuple(map(float, row)) for row in c["matrix"]))
            for c in content["covariances"]
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"the factors cannot be read: {error!r}", "expected what a calibration file holds") from error
    return FactorSet(factors, residual, domain, covariances)


def _factor(name: str, item: Mapping[str, Any]) -> Factor:
    return Factor(
        name=name,
        value=float(item["value"]),
        log_sd=float(item["log_sd"]),
        source=str(item["source"]),
        prior_value=float(item["prior"]["value"]),
        prior_log_sd=float(item["prior"]["log_sd"]),
        identified=bool(item["identified"]),
    )
