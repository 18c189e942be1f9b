"""One request -> stamped bytes, status, how it ended. The only file that imports the HTTP client for load.

aiohttp opens, pools and encrypts the connections and frames HTTP. What it does not do here is wake a task for every
token: a subclass of its protocol stamps each read in the transport's own callback, and a subclass of its body reader
files the body bytes with that stamp instead of waking a reader. The request's task sleeps until the body ends. JSON is
never looked at in this file.

The private names of aiohttp this rests on (``BaseConnector._factory``, ``ResponseHandler._payload``, the slots of
``StreamReader``) are held by ``tests/load/test_client.py``.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.streams import StreamReader
from yarl import URL

from harness.clock import NS_PER_S, now_ns
from harness.decode import StreamEnd
from harness.http_get import is_loopback

#: seconds an idle connection is kept: below uvicorn's 5 s, so that the server is never the one to close it first
KEEP_ALIVE_S = 2.5
#: bytes of an error body that are kept; the rest is read past or cut
ERROR_BODY_BYTES = 65_536
#: seconds a server has to finish an error body
ERROR_BODY_S = 2.0
#: a reused connection that drops this soon after the send, with no byte answered, was stale and not the server's failure
STALE_S = 1.0


@dataclass(slots=True, eq=False)
class Exchange:
    """One request on the wire: when it left, what came back and when, how it ended.

    Stamps are nanoseconds of :func:`harness.clock.now_ns`. ``arrivals`` holds (stamp, body bytes) in order of arrival;
    the decoder takes them out as it likes.
    """

    started_ns: int
    sent_ns: int | None = None
    #: stamp of the latest read, headers included
    last_read_ns: int | None = None
    status: int | None = None
    arrivals: list[tuple[int, bytes]] = field(default_factory=list)
    body_limit: int | None = None
    body_bytes: int = 0
    end: StreamEnd | None = None
    end_ns: int = 0
    message: str | None = None
    #: the connection had carried a request before
    reused: bool = False
    #: the send was repeated on a fresh connection after a stale one dropped
    resent: bool = False
    retry_after: str | None = None
    _deadline: asyncio.Timeout | None = None
    _stop: StreamEnd | None = None

    def stop(self, why: StreamEnd) -> None:
        """End the request from outside (stall, total time, end of stage); the connection is closed."""
        if self._stop is None:
            self._stop = why
            if self._deadline is not None:
                self._deadline.reschedule(asyncio.get_running_loop().time())

    def take(self, data: bytes) -> None:
        """File body bytes with the stamp of the read they came in. Called by the reader, for every HTTP chunk."""
        if self.body_limit is None or self.body_bytes < self.body_limit:
            self.arrivals.append((self.last_read_ns or now_ns(), data))
            self.body_bytes += len(data)

    def body(self) -> bytes:
        return b"".join(data for _, data in self.arrivals)

    def _finish(self, end: StreamEnd, message: str | None = None) -> None:
        if self.end is None:
            self.end, self.end_ns, self.message = end, now_ns(), message


#: the exchange the current task is sending: how a connection learns whom its answer belongs to
_CURRENT: ContextVar[Exchange | None] = ContextVar("current_exchange", default=None)


class _StampedTransport:
    """The transport of a connection, with the time of each write kept; everything else is passed through."""

    __slots__ = ("_handler", "_transport")

    def __init__(self, transport: Any, handler: _StampedHandler) -> None:
        self._transport = transport
        self._handler = handler

    def write(self, data: Any) -> None:
        self._transport.write(data)
        self._handler.wrote()

    def writelines(self, chunks: Any) -> None:
        self._transport.writelines(chunks)
        self._handler.wrote()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _StampedReader(StreamReader):
    """aiohttp's body reader, filing bytes instead of waking a task. Takes over a StreamReader by class change, so it
    has no state of its own; the exchange hangs on the protocol."""

    __slots__ = ()

    def feed_data(self, data: bytes, size: int = 0) -> bool:
        if data:
            exchange = self._protocol.exchange  # type: ignore[attr-defined]
            if exchange is not None:
                exchange.take(data)
        return False

    def begin_http_chunk_receiving(self) -> None:
        """Chunk borders mean nothing to an event stream."""

    def end_http_chunk_receiving(self) -> None:
        """Nor their ends."""

    def feed_eof(self) -> None:
        exchange = self._protocol.exchange  # type: ignore[attr-defined]
        if exchange is not None and exchange.end is None:
            exchange.end = StreamEnd.EOF
            exchange.end_ns = exchange.last_read_ns or now_ns()
        super().feed_eof()


class _StampedHandler(ResponseHandler):
    """aiohttp's connection protocol with a stamp on every read, taken before anything else happens."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.exchange: Exchange | None = None
        self.exchanges = 0
        self._adopted: StreamReader | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport = _StampedTransport(transport, self)  # type: ignore[assignment]

    def wrote(self) -> None:
        """Bytes of a request were handed to the socket: the exchange of this task is ours from here on."""
        exchange = _CURRENT.get()
        if exchange is None:
            return
        if self.exchange is not exchange:
            self.exchange = exchange
            exchange.reused = self.exchanges > 0
            self.exchanges += 1
        exchange.sent_ns = now_ns()

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is not None:
            exchange.last_read_ns = now_ns()
        super().data_received(data)
        if self._exception is not None and self.exchange is not None and self.exchange.end is None:
            # aiohttp hangs up on bytes that are not HTTP; without this the hang-up would look like the server's
            self.exchange.end, self.exchange.end_ns = StreamEnd.PROTOCOL, self.exchange.last_read_ns or now_ns()
            self.exchange.message = f"the answer is not HTTP: {self._exception}"
            self._wake(self._payload, aiohttp.ClientPayloadError(self.exchange.message))
        payload = self._payload
        if payload is not None and payload is not self._adopted:
            self._adopt(payload)

    def _adopt(self, payload: StreamReader) -> None:
        self._adopted = payload
        if type(payload) is not StreamReader or self.exchange is None:
            return
        for held in payload._buffer:
            self.exchange.take(held)
        payload._buffer.clear()
        payload._size = 0
        if payload._http_chunk_splits is not None:
            payload._http_chunk_splits.clear()
        if payload._eof:
            self.exchange.end = StreamEnd.EOF
            self.exchange.end_ns = self.exchange.last_read_ns or now_ns()
        payload.__class__ = _StampedReader

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.exchange is not None and self.exchange.end is None:
            # which of the two it was is lost in aiohttp's own exceptions
            self.exchange.message = (
                "the server closed the connection before the end of the answer" if exc is None else f"{exc}"
            )
            self.exchange.end = StreamEnd.EOF if exc is None else StreamEnd.RESET
            self.exchange.end_ns = now_ns()
        payload = self._payload
        super().connection_lost(exc)
        self._wake(payload, exc or ConnectionResetError("the connection was closed"))
        # a dead connection is a cycle of protocol, parser and reader: it must not keep a request's bytes alive
        self.exchange = self._adopted = None

    @staticmethod
    def _wake(payload: StreamReader | None, error: BaseException) -> None:
        """End the wait for a body that will not end: aiohttp tells its own readers, but not whoever waits for the end."""
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(error)


