"""Options that several commands share, so that a word means the same everywhere.

Use as a parameter's type: ``def command(base_url: BaseUrl, model: Model = None, ...)``. The API key is taken from the
option, else from OPENAI_API_KEY, else from VLLM_API_KEY; it is never printed, and help shows no default of it.
"""

from __future__ import annotations

from typing import Annotated

import typer

BaseUrl = Annotated[
    str,
    typer.Option(
        "--base-url", metavar="URL", help="The server, as http://HOST:PORT; a trailing slash or /v1 is understood."
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="The served model; needed only where the server has several."),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar=["OPENAI_API_KEY", "VLLM_API_KEY"],
        show_default=False,
        help="Sent as a bearer token; better given by the environment, where no process list shows it.",
    ),
]
MetricsUrl = Annotated[
    str | None,
    typer.Option("--metrics-url", metavar="URL", help="Where /metrics is, if not below --base-url."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Do not verify the server's TLS certificate.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output and nothing else.")]
