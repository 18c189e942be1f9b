"""The load worker against everything that can go wrong: one outcome each, nothing lost, every stage ends in its bound."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest
from server import FaultServer

from harness.client import StreamClient
from harness.clock import NS_PER_S, now_ns, sleep_s
from harness.load.flight import Flight
from harness.load.orders import Setup, StageOrder, Tag, split
from harness.load.stages import order_of
from harness.load.worker import Worker
from harness.measure.gaps import GapHistogram
from harness.record import Record
from loadprofiles.profile import Stage


class Load:
    """A worker in this process, and what it said."""

    def __init__(self, worker: Worker, said: list[tuple[Tag, bytes]]) -> None:
        self.worker = worker
        self._said = said

    def order(self, *, grace_s: float = 5.0, index: int = 0, **stage: Any) -> StageOrder:
        asked = {"prompt_tokens": 8, "output_tokens": 5, **stage}
        return order_of(Stage.model_validate(asked), index, start_ns=now_ns(), seed=0, grace_s=grace_s)

    async def run(self, order: StageOrder) -> list[Record]:
        before = len(self.records)
        await self.worker.run_stage(order)
        return self.records[before:]

    async def stage(self, **stage: Any) -> list[Record]:
        return await self.run(self.order(**stage))

    @property
    def records(self) -> list[Record]:
        return [Record.from_json(payload) for tag, payload in self._said if tag is Tag.RECORD]


@asynccontextmanager
async def loading(server: FaultServer, model: str, **setup: Any) -> AsyncIterator[Load]:
    said: list[tuple[Tag, bytes]] = []
    full = Setup(base_url=server.base_url, model=model, run_start_ns=now_ns(), **{"endpoint": "completions", **setup})
    async with StreamClient(full.base_url, connect_timeout_s=full.connect_timeout_s) as client:
        worker = Worker(full, client, lambda message: said.append(split(message)))
        hangar = asyncio.ensure_future(worker.hangar.run())
        try:
            yield Load(worker, said)
        finally:
            worker.cut()
            hangar.cancel()
            await asyncio.gather(hangar, return_exceptions=True)


async def one(server: FaultServer, model: str, **setup: Any) -> Record:
    """The record of a single request."""
    async with loading(server, model, **setup) as load:
        records = await load.stage(users=1, requests=1)
    assert len(records) == 1, "every request ends in exactly one record"
    return records[0]


async def test_a_true_answer_is_measured_to_the_token(fault_server: FaultServer) -> None:
    record = await one(fault_server, "normal:ttft=0.05,itl=0.02", save_content=True, save_gaps=True)
    assert (record.outcome, record.output_tokens, record.output_tokens_source) == ("ok", 5, "usage")
    assert record.ttft_ms == pytest.approx(50, abs=15)
    assert record.tpot_ms == pytest.approx(20, abs=5)
    assert record.e2e_ms == pytest.approx(130, abs=20)
    assert len(record.chunk_gaps_ms or ()) == 4
    assert record.warnings == ()


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_reads_cut_anywhere_change_nothing(fault_server: FaultServer, endpoint: str) -> None:
    record = await one(fault_server, "trickle:bytes=7,itl=0.001", endpoint=endpoint)
    assert (record.outcome, record.output_tokens, record.chunks) == ("ok", 5, 5)


async def test_a_whole_answer_in_one_write_has_one_arrival(fault_server: FaultServer) -> None:
    record = await one(fault_server, "one_write", save_gaps=True)
    assert record.outcome == "ok"
    assert record.ttft_ms == record.e2e_ms
    assert set(record.chunk_gaps_ms or ()) == {0.0}


@pytest.mark.parametrize(
    "model", ["rst:after=2", "close:after=2", "chunk_cut", "garbage", "garbage_chunk", "no_json", "html_502"]
)
async def test_a_failed_request_leaves_nothing_that_waits_for_the_collector(
    fault_server: FaultServer, model: str
) -> None:
    """The collector comes every half hour to a worker (see its ``main``): until then such cycles would pile up."""
    async with loading(fault_server, model) as load:
        gc.collect()
        gc.disable()
        try:
            records = await load.stage(users=5, requests=5)
            await asyncio.sleep(0.05)  # the loop lets go of what it closed
            left = [thing for thing in gc.get_objects() if isinstance(thing, Flight)]
        finally:
            gc.enable()
    assert {record.outcome for record in records} == {"failed"}
    assert left == []


@pytest.mark.parametrize(
    ("model", "failure", "message"),
    [
        ("rst_before_headers", "connection", ""),
        ("close_before_headers", "connection", ""),
        ("rst_after_headers", "connection", ""),
        ("rst:after=2", "connection", ""),
        ("close:after=2", "truncated", "closed the connection"),
        ("chunk_cut", "truncated", "closed the connection"),
        ("garbage", "protocol", ""),
        ("garbage_chunk", "protocol", "not HTTP"),
        ("no_json", "protocol", "not JSON"),
        ("truncated", "truncated", ""),
        ("error_in_stream", "server_error_in_stream", "EngineCore"),
        ("abort", "aborted", ""),
        ("not_a_stream", "protocol", ""),
        ("html_502", "http_502", "502 Bad Gateway"),
        ("unauthorized", "http_401", "Unauthorized"),
        ("model_not_found", "http_404", "does not exist"),
        ("too_long", "http_400", "maximum context length is 512"),
        ("too_many", "http_429", "Too many requests"),
        ("unavailable", "http_503", "queue full"),
        ("http:status=302", "http_302", ""),
    ],
)
async def test_each_fault_is_one_failure_of_its_kind(
    fault_server: FaultServer, model: str, failure: str, message: str
) -> None:
    record = await one(fault_server, model)
    assert (record.outcome, record.failure) == ("failed", failure), record.message
    assert message in (record.message or "")


async def test_half_closed_streams_end_as_truncated(fault_server: FaultServer) -> None:
    record = await one(fault_server, "half_close", stall_timeout_s=1.0)
    assert (record.outcome, record.failure) == ("failed", "truncated")


async def test_an_error_body_of_megabytes_is_cut(fault_server: FaultServer) -> None:
    record = await one(fault_server, "big_error:bytes=10000000")
    assert record.failure == "http_500"
    assert len(record.message or "") <= 500
    assert (record.message or "").startswith("xxx") or "xxx" in (record.message or "")


@pytest.mark.parametrize("model", ["silent", "stall:after=1", "comments:after=0", "comments:after=2"])
async def test_no_content_for_the_stall_timeout_is_a_stall(fault_server: FaultServer, model: str) -> None:
    began = now_ns()
    record = await one(fault_server, model, stall_timeout_s=0.3)
    assert (record.outcome, record.failure) == ("failed", "stalled")
    assert (now_ns() - began) / NS_PER_S < 2.0


async def test_time_in_which_the_client_was_suspended_is_no_stall(fault_server: FaultServer) -> None:
    """Half the stream comes before the client sleeps for two seconds, half after: the server never stalled."""
    async with loading(fault_server, "normal:ttft=0.05,itl=0.3,tokens=4", stall_timeout_s=0.8) as load:
        running = asyncio.ensure_future(load.stage(users=1, requests=1, output_tokens=4))
        await asyncio.sleep(0.5)
        sleep_s(2.0)
        records = await running
    assert [record.outcome for record in records] == ["ok"]


async def test_slow_headers_are_a_late_first_token_and_no_failure(fault_server: FaultServer) -> None:
    record = await one(fault_server, "slow_headers:delay=0.3")
    assert record.outcome == "ok"
    assert (record.ttft_ms or 0) > 300


async def test_a_request_beyond_its_total_time_is_a_timeout(fault_server: FaultServer) -> None:
    record = await one(fault_server, "endless", request_timeout_s=0.4)
    assert (record.outcome, record.failure) == ("failed", "timeout")
    assert record.chunks > 5


async def test_a_stream_that_is_done_but_never_closes_is_ok(fault_server: FaultServer) -> None:
    record = await one(fault_server, "done_hold", stall_timeout_s=0.3)
    assert record.outcome == "ok"
    assert record.output_tokens == 5


async def test_a_wrong_content_length_is_no_silent_success(fault_server: FaultServer) -> None:
    longer = await one(fault_server, "wrong_length:off=100")
    # everything was said, finish and usage too; only the framing promised more
    assert longer.outcome == "ok"
    assert longer.warnings != ()
    shorter = await one(fault_server, "wrong_length:off=-40")
    assert shorter.outcome in ("ok", "failed")
    assert shorter.warnings != () or shorter.failure is not None


async def test_a_clamped_answer_shows_beside_what_was_asked(fault_server: FaultServer) -> None:
    record = await one(fault_server, "normal:clamp=3")
    assert (record.outcome, record.output_tokens, record.asked_output_tokens) == ("ok", 3, 5)


async def test_a_refused_connection_is_a_connection_failure() -> None:
    async with FaultServer() as server:
        gone = server.base_url
    async with StreamClient(gone) as client:
        assert client.in_flight == set()
    server.port = int(gone.rsplit(":", 1)[1])
    record = await one(server, "normal")
    assert (record.outcome, record.failure, record.http_status) == ("failed", "connection", None)
    assert record.message


async def test_a_stale_connection_is_replaced_and_said(fault_server: FaultServer) -> None:
    async with loading(fault_server, "drop_reused") as load:
        records = await load.stage(users=1, requests=3)
    assert [record.outcome for record in records] == ["ok", "ok", "ok"]
    assert [("stale_connection" in record.warnings) for record in records] == [False, True, True]


async def test_an_idle_gap_longer_than_the_servers_keep_alive_fails_nothing(fault_server: FaultServer) -> None:
    async with loading(fault_server, "close_idle:after=0.2") as load:
        records = await load.stage(users=2, requests=6, think="0.4s")
    assert [record.outcome for record in records] == ["ok"] * 6


async def test_a_hundred_and_fifty_streams_are_really_in_flight(fault_server: FaultServer) -> None:
    """The barrier answers nobody before 150 requests wait: a client with a limit of its own never gets an answer."""
    async with loading(fault_server, "barrier:n=150") as load:
        records = await load.stage(users=150, requests=150, ramp_up="0.2s")
    assert Counter(record.outcome for record in records) == {"ok": 150}
    assert fault_server.stats.in_flight_max == 150


async def test_arrivals_keep_their_absolute_deadlines(fault_server: FaultServer) -> None:
    """200 a second for 5 seconds: 1,000 sends, the last one within 1 % of its time."""
    async with loading(fault_server, "normal:ttft=0.001,itl=0") as load:
        records = await load.stage(request_rate=200.0, arrival="constant", duration=5.0, output_tokens=1)
    assert len(records) == 1000
    sent_ms = sorted(record.sent_ms or 0.0 for record in records)
    assert (sent_ms[-1] - sent_ms[0]) / 1e3 == pytest.approx(4.995, rel=0.01)


async def test_latency_from_schedule_holds_the_wait_that_latency_from_sent_hides(fault_server: FaultServer) -> None:
    """Ten arrivals 0.1 s apart, one in flight, 0.5 s of service: on average 2.3 s after the schedule, 0.5 s after the send."""
    async with loading(fault_server, "normal:ttft=0.5,itl=0") as load:
        records = await load.stage(request_rate=10.0, arrival="constant", requests=10, users=1, output_tokens=1)
    from_sent = [record.e2e_ms or 0.0 for record in records]
    from_schedule = [(record.sent_ms or 0.0) - record.scheduled_ms + (record.e2e_ms or 0.0) for record in records]
    assert sum(from_sent) / 10 == pytest.approx(500, rel=0.05)
    assert sum(from_schedule) / 10 == pytest.approx(2300, rel=0.05)


async def test_a_stage_ends_in_its_bound_and_counts_the_stragglers(fault_server: FaultServer) -> None:
    began = now_ns()
    async with loading(fault_server, "silent") as load:
        records = await load.run(load.order(users=3, duration=0.3, grace_s=0.3, ramp_up=0))
    assert (now_ns() - began) / NS_PER_S < 2.0
    assert [record.outcome for record in records] == ["incomplete"] * 3
    assert all(record.failure is None for record in records)


async def test_a_drained_stage_sends_nothing_more_and_reads_to_the_end(fault_server: FaultServer) -> None:
    async with loading(fault_server, "normal:ttft=0.05,itl=0.02,tokens=10") as load:
        running = asyncio.ensure_future(load.run(load.order(users=2, duration=30.0, output_tokens=10, ramp_up=0)))
        await asyncio.sleep(0.35)
        assert load.worker.stage is not None
        load.worker.stage.drain()
        sent = load.worker.stage.sent
        records = await running
    assert {record.outcome for record in records} == {"ok"}
    assert len(records) == sent


async def test_a_failing_server_is_not_hammered(fault_server: FaultServer) -> None:
    async with loading(fault_server, "unavailable") as load:
        records = await load.stage(users=1, duration=1.0, ramp_up=0)
    # 0, 0.1, 0.3, 0.7 s: the back-off doubles
    assert 3 <= len(records) <= 5


async def test_retry_after_is_honoured_only_when_asked(fault_server: FaultServer) -> None:
    async with loading(fault_server, "too_many:retry_after=1,times=1", honour_retry_after=True) as load:
        patient = await load.stage(users=1, requests=2)
    waited_ms = (patient[1].sent_ms or 0.0) - (patient[0].sent_ms or 0.0)
    assert [record.outcome for record in patient] == ["failed", "ok"]
    assert waited_ms >= 1000


async def test_think_time_is_kept_between_requests(fault_server: FaultServer) -> None:
    async with loading(fault_server, "normal:ttft=0.01,itl=0") as load:
        records = await load.stage(users=1, requests=3, think="0.2s", output_tokens=1)
    for before, after in itertools.pairwise(records):
        pause_ms = (after.sent_ms or 0.0) - (before.sent_ms or 0.0) - (before.stream_end_ms or 0.0)
        assert pause_ms == pytest.approx(200, abs=50)


@pytest.mark.parametrize(
    ("model", "think"), [("normal:ttft=0.001,itl=0", 30.0), ("too_many:retry_after=1000000000", 0.0)]
)
async def test_nobody_sleeps_past_the_end_of_a_stage(fault_server: FaultServer, model: str, think: float) -> None:
    async with loading(fault_server, model, honour_retry_after=True) as load:
        began_ns = now_ns()
        records = await load.run(load.order(users=2, duration=0.3, think=think, ramp_up=0, grace_s=20.0))
    assert len(records) == 2
    assert now_ns() - began_ns < 5 * NS_PER_S


async def test_every_prompt_is_its_own(fault_server: FaultServer) -> None:
    async with loading(fault_server, "normal:ttft=0.001,itl=0") as load:
        workload = load.worker.workload
        for stage in range(3):
            workload.begin(stage, 16, 4)
        bodies = {workload.ask(stage, number, 0).body for stage in range(3) for number in range(50)}
        again = workload.ask(1, 7, 5).body
    assert len(bodies) == 150
    assert again in bodies, "and the same request is always the same prompt"


@pytest.mark.parametrize("case", ["event_and_id_fields", "http_503_json", "reset_mid_stream"])
async def test_replayed_cases_come_through_the_whole_client(fault_server: FaultServer, case: str) -> None:
    expected = {
        "event_and_id_fields": ("ok", None),
        "http_503_json": ("failed", "http_503"),
        "reset_mid_stream": ("failed", "connection"),
    }
    record = await one(fault_server, case)
    assert (record.outcome, record.failure) == expected[case]


async def test_gaps_reach_the_histogram_and_only_the_asked_records(fault_server: FaultServer) -> None:
    async with loading(fault_server, "normal:ttft=0.01,itl=0.01") as load:
        records = await load.stage(users=2, requests=4)
    assert all(record.chunk_gaps_ms is None for record in records)
    counted = [orjson.loads(payload) for tag, payload in load._said if tag is Tag.GAPS]
    assert [GapHistogram.from_dict(said["gaps"]).stats()["n"] for said in counted] == [16]


def test_the_private_names_of_aiohttp_this_rests_on_are_there() -> None:
    from aiohttp import BaseConnector
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.streams import StreamReader

    source: Callable[..., Any] = ResponseHandler.__init__
    assert "_payload" in source.__code__.co_names
    assert "_factory" in BaseConnector.__init__.__code__.co_names
    assert {"_buffer", "_size", "_eof", "_http_chunk_splits", "_protocol"} <= set(StreamReader.__slots__)


def test_an_order_can_be_told_apart_from_its_shares() -> None:
    order = order_of(Stage(users=2, requests=3, prompt_tokens=1, output_tokens=1), 0, start_ns=0, seed=0, grace_s=0.0)
    assert replace(order, users=[1]).users == [1]
