"""Factors for another deployment than the one they were fitted to.

On one GPU and with one engine the physics of a step is priced alike: what a fit found a factor to be over its prior
(kernels better or worse than the generation's) says something of the same factor for another model, another tensor
parallelism or another format. It says less than a measurement: the other prior is moved by the share :data:`MOVED` of it,
and of the spread between deployments that the prior states, :data:`KEPT` stays, on top of the fit's own. On another GPU
nothing is known. Flags that bound the scheduler (how many sequences, how long, how large a pool) price no step: there the
factors stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import replace

from calibration.calibration_file import Calibration, differences
from calibration.deployment import Deployment
from calibration.errors import InputError
from calibration.factors import Covariance, Factor, FactorSet
from calibration.priors import prior_factors

#: how far another deployment's factor is moved, of what the fit moved its own (on the logarithm), and how much of the
#: prior's spread stays. 485 published TPOTs were predicted from the fits of 21 other servers of one source and GPU: with
#: these the mean error was 3.9 % over models and 5.3 % over tensor parallelism, and 98 % and 90 % lay in the 90 % interval;
#: moved all the way, 5.3 % and 6.6 %, 98 % and 86 %. (The priors, made from these servers among others, give 3.4 and 4.6 %.)
MOVED, KEPT = 0.5, 0.7
#: what bounds requests and prices no step
_BOUNDS = frozenset({"max_model_len", "max_num_seqs", "max_num_batched_tokens", "dp", "enable_prefix_caching", "pool"})
#: another device is another physics
_NEVER = frozenset({"gpu", "device"})


def factors_for(calibration: Calibration, deployment: Deployment, *, transfer: bool) -> FactorSet:
    """The calibration's factors for a deployment: as they are where it is the calibrated one, as priors where it is not.

    Raises:
        InputError: it is not the calibrated one and no transfer was asked for, or the device is another.
    """
    found = differences(calibration, deployment)
    if not found:
        return calibration.factors
    said = "; ".join(map(str, found))
    if not transfer:
        raise InputError(
            f"the calibration is of another deployment: {said}",
            "leave the deployment's options out to take the calibrated one, or carry its factors over with --transfer",
        )
    never = [str(difference) for difference in found if difference.key in _NEVER]
    if never:
        raise InputError(
            f"factors of one device say nothing of another: {'; '.join(never)}", "calibrate there, or plan without"
        )
    if all(difference.key in _BOUNDS for difference in found):
        return calibration.factors
    source = f"transferred from another deployment ({said})"
    return carried(calibration.factors, prior_factors(deployment), source)


def carried(fitted: FactorSet, prior: FactorSet, source: str, kept: float = KEPT) -> FactorSet:
    """The priors of another deployment, moved as a fit moved those of its own.

    Args:
        fitted: of the deployment that was calibrated.
        prior: of the other one.
        source: where moved factors say they come from.
        kept: of the prior's spread.
    """
    factors = [_one(fitted[name], own, source, kept) for name, own in prior.factors.items()]
    added = {factor.name: kept * factor.prior_log_sd for factor in factors}
    # what was fitted together stays correlated; what is added varies alone
    covariances = tuple(
        Covariance(
            c.names,
            tuple(
                tuple(value + (added[name] ** 2 if row == column else 0.0) for column, value in enumerate(values))
                for row, (name, values) in enumerate(zip(c.names, c.matrix, strict=True))
            ),
        )
        for c in fitted.covariances
    )
    return FactorSet({factor.name: factor for factor in factors}, fitted.residual_log_sd, None, covariances)


def _one(fitted: Factor, own: Factor, source: str, kept: float) -> Factor:
    """The deployment's own prior, moved as the fit moved the other's."""
    if fitted.prior_value <= 0 or fitted.value <= 0:
        return own
    return replace(
        own,
        value=own.value * (fitted.value / fitted.prior_value) ** MOVED,
        log_sd=math.hypot(fitted.log_sd, kept * own.log_sd),
        source=source if fitted.identified else f"{own.source}; not identified where it was calibrated",
    )
