"""One connection of the fault server: requests in, and whatever bytes a mode wants out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from fault_answers import Script

if TYPE_CHECKING:
    from server import FaultServer

_PHRASES = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    429: "Too Many Requests",
    502: "Bad Gateway",
}


class Gone(Exception):
    """The client has closed the connection: the answer has no reader."""


class Connection(asyncio.Protocol):
    """Reads HTTP/1.1 requests with a content-length, one after the other, and lets the server answer each in a task."""

    def __init__(self, server: FaultServer) -> None:
        self.server = server
        self.transport: asyncio.Transport
        self.requests = 0
        self.lost = asyncio.Event()
        self.ended_by_us = False
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods alone
        self.server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self._writable.set()
        self.server.closed(self)
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next_request()

    def eof_received(self) -> bool:
        return False  # a client that ends its side is gone

    def _next_request(self) -> None:
        if self._task is not None or (head_end := self._buffer.find(b"\r\n\r\n")) < 0:
            return
        lines = self._buffer[:head_end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        end = head_end + 4 + int(headers.get("content-length", 0))
        if len(self._buffer) < end:
            return
        body, self._buffer = self._buffer[head_end + 4 : end], self._buffer[end:]
        method, path, *_ = lines[0].split()
        if self._idle is not None:
            self._idle.cancel()
        self.requests += 1
        self._task = asyncio.get_running_loop().create_task(self._answer(method, path, headers, body))
        self._task.add_done_callback(self._note_bug)

    def _note_bug(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(bug := task.exception(), Exception):
            self.server.bugs.append(bug)

    async def _answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        reply = Reply(self)
        with contextlib.suppress(Gone):
            await self.server.answer(reply, method, path, headers, body)
        self._task = None
        if headers.get("connection", "").lower() == "close":
            reply.close()
        if self.server.keep_alive_s is not None and self._idle is None:
            reply.close_when_idle(self.server.keep_alive_s)
        self._next_request()

    async def drain(self) -> None:
        await self._writable.wait()
        if self.lost.is_set() or self.transport.is_closing():
            raise Gone

    def close_when_idle(self, after_s: float) -> None:
        self._idle = asyncio.get_running_loop().call_later(after_s, self.transport.close)


class Reply:
    """What a mode may do with the connection of its request. Writing to a client that has left raises Gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.server = connection.server
        #: the connection had carried a request before
        self.reused = connection.requests > 1
        #: bytes of each write; None: as they come
        self.piece_bytes: int | None = None
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()

    # time

    async def at(self, seconds: float) -> None:
        """Wait until so long after the request."""
        if (left := self._start + seconds - self._loop.time()) > 0:
            await asyncio.sleep(left)

    def restart_clock(self) -> None:
        """Count the times of :meth:`at` from now."""
        self._start = self._loop.time()

    async def hold(self) -> None:
        """Keep the connection open until the client leaves."""
        await self._connection.lost.wait()
        raise Gone

    # bytes

    async def write(self, data: bytes) -> None:
        """Bytes as they are."""
        pieces = [data]
        if self.piece_bytes is not None:
            pieces = [data[i : i + self.piece_bytes] for i in range(0, len(data), self.piece_bytes)]
        for piece in pieces:
            await self._connection.drain()
            self._connection.transport.write(piece)
            if len(pieces) > 1:
                await asyncio.sleep(0)

    async def head(self, status: int, headers: Mapping[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, 'Status')}", *(f"{k}: {v}" for k, v in headers.items())]
        await self.write("\r\n".join([*lines, "", ""]).encode())

    async def stream_head(self) -> None:
        """200, an event stream, chunked."""
        await self.head(200, {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"})

    async def send(self, data: bytes) -> None:
        """One chunk of the body; nothing for no bytes, which would end it."""
        if data:
            await self.write(b"%x\r\n" % len(data) + data + b"\r\n")

    async def end(self) -> None:
        """The last chunk: the body is whole."""
        await self.write(b"0\r\n\r\n")

    async def plain(
        self, status: int, body: bytes, kind: str = "application/json", *, retry_after: str | None = None
    ) -> None:
        """A whole answer with its length."""
        headers = {"content-type": kind, "content-length": str(len(body))}
        if retry_after is not None:
            headers["retry-after"] = retry_after
        await self.head(status, headers)
        await self.write(body)

    # ends

    @property
    def ended_by_us(self) -> bool:
        """The server closed or reset this connection; the client did not leave it."""
        return self._connection.ended_by_us

    def close(self) -> None:
        """FIN, once what was written is out."""
        self._connection.ended_by_us = True
        self._connection.transport.close()

    def half_close(self) -> None:
        """FIN of our side; the client's stays open."""
        self._connection.transport.write_eof()

    def reset(self) -> None:
        """RST; what was written and not sent is lost."""
        self._connection.ended_by_us = True
        # uvloop's own socket object sets no options; a second handle on the same connection does
        with socket.socket(fileno=os.dup(self._connection.transport.get_extra_info("socket").fileno())) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.transport.abort()

    def close_when_idle(self, after_s: float) -> None:
        """Close the connection unless the next request comes within so long."""
        self._connection.close_when_idle(after_s)

    # counters

    def count_tokens(self, script: Script, count: int, *, first: bool, finish: str | None = None) -> None:
        stats = self.server.stats
        stats.engine_generation_tokens += count
        if first:
            stats.engine_prompt_tokens += script.ask.prompt_tokens
        if finish is not None:
            stats.engine_finished[finish] += 1
