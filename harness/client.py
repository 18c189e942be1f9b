"""One request -> stamped bytes, status, how it ended. The only file that imports the HTTP client for load.

aiohttp opens, pools and encrypts the connections and frames HTTP. What it does not do here is wake a task for every
token: a subclass of its protocol stamps each read in the transport's own callback, and a subclass of its body reader
files the body bytes with that stamp instead of waking a reader. The request's task sleeps until the body ends. Nor does
it build each request anew: the first to a path is aiohttp's own, with the proxy, authorization and headers it finds; the
later ones repeat its head over connections from the same pool (:class:`_Route`). JSON is never looked at in this file.

The private names of aiohttp this rests on (``BaseConnector._factory``, ``BaseConnector.connect``,
``ResponseHandler.set_response_params`` and ``_payload``, the slots of ``StreamReader``) are held by ``tests/load/test_client.py``.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.hdrs import CONTENT_LENGTH
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader
from yarl import URL

from harness.clock import NS_PER_S, now_ns
from harness.decode import StreamEnd
from harness.errors import LocalFault
from harness.exchange import Exchange
from harness.http_get import explain, proxy_for

#: seconds an idle connection is kept: below uvicorn's 5 s, so that the server is never the one to close it first
KEEP_ALIVE_S = 2.5
#: bytes of an error body that are kept; the rest is read past or cut
ERROR_BODY_BYTES = 65_536
#: seconds a server has to finish an error body
ERROR_BODY_S = 2.0
#: a reused connection that drops this soon after the send, with no byte answered, was stale and not the server's failure
STALE_S = 1.0


#: the exchange that aiohttp is sending for the current task, alone in a list: how a connection learns whom its answer
#: belongs to. The list is emptied after it, since contexts live on in the loop's cancelled timers
_CURRENT: ContextVar[Sequence[Exchange]] = ContextVar("current_exchange", default=())


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
        """aiohttp handed bytes of a request to the socket: the exchange of this task is ours from here on."""
        for exchange in _CURRENT.get():
            self._begin(exchange)
            exchange.sent_ns = now_ns()

    def send(self, request: bytes, exchange: Exchange) -> None:
        """Send a whole request.

        Raises:
            ServerDisconnectedError: the connection was closed right after it was opened.
        """
        if not self.is_connected():
            raise aiohttp.ServerDisconnectedError
        self._begin(exchange)
        self.transport.write(request)  # type: ignore[union-attr]
        exchange.sent_ns = now_ns()

    def _begin(self, exchange: Exchange) -> None:
        if self.exchange is not exchange:
            self.exchange = exchange
            exchange.reused = self.exchanges > 0
            self.exchanges += 1

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is not None:
            exchange.last_read_ns = now_ns()
        super().data_received(data)
        if self._exception is not None and self.exchange is not None and self.exchange.end is None:
            # aiohttp hangs up on bytes that are not HTTP; without this the hang-up would look like the server's
            self.exchange.end, self.exchange.end_ns = StreamEnd.PROTOCOL, self.exchange.last_read_ns or now_ns()
            self.exchange.message = f"the answer is not HTTP: {self._exception}"
            _drop_frames(self._exception)
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
        payload = self._payload
        exchange = self.exchange if self.exchange is not None and self.exchange.end is None else None
        if exchange is not None and exc is not None:
            # which of the two it was is lost in aiohttp's own exceptions
            exchange.end, exchange.message = StreamEnd.RESET, f"{exc}"
        super().connection_lost(exc)  # the end of a body that has no other: our reader is told so
        if exchange is not None:
            if exchange.end is None:
                exchange.end = StreamEnd.EOF
                exchange.message = "the server closed the connection before the end of the answer"
            exchange.end_ns = now_ns()
        self._wake(payload, exc or ConnectionResetError("the connection was closed"))
        if payload is not None:
            _drop_frames(payload.exception())
        # a dead connection is a cycle of protocol, parser and reader: it must not keep a request's bytes alive
        self.exchange = self._adopted = None

    @staticmethod
    def _wake(payload: StreamReader | None, error: BaseException) -> None:
        """End the wait for a body that will not end: aiohttp tells its own readers, but not whoever waits for the end."""
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(error)


def _drop_frames(error: BaseException | None) -> None:
    """Let go of the frames an exception and its causes passed through. They refer to what refers to the exception; a
    collector that comes seldom would leave such cycles, one a failed request, for half an hour."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class _Connector(aiohttp.TCPConnector):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = functools.partial(  # type: ignore[assignment]  # partial is invariant in what it makes
            _StampedHandler, loop=asyncio.get_running_loop()
        )


class _Route:
    """How requests to one path go out: by the connections that the first one's would go by, with its head.

    Args:
        request: the first one, as aiohttp resolved it.
    """

    __slots__ = ("_head", "request")

    def __init__(self, request: aiohttp.ClientRequest) -> None:
        self.request = request
        # what ClientRequest.send and StreamWriter.write_headers do
        target = str(request.url) if request.proxy and not request.is_ssl() else request.url.raw_path_qs
        headers = (f"{name}: {value}" for name, value in request.headers.items() if name != CONTENT_LENGTH)
        self._head = "\r\n".join([f"{request.method} {target} HTTP/1.1", *headers, f"{CONTENT_LENGTH}: "]).encode()

    def message(self, body: bytes) -> bytes:
        """A whole request."""
        return b"%s%d\r\n\r\n%s" % (self._head, len(body), body)


