"""A fault server in a thread of its own, for tests whose main thread runs a command or waits for a process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any, Self

import orjson
from fault_reply import Reply
from server import FaultServer

from harness.clock import now_ns


class Witness(FaultServer):
    """A fault server that remembers what it was asked and when each answer was written to its end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.prompts: list[tuple[int, ...] | str] = []
        #: stamps of harness.clock, which all processes of a machine share
        self.finished_ns: list[int] = []

    async def answer(self, reply: Reply, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        asked = method == "POST" and path.endswith("/completions")
        if asked:
            prompt = orjson.loads(body).get("prompt")
            self.prompts.append(tuple(prompt) if isinstance(prompt, list) else str(prompt))
        await super().answer(reply, method, path, headers, body)
        if asked:
            self.finished_ns.append(now_ns())


class FaultThread:
    """Runs a fault server, a :class:`Witness` unless said; a context manager. What the server's modes raised is raised at
    the end."""

    def __init__(self, server: FaultServer | None = None, **options: Any) -> None:
        self._server = Witness(**options) if server is None else server
        self._loop = asyncio.new_event_loop()
        self._listens = threading.Event()
        self._stop = asyncio.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def base_url(self) -> str:
        return self._server.base_url

    @property
    def server(self) -> Witness:
        assert isinstance(self._server, Witness), "this server remembers nothing"
        return self._server

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listens.wait(20), "the fault server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        if self._problem is not None:
            raise self._problem

    def die(self) -> None:
        """Drop every connection with RST and listen no more, as when the process is killed."""
        asyncio.run_coroutine_threadsafe(self._server._die(), self._loop).result(20)

    def restart(self, down_s: float) -> None:
        """Drop every connection, be away for so long, listen again."""
        asyncio.run_coroutine_threadsafe(self._server.restart(down_s), self._loop).result(20)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except (OSError, ExceptionGroup) as problem:
                self._problem = problem

    async def _serve(self) -> None:
        async with self._server:
            self._listens.set()
            await self._stop.wait()
