"""The ruler itself: nothing before its time, every token, its own lateness told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import orjson
import pytest

from harness.client import StreamClient
from harness.clock import NS_PER_MS, now_ns
from harness.decode import Plan, StreamDecoder
from harness.exchange import Exchange
from harness.fixed_rate import FixedRate
from harness.http_get import Getter
from harness.record import Record
from harness.twin_http import Connection


@dataclass
class Ruler:
    app: FixedRate
    base_url: str
    connections: set[Connection]


@pytest.fixture(params=[False, True], ids=["timers", "spinning"])
async def ruler(request: pytest.FixtureRequest) -> AsyncIterator[Ruler]:
    """30 ms to the first token, 5 ms between tokens."""
    app = FixedRate(30 * NS_PER_MS, 5 * NS_PER_MS, spin=request.param)
    connections: set[Connection] = set()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(app, connections), "127.0.0.1", 0)
    yield Ruler(app, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections)
    server.close()
    for connection in list(connections):
        connection.abort()
    await server.wait_closed()


async def stream(ruler: Ruler, *, chat: bool = False, tokens: int = 8) -> Record:
    """One stream through this project's own client and decoder."""
    asked = {"model": "fixed", "stream": True, "max_tokens": tokens, "stream_options": {"include_usage": True}}
    more = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": [1, 2, 3]}
    exchange = Exchange(started_ns=now_ns())
    async with StreamClient(ruler.base_url) as client:
        await client.send(f"/v1/{'chat/' if chat else ''}completions", orjson.dumps({**asked, **more}), exchange)
    decoder = StreamDecoder("chat" if chat else "completions", save_content=True, save_gaps=True)
    for stamp_ns, data in exchange.arrivals:
        decoder.feed(stamp_ns, data)
    assert exchange.end is not None
    return decoder.finish(
        Plan(request_id="0-0", stage=0, user=0, scheduled_ns=0, asked_output_tokens=tokens),
        run_start_ns=0,
        sent_ns=exchange.sent_ns,
        end=exchange.end,
        end_ns=exchange.end_ns,
        http_status=exchange.status,
        message=exchange.message,
    )


@pytest.mark.parametrize("chat", [False, True])
async def test_a_stream_is_whole_and_never_early(ruler: Ruler, chat: bool) -> None:
    record = await stream(ruler, chat=chat)
    assert (record.outcome, record.finish_reason, record.warnings) == ("ok", "length", ())
    assert (record.output_tokens, record.chunks, record.content) == (8, 8, " tok" * 8)
    assert (record.ttft_ms or 0) >= 29.9, "from the last byte of the request to the first of the answer"
    assert (record.e2e_ms or 0) >= 30 + 7 * 5 - 0.1


async def test_deadlines_are_absolute(ruler: Ruler) -> None:
    """A late token does not push the next ones: over many the mean is exact."""
    record = await stream(ruler, tokens=60)
    assert record.tpot_ms == pytest.approx(5.0, rel=0.2)


async def test_lateness_is_told_once(ruler: Ruler) -> None:
    await stream(ruler, tokens=20)
    async with Getter() as getter:
        first = orjson.loads((await getter.get(f"{ruler.base_url}/late")).body)
        second = orjson.loads((await getter.get(f"{ruler.base_url}/late")).body)
    assert first["n"] == 20
    assert 0 <= first["mean"] <= first["max"]
    assert second == {"n": 0, "mean": None, "p99": None, "max": None}


async def test_a_client_that_leaves_is_sent_nothing_more(ruler: Ruler) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(ruler.base_url.rsplit(":", 1)[1]))
    body = orjson.dumps({"model": "fixed", "max_tokens": 1000})
    writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b" tok")
    writer.close()
    await writer.wait_closed()
    async with asyncio.timeout(5):
        while ruler.app._due:  # noqa: ASYNC110  the server tells nobody
            await asyncio.sleep(0.01)
    assert len(ruler.connections) == 0


async def test_what_is_no_request_is_refused(ruler: Ruler) -> None:
    async with Getter() as getter:
        assert (await getter.post_json(f"{ruler.base_url}/v1/completions", {"max_tokens": "many"})).status == 400
        assert (await getter.get(f"{ruler.base_url}/metrics")).status == 404
        models = await getter.get(f"{ruler.base_url}/v1/models")
    assert orjson.loads(models.body)["data"][0]["id"] == "fixed"
