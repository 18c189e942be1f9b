"""How far the model is from published measurements: every row predicted, scored, and summed up by group.

TPOT is scored on every row; TTFT only below the wall, for beyond it the wait grows without bound and says nothing of a
model; throughput where the table states it; the wall on sweeps that cross it. What counts as beyond the wall is read from
the measurements alone (:func:`walls`), never from the prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from calibration.errors import CalibrationError, InputError
from calibration.factors import FactorSet
from calibration.measurements import Measurement, Unusable
from calibration.prediction import Estimate, Outcome, propagate
from calibration.priors import prior_factors
from calibration.queueing import OperatingPoint, closed_loop, open_loop
from calibration.serving import Serving, serving

#: below the wall TTFT grows at most in proportion to the users; twice as fast, and not falling again, is the wall
WALL_GROWTH = 2.0
#: a wait for the first token longer than this share of all later ones together is a wait for room
WALL_SHARE = 0.5

#: connections that aiohttp opens at most unless told otherwise; benchmark clients that forgot measured their own queue
CLIENT_CONNECTIONS = 100

QUANTITIES = ("tpot", "ttft", "throughput")


@dataclass(frozen=True, slots=True)
class Score:
    """One quantity of one row: measured and predicted, in seconds or tokens a second."""

    measured: float
    estimate: Estimate

    @property
    def error(self) -> float:
        """Relative error of the prediction, signed."""
        return self.estimate.value / self.measured - 1

    @property
    def covered(self) -> bool:
        return self.estimate.holds(self.measured)


@dataclass(frozen=True, slots=True)
class RowScore:
    """One row scored. A quantity is missing where it was not measured, or (TTFT) means nothing beyond the wall."""

    measurement: Measurement
    scores: Mapping[str, Score]
    regime: str
    beyond_wall: bool


@dataclass(frozen=True, slots=True)
class WallScore:
    """A sweep that crosses the wall: it lies above ``last_below`` users and at or below ``first_beyond``; the model says
    between ``full`` and ``staggered``."""

    measurement: Measurement
    last_below: float
    first_beyond: float
    full: float
    staggered: float

    @property
    def bracketed(self) -> bool:
        """Do the two intervals meet?"""
        return self.full <= self.first_beyond and self.staggered >= self.last_below


@dataclass(frozen=True)
class Report:
    """All scores of a table."""

    rows: Sequence[RowScore]
    walls: Sequence[WallScore]
    skipped: Sequence[Unusable]


FactorsOf = Callable[[Measurement, Serving], FactorSet]


def prior_of(measurement: Measurement, served: Serving) -> FactorSet:
    """The uncalibrated model: priors only."""
    return prior_factors(measurement.deployment, served.physics)


def score(
    measurements: Sequence[Measurement], skipped: Sequence[Unusable] = (), factors_of: FactorsOf = prior_of
) -> Report:
    """Predict and score every measurement; one that cannot be predicted is skipped with the reason."""
    left = list(skipped)
    beyond, crossings = walls(measurements)
    rows: list[RowScore] = []
    servers: dict[int, Serving] = {}
    for m in measurements:
        try:
            servers[m.row] = served = serving(m.deployment)
            _check_client(m, served)
            rows.append(score_row(m, served, factors_of(m, served), m.row in beyond))
        except CalibrationError as error:
            left.append(Unusable(m.row, m.source, m.model, m.gpu, error.message))
    found = [_wall(at, low, high, servers[at.row]) for low, high, at in crossings if at.row in servers]
    return Report(rows, [wall for wall in found if wall is not None], sorted(left, key=lambda item: item.row))


def _check_client(m: Measurement, served: Serving) -> None:
    """Refuse a row that shows its client's limit, not the server's: users waited, and by Little's law just under a hundred
    sequences ran, where there was room for far more.

    Raises:
        InputError: so it is.
    """
    wall = served.wall(m.shape)
    if m.users is None or m.tpot_s is None or m.ttft_s is None or wall is None or not _waits(m):
        return
    decoding = m.tpot_s * m.shape.output_tokens
    ran = m.users * decoding / (decoding + m.ttft_s)
    room = min(wall[0], served.deployment.max_num_seqs)
    if m.users > CLIENT_CONNECTIONS >= ran > 0.85 * CLIENT_CONNECTIONS and room > 1.5 * CLIENT_CONNECTIONS:
        raise InputError(
            f"its client kept to {CLIENT_CONNECTIONS} connections: of {m.users:.0f} users {ran:.0f} ran, with room for "
            f"{room:.0f}"
        )


def score_row(m: Measurement, served: Serving, factors: FactorSet, beyond: bool) -> RowScore:
    """One row under these factors.

    Raises:
        Unsupported: an open loop that the model says cannot be served.
    """
    point = predict_point(m, served, factors)
    users = m.users if m.users is not None else point.users
    basis = factors.basis(users, m.shape.prompt_tokens, m.shape.output_tokens)
    estimates = propagate(lambda f: outcome(predict_point(m, served, f)), factors, basis)
    measured = {
        "tpot": m.tpot_s,
        "ttft": None if beyond else m.ttft_s,
        "throughput": m.output_tokens_per_s,
    }
    scores = {key: Score(value, estimates[key]) for key, value in measured.items() if value is not None}
    return RowScore(m, scores, point.regime, beyond)


def predict_point(m: Measurement, served: Serving, factors: FactorSet) -> OperatingPoint:
    """Where the row's load settles; an open loop beyond what can be served settles nowhere, and is taken as full."""
    server = served.server(factors, m.shape)
    if m.users is not None:
        return closed_loop(server, m.shape, m.users)
    assert m.requests_per_s is not None
    found = open_loop(server, m.shape, m.requests_per_s)
    return found if found is not None else closed_loop(server, m.shape, 10 * server.most_running * server.replicas)


