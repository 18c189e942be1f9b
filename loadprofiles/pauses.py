"""Think times as a duration or as a distribution of them: the words of :mod:`loadprofiles.lengths`, in seconds. Here is
what a distribution means (its mean, its quantiles); who draws from it is elsewhere."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from loadprofiles.units import Seconds, Strict

_STANDARD = NormalDist()


class FixedPause(Strict):
    """Always the same."""

    distribution: Literal["fixed"]
    pause: Seconds

    @property
    def mean_s(self) -> float:
        """Mean in seconds."""
        return self.pause

    def quantile_s(self, p: float) -> float:
        """Seconds at probability ``p``, 0 <= p < 1: a uniform draw through it gives the distribution."""
        return self.pause


class _Between(Strict):
    low: Seconds = 0.0

    def _check(self, high: float | None) -> None:
        if high is not None and self.low > high:
            raise ValueError(f"low ({self.low:g} s) is above high ({high:g} s)")


class UniformPause(_Between):
    """Any time from ``low`` to ``high``, equally often."""

    distribution: Literal["uniform"]
    high: Seconds

    @model_validator(mode="after")
    def _ordered(self) -> UniformPause:
        self._check(self.high)
        return self

    @property
    def mean_s(self) -> float:
        return (self.low + self.high) / 2

    def quantile_s(self, p: float) -> float:
        return self.low + p * (self.high - self.low)


class ExponentialPause(_Between):
    """An exponential distribution, held between ``low`` and ``high`` (values beyond become the bound)."""

    distribution: Literal["exponential"]
    mean: Annotated[Seconds, Field(gt=0)]
    """Of the distribution before it is held between low and high."""
    high: Seconds | None = None

    @model_validator(mode="after")
    def _ordered(self) -> ExponentialPause:
        self._check(self.high)
        return self

    @property
    def mean_s(self) -> float:
        """E[min(high, max(low, X))]."""
        above = 0.0 if self.high is None else math.exp(-self.high / self.mean)
        return self.low + self.mean * (math.exp(-self.low / self.mean) - above)

    def quantile_s(self, p: float) -> float:
        return _held(-self.mean * math.log1p(-p), self.low, self.high)


class LogNormalPause(_Between):
    """A lognormal distribution (of the mean and standard deviation given), held between ``low`` and ``high``."""

    distribution: Literal["lognormal"]
    mean: Annotated[Seconds, Field(gt=0)]
    """Of the distribution before it is held between low and high."""
    std: Seconds
    high: Seconds | None = None

    @model_validator(mode="after")
    def _ordered(self) -> LogNormalPause:
        self._check(self.high)
        return self

    @property
    def _log(self) -> tuple[float, float]:
        variance = math.log1p((self.std / self.mean) ** 2)
        return math.log(self.mean) - variance / 2, math.sqrt(variance)

    @property
    def mean_s(self) -> float:
        """E[min(high, max(low, X))]."""
        mu, sigma = self._log
        if sigma == 0:
            return _held(self.mean, self.low, self.high)
        a = (math.log(self.low) - mu) / sigma if self.low else -math.inf
        b = (math.log(self.high) - mu) / sigma if self.high else (math.inf if self.high is None else -math.inf)
        inside = self.mean * (_STANDARD.cdf(b - sigma) - _STANDARD.cdf(a - sigma))
        return self.low * _STANDARD.cdf(a) + (self.high or 0.0) * (1 - _STANDARD.cdf(b)) + inside

    def quantile_s(self, p: float) -> float:
        mu, sigma = self._log
        z = _STANDARD.inv_cdf(min(max(p, 1e-12), 1 - 1e-12))
        return _held(math.exp(mu + sigma * z), self.low, self.high)


def _held(value: float, low: float, high: float | None) -> float:
    value = max(low, value)
    return value if high is None else min(high, value)


Distributed = FixedPause | UniformPause | ExponentialPause | LogNormalPause


def _shape(value: Any) -> str:
    return "<distribution>" if isinstance(value, dict | Strict) else "<pause>"


#: a duration, or a distribution
Pauses = Annotated[
    Annotated[Seconds, Tag("<pause>")]
    | Annotated[Annotated[Distributed, Field(discriminator="distribution")], Tag("<distribution>")],
    Discriminator(_shape),
]
_PAUSES: TypeAdapter[float | Distributed] = TypeAdapter(Pauses)


def pauses_of(value: Any) -> float | Distributed:
    """A pause or its JSON form, as an order to a worker or ``run.json`` carries it.

    Raises:
        pydantic.ValidationError: it is none.
    """
    return _PAUSES.validate_python(value)


def mean_pause_s(value: Any) -> float:
    """Mean seconds of a pause or its JSON form."""
    known = pauses_of(value)
    return known if isinstance(known, float) else known.mean_s
