"""``vllm-harness report``: a run as one HTML file that opens offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calibration.errors import InputError
from harness.errors import UsageError

if TYPE_CHECKING:
    from calibration.calibration_file import Calibration
    from harness.export.report import Compared
    from harness.store import RunData


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draws what it predicts; the run's own calibration.json unless said."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Exactly this file; report.html in the run's folder.")
    ] = None,
) -> None:
    from harness.cli.display import Display
    from harness.export.report import NAME

    path = out if out is not None else run / NAME
    write(run, calibration, path)
    Display().print(f"written to {path}", highlight=False, soft_wrap=True)


def write(folder: Path, calibration: Path | None, path: Path) -> None:
    """Read a run and write its report.

    Raises:
        UsageError: no run, or a file of it or the calibration does not read.
        LocalFault: the report could not be written.
    """
    from harness.export.report import report_html, write_report
    from harness.store import read_run

    run = read_run(folder)
    write_report(path, report_html(run, compared(run), calibration_of(folder, calibration)))


def compared(run: RunData) -> Compared:
    """What ``compare`` says of a run; where it says nothing, why."""
    from harness.cli.compare import document_of, sentences
    from harness.export.report import Compared

    try:
        document = document_of(run)
    except (UsageError, InputError) as error:
        return Compared(why=error.message)
    lengths = document["prompt_tokens_mean"], document["output_tokens_mean"]
    comparison = document["comparison"]
    if not comparison.levels:
        return Compared(why="no valid stage held a number of users")
    return Compared(
        comparison=comparison,
        sentences=sentences(comparison, *lengths),
    )


def calibration_of(folder: Path, path: Path | None) -> Calibration | None:
    """The calibration named, else the run's own; None where there is neither.

    Raises:
        UsageError: it does not read.
    """
    from harness.calibration_file import NAME, read_calibration

    if path is None and not (folder / NAME).is_file():
        return None
    return read_calibration(folder if path is None else path)