def outcome(point: OperatingPoint) -> Outcome:
    return {"tpot": point.tpot_s, "ttft": point.ttft_s, "throughput": point.output_tokens_per_s}


def walls(measurements: Sequence[Measurement]) -> tuple[set[int], list[tuple[float, float, Measurement]]]:
    """What the measurements say of the wall: rows beyond it, and (last users below, first beyond, row) of every sweep that
    crosses it."""
    beyond = {m.row for m in measurements if _waits(m)}
    crossings: list[tuple[float, float, Measurement]] = []
    for sweep in _sweeps(measurements):
        crossing = _crossing(sweep)
        if crossing is None:
            continue
        below, first = crossing
        beyond |= {m.row for m in sweep if _users(m) >= _users(first)}
        crossings.append((_users(below), _users(first), first))
    return beyond, crossings


def _users(m: Measurement) -> float:
    assert m.users is not None
    return m.users


def _waits(m: Measurement) -> bool:
    """Is the wait for the first token one for room?"""
    return m.ttft_s is not None and m.tpot_s is not None and m.ttft_s > WALL_SHARE * m.tpot_s * m.shape.output_tokens


def _sweeps(measurements: Iterable[Measurement]) -> list[list[Measurement]]:
    """Closed-loop rows with a TTFT by sweep, users ascending; of equal users the first."""
    groups: dict[tuple[object, ...], dict[float, Measurement]] = {}
    for m in measurements:
        if m.users is not None and m.ttft_s is not None:
            groups.setdefault(m.sweep_key, {}).setdefault(m.users, m)
    return [[group[users] for users in sorted(group)] for group in groups.values()]


def _crossing(sweep: Sequence[Measurement]) -> tuple[Measurement, Measurement] | None:
    """The first neighbours between which TTFT grows more than twice as fast as the users, and does not fall again."""
    for index, (below, first) in enumerate(pairwise(sweep)):
        assert below.ttft_s is not None
        assert first.ttft_s is not None
        growth = first.ttft_s / below.ttft_s
        later = [m.ttft_s for m in sweep[index + 1 :] if m.ttft_s is not None]
        lasting = min(later) >= first.ttft_s
        if growth > WALL_GROWTH * _users(first) / _users(below) and lasting and first.ttft_s > 1.0:
            return below, first
    return None


def _wall(m: Measurement, below: float, beyond: float, served: Serving) -> WallScore | None:
    predicted = served.wall(m.shape)
    if predicted is None:
        return None
    return WallScore(m, below, beyond, *predicted)


