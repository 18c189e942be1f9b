"""Prints the prices of ``calibration/catalog/step_priors.yaml`` out of the public table (:mod:`calibration.step_prices`),
and quotes the error on deployments left out. Run it by hand (minutes of CPU):

    VLLM_HARNESS_SHARED=../shared .venv/bin/python tests/bench/derive_step_priors.py
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from calibration.measurements import Measurement, read_measurements
from calibration.step_prices import first_tokens, fit, left_out, table, tpot_s, ttft_prices, usable

Floats = npt.NDArray[np.float64]


def shared_folder() -> Path:
    """The folder of the public data: $VLLM_HARNESS_SHARED, else ``shared`` beside the repository."""
    return Path(os.environ.get("VLLM_HARNESS_SHARED", Path(__file__).parents[3] / "shared"))


def load() -> list[Measurement]:
    """Rows with a TPOT below the wall."""
    return [row for row in everything() if usable(row)]


def everything() -> list[Measurement]:
    """All rows that can be read."""
    path = shared_folder() / "data" / "public_measurements.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return read_measurements(csv.DictReader(file))[0]


def describe(label: str, error: Floats) -> str:
    e = 100 * np.abs(error)
    return (
        f"{label:24s} n={len(e):4d}  mean {e.mean():5.1f}  median {np.median(e):5.1f}  p90 {np.quantile(e, 0.9):5.1f}"
    )


def main() -> None:
    rows = load()
    t = table(rows)
    prices = fit(t)
    out = sys.stdout.write
    out("prices\n" + "".join(f"  {name}: {value:.4g}\n" for name, value in prices.items()))
    out(describe("in sample", tpot_s(prices, t) / t.tpot_s - 1) + "\n")
    moe = np.array([row.family == "moe" for row in rows])
    by_deployment = left_out(t, t.deployment) / t.tpot_s - 1
    out(describe("deployment left out", by_deployment) + "\n")
    out(describe("  dense", by_deployment[~moe]) + "\n" + describe("  mixtures", by_deployment[moe]) + "\n")
    if "--all" in sys.argv:
        out(describe("model left out", left_out(t, [row.model for row in rows]) / t.tpot_s - 1) + "\n")
    firsts = first_tokens(everything())
    for kind in ("hopper", "blackwell", ""):
        told = firsts.where(np.array([kind in str(name) for name in firsts.generation]))
        found = ttft_prices(told)
        error = (told.fixed_s + told.amounts @ np.array([*found.values()])) / told.ttft_s - 1
        out(f"in front of the first token, {kind or 'all'}: {found}\n" + describe("  in sample", error) + "\n")
    for key in sorted(set(t.deployment)):
        one = t.deployment == key
        bias = 100 * by_deployment[one].mean()
        out(f"  {key:50s} n={one.sum():3d} bias {bias:6.1f}  mean {100 * np.abs(by_deployment[one]).mean():5.1f}\n")


if __name__ == "__main__":
    main()
