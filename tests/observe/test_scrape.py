"""Scrapes are stamped, kept whatever happens, and never in the way."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from observe_servers import Serve, ServeRaw, answering, metrics_text, unused_port

from harness.clock import NS_PER_S, now_ns
from harness.errors import LocalFault, Unreachable
from harness.http_get import Answer, Getter
from harness.observe.scrape import Scrape, ScrapeLoop, Stillness, from_rows
from harness.observe.snapshot import Snapshot, read

METRICS = "http://gpu7:8000/metrics"


class FakeClock:
    """A clock that moves only when someone sleeps or a fake server takes its time."""

    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns

    async def sleep_until(self, due_ns: int) -> None:
        self.ns = max(self.ns, due_ns)
        await asyncio.sleep(0)


class FakeServer:
    """Answers with what ``body`` says at that time, after ``takes_s``."""

    def __init__(self, clock: FakeClock, body: Callable[[float], str | Exception], takes_s: float = 0.0) -> None:
        self.clock, self.body, self.takes_s = clock, body, takes_s
        self.asked_at_s: list[float] = []

    async def get(self, url: str, *, timeout_s: float | None = None) -> Answer:
        started_ns = self.clock.ns
        self.asked_at_s.append(started_ns / NS_PER_S)
        body = self.body(started_ns / NS_PER_S)
        self.clock.ns += round(self.takes_s * NS_PER_S)
        if isinstance(body, Exception):
            raise body
        return Answer(url, 200, body.encode(), {}, started_ns, self.clock.ns)


def text(**values: float) -> str:
    names = {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "usage": "vllm:kv_cache_usage_perc",
        "tokens": "vllm:generation_tokens_total",
        "steps": "vllm:iteration_tokens_total_count",
    }
    return "".join(f'{names[key]}{{engine="0",model_name="m"}} {value}\n' for key, value in values.items())


def loop_of(server: FakeServer, clock: FakeClock, **more: Any) -> ScrapeLoop:
    return ScrapeLoop(server, METRICS, run_start_ns=0, clock=clock, **more)


async def turns(count: int = 8) -> None:
    """Let the loop's task have the floor a few times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(clock: FakeClock, seconds: float) -> None:
    for _ in range(1000):
        if clock.ns >= seconds * NS_PER_S:
            return
        await asyncio.sleep(0)
    raise AssertionError("the clock stands still")


async def test_a_scrape_is_stamped_with_the_middle_of_its_call() -> None:
    clock = FakeClock()
    clock.ns = 10 * NS_PER_S
    server = FakeServer(clock, lambda _: text(running=3), takes_s=0.2)
    loop = ScrapeLoop(server, METRICS, run_start_ns=4 * NS_PER_S, clock=clock)
    scrape = await loop.scrape_now()
    assert (scrape.at_s, scrape.duration_s, scrape.error) == (6.1, 0.2, None)
    assert scrape.snapshot is not None
    assert scrape.snapshot.running == 3
    assert loop.last_good is scrape


async def test_scrapes_start_at_the_interval_and_a_slow_one_is_not_made_up_for() -> None:
    clock = FakeClock()
    server = FakeServer(clock, lambda _: text(running=1))
    async with loop_of(server, clock, interval_s=0.5):
        await until(clock, 1.0)
        server.takes_s = 1.2
        await until(clock, 2.5)
        server.takes_s = 0.0
        await until(clock, 4.0)
    gaps = {b - a for a, b in itertools.pairwise(server.asked_at_s)}
    assert gaps == {0.5, 1.5}
    assert all(at % 0.5 == 0 for at in server.asked_at_s)


async def test_errors_are_scrapes_too_and_the_last_good_one_stays() -> None:
    clock = FakeClock()

    def body(at_s: float) -> str | Exception:
        return (
            text(running=1) if at_s < 1 else Unreachable("gpu7:8000 refused the connection") if at_s < 2 else "<html>\n"
        )

    server = FakeServer(clock, body)
    seen: list[Scrape] = []
    async with loop_of(server, clock, sink=seen.append) as loop:
        await until(clock, 2.5)
    assert [s.error and s.error[:24] for s in seen[:5]] == [
        None,
        None,
        "gpu7:8000 refused the co",
        "gpu7:8000 refused the co",
        "this is HTML or XML, not",
    ]
    assert sum(scrape.snapshot is not None for scrape in seen) == 2
    assert loop.last_good is seen[1]


async def test_what_the_sink_raises_ends_the_loop_and_is_heard() -> None:
    clock = FakeClock()

    def full(scrape: Scrape) -> None:
        raise LocalFault("disk full")

    server = FakeServer(clock, lambda _: text(running=1))
    loop = loop_of(server, clock, sink=full)
    await loop.__aenter__()
    await turns()
    with pytest.raises(LocalFault):
        await loop.scrape_now()
    assert len(server.asked_at_s) == 1
    with pytest.raises(LocalFault, match="disk full"):
        await loop.__aexit__(None, None, None)


