"""Two calibrations side by side: which factor moved, and by how much."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from calibration.calibration_file import Calibration, differences
from calibration.factors import FACTORS, Z90

Verdict = Literal["moved", "same", "not identified"]

#: chance that two calibrations of one server are said to differ, over all factors together
ALPHA = 0.05


class Moved(NamedTuple):
    """A factor in both. ``ratio``: B over A, with its 90 % interval; the verdict is held to ``ALPHA`` over all factors."""

    name: str
    unit: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    verdict: Verdict


def compare_factors(a: Calibration, b: Calibration) -> tuple[list[Moved], list[str]]:
    """Every factor that both have, and where the deployments differ, in words.

    Raises:
        InputError: a deployment cannot be rebuilt.
    """
    from scipy.special import ndtri

    rows = []
    told = [name for name in FACTORS if a.factors[name].identified and b.factors[name].identified]
    z = float(ndtri(1 - ALPHA / (2 * max(1, len(told)))))
    for name in FACTORS:
        one, two = a.factors[name], b.factors[name]
        if one.value <= 0 or two.value <= 0:
            continue
        sd = math.hypot(one.log_sd, two.log_sd)
        shift = math.log(two.value / one.value)
        verdict: Verdict = "not identified"
        if name in told:
            verdict = "moved" if abs(shift) > z * sd else "same"
        low, high = (math.exp(shift + sign * Z90 * sd) for sign in (-1, 1))
        rows.append(Moved(name, one.unit, one.value, two.value, math.exp(shift), low, high, verdict))
    found = differences(a, b.rebuild_deployment())
    return rows, [f"{d.key}: {d.calibrated} in A, {d.now} in B" for d in found]
