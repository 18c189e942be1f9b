"""The twin over real sockets: what a client of vLLM 0.32.0 sees."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from calibration.errors import InputError
from calibration.steptime import LinearStep
from calibration.twin.config import EngineConfig, Speculation
from harness.twin_server import TwinConfig, TwinServer
from harness.twin_text import tokenize, word_at

STEP = LinearStep(0.004, 0.0, 0.0, 0.0)


class Client:
    """A running twin and an HTTP session to it."""

    def __init__(self, session: aiohttp.ClientSession, server: TwinServer) -> None:
        self.session = session
        self.server = server

    async def post(self, path: str, **fields: Any) -> tuple[int, Any]:
        async with self.session.post(path, json=fields) as response:
            return response.status, await response.json(content_type=None)

    async def stream(self, path: str, **fields: Any) -> list[Any]:
        async with self.session.post(path, json={"stream": True, **fields}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines[-1] == ""
        return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    async def metrics(self) -> dict[str, float]:
        """Sample name -> value, summed over labels."""
        async with self.session.get("/metrics") as response:
            text = await response.text()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values


@asynccontextmanager
async def twin(**options: Any) -> AsyncIterator[Client]:
    flags = {"num_gpu_blocks": 257, "max_model_len": 512, **options.pop("engine", {})}
    headers = options.pop("headers", None)
    config = TwinConfig(engine=EngineConfig(**flags), **{"step_time": STEP, **options})
    server = TwinServer(config)
    listener = await server.start("127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as session:
            yield Client(session, server)
    finally:
        listener.close()
        server.stop()
        # closed transports are let go of in the loop's next turn
        await asyncio.sleep(0)


def text(events: list[Any]) -> str:
    choices = [event["choices"][0] for event in events if isinstance(event, dict) and event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


async def test_a_completion_streams_a_token_a_step_and_its_usage() -> None:
    async with twin() as client:
        events = await client.stream(
            "/v1/completions", prompt=[5] * 20, max_tokens=8, ignore_eos=True, stream_options={"include_usage": True}
        )
    assert events[-1] == "data: [DONE]"
    assert len(events) == 8 + 2
    assert events[-2]["usage"] == {"prompt_tokens": 20, "total_tokens": 28, "completion_tokens": 8}
    assert len(tokenize(text(events))) == 8


async def test_a_chat_streams_its_role_and_its_tokens() -> None:
    async with twin() as client:
        events = await client.stream(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "hello"}],
            max_completion_tokens=4,
            ignore_eos=True,
        )
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(tokenize(text(events))) == 4
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_answers_without_streaming_say_the_same() -> None:
    async with twin() as client:
        status, chat = await client.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], max_tokens=4, ignore_eos=True
        )
        _, completion = await client.post("/v1/completions", prompt="hello", max_tokens=4, ignore_eos=True)
    assert status == 200
    assert chat["usage"]["completion_tokens"] == len(tokenize(chat["choices"][0]["message"]["content"])) == 4
    assert completion["usage"]["completion_tokens"] == len(tokenize(completion["choices"][0]["text"])) == 4


async def test_tokenize_counts_as_usage_does() -> None:
    prompt, messages = "How many tokens is this, then?", [{"role": "user", "content": "And this?"}]
    async with twin() as client:
        _, tokens = await client.post("/tokenize", prompt=prompt)
        _, answer = await client.post("/v1/completions", prompt=prompt, max_tokens=1)
        _, chat_tokens = await client.post("/tokenize", messages=messages)
        _, chat = await client.post("/v1/chat/completions", messages=messages, max_tokens=1)
    assert tokens["count"] == len(tokens["tokens"]) == answer["usage"]["prompt_tokens"]
    assert chat_tokens["count"] == chat["usage"]["prompt_tokens"]
    assert tokens["max_model_len"] == 512


async def test_min_tokens_and_max_tokens_fix_the_length() -> None:
    async with twin(free_output_tokens=2.0) as client:
        _, body = await client.post("/v1/completions", prompt=[1], max_tokens=30, min_tokens=30)
    assert body["usage"]["completion_tokens"] == 30
    assert body["choices"][0]["finish_reason"] == "length"


async def test_free_lengths_are_drawn_with_the_seed_and_say_stop() -> None:
    async def lengths(seed: int) -> list[tuple[int, str]]:
        async with twin(seed=seed, free_output_tokens=6.0) as client:
            bodies = [(await client.post("/v1/completions", prompt=[1], max_tokens=400))[1] for _ in range(4)]
        return [(b["usage"]["completion_tokens"], b["choices"][0]["finish_reason"]) for b in bodies]

    first = await lengths(1)
    assert first == await lengths(1) != await lengths(2)
    assert {reason for _, reason in first} == {"stop"}


async def test_the_servers_pages() -> None:
    async with twin(model="org/model", served_model_name="small") as client:
        async with client.session.get("/v1/models") as response:
            card = (await response.json())["data"][0]
        async with client.session.get("/version") as response:
            version = await response.json()
        async with client.session.get("/health") as response:
            health = response.status, await response.text()
        async with client.session.get("/nowhere") as response:
            nowhere = response.status
        async with client.session.head("/health") as response:
            head = response.status, await response.read()
    assert (card["id"], card["root"], card["max_model_len"]) == ("small", "org/model", 512)
    assert version == {"version": "0.32.0"}
    assert health == (200, "")
    assert head == (200, b"")
    assert nowhere == 404


async def test_refusals_come_as_vllms_error_bodies() -> None:
    async with twin() as client:
        unknown = await client.post("/v1/completions", model="other", prompt="x")
        too_long = await client.post("/v1/completions", prompt=[1] * 600)
        async with client.session.post("/v1/completions", data="prompt=x") as response:
            form = response.status
        async with client.session.post("/v1/completions", data=b"{", headers={"content-type": "application/json"}) as r:
            broken = r.status
    assert unknown[0] == unknown[1]["error"]["code"] == 404
    assert too_long[0] == 400
    assert "maximum context length is 512 tokens" in too_long[1]["error"]["message"]
    assert (form, broken) == (400, 400)


async def test_a_key_is_asked_for_under_v1_only() -> None:
    async with twin(api_key="secret") as client:
        async with client.session.get("/v1/models") as response:
            assert (response.status, await response.json()) == (401, {"error": "Unauthorized"})
        async with client.session.get("/v1/models", headers={"authorization": "Bearer secret"}) as response:
            assert response.status == 200
        async with client.session.get("/metrics") as response:
            assert response.status == 200


async def test_counters_are_what_clients_got() -> None:
    async with twin() as client:
        bodies = await asyncio.gather(
            *(client.post("/v1/completions", prompt=[n] * 10, max_tokens=5 + n, ignore_eos=True) for n in range(4))
        )
        metrics = await client.metrics()
    assert metrics["vllm:generation_tokens_total"] == sum(b["usage"]["completion_tokens"] for _, b in bodies) == 26
    assert metrics["vllm:prompt_tokens_total"] == 40
    assert metrics["vllm:request_success_total"] == 4
    assert metrics["vllm:time_to_first_token_seconds_count"] == 4
    assert metrics["vllm:inter_token_latency_seconds_count"] == 22
    assert metrics["vllm:num_requests_running"] == 0
    assert metrics["http_requests_total"] == 4
    assert metrics["vllm_twin_write_lateness_seconds_count"] == 26


async def test_a_client_that_leaves_is_aborted() -> None:
    async with twin(step_time=LinearStep(0.02, 0, 0, 0)) as client:
        response = await client.session.post(
            "/v1/completions", json={"prompt": [1], "max_tokens": 500, "ignore_eos": True, "stream": True}
        )
        await response.content.readuntil(b"\n\n")
        engine = client.server.engines[0].engine
        assert engine.unfinished == 1
        response.close()
        async with asyncio.timeout(5):
            # the gauges follow when the step under way has ended
            while (metrics := await client.metrics())["vllm:num_requests_running"]:
                assert engine.unfinished == 0
    assert metrics["vllm:request_success_total"] == 0
    assert metrics["vllm:num_requests_running"] == 0


async def test_a_second_turn_hits_what_the_first_one_left() -> None:
    async with twin() as client:
        messages = [{"role": "user", "content": "tell me " * 40}]
        _, first = await client.post("/v1/chat/completions", messages=messages, max_tokens=40, ignore_eos=True)
        said = first["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        await client.post("/v1/chat/completions", messages=messages, max_tokens=1, ignore_eos=True)
        metrics = await client.metrics()
    known = first["usage"]["total_tokens"] - 1
    assert metrics["vllm:prefix_cache_hits_total"] == known // 16 * 16


async def test_a_salt_hides_a_prompt_from_the_others() -> None:
    async with twin() as client:
        for salt in ("a", "b", "b"):
            await client.post("/v1/completions", prompt=[7] * 64, max_tokens=1, cache_salt=salt)
        metrics = await client.metrics()
    assert metrics["vllm:prefix_cache_hits_total"] == 48


async def test_connections_are_kept_and_requests_may_be_sent_ahead() -> None:
    body = json.dumps({"prompt": [1], "max_tokens": 2, "ignore_eos": True}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    ) + body
    async with twin() as client:
        host, port = client.session._base_url.host, client.session._base_url.port  # type: ignore[union-attr]
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request * 3)
        answers = 0
        async with asyncio.timeout(5):
            while answers < 3:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                assert json.loads(await reader.readexactly(length))["usage"]["completion_tokens"] == 2
                answers += 1
        writer.close()
        await writer.wait_closed()


async def test_bytes_that_are_no_http_are_answered_and_dropped() -> None:
    async with twin() as client:
        host, port = client.session._base_url.host, client.session._base_url.port  # type: ignore[union-attr]
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"nonsense\r\n\r\n")
        async with asyncio.timeout(5):
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
        await writer.wait_closed()


async def test_time_may_run_faster_than_life() -> None:
    async with twin(step_time=LinearStep(1.0, 0, 0, 0), time_scale=500.0) as client:
        async with asyncio.timeout(10):
            await client.post("/v1/completions", prompt=[1], max_tokens=100, ignore_eos=True)
        metrics = await client.metrics()
    assert metrics["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(100.0, rel=0.01)


async def test_engines_behind_one_front_end_share_the_load_and_are_told_apart() -> None:
    async with twin(data_parallel_size=2) as client:
        await asyncio.gather(
            *(client.post("/v1/completions", prompt=[1] * 9, max_tokens=20, ignore_eos=True) for _ in range(4))
        )
        done = [live.engine.counters.request_success["length"] for live in client.server.engines]
        async with client.session.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-data-parallel-rank": "1"}
        ) as response:
            assert response.status == 200
        ranked = client.server.engines[1].engine.counters.request_success
        async with client.session.post(
            "/v1/completions", json={"prompt": "x"}, headers={"X-data-parallel-rank": "7"}
        ) as response:
            assert response.status == 400
    assert done == [2, 2]
    assert sum(ranked.values()) == 3


async def test_drafts_come_several_to_a_chunk_and_are_counted_as_tokens() -> None:
    async with twin(engine={"speculation": Speculation(acceptance=(1.0, 1.0))}) as client:
        events = await client.stream(
            "/v1/completions", prompt=[1], max_tokens=10, ignore_eos=True, stream_options={"include_usage": True}
        )
    assert len(events) == 4 + 2
    assert events[-2]["usage"]["completion_tokens"] == len(tokenize(text(events))) == 10


async def test_tokens_are_late_by_less_than_the_machine_takes_to_write_them() -> None:
    async with twin(step_time=LinearStep(0.02, 0, 0, 0)) as client:
        await client.stream("/v1/completions", prompt=[1], max_tokens=20, ignore_eos=True)
        lateness = client.server.lateness
    assert lateness.count == 20
    # never early
    assert lateness.sum >= 0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size"),
        ({"time_scale": 0.0}, "time_scale"),
        ({"free_output_tokens": 0.5}, "free_output_tokens"),
    ],
)
def test_a_twin_that_cannot_be_is_refused_by_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=name):
        TwinConfig(**changes)


async def test_a_client_that_reads_late_gets_every_byte_in_order() -> None:
    tokens = 12_000
    fields = {"prompt": [1], "max_tokens": tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    body = json.dumps(fields).encode()
    engine = {"num_gpu_blocks": 1025, "max_model_len": 16_384}
    async with twin(engine=engine, step_time=LinearStep(1.0, 0, 0, 0), time_scale=20_000.0) as client:
        assert client.session._base_url is not None
        with socket.socket() as small:
            # a window of a few kilobytes: the server's socket is soon full
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            small.setblocking(False)
            await asyncio.get_running_loop().sock_connect(small, ("127.0.0.1", client.session._base_url.port))
            reader, writer = await asyncio.open_connection(sock=small)
            head = "POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            async with asyncio.timeout(60):
                # all is written before the first byte is read
                while not (await client.metrics())["vllm:request_success_total"]:
                    pass
                data = await reader.read(-1)
            writer.close()
            await writer.wait_closed()
    found = re.findall(rb'"token_ids":\[(\d+)\]', data)
    assert [int(token) for token in found] == [word_at(int(found[0]), n) for n in range(tokens)]
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_client_that_asks_for_leave_to_send_its_body_gets_it() -> None:
    body = b'{"prompt":"x","max_tokens":1}'
    async with twin() as client:
        assert client.session._base_url is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", client.session._base_url.port)
        head = "POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        async with asyncio.timeout(5):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b'{"prompt":5}'])
async def test_what_cannot_be_tokenized_is_refused(data: bytes) -> None:
    async with twin() as client, client.session.post("/tokenize", data=data) as response:
        assert response.status == 400


async def test_load_is_zero_as_without_its_flag() -> None:
    async with twin() as client, client.session.get("/load") as response:
        assert await response.json() == {"server_load": 0}
