"""``vllm-harness accuracy``: the model held against a table of published measurements, every row's error in the open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import Json
from harness.errors import RunInvalid, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

#: columns without which a table is none of measurements
_NEEDED = ("gpu", "tp", "model", "weight_dtype", "isl", "osl")


def command(
    data: Annotated[Path, typer.Option("--data", metavar="CSV", help="The table of measurements.")],
    calibrated: Annotated[
        bool,
        typer.Option("--calibrated", help="Fit each server on its low levels, score its top; and hold out shapes."),
    ] = False,
    left_out: Annotated[
        str | None,
        typer.Option(
            "--left-out",
            metavar="deployment|model",
            help="Derive the priors anew for each of these from the rows of all others, so that none has seen what it"
            " predicts (minutes).",
        ),
    ] = None,
    json: Json = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print every row's error, and every row left out.")] = False,
) -> None:
    if left_out is not None:
        if calibrated:
            raise UsageError("--left-out with --calibrated, expected one of them")
        content = _left_out(data, left_out)
    else:
        content = _calibrated(data) if calibrated else _uncalibrated(data)
    if not content["rows"]:
        skipped = content["skipped"]
        raise RunInvalid(
            f"no row of {data} can be scored, {len(skipped)} are left out",
            f"the first: {skipped[0]['reason']}"
            if skipped
            else "expected rows" + (" of one server at levels four times apart" if calibrated else ""),
        )
    if json:
        import orjson

        typer.echo(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())
    else:
        _print(content, rows)


def _uncalibrated(data: Path) -> dict[str, Any]:
    from calibration.accuracy import report_json, score
    from calibration.measurements import read_measurements

    return report_json(score(*read_measurements(read_table(data))))


def _left_out(data: Path, unit: str) -> dict[str, Any]:
    from calibration.accuracy import report_json
    from calibration.measurements import read_measurements
    from calibration.step_prices import UNITS, score_left_out

    if unit not in UNITS:
        raise UsageError(f"--left-out {unit}, expected {' or '.join(UNITS)}")
    measurements, skipped = read_measurements(read_table(data))
    return {"left_out": unit, **report_json(score_left_out(measurements, skipped, unit, _progress))}


def _progress(done: int, of: int) -> None:
    import sys

    if sys.stderr.isatty():
        sys.stderr.write(f"\rpriors without each of {of}: {done}" + ("\n" if done == of else ""))
        sys.stderr.flush()


def _calibrated(data: Path) -> dict[str, Any]:
    from calibration.held_out import held_out_json, held_out_report
    from calibration.measurements import read_measurements

    return held_out_json(held_out_report(*read_measurements(read_table(data))))


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header.

    Raises:
        UsageError: the file cannot be read, or lacks a column that every row needs.
    """
    import csv

    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise UsageError(
                    f"{path}: columns {', '.join(missing)} are missing", f"expected at least {', '.join(_NEEDED)}"
                )
            # a short row has None where cells are missing, a long one a list of what is too much
            return [{key: value or "" for key, value in row.items() if isinstance(key, str)} for row in reader]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", "--data names a CSV file of measurements") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is no CSV file in UTF-8: {error}") from error


def _print(content: Mapping[str, Any], all_rows: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_summary_table(content))
    if "left_out" in content:
        console.print(f"every row with priors that have not seen its {content['left_out']}")
    if content.get("walls"):
        console.print(_wall_table(content["walls"]))
    if "held_out_shape" in content:
        console.print(
            f"above: {len(content['fits'])} servers fitted on levels up to a quarter of each top level, at the top"
        )
        console.print(_summary_table(content["held_out_shape"]))
        console.print("above: one shape of six or more left out of the fit")
    if all_rows:
        console.print(_row_table(content["rows"]))
        for item in content["skipped"]:
            console.print(
                f"left out: row {item['row']} ({item['model']}, {item['gpu']}): {item['reason']}", markup=False
            )
    else:
        left = len(content["skipped"])
        console.print(f"{len(content['rows'])} rows scored, {left} left out; --rows prints each, --json holds them all")


def _summary_table(content: Mapping[str, Any]) -> Table:
    from rich.table import Table

    title = "Error in percent: mean/median/p90, rows, share of rows inside the 90 % interval"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("TPOT", "n", "in", "TTFT", "n", "in", "tokens/s", "n", "wall"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("all", *_summary_cells(content["overall"]))
    for group, entries in content["by"].items():
        for label, entry in entries.items():
            table.add_row(f"{group} {label}", *_summary_cells(entry))
    return table


def _summary_cells(entry: Mapping[str, Any]) -> list[str]:
    tpot, ttft, throughput, wall = (entry[key] for key in ("tpot", "ttft", "throughput", "wall"))
    met = f"{wall['bracketed']} of {wall['n']}" if wall["n"] else "-"
    latency = [cell for item in (tpot, ttft) for cell in (_errors(item), str(item["n"]), _share(item))]
    return [*latency, _errors(throughput), str(throughput["n"]), met]


def _errors(entry: Mapping[str, Any]) -> str:
    if not entry["n"]:
        return "-"
    return f"{entry['mape_mean']:.1f}/{entry['mape_median']:.1f}/{entry['mape_p90']:.1f}"


def _share(entry: Mapping[str, Any]) -> str:
    return "-" if entry["coverage_90"] is None else f"{entry['coverage_90']:.0%}"


def _wall_table(walls: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="Sweeps that cross the wall", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("tokens", "measured users", "predicted", ""):
        table.add_column(name, justify="right")
    for wall in walls:
        table.add_row(
            f"{wall['model']} {wall['weights']} {wall['gpu']} TP{wall['tp']}",
            f"{wall['prompt_tokens']:.0f} / {wall['output_tokens']:.0f}",
            f"{wall['last_below']:.0f} - {wall['first_beyond']:.0f}",
            f"{wall['predicted_full']:.1f} - {wall['predicted_staggered']:.1f}",
            "" if wall["bracketed"] else "missed",
        )
    return table


def _row_table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="Every row: measured -> predicted", title_justify="left", box=None, pad_edge=False)
    for name in ("row", "", "tokens", "load"):
        table.add_column(name)
    for name in ("TPOT ms", "%", "TTFT ms", "%", "tokens/s", "%"):
        table.add_column(name, justify="right")
    for row in rows:
        load = f"{row['users']:g} users" if row["users"] is not None else f"{row['request_rate']:g} /s"
        cells = [cell for key in ("tpot", "ttft", "throughput") for cell in _row_cells(row[key])]
        table.add_row(
            str(row["row"]),
            f"{row['model']} {row['weights']} {row['gpu']} TP{row['tp']}",
            f"{row['prompt_tokens']:.0f} / {row['output_tokens']:.0f}",
            load,
            *cells,
        )
    return table


def _row_cells(item: Mapping[str, Any] | None) -> tuple[str, str]:
    if item is None:
        return "-", ""
    return f"{item['measured']:.4g} -> {item['predicted']:.4g}", f"{item['error_percent']:+.0f}"
