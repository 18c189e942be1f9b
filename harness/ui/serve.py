"""Serving the page until somebody ends it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from harness.errors import LocalFault
from harness.ui.app import make_app

#: connections that may wait to be taken: a thousand questions at once are answered, not cut
BACKLOG = 2048
#: seconds that answers under way have to end
SHUTDOWN_S = 2.0


async def serve(results: Path, host: str, port: int, token: str | None, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or a polite kill; then ramps of the page are ended in order.

    Args:
        port: 0 picks a free one.
        ready: called with the page's address once it answers.

    Raises:
        LocalFault: the address cannot be bound.
    """
    runner = web.AppRunner(make_app(results, host, token), access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        except OSError as error:
            raise LocalFault(
                f"{host}:{port} cannot be served: {error.strerror or error}", "--port 0 picks a free one"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{runner.addresses[0][1]}/")
        await _interrupted()
    finally:
        await runner.cleanup()


async def _interrupted() -> None:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    if os.name == "posix":
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, over.set)
    await over.wait()
