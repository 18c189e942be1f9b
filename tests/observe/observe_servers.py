"""Small servers on loopback: an aiohttp.web application, or raw bytes where a fault has to be exact."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web

DATA = Path(__file__).parent.parent / "data"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[..., Awaitable[str]]
ServeRaw = Callable[..., Awaitable[str]]


def metrics_text(name: str) -> str:
    return (DATA / "metrics" / f"{name}.txt").read_text()


def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """start({"GET /path": handler}) -> base URL; 404 for every other path."""
    async with AsyncExitStack() as stack:

        async def start(routes: Mapping[str, Handler], tls: ssl.SSLContext | None = None) -> str:
            app = web.Application()
            for route, handler in routes.items():
                method, path = route.split(" ", 1)
                app.router.add_route(method, path, handler)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
            await site.start()
            scheme = "https" if tls else "http"
            return f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"

        yield start


@pytest.fixture
async def serve_raw() -> AsyncIterator[ServeRaw]:
    """start(answer, hold=False) -> base URL; sends ``answer`` whatever is asked, then closes (or keeps the socket)."""
    async with AsyncExitStack() as stack:

        async def start(answer: bytes, hold: bool = False) -> str:
            released = asyncio.Event()
            connections: set[asyncio.Task[None]] = set()

            async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                connections.add(task)
                await reader.read(65536)
                writer.write(answer)
                await writer.drain()
                if hold:
                    await released.wait()
                writer.close()

            server = await asyncio.start_server(talk, "127.0.0.1", 0)

            async def stop() -> None:
                released.set()
                server.close()
                await asyncio.gather(*connections, return_exceptions=True)
                await server.wait_closed()

            stack.push_async_callback(stop)
            return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        yield start


def answering(body: str | bytes, status: int = 200, content_type: str = "text/plain") -> Handler:
    async def handler(request: web.Request) -> web.Response:
        data = body.encode() if isinstance(body, str) else body
        return web.Response(body=data, status=status, content_type=content_type)

    return handler
