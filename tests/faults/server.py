"""A server that fails on purpose, in every way a client may meet. For tests, and as a script:

    python tests/faults/server.py PORT [--keep-alive 5] [--api-key KEY]

As a fixture (see ``conftest.py``):

    async with FaultServer() as server:
        ... requests to server.base_url, model "stall:after=1" ...
        assert server.stats.requests["stall"] == 1

The request's JSON ``model`` names what happens:

* an id of ``tests/data/streams.json``: that stream, byte for byte at its times;
* a mode of ``fault_modes.py`` with parameters in the name (``normal:ttft=0.05,itl=0.02``, ``barrier:n=150``, ``rst:after=3``);
* a name given in ``FaultServer(models={"llama": "normal:itl=0.01"})``;
* anything else: 404 as vLLM says it.

GET ``/v1/models``, ``/version``, ``/health``, ``/metrics`` answer as vLLM does (``/metrics`` with counters that a restart
sets back), ``/stats`` gives the server's own counts as JSON. ``restart`` (a mode and a method) drops every connection
with RST, refuses new ones for a while, and starts with the engine's counters at 0.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import orjson
from fault_answers import Ask, Script, Stats, error, metrics, models, unknown_model
from fault_modes import MODES, parse
from fault_reply import Connection, Gone, Reply

CASES_FILE = Path(__file__).parent.parent / "data" / "streams.json"


class FaultServer:
    """The server; an async context manager.

    Args:
        port: 0 takes a free one.
        keep_alive_s: close connections idle for so long; None never does. uvicorn's default is 5.
        api_key: /v1 answers 401 without it.
        models: names of your own -> mode with parameters.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        keep_alive_s: float | None = None,
        api_key: str | None = None,
        models: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port
        self.keep_alive_s = keep_alive_s
        self.stats = Stats()
        #: what modes raised that they should not; raised at the end
        self.bugs: list[Exception] = []
        self._api_key = api_key
        self._models = dict(models or {})
        self._cases: dict[str, dict[str, Any]] = {row["id"]: row for row in orjson.loads(CASES_FILE.read_bytes())}
        self._connections: set[Connection] = set()
        self._waiting: dict[int, list[asyncio.Future[None]]] = {}
        self._server: asyncio.Server | None = None
        self._restart: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._restart is not None:
            self._restart.cancel()
        await self._die()
        if self.bugs:
            raise ExceptionGroup("the fault server itself failed", self.bugs)

    async def restart(self, down_s: float = 0.2) -> None:
        """Drop every connection, be away for ``down_s``, start again with the engine's counters at 0."""
        await self._die()
        await asyncio.sleep(down_s)
        self.stats.restarts += 1
        self.stats.engine_prompt_tokens = self.stats.engine_generation_tokens = 0
        self.stats.engine_finished.clear()
        await self._listen()

    def restart_soon(self, down_s: float) -> None:
        """:meth:`restart` from inside a request, which does not survive it."""
        self._restart = asyncio.get_running_loop().create_task(self.restart(down_s))

    async def barrier(self, n: int) -> None:
        """Wait until ``n`` are waiting here."""
        waiting = self._waiting.setdefault(n, [])
        mine = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        if len(waiting) >= n:
            for future in waiting:
                future.set_result(None)
            waiting.clear()
        try:
            await mine
        finally:
            if mine in waiting:
                waiting.remove(mine)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), "127.0.0.1", self.port, backlog=4096, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _die(self) -> None:
        if self._server is not None:
            self._server.close()
        connections = list(self._connections)
        for connection in connections:
            Reply(connection).reset()
        await asyncio.gather(*(connection.lost.wait() for connection in connections))
        if self._server is not None:
            await self._server.wait_closed()

    # what connections tell

    def opened(self, connection: Connection) -> None:
        self._connections.add(connection)
        self.stats.connections += 1
        self.stats.connections_open += 1

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self.stats.connections_open -= 1

    # answers

    async def answer(self, reply: Reply, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        """Answer one request."""
        path = path.partition("?")[0]
        if self._api_key and path.startswith("/v1/") and headers.get("authorization") != f"Bearer {self._api_key}":
            await reply.plain(401, b'{"error":"Unauthorized"}')
        elif method == "GET":
            await self._get(reply, path)
        elif path in ("/v1/completions", "/v1/chat/completions"):
            await self._complete(reply, path, body)
        else:
            await reply.plain(404, b'{"detail":"Not Found"}')

    async def _get(self, reply: Reply, path: str) -> None:
        self.stats.gets[path] += 1
        names = [*self._models, *MODES, *self._cases]
        match path:
            case "/v1/models":
                await reply.plain(200, models(names))
            case "/version":
                await reply.plain(200, b'{"version":"0.32.0"}')
            case "/health":
                await reply.plain(200, b"", "text/plain")
            case "/metrics":
                await reply.plain(200, metrics(self.stats, names[0]), "text/plain; version=0.0.4; charset=utf-8")
            case "/stats":
                await reply.plain(200, orjson.dumps(self.stats.to_dict()))
            case _:
                await reply.plain(404, b'{"detail":"Not Found"}')

    async def _complete(self, reply: Reply, path: str, body: bytes) -> None:
        try:
            ask = Ask.of(path, body)
            found = parse(self._models.get(ask.model, ask.model))
        except ValueError as problem:
            await reply.plain(400, error(str(problem), "BadRequestError", 400))
            return
        case = self._cases.get(ask.model)
        if found is None and case is None:
            await reply.plain(404, unknown_model(ask.model))
            return
        name = ask.model if found is None else found[0]
        self._begin(name)
        try:
            if found is not None:
                await MODES[name].run(reply, Script(ask), found[1])
            elif case is not None:
                await replay(reply, case)
        except (Gone, asyncio.CancelledError):
            self.stats.left += not reply.ended_by_us
            raise
        finally:
            self.stats.in_flight -= 1

    def _begin(self, name: str) -> None:
        self.stats.requests[name] += 1
        self.stats.in_flight += 1
        self.stats.in_flight_max = max(self.stats.in_flight_max, self.stats.in_flight)


async def replay(reply: Reply, case: Mapping[str, Any]) -> None:
    """A case of streams.json: its bytes at its times, then its end."""
    writes = [(at / 1000, base64.b64decode(data)) for at, data in case["writes_ms_base64"]]
    if case["status"] != 200:
        await reply.at(writes[0][0])
        kind = "application/json" if writes[0][1].startswith(b"{") else "text/html"
        await reply.plain(case["status"], writes[0][1], kind)
        return
    await reply.stream_head()
    for at, data in writes:
        await reply.at(at)
        await reply.send(data)
    match case["then"]:
        case "hold":
            await reply.hold()
        case "reset":
            await reply.at(writes[-1][0] + 0.05)  # so that the client has read what came before
            reply.reset()
        case _:
            await reply.end()


async def _serve(options: argparse.Namespace) -> None:
    async with FaultServer(port=options.port, keep_alive_s=options.keep_alive, api_key=options.api_key) as server:
        print(f"faults at {server.base_url}; models: {', '.join(MODES)}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="a server that fails on purpose")
    parser.add_argument("port", type=int)
    parser.add_argument("--keep-alive", type=float, default=None, metavar="SECONDS")
    parser.add_argument("--api-key", default=None)
    try:
        import uvloop
    except ImportError:
        asyncio.run(_serve(parser.parse_args()))
    else:
        uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