async def test_a_bug_ends_the_loop_and_is_heard() -> None:
    clock = FakeClock()
    loop = loop_of(FakeServer(clock, lambda _: KeyError("a bug")), clock)
    await loop.__aenter__()
    await turns()
    with pytest.raises(KeyError):
        await loop.__aexit__(None, None, None)


async def test_one_scrape_is_in_flight_at_a_time() -> None:
    clock = FakeClock()
    in_flight = [0, 0]

    class Slow(FakeServer):
        async def get(self, url: str, *, timeout_s: float | None = None) -> Answer:
            in_flight[0] += 1
            in_flight[1] = max(in_flight)
            await asyncio.sleep(0)
            in_flight[0] -= 1
            return await super().get(url, timeout_s=timeout_s)

    server = Slow(clock, lambda _: text(running=1))
    loop = loop_of(server, clock)
    await asyncio.gather(*(loop.scrape_now() for _ in range(5)))
    assert (in_flight[1], len(server.asked_at_s)) == (1, 5)


def test_an_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match="interval_s"):
        ScrapeLoop(FakeServer(FakeClock(), lambda _: ""), METRICS, run_start_ns=0, interval_s=0.0)


# --- waiting for idleness --------------------------------------------------------------------------------------------


def at(at_s: float, **values: Any) -> Scrape:
    snapshot = Snapshot(model="m", model_names=("m",), version_family=None, engines=1, **values)
    return Scrape(at_s=at_s, duration_s=0.0, snapshot=snapshot)


def test_two_scrapes_that_stand_still_with_nothing_running_are_idle() -> None:
    stillness = Stillness(stale_after_s=3.0)
    idle = {"running": 0, "waiting": 0, "steps": 7}
    assert [stillness.look(at(0.0, **idle)), stillness.look(at(0.25, **idle))] == [False, True]


def test_counters_that_move_are_not_idle_though_the_gauges_say_zero() -> None:
    stillness = Stillness(stale_after_s=3.0)
    looks = [stillness.look(at(i / 4, running=0, waiting=0, generation_tokens=i * 10)) for i in range(5)]
    assert looks == [False] * 5
    assert stillness.reason == "10 output tokens came of requests that are not ours"


def test_any_counter_that_moves_is_named() -> None:
    stillness = Stillness(stale_after_s=3.0)
    for posts in (1.0, 2.0):
        assert not stillness.look(at(posts, running=0, waiting=0, http_requests={"/v1/completions": posts}))
    assert stillness.reason == "http_requests still grows"


def test_gauges_left_over_from_broken_off_requests_are_idle_after_a_while() -> None:
    """V1 sets its gauges when the engine steps; with no request left it does not."""
    stillness = Stillness(stale_after_s=3.0)
    stale = {"running": 5, "waiting": 0, "kv_cache_usage": 0.2, "steps": 99}
    assert [stillness.look(at(float(i), **stale)) for i in range(5)] == [False, False, False, False, True]
    assert "stale gauges" in stillness.reason


def test_a_gauge_that_moves_is_no_stale_one() -> None:
    stillness = Stillness(stale_after_s=1.0)
    looks = [stillness.look(at(float(i), running=5, kv_cache_usage=0.1 * i, steps=99)) for i in range(5)]
    assert not any(looks)


def test_a_scrape_that_fails_or_a_restart_begins_anew() -> None:
    stillness = Stillness(stale_after_s=3.0)
    idle = {"running": 0, "waiting": 0, "steps": 7}
    assert not stillness.look(at(0.0, **idle))
    assert not stillness.look(Scrape(at_s=0.5, duration_s=0.0, error="no"))
    assert stillness.reason == "the metrics could not be read"
    assert not stillness.look(at(1.0, **idle))
    assert not stillness.look(at(1.5, running=0, waiting=0, steps=0))
    assert stillness.reason == "the server restarted"


async def test_settling_ends_at_the_first_stillness() -> None:
    clock = FakeClock()
    server = FakeServer(clock, lambda at_s: text(running=2 if at_s < 1 else 0, waiting=0, tokens=min(at_s, 1.5) * 100))
    loop = loop_of(server, clock)
    assert await loop.settle(timeout_s=10.0) is None
    assert loop.last_good is not None
    assert loop.last_good.at_s == 1.75


