"""``compare RUN --calibration FILE``: measured beside predicted, level by level."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import GateFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from calibration.calibration_file import Calibration
    from calibration.compare_levels import Asked, Held, LevelsReport
    from calibration.predict import Predictor
    from harness.store import RunData

_BAR = 28
_TITLES = {"output_tokens_per_s": "tok/s", "tpot_ms": "TPOT ms", "ttft_ms": "TTFT ms"}


def compare_with(folder: Path, file: Path, *, transfer: bool, tolerance: float | None, json: bool) -> None:
    """Hold a run against a calibration and print both.

    Raises:
        UsageError: no run, no stage, or no calibration.
        InputError: the calibration is of another deployment.
        GateFailed: a level is off by more than the tolerance.
    """
    from harness.calibration_file import read_calibration
    from harness.store import read_run

    run, calibration = read_run(folder), read_calibration(file)
    report, differences = hold(run, calibration, transfer=transfer)
    missed = None if tolerance is None else report.missed(tolerance)
    if json:
        _print_json(
            report, {"run": str(folder), "calibration": str(file), "differences": differences}, tolerance, missed
        )
    else:
        _show(report, differences)
    if missed is not None:
        raise GateFailed(missed, "see the table: which level, and whether it lies inside the interval")


def hold(run: RunData, calibration: Calibration, *, transfer: bool = False) -> tuple[LevelsReport, list[str]]:
    """A run held against a calibration, and where its server differs from the calibrated one.

    Raises:
        UsageError: the run has no finished stage.
        InputError: it differs, and ``transfer`` was not asked for.
    """
    from calibration.compare_levels import check_run, compare_levels
    from calibration.predict import Predictor, measured_loads
    from calibration.serving import serving

    if not run.stages:
        raise UsageError(f"{run.folder} has no finished stage: there is nothing to compare")
    served = serving(calibration.rebuild_deployment())
    differences = check_run(calibration, served, run.run["deployment"], transfer=transfer)
    predictor = _predictor(calibration, run.run["deployment"] if differences else {})
    used = measured_loads((stage.observation.users, stage.observation.shape) for stage in calibration.used)
    predictor = Predictor(predictor.served, predictor.factors, used)
    return compare_levels(run.stages, predictor, _asked(run)), differences


def _asked(run: RunData) -> dict[int, Asked]:
    """Think times of a run's stages, and starts where requests are equal and so keep who began together, from the profile as
    it was run. Users that were handed over are where the level before left them."""
    from calibration.compare_levels import Asked
    from loadprofiles.arrivals import ramp_up_s
    from loadprofiles.pauses import mean_pause_s

    found = {}
    for index, stage in enumerate(run.run.get("profile", {}).get("stages", ())):
        users = stage.get("users")
        equal = all(isinstance(stage.get(name), int) for name in ("users", "prompt_tokens", "output_tokens"))
        starts = equal and not stage.get("handover")
        spread_s = ramp_up_s(users, stage.get("ramp_up"), stage.get("duration")) if starts else None
        found[index] = Asked(mean_pause_s(stage.get("think", 0.0)), spread_s)
    return found


def _predictor(calibration: Calibration, deployment: Mapping[str, Any]) -> Predictor:
    """Of the calibrated deployment, with the bounds that the run's server shows where it differs."""
    from dataclasses import replace

    from calibration.predict import Predictor
    from calibration.serving import serving

    own = calibration.rebuild_deployment()
    pool = deployment.get("pool") or {}
    shown = {
        "max_model_len": deployment.get("max_model_len"),
        "max_num_seqs": deployment.get("max_num_seqs"),
        "max_num_batched_tokens": deployment.get("max_num_batched_tokens"),
        "dp": deployment.get("engines"),
        "num_gpu_blocks_override": pool.get("num_blocks"),
        "block_size": pool.get("block_size"),
    }
    return Predictor(
        serving(replace(own, **{name: value for name, value in shown.items() if value is not None})),
        calibration.factors,
    )


