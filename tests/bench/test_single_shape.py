"""A server fitted on one shape only, predicted at its others: do the intervals admit how little that tells."""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from calibration.accuracy import walls
from calibration.errors import CalibrationError
from calibration.fit import FEWEST_OBSERVATIONS
from calibration.held_out import _trial
from calibration.measurements import Measurement, read_measurements

SHARED = Path(os.environ.get("VLLM_HARNESS_SHARED", Path(__file__).resolve().parents[3] / "shared"))


@pytest.mark.bench
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared public measurements")
def test_one_shape_s_predictions_of_others_hold_the_truth() -> None:
    with (SHARED / "data" / "public_measurements.csv").open(newline="", encoding="utf-8") as file:
        rows, _ = read_measurements(csv.DictReader(file))
    beyond, _ = walls(rows)
    servers: dict[tuple[object, ...], dict[tuple[float, float], list[Measurement]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for m in rows:
        if m.users is not None and m.tpot_s is not None and m.row not in beyond:
            servers[m.server_key][m.nominal_shape].append(m)
    inside, errors = [], []
    for shapes in servers.values():
        for shape, fitted in shapes.items():
            others = [m for other, rows_ in shapes.items() if other != shape for m in rows_]
            if len(fitted) < FEWEST_OBSERVATIONS or not others:
                continue
            try:
                trial = _trial(fitted, others)
            except CalibrationError:
                continue
            for row in trial.scored:
                score = row.scores.get("tpot")
                if score is not None:
                    inside.append(score.covered)
                    errors.append(abs(score.error))
    print(
        f"fitted on one shape, {len(inside)} rows of others: {np.mean(inside):.1%} inside 90 % intervals, error "
        f"median {np.median(errors):.1%}, mean {np.mean(errors):.1%}, worst {np.max(errors):.0%}"
    )
    assert len(inside) > 200
    assert np.mean(inside) >= 0.85
