"""What is running there, against servers of every kind."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from observe_servers import Handler, Serve, answering, metrics_text, unused_port

from harness.errors import HarnessError, NotVllm, Refused, Unreachable, UsageError
from harness.http_get import Getter
from harness.observe.probe import (
    ModelCard,
    ProbeResult,
    choose_model,
    metrics_address,
    metrics_name,
    probe,
    read_cards,
)

SERVER_INFO = {"vllm_config": {"scheduler_config": {"max_num_seqs": 64, "max_num_batched_tokens": 2048}}}


def as_json(document: Any, status: int = 200) -> Handler:
    return answering(json.dumps(document), status, "application/json")


def card(id: str, **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "object": "model",
        "owned_by": "vllm",
        "root": "/models/x",
        "parent": None,
        "max_model_len": 2048,
    } | more


def vllm_032(**changes: Handler) -> dict[str, Handler]:
    """The routes of a vLLM 0.32 in developer mode."""
    return {
        "GET /v1/models": as_json({"object": "list", "data": [card("smollm2")]}),
        "GET /health": answering(""),
        "GET /version": as_json({"version": "0.32.0"}),
        "GET /metrics": answering(metrics_text("vllm_032")),
        "POST /tokenize": as_json({"count": 3, "max_model_len": 2048, "tokens": [1, 2, 3]}),
        "GET /server_info": as_json(SERVER_INFO),
    } | changes


async def probed(base_url: str, *, api_key: str | None = None, **more: Any) -> ProbeResult:
    async with Getter(api_key=api_key, key_url=base_url) as getter:
        return await probe(getter, base_url, **more)


def lacking(result: ProbeResult) -> list[str]:
    return [missing.what.split(" (")[0] for missing in result.missing]


async def test_a_server_that_shows_everything_is_known_whole(serve: Serve) -> None:
    base = await serve(vllm_032())
    result = await probed(base)
    assert result.to_dict() == {
        "base_url": base,
        "model": "smollm2",
        "metrics_model": "smollm2",
        "model_root": "/models/x",
        "models": ["smollm2"],
        "max_model_len": 2048,
        "vllm_version": "0.32.0",
        "is_vllm": True,
        "version_family": "v1 0.12-0.32",
        "engines": 1,
        "pool": {
            "block_size": 128,
            "num_blocks": 364,
            "usable_blocks": 363,
            "tokens": 46592,
            "usable_tokens": 46464,
            "kv_cache_dtype": "auto",
            "kv_cache_memory_bytes": 1 << 30,
            "num_gpu_blocks_override": None,
            "gpu_memory_utilization": 0.92,
            "prefix_caching": True,
        },
        "usable_pool_tokens": 46464,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "speculative_decoding": True,
        "tokenize": True,
        "metrics_url": f"{base}/metrics",
        "missing": [],
        "notes": [
            "15 requests run and 0 wait by the gauges: other clients' traffic, or gauges left over from requests that"
            " were broken off",
            "prefix caching is on: prompts that share a beginning are measured faster than new ones",
        ],
    }


async def test_a_probe_comes_back_from_its_file(serve: Serve) -> None:
    result = await probed(await serve(vllm_032()))
    assert ProbeResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    with pytest.raises(ValueError, match="speed"):
        ProbeResult.from_dict(result.to_dict() | {"speed": 1})


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
async def test_the_base_url_may_end_in_v1_or_a_slash(serve: Serve, tail: str) -> None:
    base = await serve(vllm_032())
    assert (await probed(base + tail)).base_url == base


@pytest.mark.parametrize(("name", "usable"), [("vllm_v0", 38000), ("vllm_v1_09", 2070 * 16)])
async def test_older_servers_are_known_as_far_as_they_show(serve: Serve, name: str, usable: int) -> None:
    model = "meta-llama/Llama-3.1-8B-Instruct"
    routes = {
        "GET /v1/models": as_json({"data": [card(model, max_model_len=8192)]}),
        "GET /metrics": answering(metrics_text(name)),
    }
    result = await probed(await serve(routes))
    assert (result.vllm_version, result.usable_pool_tokens, result.max_model_len) == (None, usable, 8192)
    assert lacking(result) == ["the version", "waiting by reason", "max_num_seqs", "/tokenize"]
    assert all(missing.why_it_matters for missing in result.missing)


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (answering("", 404), "HTTP 404"),
        (answering('{"error":"Unauthorized"}', 401), "HTTP 401, guarded"),
        (answering("", 403), "HTTP 403, guarded"),
        (answering("<html><title>Login</title>"), "HTML or XML titled 'Login'"),
        (answering("python_info 1\n"), "--disable-log-stats"),
        (answering(metrics_text("vllm_032")[:9000]), "cut off"),
    ],
)
async def test_without_metrics_the_rest_is_known_and_the_loss_is_said(
    serve: Serve, handler: Handler, says: str
) -> None:
    result = await probed(await serve(vllm_032(**{"GET /metrics": handler})))
    assert (result.metrics_url, result.pool, result.engines, result.usable_pool_tokens) == (None, None, None, None)
    assert (result.model, result.max_model_len, result.is_vllm) == ("smollm2", 2048, True)
    assert lacking(result) == ["the server's metrics"]
    assert says in result.missing[0].what
    assert "preemptions" in result.missing[0].why_it_matters


async def test_metrics_may_be_elsewhere_and_the_key_does_not_follow(serve: Serve) -> None:
    seen: list[str | None] = []

    async def metrics(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response(text=metrics_text("vllm_032"))

    base = await serve(vllm_032(**{"GET /metrics": answering("", 404)}))
    elsewhere = (await serve({"GET /metrics": metrics})).replace("127.0.0.1", "localhost")
    result = await probed(base, api_key="k", metrics_url=elsewhere)
    assert (result.metrics_url, result.usable_pool_tokens) == (f"{elsewhere}/metrics", 46464)
    assert seen == [None]


async def test_metrics_elsewhere_that_cannot_be_reached_are_missing(serve: Serve) -> None:
    base = await serve(vllm_032())
    result = await probed(base, metrics_url=f"http://127.0.0.1:{unused_port()}")
    assert result.metrics_url is None
    assert "refused the connection" in result.missing[0].what


async def test_a_key_is_sent_where_one_is_needed(serve: Serve) -> None:
    async def models(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer right":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [card("smollm2")]})

    base = await serve(vllm_032(**{"GET /v1/models": models}))
    assert (await probed(base, api_key="right")).model == "smollm2"
    with pytest.raises(Refused, match="wants an API key") as without:
        await probed(base)
    assert "OPENAI_API_KEY" in without.value.hint
    with pytest.raises(Refused, match="refuses the API key") as wrong:
        await probed(base, api_key="wr0ng")
    assert "wr0ng" not in wrong.value.message + wrong.value.hint


@pytest.mark.parametrize(
    ("handler", "kind", "says"),
    [
        (answering("", 404), NotVllm, "does not exist"),
        (answering("", 500), Refused, "HTTP 500"),
        (answering("<html>hello</html>"), NotVllm, "no list of models: '<html>hello</html>'"),
        (as_json({"models": []}), NotVllm, "no list of models"),
        (as_json([1]), NotVllm, "no list of models"),
        (as_json({"data": [{"name": "x"}]}), NotVllm, "no list of models"),
        (as_json({"data": []}), Refused, "lists no model"),
    ],
)
async def test_a_server_that_cannot_be_used_is_refused(
    serve: Serve, handler: Handler, kind: type[HarnessError], says: str
) -> None:
    base = await serve(vllm_032(**{"GET /v1/models": handler}))
    with pytest.raises(kind, match=says) as caught:
        await probed(base)
    assert caught.value.exit_code == 5


async def test_a_dead_engine_is_refused(serve: Serve) -> None:
    base = await serve(vllm_032(**{"GET /health": answering("", 503)}))
    with pytest.raises(Refused, match="engine is dead"):
        await probed(base)


async def test_a_server_that_is_not_there_is_unreachable() -> None:
    with pytest.raises(Unreachable, match="refused the connection"):
        await probed(f"http://127.0.0.1:{unused_port()}")


async def test_a_url_that_is_none_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--metrics-url"):
        await probed("http://127.0.0.1:1", metrics_url="gpu7:8000")


async def test_another_openai_server_is_known_by_less(serve: Serve) -> None:
    base = await serve({"GET /v1/models": as_json({"object": "list", "data": [{"id": "gpt-x", "object": "model"}]})})
    result = await probed(base)
    assert (result.model, result.is_vllm, result.max_model_len, result.tokenize) == ("gpt-x", False, None, False)
    assert lacking(result) == [
        "the version",
        "the server's metrics",
        "max_num_seqs",
        "/tokenize",
        "max_model_len in /v1/models",
    ]


async def test_a_gateway_that_renames_the_model_is_followed_and_said(serve: Serve) -> None:
    base = await serve(vllm_032(**{"GET /v1/models": as_json({"data": [card("fast-model", root=None)]})}))
    result = await probed(base)
    assert (result.model, result.metrics_model) == ("fast-model", "smollm2")
    assert "'smollm2', not 'fast-model'" in result.notes[0]


async def test_metrics_of_several_other_models_are_of_no_use(serve: Serve) -> None:
    text = "".join(f'vllm:num_requests_running{{model_name="{m}"}} 1\n' for m in "ab")
    result = await probed(await serve(vllm_032(**{"GET /metrics": answering(text)})))
    assert result.metrics_url is None
    assert "a, b" in result.missing[0].what


async def test_a_pool_that_is_not_shown_is_missing(serve: Serve) -> None:
    text = metrics_text("vllm_032").replace('num_gpu_blocks="364"', 'num_gpu_blocks="None"')
    result = await probed(await serve(vllm_032(**{"GET /metrics": answering(text)})))
    assert lacking(result) == ["the size of the KV pool"]
    assert result.pool is not None
    assert (result.pool.block_size, result.pool.tokens, result.usable_pool_tokens) == (128, None, None)


async def test_a_sleeping_engine_and_odd_labels_are_noted(serve: Serve) -> None:
    text = (
        metrics_text("vllm_032")
        .replace('sleep_state="awake"} 1.0', 'sleep_state="awake"} 0.0')
        .replace('sliding_window="None"', 'sliding_window="some"')
        .replace(
            'num_requests_running{engine="0",model_name="smollm2"} 15', 'num_requests_running{model_name="smollm2"} 0'
        )
        .replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"')
    )
    result = await probed(await serve(vllm_032(**{"GET /metrics": answering(text)})))
    assert len(result.notes) == 2
    assert "sleeps" in result.notes[0]
    assert 'sliding_window="some"' in result.notes[1]


@pytest.mark.parametrize(
    "handler",
    [answering("", 404), answering("not json"), as_json([1]), as_json({"vllm_config": "text"}), as_json({})],
)
async def test_limits_that_are_not_shown_are_unknown(serve: Serve, handler: Handler) -> None:
    result = await probed(await serve(vllm_032(**{"GET /server_info": handler})))
    assert (result.max_num_seqs, lacking(result)) == (None, ["max_num_seqs"])


# --- cards ---------------------------------------------------------------------------------------------------------


def cards(*rows: dict[str, Any]) -> list[ModelCard]:
    return read_cards(json.dumps({"data": list(rows)}).encode(), "http://x/v1/models")


def test_the_only_base_model_is_chosen_and_its_adapters_are_not() -> None:
    there = cards(card("llama"), card("sql-lora", parent="llama", root="/lora/sql", max_model_len=None))
    assert choose_model(there, None).id == "llama"
    assert choose_model(there, "sql-lora").id == "sql-lora"


def test_aliases_of_one_model_are_one_model() -> None:
    there = cards(card("llama"), card("gpt-4-turbo"))
    assert choose_model(there, None).id == "llama"
    assert metrics_name(there, choose_model(there, "gpt-4-turbo")) == "llama"


def test_several_models_must_be_named() -> None:
    there = cards(card("a", root="/a"), card("b", root="/b"))
    with pytest.raises(Refused, match="several models") as caught:
        choose_model(there, None)
    assert "a, b" in caught.value.hint


def test_a_wrong_model_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(Refused, match="'smollm3'") as caught:
        choose_model(cards(card("smollm2")), "smollm3")
    assert "smollm2" in caught.value.hint


async def test_an_adapter_has_the_context_and_the_metrics_of_its_base(serve: Serve) -> None:
    data = [card("smollm2"), card("sql", parent="smollm2", root="/lora/sql", max_model_len=None)]
    result = await probed(await serve(vllm_032(**{"GET /v1/models": as_json({"data": data})})), model="sql")
    assert (result.model, result.metrics_model, result.max_model_len) == ("sql", "smollm2", 2048)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://h:8000", "http://h:8000/metrics"),
        ("http://h:8000/v1/", "http://h:8000/metrics"),
        ("http://h:8000/metrics", "http://h:8000/metrics"),
        ("http://h:8000/metrics/", "http://h:8000/metrics"),
        ("http://gw/llm/v1", "http://gw/llm/metrics"),
    ],
)
def test_metrics_are_below_the_root(given: str, url: str) -> None:
    assert metrics_address(given) == url