def document(report: LevelsReport) -> dict[str, Any]:
    """Levels as JSON: one entry a stage, its metrics by name."""
    return {
        "levels": [
            {
                "stage": level.index,
                "users": level.load.users,
                "request_rate": level.load.request_rate,
                "prompt_tokens": level.load.shape.prompt_tokens,
                "output_tokens": level.load.shape.output_tokens,
                "method": level.method,
                **{held.metric: _held_json(held) for held in level.held},
            }
            for level in report.levels
        ],
        "summary": summary(report),
        "left_out": list(report.left_out),
    }


def _held_json(held: Held) -> dict[str, Any]:
    return {
        "measured": held.measured,
        "predicted": held.predicted.to_json(),
        "error": held.error,
        "inside": held.inside,
    }


def summary(report: LevelsReport) -> dict[str, Any]:
    """By metric: how many, mean and worst error, and how many lie inside."""
    found: dict[str, Any] = {}
    for metric in _TITLES:
        rows = [held for level in report.levels for held in level.held if held.metric == metric]
        if rows:
            errors = [abs(held.error) for held in rows]
            found[metric] = {
                "n": len(rows),
                "error_mean": sum(errors) / len(rows),
                "error_max": max(errors),
                "inside": sum(held.inside for held in rows),
            }
    return found


def _print_json(report: LevelsReport, about: dict[str, Any], tolerance: float | None, missed: str | None) -> None:
    import orjson

    from harness.cli.display import print_document

    content = {**about, **document(report), "tolerance": tolerance, "missed": missed}
    print_document(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _show(report: LevelsReport, differences: Sequence[str]) -> None:
    from harness.cli.display import Display

    out = Display(width=None if sys.stdout.isatty() else 130, highlight=False)
    for metric in _TITLES:
        table = levels_table(report, metric)
        if table.row_count:
            out.print(table, "", sep="\n")
    for metric, found in summary(report).items():
        out.print(
            f"{_TITLES[metric]:8} off by {found['error_mean']:.1%} on average, {found['error_max']:.1%} at most;"
            f" {found['inside']} of {found['n']} inside the 90 % interval",
            markup=False,
        )
    for name in report.left_out:
        out.print(f"left out: {name}", style="yellow", markup=False, soft_wrap=True)
    for difference in differences:
        out.print(f"note: {difference}", style="yellow", markup=False, soft_wrap=True)


def levels_table(report: LevelsReport, metric: str) -> Table:
    """Measured and predicted of one metric over the levels, as numbers and as bars."""
    from rich.table import Table

    from harness.cli.predict_view import significant

    table = Table(title=_TITLES[metric], title_justify="left", box=None, header_style="bold", pad_edge=False)
    for name in ("level", "measured", "predicted", "90 % interval", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("measured over predicted", no_wrap=True)
    rows = [(level, held) for level in report.levels for held in level.held if held.metric == metric]
    most = max((max(held.measured, held.predicted.high) for _, held in rows), default=1.0)
    for level, held in rows:
        load, spread = level.load, held.predicted
        table.add_row(
            str(load.users) if load.request_rate is None else f"{load.request_rate:g}/s",
            significant(held.measured),
            significant(spread.value),
            f"{significant(spread.low)} - {significant(spread.high)}",
            f"{held.error:+.1%}",
            f"{'in' if held.inside else 'OUT'}, {spread.basis}",
            bars(held, most),
        )
    return table


def bars(held: Held, most: float) -> str:
    """Two lines: what was measured, and the prediction with its interval in a lighter shade."""
    spread = held.predicted
    measured, low, value, high = (
        min(_BAR, max(0, round(_BAR * x / most))) for x in (held.measured, spread.low, spread.value, spread.high)
    )
    predicted = "█" * low + "▓" * max(0, value - low) + "░" * max(0, high - max(value, low))
    return "█" * measured + "\n" + predicted
