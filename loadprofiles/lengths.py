"""Lengths in tokens, or turns of a conversation, as a number or as a distribution: what may stand where a profile asks
for a length. Here is what a distribution means (its mean, its bounds, its quantiles); who draws from it is elsewhere."""

from __future__ import annotations

import bisect
import math
from itertools import accumulate
from statistics import NormalDist
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from loadprofiles.units import Strict

Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
_STANDARD = NormalDist()


class Fixed(Strict):
    """Always the same."""

    distribution: Literal["fixed"]
    tokens: Tokens

    @property
    def mean(self) -> float:
        return float(self.tokens)

    @property
    def most(self) -> int:
        return self.tokens

    def quantile(self, p: float) -> int:
        """The length at probability ``p``, 0 <= p < 1: a uniform draw through it gives the distribution."""
        return self.tokens


class Uniform(Strict):
    """Every whole number from ``low`` to ``high``, both included, equally often."""

    distribution: Literal["uniform"]
    low: Tokens
    high: Tokens

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        return self

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    @property
    def most(self) -> int:
        return self.high

    def quantile(self, p: float) -> int:
        return self.low + int(p * (self.high - self.low + 1))


class _Clipped(Strict):
    """A continuous distribution, rounded and held between ``low`` and ``high``."""

    mean_tokens: Annotated[float, Field(gt=0, le=10_000_000)]
    """Of the distribution before it is held between low and high."""
    std_tokens: Annotated[float, Field(ge=0, le=10_000_000)]
    low: Tokens = 1
    high: Tokens
    """No length is longer: the server's context has to hold it."""

    @model_validator(mode="after")
    def _ordered(self) -> _Clipped:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        return self

    @property
    def most(self) -> int:
        return self.high

    def _held(self, value: float) -> int:
        return min(self.high, max(self.low, round(value)))


class Normal(_Clipped):
    """A normal distribution, held between ``low`` and ``high`` (values beyond become the bound)."""

    distribution: Literal["normal"]

    @property
    def mean(self) -> float:
        """E[min(high, max(low, X))], but for the rounding to whole tokens."""
        mu, sigma = self.mean_tokens, self.std_tokens
        if sigma == 0:
            return min(float(self.high), max(float(self.low), mu))
        a, b = (self.low - mu) / sigma, (self.high - mu) / sigma
        below, above = _STANDARD.cdf(a), 1 - _STANDARD.cdf(b)
        inside = mu * (1 - below - above) + sigma * (_STANDARD.pdf(a) - _STANDARD.pdf(b))
        return self.low * below + self.high * above + inside

    def quantile(self, p: float) -> int:
        return self._held(self.mean_tokens + self.std_tokens * _z(p))


class LogNormal(_Clipped):
    """A lognormal distribution (of the mean and standard deviation given, in tokens), held between ``low`` and ``high``."""

    distribution: Literal["lognormal"]

    @property
    def _log(self) -> tuple[float, float]:
        variance = math.log1p((self.std_tokens / self.mean_tokens) ** 2)
        return math.log(self.mean_tokens) - variance / 2, math.sqrt(variance)

    @property
    def mean(self) -> float:
        """E[min(high, max(low, X))], but for the rounding to whole tokens."""
        mu, sigma = self._log
        if sigma == 0:
            return min(float(self.high), max(float(self.low), self.mean_tokens))
        a, b = (math.log(self.low) - mu) / sigma, (math.log(self.high) - mu) / sigma
        below, above = _STANDARD.cdf(a), 1 - _STANDARD.cdf(b)
        inside = self.mean_tokens * (_STANDARD.cdf(b - sigma) - _STANDARD.cdf(a - sigma))
        return self.low * below + self.high * above + inside

    def quantile(self, p: float) -> int:
        mu, sigma = self._log
        return self._held(math.exp(mu + sigma * _z(p)))


class Empirical(Strict):
    """The lengths seen somewhere, each as often as its weight says (equally often without weights)."""

    distribution: Literal["empirical"]
    values: Annotated[tuple[Tokens, ...], Field(min_length=1, max_length=100_000, strict=False)]
    weights: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False)] | None = None

    @model_validator(mode="after")
    def _weighed(self) -> Empirical:
        if self.weights is not None:
            if len(self.weights) != len(self.values):
                raise ValueError(f"{len(self.weights)} weights for {len(self.values)} values")
            if not sum(self.weights) > 0:
                raise ValueError("the weights sum up to 0")
        return self

    @property
    def _shares(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * len(self.values)

    @property
    def mean(self) -> float:
        shares = self._shares
        return math.fsum(value * share for value, share in zip(self.values, shares, strict=True)) / math.fsum(shares)

    @property
    def most(self) -> int:
        return max(value for value, share in zip(self.values, self._shares, strict=True) if share)

    def quantile(self, p: float) -> int:
        upto = list(accumulate(self._shares))
        return self.values[min(bisect.bisect_right(upto, p * upto[-1]), len(self.values) - 1)]


def _z(p: float) -> float:
    return _STANDARD.inv_cdf(min(max(p, 1e-12), 1 - 1e-12))


Distribution = Annotated[Fixed | Uniform | Normal | LogNormal | Empirical, Field(discriminator="distribution")]


def _shape(value: Any) -> str:
    return "<distribution>" if isinstance(value, dict | Strict) else "<tokens>"


#: a number, or a distribution
Lengths = Annotated[
    Annotated[Tokens, Tag("<tokens>")] | Annotated[Distribution, Tag("<distribution>")], Discriminator(_shape)
]


def mean_of(lengths: int | Fixed | Uniform | Normal | LogNormal | Empirical) -> float:
    """Mean length in tokens."""
    return float(lengths) if isinstance(lengths, int) else lengths.mean


def most_of(lengths: int | Fixed | Uniform | Normal | LogNormal | Empirical) -> int:
    """The longest that can be drawn, in tokens."""
    return lengths if isinstance(lengths, int) else lengths.most


def quantile_of(lengths: int | Fixed | Uniform | Normal | LogNormal | Empirical, p: float) -> int:
    """The length at probability ``p``, 0 <= p < 1; of a number, itself."""
    return lengths if isinstance(lengths, int) else lengths.quantile(p)
