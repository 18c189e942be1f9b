"""Weighted, robust least squares of logarithms with log-normal priors: few positive factors, each multiplying a known amount.

    ln y = ln(offset + sum_j x_j f_j) + error,      ln f_j ~ N(ln prior_j, prior_sd_j)

Solved by Gauss-Newton with weights that fall for outliers (Huber); the scatter of the errors is estimated along, drawn
towards what is known of it. A prior that the data contradict lets go in the same way: a server may be unlike all that were
measured. The posterior of the logarithms is normal around the solution (Laplace).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_ROUNDS = 75
#: first all observations count in full, or a server far off its priors would be an outlier in every one of them
_TRUSTING_ROUNDS = 15
_CONVERGED = 1e-10
#: errors beyond this many standard deviations count less
_HUBER = 1.5
#: a factor this many standard deviations off its prior is held by it no stronger than there
_PRIOR_HUBER = 2.0
#: the expected scatter weighs as much as this many observations
SCATTER_WEIGHT = 4.0
#: no step moves a logarithm further
_LONGEST_STEP = 1.0


@dataclass(frozen=True)
class Solution:
    """Logarithms of the factors with their covariance, the scatter (log sd of one observation), weights and residuals."""

    log_factors: Floats
    covariance: Floats
    scatter: float
    weights: Floats
    residuals: Floats
    #: d ln y / d ln f at the solution, shape (observations, factors)
    sensitivities: Floats


def solve(
    amounts: Floats,
    offset: Floats,
    measured: Floats,
    own_sd: Floats,
    prior: Floats,
    prior_sd: Floats,
    scatter: float,
    scatter_weight: float = SCATTER_WEIGHT,
    common_sd: Floats | None = None,
) -> Solution:
    """The factors of these observations.

    Args:
        amounts: x, shape (n, m); offset and measured: shape (n,).
        own_sd: relative standard error of each observation, beyond the scatter.
        common_sd: the part of it that errs the same way in all of them, as a wrong picture of the server does: more of
            them average nothing out of it. None: there is none.
        prior, prior_sd: of the factors, shape (m,); the sd is of the logarithm.
        scatter: expected log sd of one observation about the model; it weighs as ``scatter_weight`` observations.
    """
    theta, target = np.log(prior), np.log(measured)
    size = scatter
    weights = np.ones(len(measured))
    for round_number in range(_ROUNDS):
        model, slope = _model(amounts, offset, theta)
        residual = target - np.log(model)
        sd = np.hypot(size, own_sd)
        if round_number >= _TRUSTING_ROUNDS:
            weights = np.minimum(1.0, _HUBER * sd / np.maximum(np.abs(residual), 1e-300))
        scaled = slope * (weights / sd**2)[:, None]
        precision = _precision(theta - np.log(prior), prior_sd)
        normal = scaled.T @ slope + precision
        step = np.linalg.solve(normal, scaled.T @ residual - precision @ (theta - np.log(prior)))
        theta = theta + np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)
        if round_number < _TRUSTING_ROUNDS:
            continue
        before, size = size, _scatter(residual, weights, own_sd, normal, precision, scatter, scatter_weight)
        if np.max(np.abs(step), initial=0.0) < _CONVERGED and abs(size - before) < _CONVERGED:
            break
    model, slope = _model(amounts, offset, theta)
    sd = np.hypot(size, own_sd)
    scaled = slope * (weights / sd**2)[:, None]
    precision = _precision(theta - np.log(prior), prior_sd)
    covariance = np.linalg.inv(scaled.T @ slope + precision)
    if common_sd is not None:
        # what all share makes each count for less, but scatters none of them: it moves them together
        alone = scaled.T @ (slope * (1.0 - (common_sd / sd) ** 2)[:, None]) + precision
        moved = covariance @ (scaled.T @ common_sd)
        covariance = covariance @ alone @ covariance + np.outer(moved, moved)
    return Solution(theta, covariance, size, weights, target - np.log(model), slope)


def _precision(moved: Floats, prior_sd: Floats) -> Floats:
    """Of the priors, at factors that moved so far from them."""
    return np.diag(np.minimum(1.0, _PRIOR_HUBER * prior_sd / np.maximum(np.abs(moved), 1e-300)) / prior_sd**2)


def _model(amounts: Floats, offset: Floats, theta: Floats) -> tuple[Floats, Floats]:
    """y, and d ln y / d ln f."""
    parts = amounts * np.exp(theta)
    model = offset + parts.sum(axis=1)
    return model, parts / model[:, None]


def _scatter(
    residual: Floats,
    weights: Floats,
    own_sd: Floats,
    normal: Floats,
    precision: Floats,
    expected: float,
    weight: float,
) -> float:
    """Scatter from the residuals, over the degrees of freedom that the factors leave, drawn towards the expected one."""
    taken = len(precision) - float(np.trace(np.linalg.solve(normal, precision)))
    spread = float(np.sum(weights * np.maximum(residual**2 - own_sd**2, 0.0)))
    free = max(float(weights.sum()) - taken, 0.0)
    return float(np.sqrt((spread + weight * expected**2) / (free + weight)))


def inflation(sensitivities: Floats) -> Floats:
    """Variance inflation of each factor: how much the others' likeness widens it; 1 is none, infinite is complete."""
    if sensitivities.shape[1] == 0:
        return np.zeros(0)
    norms = np.linalg.norm(sensitivities, axis=0)
    unit = sensitivities / np.where(norms > 0, norms, 1.0)
    found = np.diag(np.linalg.pinv(unit.T @ unit, rcond=1e-12)).copy()
    singular = np.linalg.matrix_rank(unit, tol=1e-7) < unit.shape[1]
    return np.where(norms > 0, np.maximum(found, 1.0), np.inf) if not singular else np.full(len(norms), np.inf)


def condition(sensitivities: Floats) -> float:
    """Condition number of the design, columns scaled to length one."""
    norms = np.linalg.norm(sensitivities, axis=0)
    unit = sensitivities[:, norms > 0] / norms[norms > 0]
    if unit.shape[1] == 0 or unit.shape[0] == 0:
        return float("inf")
    values = np.linalg.svd(unit, compute_uv=False)
    smallest = values[-1] if len(values) == unit.shape[1] else 0.0
    return float(values[0] / smallest) if smallest > 0 else float("inf")
