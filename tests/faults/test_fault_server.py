"""The fault server does what its modes say: one look at each group, over plain sockets."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import pytest
from fault_modes import FLAKY, MODES, parse
from server import FaultServer


@dataclass
class Answer:
    """What a plain socket saw: bytes until the server ended, or until it was silent for a while."""

    data: bytes = b""
    #: "fin", "rst" or "open"
    ended: str = "open"
    at_s: list[float] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.data.split(b" ", 2)[1])


def request(model: str, *, path: str = "/v1/completions", headers: str = "", **fields: Any) -> bytes:
    body = orjson.dumps({"model": model, "prompt": [1, 2, 3], "max_tokens": 3, "stream": True, **fields})
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


async def ask(server: FaultServer, data: bytes, *, patience_s: float = 0.3) -> Answer:
    """One connection, one request; leave it when nothing came for ``patience_s``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    loop, answer = asyncio.get_running_loop(), Answer()
    writer.write(data)
    began = loop.time()
    try:
        async with asyncio.timeout(None) as patience:
            while True:
                patience.reschedule(loop.time() + patience_s)
                read = await reader.read(1 << 20)
                if not read:
                    answer.ended = "fin"
                    break
                answer.data += read
                answer.at_s.append(loop.time() - began)
    except TimeoutError:
        pass
    except ConnectionResetError:
        answer.ended = "rst"
    writer.close()
    return answer


async def fetch(server: FaultServer, path: str) -> bytes:
    answer = await ask(server, f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    return answer.data.partition(b"\r\n\r\n")[2]


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def stream_of(
    session: aiohttp.ClientSession, server: FaultServer, model: str, path: str = "/v1/completions", **fields: Any
) -> str:
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 3, "stream": True, **fields}
    async with session.post(server.base_url + path, json=body) as response:
        assert response.status == 200
        return await response.text()


async def test_a_true_answer_honours_what_was_asked(fault_server: FaultServer, session: aiohttp.ClientSession) -> None:
    asked: dict[str, Any] = {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }
    said = await stream_of(session, fault_server, "normal:ttft=0,itl=0", **asked)
    events = [orjson.loads(part.removeprefix("data: ")) for part in said.split("\n\n")[:-2]]
    assert said.endswith("data: [DONE]\n\n")
    assert [len(e["choices"]) for e in events] == [1, 1, 1, 0]
    assert [e["usage"]["completion_tokens"] for e in events] == [1, 2, 3, 3]
    assert [e["choices"][0]["finish_reason"] for e in events[:3]] == [None, None, "length"]
    assert [e["choices"][0]["token_ids"] for e in events[:3]] == [[1000], [1001], [1002]]
    assert (fault_server.stats.engine_prompt_tokens, fault_server.stats.engine_generation_tokens) == (3, 3)
    assert (fault_server.stats.in_flight, fault_server.stats.left) == (0, 0)


async def test_a_chat_answer_has_a_role_and_reasoning_first(
    fault_server: FaultServer, session: aiohttp.ClientSession
) -> None:
    said = await stream_of(
        session,
        fault_server,
        "normal:itl=0,reasoning=2",
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "a b"}],
    )
    deltas = [orjson.loads(part.removeprefix("data: "))["choices"][0]["delta"] for part in said.split("\n\n")[:-2]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning": " tok"},
        {"reasoning": " tok"},
        {"content": " tok"},
    ]


async def test_the_pace_is_kept(fault_server: FaultServer) -> None:
    answer = await ask(fault_server, request("normal:ttft=0.1,itl=0.05"))
    times = [at for at in answer.at_s if at > 0.05]
    assert len(times) >= 3
    assert times[0] >= 0.1
    assert times[2] >= 0.2


async def test_clamp_and_tokens_change_how_much_is_said(
    fault_server: FaultServer, session: aiohttp.ClientSession
) -> None:
    for model, tokens in (("normal:itl=0,clamp=2", 2), ("normal:itl=0,tokens=5,per_chunk=2", 5)):
        assert (await stream_of(session, fault_server, model)).count(" tok") == tokens


