"""The nine numbers said of every distribution, with their keys of DESIGN section 7."""

from __future__ import annotations

import numpy as np

from calibration.trace import Floats

Stats = dict[str, float | int | None]

PERCENTILES = (50, 90, 95, 99)
KEYS = ("n", "mean", "std", "p50", "p90", "p95", "p99", "min", "max")


def empty() -> Stats:
    """Nothing was measured: n is 0 and the rest is null."""
    return {"n": 0} | dict.fromkeys(KEYS[1:])


def percentile_of_sorted(values: Floats, percent: float) -> float:
    """Linear interpolation between closest ranks (Hyndman and Fan 1996, type 7; numpy's default).

    Args:
        values: ascending, at least one, no NaN.
        percent: 0 to 100.
    """
    rank = percent / 100 * (len(values) - 1)
    below = int(rank)
    above = min(below + 1, len(values) - 1)
    return float(values[below] + (values[above] - values[below]) * (rank - below))


def describe(values: Floats) -> Stats:
    """Count, mean, standard deviation (of these values: divisor n), percentiles and extremes; NaN is left out."""
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return empty()
    percentiles = {f"p{percent}": percentile_of_sorted(known, percent) for percent in PERCENTILES}
    return {
        "n": len(known),
        # rounding may carry the mean of equal values past them by one bit
        "mean": float(np.clip(np.mean(known), known[0], known[-1])),
        "std": float(np.std(known)),
        **percentiles,
        "min": float(known[0]),
        "max": float(known[-1]),
    }
