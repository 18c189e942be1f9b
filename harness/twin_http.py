"""HTTP/1.1 as the twin needs it: whole requests in, bytes out, and the news that a client has gone.

An own protocol on the event loop rather than a framework: a thousand streams get a write each in every engine step,
and each write is one call.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from os import write
from typing import Protocol, cast

_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}
_REASONS |= {413: "Content Too Large", 431: "Request Header Fields Too Large", 501: "Not Implemented"}
MAX_HEAD_BYTES = 65_536
MAX_BODY_BYTES = 64 * 1024 * 1024

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Header names are lower case; ``path`` is without the query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    arrived_ns: int


class App(Protocol):
    """What answers. It writes to the connection, now or later, and calls :meth:`Connection.done` at the end."""

    def now_ns(self) -> int: ...

    def handle(self, connection: Connection, request: Request) -> None: ...

    def gone(self, connection: Connection) -> None:
        """The client closed the connection before its answer was complete."""
        ...


def response(status: int, body: bytes, content_type: str = "application/json", close: bool = False) -> bytes:
    """A whole response."""
    head = f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\ncontent-type: {content_type}\r\n"
    head += f"content-length: {len(body)}\r\n" + ("connection: close\r\n" if close else "") + "\r\n"
    return head.encode() + body


class BadRequest(Exception):
    """Bytes that are no HTTP request the twin reads."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestParser:
    """Bytes in, requests out. Knows content-length and chunked bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        #: the head of a request whose body is still coming
        self._head: tuple[str, str, dict[str, str]] | None = None
        self._chunks: bytearray | None = None
        #: the client waits for leave to send its body
        self.expects_continue = False

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self, now_ns: int) -> Request | None:
        """The next whole request, or None until more bytes come.

        Raises:
            BadRequest: the bytes make no sense; the connection is of no further use.
        """
        if self._head is None and not self._read_head():
            return None
        assert self._head is not None
        body = self._read_body(self._head[2])
        if body is None:
            return None
        method, path, headers = self._head
        self._head, self._chunks, self.expects_continue = None, None, False
        return Request(method, path, headers, body, now_ns)

    def _read_head(self) -> bool:
        while self._buffer[:2] == b"\r\n":
            del self._buffer[:2]
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise BadRequest(431, "the head of the request is too large")
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        parts = lines[0].split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            raise BadRequest(400, "not an HTTP/1 request line")
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise BadRequest(400, "a header line without a colon")
            headers[name.strip().lower()] = value.strip()
        self._head = (parts[0], parts[1].partition("?")[0], headers)
        self.expects_continue = headers.get("expect", "").lower() == "100-continue"
        return True

    def _read_body(self, headers: dict[str, str]) -> bytes | None:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return self._read_chunked()
        length = headers.get("content-length", "0")
        if not length.isdigit():
            raise BadRequest(400, f"content-length is {length!r}")
        if int(length) > MAX_BODY_BYTES:
            raise BadRequest(413, "the body is too large")
        if len(self._buffer) < int(length):
            return None
        body = bytes(self._buffer[: int(length)])
        del self._buffer[: int(length)]
        return body

    def _read_chunked(self) -> bytes | None:
        if self._chunks is None:
            self._chunks = bytearray()
        while (line := self._buffer.find(b"\r\n")) >= 0:
            size = self._chunk_size(bytes(self._buffer[:line]))
            if len(self._buffer) < line + 2 + size + 2:
                return None
            self._chunks += self._buffer[line + 2 : line + 2 + size]
            if len(self._chunks) > MAX_BODY_BYTES:
                raise BadRequest(413, "the body is too large")
            if not size:
                # trailers, if any, end with an empty line
                end = self._buffer.find(b"\r\n\r\n", line)
                if end < 0:
                    return None
                del self._buffer[: end + 4]
                return bytes(self._chunks)
            del self._buffer[: line + 2 + size + 2]
        return None

    @staticmethod
    def _chunk_size(line: bytes) -> int:
        try:
            return int(line.split(b";")[0], 16)
        except ValueError:
            raise BadRequest(400, "a chunk without a size") from None


class Connection(asyncio.Protocol):
    """One client. Requests are answered one after the other; what is sent meanwhile waits."""

    def __init__(self, app: App, connections: set[Connection]) -> None:
        self._app = app
        self._connections = connections
        self._parser = RequestParser()
        self._transport: asyncio.Transport | None = None
        self._fd = -1
        #: the transport holds bytes that the socket has not taken yet
        self._behind = False
        self._busy = False
        self._close_after = False
        #: the app's own
        self.state: object | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, but not the class
        self._transport = cast(asyncio.Transport, transport)
        # a slow reader is not our clock's business: what it does not take waits in memory
        self._transport.set_write_buffer_limits(high=1 << 30)
        self._fd = transport.get_extra_info("socket").fileno()
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)
        if self._busy:
            self._busy = False
            self._app.gone(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed(data)
        if not self._busy:
            self._serve_next()

    def _serve_next(self) -> None:
        try:
            request = self._parser.next(self._app.now_ns())
        except BadRequest as error:
            self.write(response(error.status, str(error).encode(), "text/plain; charset=utf-8", close=True))
            self.close()
            return
        if request is None:
            if self._parser.expects_continue:
                self._parser.expects_continue = False
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return
        self._busy = True
        self._close_after = request.headers.get("connection", "").lower() == "close"
        self._app.handle(self, request)

    def write(self, data: bytes) -> None:
        """Hand ``data`` to the socket at once, as far as it takes it; the transport sends the rest."""
        transport = self._transport
        if transport is None:
            return
        if self._behind:
            self._behind = transport.get_write_buffer_size() > 0
            if self._behind:
                transport.write(data)
                return
        try:
            sent = write(self._fd, data)
        except BlockingIOError:
            sent = 0
        except OSError:
            # the client has gone; the event loop will tell
            return
        if sent < len(data):
            self._behind = True
            transport.write(data[sent:])

    def done(self) -> None:
        """The answer is complete; the next request may be read."""
        self._busy = False
        self.state = None
        if self._close_after:
            self.close()
        elif self._transport is not None:
            self._serve_next()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Drop the connection at once, as a server that dies does."""
        if self._transport is not None:
            self._transport.abort()