def summary(rows: Sequence[RowScore], sweeps: Sequence[WallScore]) -> dict[str, Any]:
    """``{tpot, ttft, throughput: {n, mape_mean, mape_median, mape_p90, coverage_90}, wall: {n, bracketed}}``; errors in
    percent, coverage a share; None where there is nothing."""
    found: dict[str, Any] = {}
    for quantity in QUANTITIES:
        scores = [row.scores[quantity] for row in rows if quantity in row.scores]
        errors = sorted(100 * abs(item.error) for item in scores)
        found[quantity] = {
            "n": len(scores),
            "mape_mean": sum(errors) / len(errors) if errors else None,
            "mape_median": percentile(errors, 50),
            "mape_p90": percentile(errors, 90),
            "coverage_90": sum(item.covered for item in scores) / len(scores) if scores else None,
        }
    found["wall"] = {"n": len(sweeps), "bracketed": sum(wall.bracketed for wall in sweeps)}
    return found


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between ordered values; None of none."""
    if not ordered:
        return None
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


#: how rows are grouped: name -> label of a row
GROUPS: Mapping[str, Callable[[Measurement], str]] = {
    "family": lambda m: m.family,
    "gpu": lambda m: m.gpu,
    "model": lambda m: m.model,
    "tp": lambda m: str(m.tp),
    "source": lambda m: m.source,
}


def report_json(report: Report) -> dict[str, Any]:
    """The whole report as plain values (DESIGN section 7): ``overall, by, skipped, rows``, and ``walls`` beside them."""
    return {
        "overall": summary(report.rows, report.walls),
        "by": {name: _grouped(report, label) for name, label in GROUPS.items()},
        "skipped": [
            {"row": s.row, "source": s.source, "model": s.model, "gpu": s.gpu, "reason": s.reason}
            for s in report.skipped
        ],
        "rows": [row_json(row) for row in report.rows],
        "walls": [wall_json(wall) for wall in report.walls],
    }


def _grouped(report: Report, label: Callable[[Measurement], str]) -> dict[str, Any]:
    labels = sorted({label(row.measurement) for row in report.rows})
    return {
        name: summary(
            [row for row in report.rows if label(row.measurement) == name],
            [wall for wall in report.walls if label(wall.measurement) == name],
        )
        for name in labels
    }


def row_json(row: RowScore) -> dict[str, Any]:
    """One row: what it is, and each quantity's ``{measured, predicted, low, high, basis, error_percent}`` (ms, tokens/s),
    None where it is not scored."""
    m = row.measurement
    found: dict[str, Any] = {
        "row": m.row,
        "source": m.source,
        "gpu": m.gpu,
        "model": m.model,
        "family": m.family,
        "tp": m.tp,
        "weights": m.deployment.weights.name,
        "prompt_tokens": m.nominal_shape[0],
        "output_tokens": m.nominal_shape[1],
        "users": m.users,
        "request_rate": m.requests_per_s,
        "regime": row.regime,
        "beyond_wall": row.beyond_wall,
    }
    for quantity in QUANTITIES:
        item = row.scores.get(quantity)
        scale = 1.0 if quantity == "throughput" else 1e3
        found[quantity] = None if item is None else _score_json(item, scale)
    return found


def _score_json(item: Score, scale: float) -> dict[str, Any]:
    return {
        "measured": item.measured * scale,
        "predicted": item.estimate.value * scale,
        "low": item.estimate.low * scale,
        "high": item.estimate.high * scale,
        "basis": item.estimate.basis,
        "error_percent": 100 * item.error,
    }


def wall_json(wall: WallScore) -> dict[str, Any]:
    m = wall.measurement
    return {
        "row": m.row,
        "gpu": m.gpu,
        "model": m.model,
        "tp": m.tp,
        "weights": m.deployment.weights.name,
        "prompt_tokens": m.nominal_shape[0],
        "output_tokens": m.nominal_shape[1],
        "last_below": wall.last_below,
        "first_beyond": wall.first_beyond,
        "predicted_full": wall.full,
        "predicted_staggered": wall.staggered,
        "bracketed": wall.bracketed,
    }
