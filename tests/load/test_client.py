"""What the client rests on in aiohttp, held by what goes over the wire: later requests are the first one again, over the
same connections, whatever stands between."""

from __future__ import annotations

import asyncio
import errno
import gzip
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from harness.client import StreamClient
from harness.clock import now_ns
from harness.exchange import Exchange
from harness.outcome import StreamEnd


class Ear:
    """A server that keeps what it hears and says the same to every request."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"Content-Length: (\d+)", head)
                assert length is not None, head
                self.heads.append(head)
                self.bodies.append(await reader.readexactly(int(length[1])))
                writer.write(self.answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def hearing(answer: bytes) -> AsyncIterator[tuple[Ear, int]]:
    ear = Ear(answer)
    server = await asyncio.start_server(ear.hear, "127.0.0.1", 0)
    async with server:
        yield ear, server.sockets[0].getsockname()[1]


def client_of(port: int) -> StreamClient:
    return StreamClient(f"http://127.0.0.1:{port}")


async def sent(client: StreamClient, body: bytes = b"{}") -> Exchange:
    exchange = Exchange(started_ns=now_ns())
    await client.send("/v1/completions", body, exchange)
    return exchange


async def test_later_requests_have_the_head_of_the_first_and_its_connection() -> None:
    async with hearing(chunked(b"data: [DONE]\n\n")) as (ear, port):
        headers = {"Authorization": "Bearer k", "X-Name": "é"}
        async with StreamClient(f"http://127.0.0.1:{port}/prefix", headers=headers) as client:
            exchanges = [await sent(client, body) for body in (b"{}", b'{"n":1}', b"{}")]
    assert [exchange.end for exchange in exchanges] == [StreamEnd.EOF] * 3
    assert [exchange.body() for exchange in exchanges] == [b"data: [DONE]\n\n"] * 3
    assert [exchange.reused for exchange in exchanges] == [False, True, True]
    assert ear.connections == 1
    assert ear.bodies == [b"{}", b'{"n":1}', b"{}"]
    first, second, third = (sorted(head.split(b"\r\n")) for head in ear.heads)
    assert first == third
    assert [line for line in second if line not in first] == [b"Content-Length: 7"]
    assert b"POST /prefix/v1/completions HTTP/1.1" in first
    assert b"Authorization: Bearer k" in first


async def test_later_requests_go_through_the_proxy_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hearing(chunked(b"data: [DONE]\n\n")) as (ear, port):
        monkeypatch.setenv("http_proxy", f"http://user:pass@127.0.0.1:{port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        async with StreamClient("http://gpu7.example:8000") as client:
            exchanges = [await sent(client) for _ in range(3)]
    assert [exchange.status for exchange in exchanges] == [200] * 3
    assert exchanges[2].reused
    assert len({tuple(sorted(head.split(b"\r\n"))) for head in ear.heads}) == 1
    assert ear.heads[0].startswith(b"POST http://gpu7.example:8000/v1/completions HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic dXNlcjpwYXNz\r\n" in ear.heads[2]


async def test_no_credentials_of_a_netrc_file_are_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They would go to any server of that name, and clash with the API key."""
    (tmp_path / "netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    async with hearing(chunked(b"data: [DONE]\n\n")) as (ear, port):
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        async with StreamClient("http://gpu7.example", headers={"Authorization": "Bearer k"}) as client:
            await sent(client)
    assert b"Authorization: Bearer k\r\n" in ear.heads[0]
    assert b"Basic" not in ear.heads[0]


async def test_a_stream_is_asked_for_as_it_is_and_read_though_it_is_compressed() -> None:
    packed = gzip.compress(b"data: [DONE]\n\n")
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with hearing(head + packed) as (ear, port), client_of(port) as client:
        exchanges = [await sent(client) for _ in range(2)]
    assert all(b"Accept-Encoding: identity\r\n" in heard for heard in ear.heads)
    assert [(exchange.end, exchange.body()) for exchange in exchanges] == [(StreamEnd.EOF, b"data: [DONE]\n\n")] * 2


async def test_a_redirect_is_not_followed_and_its_address_is_kept() -> None:
    answer = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: https://gpu7/v1/completions\r\nContent-Length: 0\r\n\r\n"
    async with hearing(answer) as (_, port), client_of(port) as client:
        exchanges = [await sent(client) for _ in range(2)]
    assert [(exchange.status, exchange.message) for exchange in exchanges] == [
        (307, "the server redirects to https://gpu7/v1/completions")
    ] * 2


async def test_an_ipv6_address_is_reached() -> None:
    ear = Ear(chunked(b"data: [DONE]\n\n"))
    try:
        server = await asyncio.start_server(ear.hear, "::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with server, StreamClient(f"http://[::1]:{server.sockets[0].getsockname()[1]}") as client:
        exchanges = [await sent(client) for _ in range(2)]
    assert [exchange.body() for exchange in exchanges] == [b"data: [DONE]\n\n"] * 2
    assert b"Host: [::1]:" in ear.heads[0]


async def test_a_request_stopped_before_its_send_is_not_sent() -> None:
    async with hearing(chunked(b"data: [DONE]\n\n")) as (ear, port), client_of(port) as client:
        exchange = Exchange(started_ns=now_ns())
        exchange.stop(StreamEnd.CANCELLED)
        await client.send("/v1/completions", b"{}", exchange)
    assert (exchange.end, exchange.status, ear.heads) == (StreamEnd.CANCELLED, None, [])


@pytest.mark.parametrize(
    ("error", "end", "message"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "no"), StreamEnd.CONNECT, "gpu7:8000 refused the connection"),
        (OSError(errno.EMFILE, "Too many open files"), StreamEnd.CLIENT, "may open no more files"),
    ],
)
async def test_why_there_is_no_connection_says_whose_fault_it_is(
    monkeypatch: pytest.MonkeyPatch, error: OSError, end: StreamEnd, message: str
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise aiohttp.ClientConnectorError(SimpleNamespace(), error)  # type: ignore[arg-type]

    async with StreamClient("http://gpu7:8000") as client:
        monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", fail)
        exchange = await sent(client)
    assert exchange.end is end
    assert message in (exchange.message or "")


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_an_answer_without_a_body_has_ended(status: bytes) -> None:
    async with hearing(b"HTTP/1.1 %s\r\n\r\n" % status) as (_, port), client_of(port) as client:
        exchanges = [await sent(client) for _ in range(2)]
    assert [exchange.status for exchange in exchanges] == [int(status[:3])] * 2
    assert [exchange.end for exchange in exchanges] == [StreamEnd.EOF] * 2
    assert all((exchange.sent_ns or 0) < exchange.end_ns <= now_ns() for exchange in exchanges)


async def test_a_hundred_continue_is_not_the_answer() -> None:
    answer = b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(b"data: [DONE]\n\n")
    async with hearing(answer) as (_, port), client_of(port) as client:
        exchanges = [await sent(client) for _ in range(2)]
    assert [(exchange.status, exchange.body()) for exchange in exchanges] == [(200, b"data: [DONE]\n\n")] * 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: [DONE]\n\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 14\r\n\r\ndata: [DONE]\n\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: [DONE]\n\n",
    ],
)
async def test_a_body_may_end_with_its_connection(answer: bytes) -> None:
    class Closing(Ear):
        async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            await reader.readuntil(b"{}")
            writer.write(self.answer)
            writer.close()

    ear = Closing(answer)
    server = await asyncio.start_server(ear.hear, "127.0.0.1", 0)
    async with server, client_of(server.sockets[0].getsockname()[1]) as client:
        exchanges = [await sent(client) for _ in range(2)]
    assert [(exchange.end, exchange.body()) for exchange in exchanges] == [(StreamEnd.EOF, b"data: [DONE]\n\n")] * 2
    assert [exchange.message for exchange in exchanges] == [None, None]
    assert ear.connections == 2


def chunked(data: bytes) -> bytes:
    """A whole answer of one chunk."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
