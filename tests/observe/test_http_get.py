"""One question, one whole answer, and every foreign error in our words."""

from __future__ import annotations

import asyncio
import errno
import inspect
import socket
import ssl

import aiohttp
import pytest
from aiohttp import client_exceptions, http_exceptions, web
from observe_servers import DATA, Serve, ServeRaw, answering, unused_port

from harness.errors import HarnessError, LocalFault, NotVllm, Refused, Unreachable, UsageError
from harness.http_get import (
    MAPPED,
    RULES,
    Getter,
    base_url_of,
    bearer,
    explain,
    failure_kind,
    is_loopback,
    proxy_for,
    rule_of,
)
from harness.record import Failure

URL = "http://gpu7:8000/metrics"


def aiohttp_errors() -> list[type[BaseException]]:
    """Every exception a client of aiohttp can meet; its warnings, its end-of-stream mark, and WebSockets' misuse are none."""
    found = {
        kind
        for module in (aiohttp, client_exceptions, http_exceptions)
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__.startswith("aiohttp")
    }
    return sorted(found - {aiohttp.EofStream, aiohttp.WSMessageTypeError}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", [k for k in aiohttp_errors() if not issubclass(k, Warning)], ids=lambda k: k.__name__)
def test_every_exception_of_aiohttp_has_a_rule(kind: type[BaseException]) -> None:
    assert issubclass(kind, MAPPED)
    # ClientError itself is the base aiohttp never raises
    assert kind is aiohttp.ClientError or any(issubclass(kind, rule.types) for rule in RULES)


def test_a_more_specific_class_is_asked_before_its_base() -> None:
    for i, rule in enumerate(RULES):
        for earlier in RULES[:i]:
            for kind in rule.types:
                assert not issubclass(kind, earlier.types), f"{kind.__name__} never reaches its rule"


@pytest.mark.parametrize(
    ("error", "kind", "says", "failure"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "no"), Unreachable, "refused the connection", Failure.CONNECTION),
        (OSError(errno.EMFILE, "Too many open files"), LocalFault, "no more files", Failure.CONNECTION),
        (OSError(errno.ENETUNREACH, "unreachable"), Unreachable, "no route", Failure.CONNECTION),
        (ConnectionResetError(errno.ECONNRESET, "reset"), Unreachable, "broke off", Failure.CONNECTION),
        (OSError(errno.EADDRNOTAVAIL, "no address"), Unreachable, "no address", Failure.CONNECTION),
        (socket.gaierror(-2, "Name or service not known"), Unreachable, "unknown host", Failure.CONNECTION),
        (ssl.SSLError(1, "wrong version number"), Unreachable, "TLS", Failure.CONNECTION),
        (TimeoutError(), Unreachable, "in time", Failure.TIMEOUT),
        (aiohttp.ConnectionTimeoutError(), Unreachable, "no connection", Failure.TIMEOUT),
        (aiohttp.ServerDisconnectedError(), Unreachable, "broke off", Failure.CONNECTION),
        (aiohttp.ClientPayloadError("cut"), Unreachable, "broke off", Failure.TRUNCATED),
        (http_exceptions.BadStatusLine("SSH-2.0"), NotVllm, "HTTP", Failure.PROTOCOL),
        (aiohttp.InvalidURL("x"), UsageError, "not a URL", Failure.CLIENT),
        (aiohttp.ClientError("new kind"), Unreachable, "new kind", Failure.CONNECTION),
    ],
)
def test_an_error_becomes_one_sentence_and_a_failure_kind(
    error: BaseException, kind: type[HarnessError], says: str, failure: Failure
) -> None:
    told = explain(error, URL)
    assert type(told) is kind
    assert says in told.message
    assert failure_kind(error) is failure
    assert told.hint or isinstance(told, Unreachable)


def test_a_bug_of_ours_has_no_rule() -> None:
    assert rule_of(KeyError("x")) is None
    assert not isinstance(KeyError("x"), MAPPED)


async def test_an_answer_is_whole_and_stamped(serve: Serve) -> None:
    base = await serve({"GET /metrics": answering("a 1\n"), "POST /tokenize": answering("{}", 400)})
    async with Getter() as getter:
        answer = await getter.get(f"{base}/metrics")
        refused = await getter.post_json(f"{base}/tokenize", {"prompt": "a"})
    assert (answer.status, answer.body, answer.ok, answer.text()) == (200, b"a 1\n", True, "a 1\n")
    assert answer.started_ns < answer.ended_ns
    assert answer.elapsed_s == (answer.ended_ns - answer.started_ns) / 1e9
    assert (refused.status, refused.ok) == (400, False)


async def test_the_key_goes_out_as_a_bearer_token_and_own_headers_beside_it(serve: Serve) -> None:
    seen: dict[str, str] = {}

    async def note(request: web.Request) -> web.Response:
        seen.update(request.headers)
        return web.Response()

    base = await serve({"GET /": note})
    async with Getter(api_key="s3cret", headers={"X-Team": "a"}) as getter:
        await getter.get(base + "/")
    assert seen["Authorization"] == "Bearer s3cret"
    assert seen["X-Team"] == "a"