async def test_settling_is_bounded_and_says_what_moves() -> None:
    clock = FakeClock()
    server = FakeServer(clock, lambda at_s: text(running=2, waiting=1, tokens=at_s * 100))
    loop = loop_of(server, clock)
    said = await loop.settle(timeout_s=2.0)
    assert said == "the server is not idle: 25 output tokens came of requests that are not ours"
    assert clock.ns == 2 * NS_PER_S


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_row_gives_the_scrape_back() -> None:
    good, bad = at(1.25, running=3, preemptions=1), Scrape(at_s=2.5, duration_s=0.125, error="no answer")
    for scrape in (good, bad):
        assert Scrape.from_row(json.loads(json.dumps(scrape.to_row(), allow_nan=False))) == scrape
    assert bad.to_row() == {"at_ms": 2500.0, "duration_ms": 125.0, "error": "no answer"}


@pytest.mark.parametrize("change", [{"error": "both"}, {"extra": 1}])
def test_a_row_of_other_keys_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a scrape has"):
        Scrape.from_row(at(1.0).to_row() | change)
    with pytest.raises(ValueError, match="a scrape has"):
        Scrape.from_row({"at_ms": 1.0, "duration_ms": 1.0})


# --- against real sockets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "running"), [("vllm_v0", 12), ("vllm_v1_09", 12), ("vllm_032", 15)])
async def test_the_three_texts_are_scraped_over_http(serve: Serve, name: str, running: int) -> None:
    base = await serve({"GET /metrics": answering(metrics_text(name))})
    start_ns = now_ns()
    async with Getter() as getter, ScrapeLoop(getter, f"{base}/metrics", run_start_ns=start_ns, interval_s=60) as loop:
        scrape = await loop.scrape_now()
    assert scrape.error is None
    assert scrape.snapshot is not None
    assert scrape.snapshot.running == running
    assert scrape.at_s > scrape.duration_s / 2 > 0
    assert scrape.at_s + scrape.duration_s / 2 <= (now_ns() - start_ns) / NS_PER_S


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (401, '{"error":"Unauthorized"}', "HTTP 401: a key is needed"),
        (404, "", "HTTP 404: no /metrics there"),
        (502, "<html>", "HTTP 502: no metrics"),
        (200, "<html><title>Login</title>", "this is HTML or XML titled 'Login', not metrics"),
        (200, "python_info 1\n", "no vllm: series in this /metrics text"),
    ],
)
async def test_other_answers_are_errors_with_their_reason(serve: Serve, status: int, body: str, error: str) -> None:
    base = await serve({"GET /metrics": answering(body, status)})
    async with Getter() as getter:
        scrape = await ScrapeLoop(getter, f"{base}/metrics", run_start_ns=now_ns()).scrape_now()
    assert (scrape.snapshot, scrape.error) == (None, error)


async def test_a_server_that_dies_while_it_answers_leaves_an_error(serve_raw: ServeRaw) -> None:
    half = metrics_text("vllm_032").encode()[:20_000]
    told = await serve_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 45885\r\n\r\n" + half)
    untold = await serve_raw(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + half)
    async with Getter() as getter:
        errors = [(await ScrapeLoop(getter, url, run_start_ns=0).scrape_now()).error for url in (told, untold)]
    assert "broke off" in str(errors[0])
    assert "cut off inside its last line" in str(errors[1])


async def test_a_dead_server_leaves_errors_and_raises_nothing() -> None:
    url = f"http://127.0.0.1:{unused_port()}/metrics"
    async with Getter() as getter:
        scrape = await ScrapeLoop(getter, url, run_start_ns=now_ns()).scrape_now()
    assert "refused the connection" in str(scrape.error)


async def test_a_slow_answer_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.observe.scrape.TIMEOUT_S", 0.05)
    released = asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        await released.wait()
        return web.Response()

    base = await serve({"GET /metrics": slow})
    async with Getter() as getter:
        scrape = await ScrapeLoop(getter, f"{base}/metrics", run_start_ns=now_ns()).scrape_now()
    released.set()
    assert "in time" in str(scrape.error)
    assert 0.04 < scrape.duration_s < 2.0


def test_scrapes_read_back_share_what_does_not_change_and_follow_their_baseline() -> None:
    config = 'vllm:cache_config_info{block_size="16",engine="0"} 1\n'
    zero, one, two = (
        Scrape(at_s=float(at), duration_s=0.01, snapshot=read(config + text(running=at))) for at in range(3)
    )
    failed = Scrape(at_s=1.5, duration_s=0.01, error="no")
    scrapes = from_rows([scrape.to_row() for scrape in (one, failed, two)], before=zero)
    assert scrapes == [zero, one, failed, two]
    configs = {id(scrape.snapshot.cache_config) for scrape in scrapes if scrape.snapshot is not None}
    assert len(configs) == 1
