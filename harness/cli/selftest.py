"""``vllm-harness selftest``: how true this client is on this machine, by stream count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import Json
from harness.errors import RunInvalid, UsageError

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_STREAMS = "1,10,100,500,1000"


def command(
    streams: Annotated[
        str, typer.Option("--streams", metavar="N,N,...", help="Numbers of streams to measure at.")
    ] = DEFAULT_STREAMS,
    json: Json = False,
    processes: Annotated[
        str, typer.Option("--processes", metavar="N|auto", help="Load workers; auto is what a ramp would take.")
    ] = "auto",
) -> None:
    import asyncio

    import orjson

    from harness.cli.display import Display, print_document
    from harness.cli.ramp import processes_for
    from harness.selftest import keep, measure

    levels = _levels(streams)
    err = Display(stderr=True)

    def said(level: int) -> None:
        if not json:
            err.print(f"measuring {_streams(level)}", highlight=False)

    result = asyncio.run(measure(levels, processes=processes_for(processes, max(levels)), on_level=said))
    known = any(reading["verdict"] != "unclear" for reading in result["readings"])
    path = keep(result) if known else None
    if json:
        print_document(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    else:
        _print(result)
        err.print(
            "not kept, since nothing is known" if path is None else f"kept in {path}; runs on this machine quote it",
            highlight=False,
            soft_wrap=True,
        )
    if result["trusted"] is None:
        raise RunInvalid(
            "no load was read truly on this machine", "is it busy with something else? The reasons stand above"
        )


def _streams(count: int) -> str:
    return f"{count:,} stream{'' if count == 1 else 's'}"


def _levels(text: str) -> list[int]:
    try:
        levels = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        levels = []
    if not levels or levels[0] < 1 or levels[-1] > 100_000:
        raise UsageError(
            f"--streams: expected whole numbers from 1 to 100000, separated by commas, not {text!r}",
            f"for example --streams {DEFAULT_STREAMS}",
        )
    return levels


def _print(result: Mapping[str, Any]) -> None:
    import sys

    from harness.cli.display import Display

    out = Display(width=None if sys.stdout.isatty() else 140, highlight=False)
    server = result["server"]
    out.print(
        f"a server that sends its first token after {server['ttft_ms']:g} ms and then one each {server['itl_ms']:g} ms,"
        f" {server['output_tokens']} a stream, {'on a core of its own' if server['own_core'] else 'on the same core'};"
        f" this client on {result['processes']} worker{'s' if result['processes'] > 1 else ''}"
    )
    out.print(readings_table(result))
    for reading in result["readings"]:
        for reason in reading["reasons"]:
            out.print(f"  {_streams(reading['streams'])}: {reason}", style="yellow")
    out.print(_conclusion(result))


def _conclusion(result: Mapping[str, Any]) -> str:
    best = result["trusted"]
    if best is None:
        return "nothing can be said of this client here"
    untrue = [reading["streams"] for reading in result["readings"] if reading["verdict"] == "untrue"]
    upto = f"this client can be trusted on this machine up to {_streams(best['streams'])}, {best['tokens_per_s']:,.0f} tok/s"
    return upto + (f"; at {min(untrue):,} it is not" if untrue else ", the most that was read truly")


def readings_table(result: Mapping[str, Any]) -> Table:
    """A row for each number of streams: what is true, what was read."""
    from rich.table import Table

    from harness.cli.live import significant

    server = result["server"]
    per_stream = 1e3 * server["output_tokens"] / (server["ttft_ms"] + (server["output_tokens"] - 1) * server["itl_ms"])
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in (
        *("streams", "TTFT ms", "p99", "TPOT ms", "gap p99", "tok/s", "of true"),
        *("CPU s/Mtok", "loop lag p99", "server late p99"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_row(
        *("true", significant(server["ttft_ms"]), significant(server["ttft_ms"]), significant(server["itl_ms"])),
        *(significant(server["itl_ms"]), f"{per_stream:.4g} each", "100 %", "", "", "", ""),
        style="dim",
    )
    for reading in result["readings"]:
        rate = reading["tokens_per_s"]
        share = None if rate is None else rate / (reading["streams"] * per_stream)
        table.add_row(
            f"{reading['streams']:,}",
            *(significant(reading[key]) for key in ("ttft_ms_mean", "ttft_ms_p99", "tpot_ms_mean", "gap_ms_p99")),
            significant(rate),
            "-" if share is None else f"{share:.1%}",
            *(
                significant(reading[key])
                for key in ("cpu_s_per_million_tokens", "loop_lag_ms_p99", "server_late_ms_p99")
            ),
            reading["verdict"],
            style={"true": "", "unclear": "yellow", "untrue": "red"}[reading["verdict"]],
        )
    return table
