"""``vllm-harness ui``: the page, on loopback unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.errors import UsageError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def command(
    port: Annotated[int, typer.Option(help="Where the page is served; 0 picks a free one.", min=0, max=65535)] = 8090,
    results: Annotated[Path, typer.Option(metavar="DIR", help="The folder of runs.")] = Path("results"),
    host: Annotated[str, typer.Option(help="Another address than loopback needs --token.")] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            metavar="SECRET",
            envvar="VLLM_HARNESS_UI_TOKEN",
            show_default=False,
            help="Asked of everybody who opens the page; better given by the environment.",
        ),
    ] = None,
) -> None:
    if host not in LOOPBACK and not token:
        raise UsageError(
            f"--host {host}: on another address than loopback the page starts ramps for whoever finds it",
            "give --token SECRET as well, or set VLLM_HARNESS_UI_TOKEN",
        )
    if token is not None and len(token) < 8:
        raise UsageError("--token: expected at least 8 characters", "for example: openssl rand -hex 16")
    import asyncio
    import logging

    from harness.ui.serve import serve

    logging.basicConfig(level=logging.WARNING, format="vllm-harness ui: %(message)s")
    asyncio.run(serve(results, host, port, token, _ready))


def _ready(url: str) -> None:
    typer.echo(f"the page is at {url} (Ctrl-C ends it)")
