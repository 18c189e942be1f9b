"""Workloads through a worker, on the wire: what a user's next request holds is what the server answered before."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fault_thread import FaultThread

from harness.client import Exchange, StreamClient
from harness.clock import now_ns
from harness.load.orders import Setup, Tag, split
from harness.load.stages import order_of
from harness.load.worker import Worker
from harness.record import Record
from harness.workload.prepare import Prepared
from loadprofiles.profile import Stage
from loadprofiles.workload import Conversation, Synthetic

SEND = StreamClient.send


async def run(
    served: FaultThread, work: Prepared, monkeypatch: pytest.MonkeyPatch, **stage: Any
) -> tuple[list[Record], list[dict[str, Any]]]:
    """The records of a stage, and the bodies sent, in the order of their sending."""
    said: list[tuple[Tag, bytes]] = []
    bodies: list[dict[str, Any]] = []

    async def send(self: StreamClient, path: str, body: bytes, exchange: Exchange) -> None:
        bodies.append(json.loads(body))
        await SEND(self, path, body, exchange)

    monkeypatch.setattr(StreamClient, "send", send)
    setup = Setup(
        base_url=served.base_url,
        model="normal:ttft=0.001,itl=0",
        endpoint=work.spec.endpoint,
        run_start_ns=now_ns(),
        workload=work.for_workers(),
    )
    async with StreamClient(setup.base_url) as client:
        worker = Worker(setup, client, lambda message: said.append(split(message)))
        background = [asyncio.ensure_future(work) for work in (worker.hangar.run(), worker.make())]
        asked = Stage.model_validate({"ramp_up": "0s", **stage})
        try:
            await worker.run_stage(order_of(asked, 0, start_ns=now_ns(), seed=0, grace_s=5.0))
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
    return [Record.from_json(payload) for tag, payload in said if tag is Tag.RECORD], bodies


async def test_what_the_server_said_is_in_the_next_turn(faults: FaultThread, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Conversation(kind="conversation", turns=3, prompt_tokens=6, output_tokens=4)
    records, bodies = await run(faults, Prepared(spec=spec), monkeypatch, users=1, requests=3)
    assert [record.outcome for record in records] == ["ok"] * 3
    assert {record.content for record in records} == {None}, "kept for the next turn, not for the file"
    first, second, third = (body["messages"] for body in bodies)
    assert (len(first), len(second), len(third)) == (1, 3, 5)
    assert second[1]["role"] == "assistant"
    assert second[1]["content"], "the server's own words"
    assert third[:3] == second


async def test_requests_made_ahead_are_those_that_would_be_made_at_once(
    faults: FaultThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Synthetic(prompt_tokens=8, output_tokens=2)
    records, ahead = await run(
        faults, Prepared(spec=spec), monkeypatch, users=1, requests=10, prompt_tokens=8, output_tokens=2
    )
    monkeypatch.setattr(Worker, "make_ahead", lambda *_: None)
    _, at_once = await run(
        faults, Prepared(spec=spec), monkeypatch, users=1, requests=10, prompt_tokens=8, output_tokens=2
    )
    assert ahead == at_once
    assert len({record.request_id for record in records}) == 10


async def test_lengths_drawn_are_asked_and_recorded(faults: FaultThread, monkeypatch: pytest.MonkeyPatch) -> None:
    spread = {"distribution": "uniform", "low": 2, "high": 6}
    records, bodies = await run(
        faults, Prepared(spec=Synthetic()), monkeypatch, users=2, requests=12, prompt_tokens=8, output_tokens=spread
    )
    assert sorted(body["max_tokens"] for body in bodies) == sorted(r.asked_output_tokens or 0 for r in records)
    assert len({record.asked_output_tokens for record in records}) > 1
    assert all(record.output_tokens == record.asked_output_tokens for record in records)
