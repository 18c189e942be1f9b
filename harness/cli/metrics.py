"""``vllm-harness metrics FILE|URL``: read a /metrics text the way a ramp does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from harness.cli.options import ApiKey, Insecure, Json, Model
from harness.errors import NotVllm, Refused, UsageError

if TYPE_CHECKING:
    from harness.http_get import Answer
    from harness.observe.snapshot import Snapshot
    from harness.wire.prom import BadMetrics

Source = Annotated[
    str, typer.Argument(metavar="FILE|URL", help="A saved /metrics text, - for standard input, or a server's address.")
]


def command(
    source: Source, model: Model = None, as_json: Json = False, api_key: ApiKey = None, insecure: Insecure = False
) -> None:
    from harness.cli.display import print_document
    from harness.observe.snapshot import NoSuchModel, read
    from harness.wire.prom import BadMetrics

    is_url = source.startswith(("http://", "https://"))
    text = _ask(source, api_key, not insecure) if is_url else _file(source)
    try:
        snapshot = read(text, model)
    except NoSuchModel as error:
        _refuse(source, error, Refused if is_url else UsageError)
    except BadMetrics as error:
        _refuse(source, error, NotVllm if is_url else UsageError)
    if as_json:
        print_document(json.dumps(snapshot.contract(), allow_nan=False).encode() + b"\n")
    else:
        _show(source, snapshot)


def _refuse(source: str, error: BadMetrics, kind: type[UsageError | Refused | NotVllm]) -> NoReturn:
    raise kind(f"{source}: {error.message}", error.hint) from error


def _file(source: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{source}: {error.strerror}", "expected a saved /metrics text, or http://HOST:PORT"
        ) from error


def _ask(url: str, api_key: str | None, verify_tls: bool) -> bytes:
    import asyncio

    from harness.http_get import Getter
    from harness.observe.probe import metrics_address

    async def ask() -> Answer:
        async with Getter(api_key=api_key, verify_tls=verify_tls) as getter:
            return await getter.get(metrics_address(url, "the address"))

    answer = asyncio.run(ask())
    if not answer.ok:
        hint = "set OPENAI_API_KEY, or give --api-key" if answer.status in (401, 403) else "is there a /metrics?"
        raise Refused(f"{answer.url} answers HTTP {answer.status}", hint)
    return answer.body


def _show(source: str, snapshot: Snapshot) -> None:
    from rich.table import Table

    from harness.cli.display import Display

    table = Table(
        title=f"{snapshot.model or 'vLLM'} ({snapshot.version_family or 'unknown version'})", title_justify="left"
    )
    table.add_column("meaning")
    table.add_column(source, justify="right", overflow="fold")
    for key, value in snapshot.contract().items():
        for label, part in _rows(key, value):
            table.add_row(label, part)
    Display().print(table)


def _rows(key: str, value: Any) -> list[tuple[str, str]]:
    """A value, or its parts where it is one by label; nothing for what the server did not say."""
    if value is None or value in ("", [], ()):
        return []
    if isinstance(value, dict):
        return [row for part, inner in value.items() for row in _rows(f"{key}.{part}", inner)]
    if isinstance(value, bool):
        return [(key, "yes" if value else "no")]
    if isinstance(value, list | tuple):
        return [(key, ", ".join(map(str, value)))]
    return [
        (key, f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value))
    ]
