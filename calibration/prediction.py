"""Numbers with an interval and a basis, from factors with a spread.

The spread of a prediction is the delta method on the logarithm: each factor is moved by its own standard deviation, up and
down, and the moves of the result are added in squares, together with what single measurements scatter about the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from calibration.factors import FACTORS, Z90, Basis, FactorSet


class Estimate(NamedTuple):
    """A value with its 90 % interval. ``basis``: measured, interpolated or extrapolated."""

    value: float
    low: float
    high: float
    basis: Basis

    def holds(self, measured: float) -> bool:
        """Is the measured value inside the interval?"""
        return self.low <= measured <= self.high

    def to_json(self) -> dict[str, float | str]:
        return {"value": self.value, "low": self.low, "high": self.high, "basis": self.basis}


Outcome = Mapping[str, float]


def propagate(
    evaluate: Callable[[FactorSet], Outcome], factors: FactorSet, basis: Basis, names: tuple[str, ...] = FACTORS
) -> dict[str, Estimate]:
    """Estimates of all positive quantities that ``evaluate`` gives, by name.

    ``names`` are the factors that are moved; a factor without spread moves nothing.
    """
    centre = evaluate(factors)
    moves = {name: _moves(evaluate, factors, name) for name in names if _varies(factors, name)}
    return {
        key: _around(
            value, math.sqrt(_variance(factors, {name: move[key] for name, move in moves.items()}, key)), basis
        )
        for key, value in centre.items()
    }


def _varies(factors: FactorSet, name: str) -> bool:
    return factors[name].log_sd > 0 and factors.value(name) > 0


def _moves(evaluate: Callable[[FactorSet], Outcome], factors: FactorSet, name: str) -> dict[str, float]:
    """How far each logarithm moves with one standard deviation of a factor."""
    sd = factors[name].log_sd
    up, down = (evaluate(factors.scaled(name, math.exp(sign * sd))) for sign in (1, -1))
    return {key: (math.log(up[key]) - math.log(down[key])) / 2 for key in up}


def _variance(factors: FactorSet, moves: Mapping[str, float], key: str) -> float:
    """Scatter, the moves of factors that vary alone, and those of factors fitted together with their correlation."""
    together = {name for c in factors.covariances for name in c.names}
    total = factors.residual_log_sd.get(key, 0.0) ** 2
    total += sum(move**2 for name, move in moves.items() if name not in together)
    for c in factors.covariances:
        scaled = [moves.get(name, 0.0) / factors[name].log_sd if factors[name].log_sd > 0 else 0.0 for name in c.names]
        total += sum(
            a * b * v for a, row in zip(scaled, c.matrix, strict=True) for b, v in zip(scaled, row, strict=True)
        )
    return max(total, 0.0)


def _around(value: float, log_sd: float, basis: Basis) -> Estimate:
    return Estimate(value, value * math.exp(-Z90 * log_sd), value * math.exp(Z90 * log_sd), basis)