async def test_a_case_is_replayed_byte_for_byte(fault_server: FaultServer) -> None:
    case = fault_server._cases["utf8_split_in_character"]
    answer = await ask(fault_server, request("utf8_split_in_character"))
    for _, data in case["writes_ms_base64"]:
        assert base64.b64decode(data) in answer.data
    assert answer.data.endswith(b"0\r\n\r\n")
    assert 0.1 <= answer.at_s[-1] < 0.3
    assert (await ask(fault_server, request("reset_mid_stream"))).ended == "rst"
    assert (await ask(fault_server, request("http_502_html"))).status == 502


@pytest.mark.parametrize(
    ("model", "tokens", "ended"),
    [
        ("silent", 0, "open"),
        ("stall:after=2", 2, "open"),
        ("comments:after=1,every=0.2", 1, "open"),
        ("done_hold", 3, "open"),
        ("rst_before_headers", 0, "rst"),
        ("close_before_headers", 0, "fin"),
        ("rst_after_headers", 0, "rst"),
        ("rst:after=2", 2, "rst"),
        ("close:after=2", 2, "fin"),
        ("half_close:after=1", 1, "fin"),
        ("chunk_cut:after=1", 1, "fin"),
        ("garbage", 0, "fin"),
        ("truncated:after=2", 2, "open"),
        ("wrong_length:off=50", 3, "fin"),
        ("close_idle:after=0.05", 3, "fin"),
        ("trickle:bytes=50,itl=0", 3, "open"),
    ],
)
async def test_how_far_a_mode_goes_and_how_it_ends(
    fault_server: FaultServer, model: str, tokens: int, ended: str
) -> None:
    answer = await ask(fault_server, request(model), patience_s=0.15 if "comments" not in model else 0.1)
    assert (answer.data.count(b'" tok"'), answer.ended) == (tokens, ended)
    assert fault_server.stats.requests[model.partition(":")[0]] == 1


@pytest.mark.parametrize(
    ("model", "status", "part"),
    [
        ("html_502", 502, b"<title>502 Bad Gateway"),
        ("unauthorized", 401, b'{"error":"Unauthorized"}'),
        ("model_not_found", 404, b"The model `model_not_found` does not exist."),
        ("no_such_model", 404, b"The model `no_such_model` does not exist."),
        ("too_many:retry_after=2", 429, b"retry-after: 2\r\n"),
        ("unavailable", 503, b"queue full"),
        ("too_long", 400, b"maximum context length"),
        ("http:status=302", 302, b"short and stout"),
        ("big_error:bytes=100000", 500, b"x" * 100_000),
        ("stall:often=1", 400, b"mode stall has no parameter 'often'; it has after, itl, tokens, ttft"),
        ("error_in_stream", 200, b"EngineCore encountered an issue."),
        ("abort", 200, b'"finish_reason":"abort"'),
        ("no_json", 200, b"data: {oops"),
        ("not_a_stream", 200, b"Please log in"),
        ("garbage_chunk", 200, b"zzzz\r\n"),
        ("one_write", 200, b"[DONE]"),
    ],
)
async def test_what_a_mode_answers(fault_server: FaultServer, model: str, status: int, part: bytes) -> None:
    answer = await ask(fault_server, request(model), patience_s=0.1)
    assert answer.status == status
    assert part in answer.data


async def test_the_barrier_answers_when_all_are_there(fault_server: FaultServer) -> None:
    first = asyncio.create_task(ask(fault_server, request("barrier:n=3"), patience_s=1.0))
    second = asyncio.create_task(ask(fault_server, request("barrier:n=3"), patience_s=1.0))
    await asyncio.sleep(0.1)
    assert fault_server.stats.in_flight == 2
    third = await ask(fault_server, request("barrier:n=3"), patience_s=0.3)
    for answer in (await first, await second, third):
        assert answer.data.count(b'" tok"') == 3
    assert fault_server.stats.in_flight_max == 3


