"""Is a series in its steady state: where its warm-up ends, and whether it still trends after that.

Warm-up is cut by MSER (White, "An effective truncation heuristic for bias reduction in simulation output", Simulation
69(6), 1997; on batch means: White, Cobb and Spratt, WSC 2000): drop the first d values so that the standard error of
the mean of the rest is least, d at most half. MSER alone also cuts noise, so a cut is kept only where what it drops
differs from the rest by more than ``CUT_RELATIVE`` and by more than ``CUT_ERRORS`` standard errors (four, not the usual
two or three: the place of the cut is itself chosen to make the difference large).

A trend is told by the rank test of Mann (Econometrica 13, 1945) and Kendall and must matter too: over the whole series
the slope of Sen (JASA 63, 1968) has to move the value by more than ``TREND_RELATIVE`` of its median.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from calibration.trace import Floats

#: fewer values cannot tell a warm-up from noise: nothing is cut
MSER_VALUES = 10
CUT_RELATIVE = 0.05
CUT_ERRORS = 4.0
#: fewer values cannot tell a trend: the rank statistic of 8 can reach z = 3.3, that of 5 only 2.2
TREND_VALUES = 8
#: two-sided 1 %: several series are looked at in every stage
TREND_Z = 2.576
TREND_RELATIVE = 0.10
_ROUNDING = 1e-12


def warm_up(values: Floats) -> int:
    """How many values at the start to drop; 0 where there is no warm-up or no way to tell.

    Args:
        values: a series in order of time, evenly spaced batch means, no NaN; shape (m,).
    """
    m = len(values)
    if m < MSER_VALUES:
        return 0
    # sums over the values from d on, for each d up to half
    left = m - np.arange(m // 2 + 1)
    centred = values - values.mean()
    totals = np.cumsum(centred[::-1])[::-1][: m // 2 + 1]
    squares = np.cumsum(centred[::-1] ** 2)[::-1][: m // 2 + 1]
    scores = (squares - totals**2 / left) / left**2
    # the first of the least: values that are equal differ by rounding
    cut = int(np.argmax(scores <= scores.min() + _ROUNDING * scores[0]))
    return cut if cut and _differs(values[:cut], values[cut:]) else 0


def _differs(dropped: Floats, kept: Floats) -> bool:
    difference = abs(float(dropped.mean() - kept.mean()))
    error = float(kept.std(ddof=1)) * math.sqrt(1 / len(dropped) + 1 / len(kept))
    return difference > CUT_RELATIVE * abs(float(kept.mean())) and difference > CUT_ERRORS * error


@dataclass(frozen=True, slots=True)
class Trend:
    """``z`` of the rank test; ``relative_change``: Sen's slope times the length of the series over its median."""

    z: float
    relative_change: float

    @property
    def matters(self) -> bool:
        return abs(self.z) > TREND_Z and abs(self.relative_change) > TREND_RELATIVE


def trend(values: Floats) -> Trend | None:
    """The trend of an evenly spaced series without NaN, shape (m,); None when it is too short to tell."""
    m = len(values)
    if m < TREND_VALUES:
        return None
    early, late = np.triu_indices(m, k=1)
    rises = values[late] - values[early]
    score = float(np.sign(rises).sum())
    # variance without ties: ties only make the test more careful
    variance = m * (m - 1) * (2 * m + 5) / 18
    z = (score - np.sign(score)) / math.sqrt(variance)
    slope = float(np.median(rises / (late - early)))
    middle = abs(float(np.median(values)))
    change = slope * (m - 1)
    return Trend(float(z), change / middle if middle else math.copysign(math.inf, change) if change else 0.0)
