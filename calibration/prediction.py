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
    variance = {key: factors.residual_log_sd.get(key, 0.0) ** 2 for key in centre}
    for name in names:
        sd = factors[name].log_sd
        if sd == 0 or factors.value(name) == 0:
            continue
        up, down = (evaluate(factors.scaled(name, math.exp(sign * sd))) for sign in (1, -1))
        for key in centre:
            if up[key] > 0 and down[key] > 0:
                variance[key] += ((math.log(up[key]) - math.log(down[key])) / 2) ** 2
    return {key: _around(value, math.sqrt(variance[key]), basis) for key, value in centre.items()}


def _around(value: float, log_sd: float, basis: Basis) -> Estimate:
    return Estimate(value, value * math.exp(-Z90 * log_sd), value * math.exp(Z90 * log_sd), basis)
