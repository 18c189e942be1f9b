"""The page's server in this process, asked without a browser."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, CookieJar
from aiohttp.test_utils import TestServer

from harness.ui.app import make_app

#: a sizing that fits
LLAMA = {"model": "llama-3.1-8b", "gpu": "h100-sxm", "prompt_tokens": 1000, "output_tokens": 500}


class Client:
    """Asks the server as a browser on its own page would, unless headers say otherwise."""

    def __init__(self, session: ClientSession, server: TestServer) -> None:
        self._session = session
        self.server = server
        self.origin = f"http://127.0.0.1:{server.port}"

    async def ask(self, method: str, path: str, *, follow: bool = True, **more: Any) -> tuple[int, Any]:
        """Status, and the JSON or the text. ``path`` goes out as it is: no dot is taken away."""
        from yarl import URL

        url = URL(self.origin + path, encoded=True)
        async with self._session.request(method, url, allow_redirects=follow, **more) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else await response.text()

    async def get(self, path: str, **more: Any) -> tuple[int, Any]:
        return await self.ask("GET", path, **more)

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, Any]:
        return await self.ask("POST", path, json=body, **more)


@asynccontextmanager
async def serving(results: Path, host: str = "127.0.0.1", token: str | None = None) -> AsyncIterator[Client]:
    server = TestServer(make_app(results, host, token), host="127.0.0.1")
    await server.start_server()
    try:
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as session:
            yield Client(session, server)
    finally:
        await server.close()
