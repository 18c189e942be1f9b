"""An HTTP proxy that tunnels (CONNECT), and a TLS end in front of a plain server: how an https target is reached where the
network lets nobody out by himself. Both run in one thread; hosts that are asked for need not exist anywhere."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
import threading
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit


class ConnectProxy:
    """A proxy on loopback whose every tunnel ends in a TLS end before one server; a context manager.

    Args:
        target: the plain server's URL.
        certificate, key: of the TLS end.
        login: "user:password" that the proxy wants; None: it lets everybody through.
    """

    def __init__(self, target: str, certificate: Path, key: Path, login: str | None = None) -> None:
        parts = urlsplit(target)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = parts.hostname, parts.port
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(certificate, key)
        self._login = None if login is None else f"Basic {base64.b64encode(login.encode()).decode()}"
        self._listens = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._behind: tuple[str, int] = ("", 0)
        self.port = 0
        #: the first line of each request to the proxy
        self.asked: list[str] = []
        #: what went through the tunnels to the server, decrypted
        self.inside = bytearray()

    @property
    def tunnels(self) -> int:
        return sum(line.startswith("CONNECT ") for line in self.asked)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listens.wait(20), "the proxy did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        end = await asyncio.start_server(self._decrypted, "127.0.0.1", 0, ssl=self._tls)
        proxy = await asyncio.start_server(self._proxied, "127.0.0.1", 0)
        self._behind, self.port = end.sockets[0].getsockname(), proxy.sockets[0].getsockname()[1]
        self._listens.set()
        await self._stop.wait()
        for server in (proxy, end):
            server.close()

    async def _proxied(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.asked.append(head[0])
        if not head[0].startswith("CONNECT "):
            await self._refuse(writer, "405 Method Not Allowed")
        elif self._login is not None and f"Proxy-Authorization: {self._login}" not in head:
            await self._refuse(writer, "407 Proxy Authentication Required")
        else:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await _joined(reader, writer, *await asyncio.open_connection(*self._behind[:2]))

    @staticmethod
    async def _refuse(writer: asyncio.StreamWriter, status: str) -> None:
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async def _decrypted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _joined(reader, writer, *await asyncio.open_connection(*self._target), self.inside)


async def _joined(
    near: asyncio.StreamReader,
    to_near: asyncio.StreamWriter,
    far: asyncio.StreamReader,
    to_far: asyncio.StreamWriter,
    kept: bytearray | None = None,
) -> None:
    """Two connections as one, until both have ended. ``kept`` takes what goes to the far end."""
    await asyncio.gather(_pumped(near, to_far, kept), _pumped(far, to_near))


async def _pumped(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None = None) -> None:
    # who hangs up in the middle is a test's business, not the tunnel's
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(65_536):
            if kept is not None:
                kept += data
            writer.write(data)
            await writer.drain()
    writer.close()