class _Request(aiohttp.ClientRequest):
    """aiohttp's request, telling when it is on its way: from then on its head is whole."""

    on_sent: Callable[[aiohttp.ClientRequest], None]

    async def send(self, conn: Any) -> aiohttp.ClientResponse:
        response = await super().send(conn)
        self.on_sent(self)
        return response


class _Held(Protocol):
    """What holds a connection: aiohttp's response, or its connection itself."""

    def close(self) -> None: ...

    def release(self) -> Any: ...


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
        self._proxy = proxy_for(base_url)
        self._headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            # a proxy that compresses a stream holds its tokens back
            "Accept-Encoding": "identity",
            **(headers or {}),
        }
        self._connect_timeout_s = connect_timeout_s
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._urls: dict[str, URL] = {}
        self._routes: dict[URL, _Route] = {}
        self._ssl: bool | ssl.SSLContext = verify_tls
        self._session: aiohttp.ClientSession | None = None
        self.in_flight: set[Exchange] = set()

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=_Connector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=300, ssl=self._ssl),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=self._timeout,
            request_class=self._new_request,  # type: ignore[arg-type]  # what makes one will do
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

    def _new_request(self, *args: Any, **options: Any) -> aiohttp.ClientRequest:
        request = _Request(*args, **options)
        request.on_sent = self._learn
        return request

    def _learn(self, request: aiohttp.ClientRequest) -> None:
        self._routes[request.url] = _Route(request)

    def _url_of(self, path: str) -> URL:
        if (url := self._urls.get(path)) is None:
            url = self._urls[path] = self._url.joinpath(path.lstrip("/"))
        return url

    async def _attempt(self, path: str, body: bytes, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(None) as deadline:
                exchange._deadline = deadline
                if exchange._stop is not None:
                    exchange.stop(exchange._stop)
                if (route := self._routes.get(url := self._url_of(path))) is None:
                    await self._first(url, body, exchange)
                else:
                    await self._again(route, body, exchange)
        except (TimeoutError, aiohttp.ClientError, HttpProcessingError, ConnectionError, ValueError) as error:
            exchange._finish(*self._end_by(error, exchange))
            _drop_frames(error)
        finally:
            exchange._deadline = None

    def _end_by(self, error: Exception, exchange: Exchange) -> tuple[StreamEnd, str | None]:
        """What an exception of aiohttp's says of the end."""
        match error:
            case TimeoutError() if exchange._stop is not None:
                return exchange._stop, None
            case TimeoutError():  # aiohttp's connect timeout is one too
                return StreamEnd.CONNECT, f"no connection within {self._connect_timeout_s:g} s ({error})"
            case aiohttp.ClientConnectorError():
                told = explain(error, str(self._url))
                return StreamEnd.CLIENT if isinstance(told, LocalFault) else StreamEnd.CONNECT, told.message
            case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError() | ConnectionError():
                return StreamEnd.RESET, str(error) or type(error).__name__
            case aiohttp.ClientPayloadError():
                return StreamEnd.PROTOCOL, str(error)
        return StreamEnd.PROTOCOL, f"{type(error).__name__}: {error}"

    async def _first(self, url: URL, body: bytes, exchange: Exchange) -> None:
        """Send as aiohttp does; :meth:`_learn` learns from it how to do it again."""
        assert self._session is not None, "used outside its context"
        current = [exchange]
        token = _CURRENT.set(current)
        try:
            response = await self._session.post(url, data=body, allow_redirects=False, proxy=self._proxy)
        finally:
            _CURRENT.reset(token)
            current.clear()
        await self._receive(response.status, response.headers, response.content, exchange, response)

    async def _again(self, route: _Route, body: bytes, exchange: Exchange) -> None:
        assert self._session is not None, "used outside its context"
        assert self._session.connector is not None
        connection = await self._session.connector.connect(route.request, traces=[], timeout=self._timeout)
        protocol: Any = connection.protocol
        try:
            protocol.set_response_params(read_until_eof=True)
            protocol.send(route.message(body), exchange)
            message, content = await protocol.read()
            while message.code < 200 and message.code != 101:
                message, content = await protocol.read()
        except BaseException:
            connection.close()
            raise
        await self._receive(message.code, message.headers, content, exchange, connection)

    async def _receive(
        self, status: int, headers: Mapping[str, str], content: StreamReader, exchange: Exchange, held: _Held
    ) -> None:
        try:
            exchange.status = status
            if status != 200:
                exchange.body_limit = ERROR_BODY_BYTES
                exchange.retry_after = headers.get("Retry-After")
                if 300 <= status < 400:
                    exchange.message = f"the server redirects to {headers.get('Location', 'nowhere')}"
                async with asyncio.timeout(ERROR_BODY_S):
                    await self._end_of(content)
            else:
                await self._end_of(content)
            exchange._finish(StreamEnd.EOF)  # unless its last byte said so: an answer without a body has none
        except TimeoutError:
            if exchange._stop is not None or status == 200:
                raise
            exchange._finish(StreamEnd.EOF)
        finally:
            held.close() if exchange.end is not StreamEnd.EOF or exchange.message else held.release()

    @staticmethod
    async def _end_of(content: StreamReader) -> None:
        if (error := content.exception()) is not None:
            raise error
        await content.wait_eof()