class _Connector(aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = functools.partial(  # type: ignore[assignment]  # partial is invariant in what it makes
            _StampedHandler, loop=asyncio.get_running_loop()
        )


class StreamClient:
    """Sends requests and gathers their stamped bytes. No limit on connections of its own.

    Args:
        base_url: scheme, host, port and optional prefix, without ``/v1``.
        headers: sent with every request (authorization among them).
        connect_timeout_s: seconds for name look-up, TCP and TLS.
        verify_tls: False accepts any certificate.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 10.0,
        verify_tls: bool = True,
    ) -> None:
        self._url = URL(base_url)
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **(headers or {})}
        self._connect_timeout_s = connect_timeout_s
        self._ssl: bool | ssl.SSLContext = verify_tls
        self._session: aiohttp.ClientSession | None = None
        self.in_flight: set[Exchange] = set()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=_Connector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=300, ssl=self._ssl),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            trust_env=not is_loopback(self._url.host or "localhost"),
            auto_decompress=True,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, path: str, body: bytes, exchange: Exchange) -> None:
        """POST ``body`` and return when the answer has ended, whatever its end; nothing is raised for it.

        ``exchange`` is filled in place, so that others may decode and stop it meanwhile. A reused connection that
        drops before any answer is replaced once, and the exchange says so (``resent``).
        """
        self.in_flight.add(exchange)
        try:
            await self._attempt(path, body, exchange)
            if self._was_stale(exchange):
                exchange.end, exchange.message, exchange.sent_ns = None, None, None
                exchange.resent = True
                await self._attempt(path, body, exchange)
        finally:
            self.in_flight.discard(exchange)

    @staticmethod
    def _was_stale(exchange: Exchange) -> bool:
        return (
            exchange.reused
            and not exchange.resent
            and exchange.last_read_ns is None
            and exchange.sent_ns is not None
            and exchange.end in (StreamEnd.EOF, StreamEnd.RESET)
            and exchange.status is None
            and exchange.end_ns - exchange.sent_ns < STALE_S * NS_PER_S
        )

    async def _attempt(self, path: str, body: bytes, exchange: Exchange) -> None:
        assert self._session is not None, "used outside its context"
        token = _CURRENT.set(exchange)
        try:
            async with asyncio.timeout(None) as deadline:
                exchange._deadline = deadline
                if exchange._stop is not None:
                    exchange.stop(exchange._stop)
                response = await self._session.post(
                    self._url.joinpath(path.lstrip("/")), data=body, allow_redirects=False
                )
                await self._receive(response, exchange)
        except TimeoutError as error:
            # ours (stop) or aiohttp's connect timeout, which is a TimeoutError too
            if exchange._stop is not None:
                exchange._finish(exchange._stop)
            else:
                exchange._finish(StreamEnd.CONNECT, f"no connection within {self._connect_timeout_s:g} s ({error})")
        except aiohttp.ClientConnectorError as error:
            exchange._finish(StreamEnd.CONNECT, str(error))
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError) as error:
            exchange._finish(StreamEnd.RESET, str(error) or type(error).__name__)
        except aiohttp.ClientPayloadError as error:
            exchange._finish(StreamEnd.PROTOCOL, str(error))
        except (aiohttp.ClientError, ValueError) as error:
            exchange._finish(StreamEnd.PROTOCOL, f"{type(error).__name__}: {error}")
        finally:
            exchange._deadline = None
            _CURRENT.reset(token)

    async def _receive(self, response: aiohttp.ClientResponse, exchange: Exchange) -> None:
        try:
            exchange.status = response.status
            if response.status != 200:
                exchange.body_limit = ERROR_BODY_BYTES
                exchange.retry_after = response.headers.get("Retry-After")
                async with asyncio.timeout(ERROR_BODY_S):
                    await self._end_of(response.content)
            else:
                await self._end_of(response.content)
        except TimeoutError:
            if exchange._stop is not None or response.status == 200:
                raise
            exchange._finish(StreamEnd.EOF)
        finally:
            response.close() if exchange.end is not StreamEnd.EOF or exchange.message else response.release()

    @staticmethod
    async def _end_of(content: StreamReader) -> None:
        if (error := content.exception()) is not None:
            raise error
        await content.wait_eof()