async def test_a_same_origin_redirect_is_followed(serve: Serve) -> None:
    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/metrics/")

    base = await serve({"GET /metrics": redirect, "GET /metrics/": answering("a 1\n")})
    async with Getter() as getter:
        answer = await getter.get(f"{base}/metrics")
    assert (answer.body, answer.url) == (b"a 1\n", f"{base}/metrics/")


async def test_a_redirect_in_circles_is_refused(serve: Serve) -> None:
    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPFound("/")

    base = await serve({"GET /": redirect})
    async with Getter() as getter:
        with pytest.raises(Refused, match="in circles"):
            await getter.get(base + "/")


async def test_a_refused_connection_is_unreachable() -> None:
    async with Getter() as getter:
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises(Unreachable, match="refused the connection") as caught:
                await getter.get(f"http://{host}:{unused_port()}/metrics")
            assert caught.value.exit_code == 5


async def test_an_unknown_host_is_named() -> None:
    async with Getter() as getter:
        with pytest.raises(Unreachable, match=r"unknown host no\.such\.host\.invalid"):
            await getter.get("http://no.such.host.invalid/metrics")


@pytest.mark.parametrize("url", ["http:///x", "ftp://x/", "http://127.0.0.1:99999/", f"http://{'a' * 300}/", "x"])
async def test_what_is_no_url_is_a_usage_error(url: str) -> None:
    async with Getter() as getter:
        with pytest.raises(UsageError, match="not a URL"):
            await getter.get(url)


async def test_a_slow_answer_is_given_up_in_time(serve_raw: ServeRaw) -> None:
    base = await serve_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", hold=True)
    async with Getter(timeout_s=0.05) as getter:
        with pytest.raises(Unreachable, match="in time"):
            await getter.get(base)


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (b"", Unreachable, "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", Unreachable, "broke off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", Unreachable, "broke off"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", NotVllm, "does not answer in HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", NotVllm, "does not answer in HTTP"),
    ],
)
async def test_broken_bytes_are_told_apart(
    serve_raw: ServeRaw, answer: bytes, kind: type[HarnessError], says: str
) -> None:
    base = await serve_raw(answer)
    async with Getter(timeout_s=5) as getter:
        with pytest.raises(kind, match=says):
            await getter.get(base)


async def test_https_against_plain_http_is_a_tls_failure(serve: Serve) -> None:
    base = await serve({"GET /": answering("")})
    async with Getter() as getter:
        with pytest.raises(Unreachable, match="TLS with"):
            await getter.get(base.replace("http://", "https://"))


async def test_an_untrusted_certificate_is_refused_unless_told_otherwise(serve: Serve) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(DATA / "tls" / "localhost.crt", DATA / "tls" / "localhost.key")
    base = await serve({"GET /": answering("hello")}, context)
    async with Getter() as getter:
        with pytest.raises(Unreachable, match="certificate") as caught:
            await getter.get(base + "/")
    assert "--insecure" in caught.value.hint
    async with Getter(verify_tls=False) as getter:
        assert (await getter.get(base + "/")).body == b"hello"


async def test_an_endless_answer_is_cut(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.http_get.MAX_BODY_BYTES", 1 << 20)

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 65536)
        except ConnectionResetError:
            return response

    base = await serve({"GET /": endless})
    async with Getter() as getter:
        with pytest.raises(NotVllm, match="more than 1 MiB"):
            await getter.get(base + "/")
    await asyncio.sleep(0)


async def test_a_getter_asks_only_while_it_is_open() -> None:
    with pytest.raises(RuntimeError):
        await Getter().get("http://127.0.0.1/")


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        (" https://gw.example/team/llm/v1/ ", "https://gw.example/team/llm"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_a_base_url_is_understood_with_and_without_v1(given: str, base: str) -> None:
    assert base_url_of(given) == base


@pytest.mark.parametrize(
    "given",
    ["localhost:8000", "", "ftp://x", "http://", "http://h:port", "http://h/?a=1", "http://h/#f", "http://u:pw@h:1"],
)
def test_what_is_no_base_url_is_refused_with_what_was_expected(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        base_url_of(given)
    assert "pw" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("key", ["line\nbreak", "naïve", " s3cret "])
def test_a_key_no_header_can_carry_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        bearer(key)
    assert key.strip() not in caught.value.message + caught.value.hint


def test_no_key_sends_no_header() -> None:
    assert bearer(None) == bearer("") == {}


def test_loopback_never_goes_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "gpu8")
    assert proxy_for("http://127.0.0.1:8000/metrics") is None
    assert proxy_for("http://[::1]:8000/metrics") is None
    assert proxy_for("http://gpu8:8000/metrics") is None
    assert proxy_for("http://gpu7:8000/metrics") == "http://proxy:3128"
    assert is_loopback("localhost")
    assert not is_loopback("gpu7")