async def test_endless_goes_on_until_the_client_leaves(
    fault_server: FaultServer, session: aiohttp.ClientSession
) -> None:
    async with session.post(
        fault_server.base_url + "/v1/completions", json={"model": "endless:ttft=0,itl=0", "prompt": "a"}
    ) as response:
        await response.content.readexactly(1_000_000)
        response.close()
    async with asyncio.timeout(2):
        while fault_server.stats.in_flight:  # noqa: ASYNC110 - the server has no event for this
            await asyncio.sleep(0.01)
    assert fault_server.stats.left == 1


async def test_a_reused_connection_is_dropped_where_asked(fault_server: FaultServer) -> None:
    answer = await ask(fault_server, request("drop_reused:itl=0") + request("drop_reused:itl=0"))
    assert (answer.data.count(b"HTTP/1.1 200"), answer.ended) == (1, "fin")
    assert (fault_server.stats.requests["drop_reused"], fault_server.stats.connections) == (2, 1)


async def test_keep_alive_ends_for_every_mode() -> None:
    async with FaultServer(keep_alive_s=0.05) as server:
        assert (await ask(server, request("normal:itl=0"), patience_s=1.0)).ended == "fin"


async def test_a_restart_drops_streams_and_counters(fault_server: FaultServer) -> None:
    await ask(fault_server, request("normal:itl=0"), patience_s=0.05)
    assert b'generation_tokens_total{engine="0",model_name="normal"} 3\n' in await fetch(fault_server, "/metrics")
    bystander = asyncio.create_task(ask(fault_server, request("stall"), patience_s=1.0))
    answer = await ask(fault_server, request("restart:after=2,down=0.1"), patience_s=1.0)
    assert (answer.data.count(b'" tok"'), answer.ended, (await bystander).ended) == (2, "rst", "rst")
    with pytest.raises(ConnectionRefusedError):
        await ask(fault_server, request("normal"))
    await asyncio.sleep(0.2)
    assert b'generation_tokens_total{engine="0",model_name="normal"} 0\n' in await fetch(fault_server, "/metrics")
    assert (fault_server.stats.restarts, fault_server.stats.left) == (1, 0)


async def test_what_is_served_is_listed(fault_server: FaultServer) -> None:
    names = {card["id"] for card in orjson.loads(await fetch(fault_server, "/v1/models"))["data"]}
    assert names >= {"normal", "barrier", "one_token", "http_503_json"}
    assert orjson.loads(await fetch(fault_server, "/version")) == {"version": "0.32.0"}
    stats = orjson.loads(await fetch(fault_server, "/stats"))
    assert stats["gets"] == {"/v1/models": 1, "/version": 1, "/stats": 1}


async def test_a_key_and_names_of_ones_own() -> None:
    async with FaultServer(api_key="secret", models={"llama": "normal:itl=0"}) as server:
        assert (await ask(server, request("llama"), patience_s=0.1)).status == 401
        allowed = await ask(server, request("llama", headers="Authorization: Bearer secret\r\n"), patience_s=0.1)
        assert allowed.data.count(b'" tok"') == 3
        assert server.stats.requests == {"normal": 1}


async def test_flaky_fails_the_share_it_was_told_in_ways_it_tells(fault_server: FaultServer) -> None:
    for _ in range(30):
        await ask(fault_server, request("flaky:rate=0.5,ttft=0,itl=0", headers="connection: close\r\n"), patience_s=0.2)
    drawn = {name.removeprefix("flaky/"): n for name, n in fault_server.stats.requests.items() if "/" in name}
    assert sum(drawn.values()) == 30
    assert set(drawn) <= {"normal", *FLAKY}
    assert 8 <= drawn["normal"] <= 22


def test_every_mode_has_a_pace_and_every_flaky_mode_exists() -> None:
    assert set(FLAKY) <= set(MODES)
    for name, entry in MODES.items():
        assert {"ttft", "itl", "tokens"} <= set(entry.defaults)
        assert parse(name) == (name, entry.defaults)
    assert parse("no_such_mode:a=1") is None
