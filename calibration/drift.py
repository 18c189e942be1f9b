"""Do the factors of a calibration still hold on a later run? One question of every stage, and which factor moved.

With ``r`` the logarithms of measured over predicted (TPOT, then TTFT), their covariance under "nothing has changed" is

    V = J S J' + scatter^2 + each mean's own standard error^2

where S is the covariance of the fitted factors and J how predictions move with them. ``r' V^-1 r`` over its degrees of
freedom is held against F, since the scatter was estimated from few stages; a single factor's shift is the generalised
least-squares estimate along its column of J, held against Student's t. All tests together, one each for TPOT and TTFT and
one a factor, raise a false alarm in at most ``alpha`` of the cases (Holm, Scandinavian Journal of Statistics 6(2), 1979).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from calibration.calibration_file import Calibration
from calibration.errors import NotIdentifiable
from calibration.factors import FACTORS, Z90, FactorSet
from calibration.observation import Observation
from calibration.queueing import closed_loop
from calibration.serving import Serving, serving

Floats = npt.NDArray[np.float64]

#: a false alarm in at most so many of all checks
ALPHA = 0.01
#: what the expected scatter weighed in the fit, in stages
_SCATTER_STAGES = 2.0
_MOVE = 0.05


class Verdict(NamedTuple):
    """One test. ``p_adjusted`` by Holm over all tests of the check; ``rejected``: at the check's false-alarm rate."""

    name: str
    statistic: float
    p: float
    p_adjusted: float
    rejected: bool


class Shift(NamedTuple):
    """A factor's estimated move, as a ratio to its calibrated value, with a 90 % interval."""

    factor: str
    ratio: float
    low: float
    high: float
    test: Verdict


