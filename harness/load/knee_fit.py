"""The bend of throughput over users, from a handful of levels.

Below the wall a step grows in proportion to the streams it serves, so that each of N users gets a token every ``a + b*N``
seconds and throughput is ``S(N) = N / (a + b*N)``; users who think for z seconds a token leave ``N - z*S`` of them streaming,
so that ``S * (a + b*(N - z*S) + z) = N``. At a wall (pool full, max_num_seqs) no more than W run at once; what
streams need of the pool varies, so W does, normally, by a share r of itself::

    X(N) = S(E[min(N, W + r*W*Z)]),   E[min(N, V)] = N - d*(z*Phi(z) + phi(z)),   d = r*W, z = (N - W) / d

The form without a wall is kept unless the wall explains enough more (AICc, Hurvich and Tsai, Biometrika 76(2), 1989). The
knee is where ``dX/dN`` has fallen to ``slope`` of X(1); its interval is by the delta method, with the residuals' own scale
where that is larger than the levels' errors, and Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from calibration.trace import Floats

#: relative error a level's throughput has at least: the form is not exact
LEAST_ERROR = 0.004
#: levels beyond so many times the knee say nothing of it: preemption makes throughput fall there
BEYOND = 1.75
BELOW = 8.0
#: r of the wall, held within
_VARIES = (0.002, 0.5)
#: where the search for the least squares starts, from the priors' centres: log a, log b, log W, log r
_STARTS = {
    2: (np.zeros(2), np.array([0.0, -3.0])),
    4: (np.zeros(4), np.array([0.0, -3.0, 0.0, 0.0]), np.array([0.0, -1.0, -0.4, 0.0])),
}
#: of log users in which the knee is looked for
_GRID = np.linspace(0.0, math.log(1e6), 400)


class LevelRate(NamedTuple):
    """Tokens per second at a number of users, and its standard error."""

    users: int
    rate: float
    error: float


class KneeFit(NamedTuple):
    """The knee in users, the ends of its interval, and the form that was kept."""

    users: float
    low: float
    high: float
    wall: bool
    parameters: tuple[float, ...]


def fit_knee(
    levels: Sequence[LevelRate], slope: float, confidence: float, think_s_per_token: float = 0.0
) -> KneeFit | None:
    """The knee of these levels; None with fewer than four, or where no form bends down to ``slope``.

    ``think_s_per_token``: seconds a user thinks for each token it is sent, 0 without think time.

    The levels near the knee count: a first fit of all says where it is, a second is of those around it and the lowest.
    """
    found = _fit(levels, slope, confidence, think_s_per_token)
    for _ in range(2):
        if found is None:
            return None
        lowest = min(level.users for level in levels)
        near = [
            level
            for level in levels
            if level.users == lowest or found.users / BELOW <= level.users <= BEYOND * found.users
        ]
        found = (
            _fit(near, slope, confidence, think_s_per_token) if len(near) < len(levels) and len(near) >= 6 else None
        ) or found
    return found


def _fit(levels: Sequence[LevelRate], slope: float, confidence: float, think: float) -> KneeFit | None:
    if len(levels) < 4:
        return None
    users = np.array([level.users for level in levels], dtype=np.float64)
    rates = np.log([level.rate for level in levels])
    errors = np.array([max(LEAST_ERROR, level.error / level.rate) for level in levels])
    fits = [
        fit
        for size in (2, 4)
        if len(levels) >= size + 2 and (fit := _least_squares(users, rates, errors, size, think)) is not None
    ]
    fits = sorted(fits, key=lambda fit: fit.aicc)
    for fit in fits:
        if (knee := _knee_of(fit, slope, confidence, len(levels), think)) is not None:
            return knee
    return None


class _Solution(NamedTuple):
    theta: Floats
    covariance: Floats
    aicc: float


def _curve(theta: Floats, users: Floats, think: float) -> Floats:
    """log throughput."""
    running = users
    if len(theta) == 4:
        wall, varies = math.exp(min(theta[2], 30.0)), float(np.clip(math.exp(min(theta[3], 9.0)), *_VARIES))
        z = (users / wall - 1) / varies
        lost: Floats = varies * wall * (z * _normal_cdf(z) + np.exp(-z * z / 2) / math.sqrt(2 * math.pi))
        running = np.maximum(users - lost, 1e-9)
    alone, added = math.exp(theta[0]), math.exp(theta[1])
    pace = alone + added * running + think
    logs: Floats = np.log(2 * running / (pace + np.sqrt(np.maximum(pace**2 - 4 * added * think * running, 0.0))))
    return logs


def _normal_cdf(z: Floats) -> Floats:
    from scipy.special import ndtr

    cdf: Floats = ndtr(z)
    return cdf


def _least_squares(users: Floats, rates: Floats, errors: Floats, size: int, think: float) -> _Solution | None:
    """Least squares with weak priors (a spread of e-folds), which hold what no level tells."""
    from scipy.optimize import leastsq

    lowest, most = int(np.argmin(users)), float(rates.max())
    alone = math.log(max(1e-9, float(users[lowest] / np.exp(rates[lowest])) - think))
    # throughput is at its most from about the wall on
    reached = float(np.log(users[int(np.argmax(rates >= most - 0.03))]))
    centres = np.array([alone, -most - 1.0, reached, math.log(0.05)][:size])
    widths = np.array([1.0, 4.0, 1.0, 1.2][:size])

    def misfit(theta: Floats) -> Floats:
        return np.concatenate([(_curve(theta, users, think) - rates) / errors, (theta - centres) / widths])

    best: tuple[float, Floats, Floats] | None = None
    for shift in _STARTS[size]:
        theta, covariance, info, _, flag = leastsq(misfit, centres + shift, full_output=True, maxfev=400)
        cost = float(info["fvec"] @ info["fvec"])
        if flag in (1, 2, 3, 4) and (best is None or cost < best[0]):
            best = cost, theta, covariance
    if best is None:
        return None
    chi2, theta, covariance = best
    n = len(users)
    correction = 2 * size + 2 * size * (size + 1) / max(1, n - size - 1)
    return _Solution(theta, covariance * max(1.0, chi2 / (n - size)), chi2 + correction)


def _knee_of(fit: _Solution, slope: float, confidence: float, n: int, think: float) -> KneeFit | None:
    knee = _solve(fit.theta, slope, think)
    if knee is None:
        return None
    from scipy.special import stdtrit

    gradient = _gradient(lambda theta: math.log(_solve(theta, slope, think) or knee), fit.theta)
    spread = math.sqrt(max(0.0, float(gradient @ fit.covariance @ gradient)))
    half = float(stdtrit(max(1, n - len(fit.theta)), (1 + confidence) / 2)) * spread
    return KneeFit(knee, knee * math.exp(-half), knee * math.exp(half), len(fit.theta) == 4, tuple(fit.theta.tolist()))


def _gradient(of: Callable[[Floats], float], theta: Floats) -> Floats:
    steps = np.eye(len(theta)) * 1e-4
    return np.array([(of(theta + step) - of(theta - step)) / 2e-4 for step in steps])


def _solve(theta: Floats, slope: float, think: float) -> float | None:
    """Users at which the slope of the curve is ``slope`` of X(1); None where it never falls so far."""
    middles, above = _slopes(theta, _GRID, slope, think)
    for _ in range(2):
        if not (above < 0).any():
            return None
        at = int(np.argmax(above < 0))
        if at == 0:
            return 1.0
        step = middles[at] - middles[at - 1]
        middles, above = _slopes(theta, np.linspace(middles[at - 1] - step, middles[at] + step, 33), slope, think)
    at = max(1, int(np.argmax(above < 0)))
    return float(np.exp(np.interp(0.0, above[[at, at - 1]], middles[[at, at - 1]])))


def _slopes(theta: Floats, logs: Floats, slope: float, think: float) -> tuple[Floats, Floats]:
    """(log users, log of dX/dN over ``slope`` * X(1)) between the points given."""
    curve = _curve(theta, np.exp(logs), think)
    first = float(_curve(theta, np.ones(1), think)[0])
    middles = (logs[1:] + logs[:-1]) / 2
    elasticity = np.maximum(np.diff(curve) / np.diff(logs), 1e-300)
    return middles, np.log(elasticity) + (curve[1:] + curve[:-1]) / 2 - middles - first - math.log(slope)
