"""Intervals of stage means that respect that neighbours are alike: what a stage's mean is worth as a statement about the
server, not about these very requests.

Requests of one stage share the server's batches, so a thousand of them say less than a thousand independent ones would.
How much less is the effective sample size: n over the integrated autocorrelation time, by Geyer's initial monotone
positive sequence (Statistical Science 7(4), 1992, section 3.3). The interval of a mean is then Student's with as many
degrees of freedom as effective values less one; that of a share Jeffreys' with the effective counts (Brown, Cai and
DasGupta, Statistical Science 16(2), 2001).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from calibration.trace import Floats

CONFIDENCE = 0.9
#: fewer values tell nothing of how they hang together
LEAST_VALUES = 8
#: differences below this share of the mean are rounding
_ROUNDING = 1e-9


class Interval(NamedTuple):
    """A mean, the ends of its interval, and how many independent values it is worth."""

    mean: float
    low: float
    high: float
    n_effective: float

    def to_dict(self, scale: float = 1.0) -> dict[str, float]:
        """For ``summary.json``; values times ``scale``."""
        return {
            "low": self.low * scale,
            "high": self.high * scale,
            "n_effective": self.n_effective,
            "confidence": CONFIDENCE,
        }


def autocorrelation_time(values: Floats) -> float:
    """Integrated autocorrelation time of a series in order, in values: 1 for independent ones.

    Never under 1: a series that swings (users in lock step) is not taken to say more than its number of values.
    """
    n = len(values)
    centred = values - values.mean()
    variance = float(centred @ centred) / n
    if n < 2 or variance <= (_ROUNDING * abs(float(values.mean()))) ** 2:
        return 1.0
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    rho = np.fft.irfft(spectrum * np.conj(spectrum), size)[:n] / (n * variance)
    # sums of neighbouring pairs are positive, decreasing and convex for a reversible chain: stop where they are not
    pairs = rho[: n // 2 * 2].reshape(-1, 2).sum(axis=1)
    upto = int(np.argmax(pairs <= 0)) if (pairs <= 0).any() else len(pairs)
    return max(1.0, 2.0 * float(np.minimum.accumulate(pairs[:upto]).sum()) - 1.0)


def effective_size(values: Floats) -> float:
    """Independent values that a series in order is worth; at most its length, at least 1."""
    return max(1.0, len(values) / autocorrelation_time(values)) if len(values) else 0.0


def mean_interval(values: Floats, confidence: float = CONFIDENCE) -> Interval | None:
    """The mean of a series in order of time, and its interval; None under :data:`LEAST_VALUES` values (NaN left out), or
    where they are worth less than two."""
    known = values[~np.isnan(values)]
    if len(known) < LEAST_VALUES:
        return None
    worth = effective_size(known)
    if worth < 2:
        return None
    from scipy.special import stdtrit

    mean = float(known.mean())
    # the spread about an estimated mean, of values that are alike: the bias of the variance is 1 / worth
    spread = float(known.std()) * math.sqrt(worth / (worth - 1))
    half = float(stdtrit(worth - 1, (1 + confidence) / 2)) * spread / math.sqrt(worth)
    return Interval(mean, mean - half, mean + half, worth)


def share_interval(met: float, of: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Jeffreys' interval of a share, from effective counts (need not be whole)."""
    from scipy.special import betaincinv

    tail = (1 - confidence) / 2
    low = 0.0 if met <= 0 else float(betaincinv(met + 0.5, of - met + 0.5, tail))
    high = 1.0 if met >= of else float(betaincinv(met + 0.5, of - met + 0.5, 1 - tail))
    return low, high


def share_at_least(met: float, of: float, target: float) -> float:
    """Probability that a share is at least ``target``, by Jeffreys' prior and effective counts."""
    from scipy.special import betainc

    return 1.0 - float(betainc(met + 0.5, of - met + 0.5, target))