class StageDrift(NamedTuple):
    """A stage beside its prediction: measured over predicted, less one; ``inside`` the 90 % interval of a prediction."""

    label: str
    tpot_error: float
    ttft_error: float | None
    inside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The verdict. ``shifts`` by size of the evidence; ``moved`` names the factor the data blame, if any test rejects."""

    holds: bool
    alpha: float
    tests: tuple[Verdict, ...]
    shifts: tuple[Shift, ...]
    stages: tuple[StageDrift, ...]

    @property
    def moved(self) -> str | None:
        if self.holds or not self.shifts:
            return None
        return min(self.shifts, key=lambda shift: shift.test.p).factor


def check(calibration: Calibration, observations: Sequence[Observation], alpha: float = ALPHA) -> Drift:
    """Hold later stages of the calibrated deployment against its factors.

    Raises:
        NotIdentifiable: no stage to check.
    """
    if not observations:
        raise NotIdentifiable("no usable stage: there is nothing to check", "run a few levels below the wall")
    served = serving(calibration.rebuild_deployment())
    factors = calibration.factors
    rows = _Rows(served, factors, observations)
    told = [name for name, finding in calibration.fit.findings.items() if finding.identified]
    free = max(3.0, len(calibration.used) - len(told) + _SCATTER_STAGES)
    total = rows.slopes @ _covariance(factors) @ rows.slopes.T + np.diag(rows.variances)
    spread = np.asarray(np.linalg.inv(total), dtype=np.float64)
    found = [_overall(name, rows, spread, at, free) for name, at in rows.parts()]
    columns = [(name, rows.slopes[:, FACTORS.index(name)]) for name in told]
    raw = [(name, *_shift(rows.residuals, spread, column)) for name, column in columns if np.any(np.abs(column) > 1e-6)]
    found += [(name, ratio_log / sd, _two_sided(ratio_log / sd, free)) for name, ratio_log, sd in raw]
    tests = _holm(found, alpha)
    by_name = {test.name: test for test in tests}
    shifts = [
        Shift(name, math.exp(move), math.exp(move - Z90 * sd), math.exp(move + Z90 * sd), by_name[name])
        for name, move, sd in raw
    ]
    return Drift(
        holds=not any(test.rejected for test in tests),
        alpha=alpha,
        tests=tuple(tests),
        shifts=tuple(sorted(shifts, key=lambda shift: shift.test.p)),
        stages=tuple(rows.stages()),
    )


class _Rows:
    """Residuals of all TPOT, then of all TTFT that were measured, with slopes and the variances of their own."""

    def __init__(self, served: Serving, factors: FactorSet, observations: Sequence[Observation]) -> None:
        self._served, self._factors, self._observations = served, factors, observations
        self._timed = [o for o in observations if o.ttft_s is not None]
        centre = [self._predicted(factors, o) for o in observations]
        timed = [pair for pair, o in zip(centre, observations, strict=True) if o.ttft_s is not None]
        tpot = [math.log(o.tpot_s / said[0]) for o, said in zip(observations, centre, strict=True)]
        ttft = [math.log((o.ttft_s or 1.0) / said[1]) for o, said in zip(self._timed, timed, strict=True)]
        self.residuals = np.array([*tpot, *ttft])
        scatter = factors.residual_log_sd
        self.variances = np.array(
            [scatter.get("tpot", 0.0) ** 2 + o.tpot_log_sd**2 for o in observations]
            + [scatter.get("ttft", 0.0) ** 2 + o.ttft_log_sd**2 for o in self._timed]
        )
        self.slopes = np.column_stack([self._slope(name) for name in FACTORS])

    def _predicted(self, factors: FactorSet, o: Observation) -> tuple[float, float]:
        point = closed_loop(self._served._replace(pool=None).server(factors, o.shape), o.shape, o.users)
        return point.tpot_s, point.ttft_s

    def _slope(self, name: str) -> Floats:
        if self._factors.value(name) <= 0:
            return np.zeros(len(self.residuals))
        up, down = (self._factors.scaled(name, math.exp(sign * _MOVE)) for sign in (1, -1))
        pairs = [(self._predicted(up, o), self._predicted(down, o)) for o in self._observations]
        tpot = [math.log(a[0] / b[0]) for a, b in pairs]
        ttft = [
            math.log(a[1] / b[1]) for (a, b), o in zip(pairs, self._observations, strict=True) if o.ttft_s is not None
        ]
        return np.array([*tpot, *ttft]) / (2 * _MOVE)

    def parts(self) -> list[tuple[str, slice]]:
        n = len(self._observations)
        found = [("tpot", slice(0, n))]
        return [*found, ("ttft", slice(n, None))] if self._timed else found

    def stages(self) -> list[StageDrift]:
        total = self.slopes @ _covariance(self._factors) @ self.slopes.T + np.diag(self.variances)
        wide = Z90 * np.sqrt(np.diag(total))
        n, found, late = len(self._observations), [], len(self._observations)
        for i, o in enumerate(self._observations):
            ttft_error, inside = None, bool(abs(self.residuals[i]) <= wide[i])
            if o.ttft_s is not None:
                ttft_error = float(np.expm1(self.residuals[late]))
                inside = inside and bool(abs(self.residuals[late]) <= wide[late])
                late += 1
            found.append(StageDrift(o.label, float(np.expm1(self.residuals[i])), ttft_error, inside))
        assert len(found) == n
        return found


def _covariance(factors: FactorSet) -> Floats:
    found = np.diag([factors[name].log_sd ** 2 for name in FACTORS])
    for c in factors.covariances:
        at = [FACTORS.index(name) for name in c.names]
        found[np.ix_(at, at)] = np.array(c.matrix)
    return found


def _overall(name: str, rows: _Rows, spread: Floats, at: slice, free: float) -> tuple[str, float, float]:
    """Mean square of the standardised residuals of one quantity, and how rarely it is so large."""
    from scipy.stats import f

    residuals = rows.residuals[at]
    total = np.linalg.inv(spread)[at, at]
    statistic = float(residuals @ np.linalg.solve(total, residuals)) / len(residuals)
    return name, statistic, float(f.sf(statistic, len(residuals), free))


def _shift(residuals: Floats, spread: Floats, column: Floats) -> tuple[float, float]:
    """Move of a factor's logarithm that explains the residuals best, and its standard deviation."""
    precision = float(column @ spread @ column)
    return float(column @ spread @ residuals) / precision, 1.0 / math.sqrt(precision)


def _two_sided(statistic: float, free: float) -> float:
    from scipy.stats import t

    return float(2 * t.sf(abs(statistic), free))


def _holm(found: Sequence[tuple[str, float, float]], alpha: float) -> list[Verdict]:
    order = sorted(range(len(found)), key=lambda i: found[i][2])
    adjusted, highest = [1.0] * len(found), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, found[i][2] * (len(found) - rank)))
        adjusted[i] = highest
    return [Verdict(name, statistic, p, q, q <= alpha) for (name, statistic, p), q in zip(found, adjusted, strict=True)]
