"""What calibration is worth where nobody measured: fitted on some rows of each server, scored on others.

Two protocols, both on rows below the measured wall:

* **top**: fit on up to a quarter of the users of each sweep's top level, predict the top: four times further out;
* **shape**: where a server was run with six shapes or more, fit on all but one and predict that one.

A fit sees nothing of the rows it is scored on. The priors come from the whole table, by generation (their own error on
deployments left out stands in ``catalog/step_priors.yaml``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from calibration.accuracy import GROUPS, RowScore, row_json, score_row, summary, walls
from calibration.errors import CalibrationError
from calibration.fit import FEWEST_OBSERVATIONS, Fit, fit
from calibration.measurements import Measurement, Unusable
from calibration.observation import Observation
from calibration.priors import prior_factors
from calibration.serving import serving

#: the top level is this many times the users of the largest level fitted, at least
EXTRAPOLATION = 4.0
SHAPES_TO_HOLD_ONE_OUT = 6

#: relative error of a published mean about a smooth model: the same server run again differs by 1 to 6 %, and kernels and
#: CUDA graphs chosen by batch size put steps of some 5 % into TPOT over users that no smooth term follows
PUBLISHED_LOG_SD = 0.07


@dataclass(frozen=True)
class Trial:
    """A fit of one server, and the rows it was scored on."""

    fit: Fit
    fitted_rows: tuple[int, ...]
    scored: tuple[RowScore, ...]


@dataclass(frozen=True)
class HeldOutReport:
    """Trials of both protocols, and what could not be used."""

    top: Sequence[Trial]
    shape: Sequence[Trial]
    skipped: Sequence[Unusable]

    @property
    def top_rows(self) -> list[RowScore]:
        return [row for trial in self.top for row in trial.scored]

    @property
    def shape_rows(self) -> list[RowScore]:
        return [row for trial in self.shape for row in trial.scored]


def held_out_report(measurements: Sequence[Measurement], skipped: Sequence[Unusable] = ()) -> HeldOutReport:
    """Both protocols over all servers of a table."""
    left = list(skipped)
    beyond, _ = walls(measurements)
    servers: dict[tuple[object, ...], list[Measurement]] = defaultdict(list)
    for m in measurements:
        if m.users is not None and m.tpot_s is not None and m.row not in beyond:
            servers[m.server_key].append(m)
    top: list[Trial] = []
    shape: list[Trial] = []
    for rows in servers.values():
        top += _tried([_top_split(rows)], left)
        shape += _tried(_shape_splits(rows), left)
    return HeldOutReport(top, shape, left)


Split = tuple[list[Measurement], list[Measurement]]


def _top_split(rows: Sequence[Measurement]) -> Split:
    """(fitted, held out): of each shape the levels up to a quarter of the top one, and the top one."""
    fitted: list[Measurement] = []
    held: list[Measurement] = []
    for sweep in _by_shape(rows).values():
        top = max(_users(m) for m in sweep)
        low = [m for m in sweep if _users(m) <= top / EXTRAPOLATION]
        if low:
            fitted += low
            held += [m for m in sweep if _users(m) == top]
    return fitted, held


def _shape_splits(rows: Sequence[Measurement]) -> Iterator[Split]:
    """(fitted, held out) for each shape in turn, where there are enough."""
    shapes = _by_shape(rows)
    if len(shapes) < SHAPES_TO_HOLD_ONE_OUT:
        return
    for shape, held in shapes.items():
        yield [m for m in rows if m.nominal_shape != shape], held


def _by_shape(rows: Sequence[Measurement]) -> dict[tuple[float, float], list[Measurement]]:
    found: dict[tuple[float, float], list[Measurement]] = defaultdict(list)
    for m in rows:
        found[m.nominal_shape].append(m)
    return found


def _users(m: Measurement) -> float:
    assert m.users is not None
    return m.users


def _tried(splits: Sequence[Split] | Iterator[Split], left: list[Unusable]) -> list[Trial]:
    trials = []
    for fitted, held in splits:
        if len(fitted) < FEWEST_OBSERVATIONS or not held:
            continue
        try:
            trials.append(_trial(fitted, held))
        except CalibrationError as error:
            left += [Unusable(m.row, m.source, m.model, m.gpu, error.message) for m in held]
    return trials


def _trial(fitted: Sequence[Measurement], held: Sequence[Measurement]) -> Trial:
    """Fit, then predict what was held out, each row with its own flags."""
    longest = max(fitted, key=lambda m: m.deployment.max_model_len)
    served = serving(longest.deployment)
    found = fit(served, prior_factors(longest.deployment, served.physics), [_observation(m) for m in fitted])
    scored = tuple(score_row(m, serving(m.deployment), found.factors, beyond=False) for m in held)
    return Trial(found, tuple(m.row for m in fitted), scored)


def _observation(m: Measurement) -> Observation:
    assert m.users is not None
    assert m.tpot_s is not None
    return Observation(
        label=str(m.row),
        shape=m.shape,
        users=m.users,
        tpot_s=m.tpot_s,
        ttft_s=m.ttft_s,
        tpot_log_sd=PUBLISHED_LOG_SD,
    )


def held_out_json(report: HeldOutReport) -> dict[str, Any]:
    """The contract's keys over the top levels, and ``held_out_shape`` beside them."""
    return {
        "overall": summary(report.top_rows, []),
        "by": _by_group(report.top_rows),
        "skipped": [
            {"row": s.row, "source": s.source, "model": s.model, "gpu": s.gpu, "reason": s.reason}
            for s in report.skipped
        ],
        "rows": [{**row_json(row), "held_out": "top"} for row in report.top_rows],
        "held_out_shape": {
            "overall": summary(report.shape_rows, []),
            "by": _by_group(report.shape_rows),
            "rows": [{**row_json(row), "held_out": "shape"} for row in report.shape_rows],
        },
        "fits": [_fit_json(trial) for trial in report.top],
    }


def _by_group(rows: Sequence[RowScore]) -> dict[str, Any]:
    return {
        name: {
            value: summary([row for row in rows if label(row.measurement) == value], [])
            for value in sorted({label(row.measurement) for row in rows})
        }
        for name, label in GROUPS.items()
    }


def _fit_json(trial: Trial) -> dict[str, Any]:
    m = trial.scored[0].measurement
    return {
        "gpu": m.gpu,
        "model": m.model,
        "tp": m.tp,
        "weights": m.deployment.weights.name,
        "vllm_version": m.stated_version or None,
        "fitted_rows": list(trial.fitted_rows),
        "condition": trial.fit.condition if trial.fit.condition != float("inf") else None,
        **trial.fit.factors.to_json(),
    }
