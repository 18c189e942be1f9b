"""``vllm-harness export``: a run in other tools' formats, or another tool's result as a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import Json
from harness.errors import LocalFault, UsageError

if TYPE_CHECKING:
    from harness.formats.imported import Imported
    from harness.store import RunData

OUT_FORMATS = ("csv", "parquet", "vllm-bench", "openmetrics")
IN_FORMATS = ("auto", "vllm-bench", "guidellm", "aiperf")


def command(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="The folder of a run to write out.")] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"Of what is written: {', '.join(OUT_FORMATS)} (parquet needs the extra of that name)."
            f" With --from, of what is read: {', '.join(IN_FORMATS)}.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE|DIR", help="Exactly this file, stdout unless said; with --from the folder made."
        ),
    ] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A result of vllm bench serve, guidellm or aiperf to make a run of; several of one tool are a stage each.",
        ),
    ] = None,
    window: Annotated[
        str,
        typer.Option(
            metavar="whole|steady",
            help="With --from: count every request, as those tools do, or only the steady part of each stage.",
        ),
    ] = "whole",
    json: Json = False,
) -> None:
    if source:
        if run is not None:
            raise UsageError("RUN is written out, --from is read in: not both at once", f"leave out {run}")
        _bring_in(source, format_ or "auto", out, window, json)
    elif run is None:
        raise UsageError("nothing to export", "give RUN --format csv, or --from FILE --out DIR")
    else:
        _write_out(run, format_, out, json)


def _one_of(option: str, value: str | None, known: tuple[str, ...]) -> str:
    if value is None or value not in known:
        given = "nothing" if value is None else repr(value)
        raise UsageError(f"{option}: expected {', '.join(known[:-1])} or {known[-1]}, not {given}")
    return value


def _bring_in(source: list[Path], format_: str, out: Path | None, window: str, json: bool) -> None:
    from harness.formats.imported import write_folder
    from harness.formats.read import read_files

    kind = _one_of("--format", format_, IN_FORMATS)
    rule = _one_of("--window", window, ("whole", "steady"))
    if out is None:
        raise UsageError("--from needs --out DIR", "the folder to make; it must not hold a run")
    run = read_files(source, kind)
    made = write_folder(run, out, "steady" if rule == "steady" else "whole")
    if json:
        _print_json(
            {
                "out": str(out),
                "format": run.format,
                "stages": made.stages,
                "checks": [one.to_dict() for one in made.checks],
                "warnings": made.warnings,
            }
        )
    else:
        _show(made, run.format, out)


def _print_json(document: dict[str, Any]) -> None:
    import orjson

    from harness.cli.display import print_document

    print_document(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _show(made: Imported, tool: str, out: Path) -> None:
    import sys

    from rich.table import Table

    from harness.cli.display import Display
    from harness.cli.live import stage_table

    display = Display(width=None if sys.stdout.isatty() else 140)
    display.print(stage_table(made.stages))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, side in (
        ("stage", "right"),
        (f"{tool} printed", "left"),
        ("", "right"),
        ("its requests give", "left"),
        ("", "right"),
    ):
        table.add_column(name, justify="right" if side == "right" else "left")
    table.add_column("")
    for found in made.checks:
        value = "-" if found.value is None else f"{found.value:,.6g}"
        verdict = {True: "same", False: "differs", None: "-"}[found.agrees]
        if found.agrees and found.printed.why:
            verdict = f"near: {found.printed.why}"
        table.add_row(
            str(found.stage + 1),
            found.printed.theirs,
            f"{found.printed.value:,.6g}",
            found.printed.ours,
            value,
            verdict,
        )
    if made.checks:
        display.print(table)
    for stage in made.stages:
        for reason in stage["reasons"]:
            display.print(f"  stage {stage['index'] + 1}: {reason}", style="yellow", highlight=False, soft_wrap=True)
    for warning in made.warnings:
        display.print(f"  {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    display.print(f"written to {out}", highlight=False, soft_wrap=True)


def _write_out(folder: Path, format_: str | None, out: Path | None, json: bool) -> None:
    from harness.store import REQUESTS, RUN, SCRAPES, SUMMARY, read_run

    kind = _one_of("--format", format_, OUT_FORMATS)
    run = read_run(folder)
    if out is None:
        if json:
            raise UsageError("--json needs --out", "standard output holds either the export or the JSON document")
        if kind == "parquet":
            raise UsageError("Parquet is no text: --out FILE is needed", f"for example --out {folder.name}.parquet")
        _to_stdout(run, kind)
        return
    if out.resolve().parent == folder.resolve() and out.name in (RUN, REQUESTS, SCRAPES, SUMMARY):
        raise UsageError(f"{out} is the run itself", "give --out another name")
    written = _to_file(run, kind, out)
    if json:
        _print_json({"out": str(out), "format": kind, **written})
        return
    from harness.cli.display import Display

    counted = " ".join(f"{value:,} {name}" for name, value in written.items())
    Display().print(f"{counted} written to {out}".lstrip(), highlight=False, soft_wrap=True)


def _to_file(run: RunData, kind: str, out: Path) -> dict[str, int]:
    """Beside its final name first: an export that fails leaves nothing half written."""
    draft = out.with_name(f".{out.name}.draft")
    try:
        written = _write_draft(run, kind, draft)
        draft.replace(out)
    except OSError as error:
        raise LocalFault(f"{out} could not be written: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
    return written


def _write_draft(run: RunData, kind: str, draft: Path) -> dict[str, int]:
    from harness.formats.tables import write_csv, write_parquet

    if kind == "parquet":
        return {"requests": write_parquet(run, draft)}
    if kind == "csv":
        with draft.open("w", encoding="utf-8", newline="") as stream:
            return {"requests": write_csv(run, stream)}
    return {"bytes": draft.write_bytes(_document(run, kind))}


def _document(run: RunData, kind: str) -> bytes:
    if kind == "openmetrics":
        from harness.cli.exporter import families_of
        from harness.formats.openmetrics import openmetrics

        return openmetrics(families_of(run.folder))
    from harness.formats.vllm_bench_write import results

    documents = list(results(run))
    if not documents:
        raise UsageError(f"{run.folder} has no finished stage with requests: there is nothing to export")
    return b"\n".join(documents) + b"\n"


def _to_stdout(run: RunData, kind: str) -> None:
    import sys

    from harness.cli.display import print_document
    from harness.formats.tables import write_csv

    if kind == "csv":
        write_csv(run, sys.stdout)
    else:
        print_document(_document(run, kind))
