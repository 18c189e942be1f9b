"""Several worker processes are one load: the same users and requests, stages in step, one file, no traffic per token."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from console import records_of, stages_of
from fault_thread import Witness

from harness.cli.ramp import _processes
from harness.clock import NS_PER_MS, NS_PER_S, now_ns
from harness.errors import RunInvalid
from harness.load.controller import Fleet, StageOutcome, share
from harness.load.options import RampOptions
from harness.load.orders import Setup, StageEnd, StageOrder, Tag, line
from harness.load.run import Run
from harness.load.stages import order_of
from harness.record import Record
from loadprofiles.profile import Profile, Stage, parse_profile


@pytest.fixture
async def witness() -> AsyncIterator[Witness]:
    async with Witness() as server:
        yield server


@asynccontextmanager
async def fleet_of(count: int, server: Witness, model: str) -> AsyncIterator[tuple[Fleet, list[Record]]]:
    """Workers at the server, and the records they send."""
    records: list[Record] = []
    fleet = Fleet(count, "auto", lambda row: records.append(Record.from_json(row)))
    setup = Setup(base_url=server.base_url, model=model, endpoint="completions", run_start_ns=now_ns())
    try:
        await fleet.start(setup)
        yield fleet, records
    finally:
        await fleet.close()


def order(index: int = 0, *, lead_s: float = 0.1, **stage: object) -> StageOrder:
    asked = Stage.model_validate({"prompt_tokens": 8, "output_tokens": 4, "ramp_up": "0s", **stage})
    return order_of(asked, index, start_ns=now_ns() + int(lead_s * NS_PER_S), seed=7, grace_s=5.0)


async def loaded(count: int, server: Witness, **stage: object) -> tuple[StageOutcome, list[Record], Counter[object]]:
    before = len(server.prompts)
    async with fleet_of(count, server, "normal") as (fleet, records):
        outcome = await fleet.stage(share(order(**stage), count))
    return outcome, records, Counter(server.prompts[before:])


async def test_two_processes_send_what_one_sends(witness: Witness) -> None:
    _, alone, asked_alone = await loaded(1, witness, users=5, requests=20)
    outcome, together, asked_together = await loaded(2, witness, users=5, requests=20)
    assert outcome.faults == []
    assert len(alone) == len(together) == 20
    assert {record.user for record in together} == {record.user for record in alone} == set(range(5))
    ids = [record.request_id for record in together]
    assert len(set(ids)) == 20, "no request twice"
    assert set(asked_together.values()) == {1}, "no prompt twice: two processes never meet in a prefix"
    assert {len(prompt) for prompt in asked_together} == {8}
    assert set(asked_alone.values()) == {1}


async def test_requests_go_where_the_users_are(witness: Witness) -> None:
    """Three processes for two users: the third has nobody to send its share."""
    _, records, _ = await loaded(3, witness, users=2, requests=10)
    assert len(records) == 10


async def test_two_processes_send_the_same_arrivals_as_one(witness: Witness) -> None:
    stage = {"request_rate": 40.0, "requests": 30}
    meant = order(**stage)
    async with fleet_of(2, witness, "normal") as (fleet, records):
        await fleet.stage(share(meant, 2))
        start_ms = (meant.start_ns - fleet._run_start_ns) / NS_PER_MS
    due_ms = sorted((due - meant.start_ns) / NS_PER_MS for due in meant.due_ns)
    assert sorted(record.scheduled_ms - start_ms for record in records) == pytest.approx(due_ms, abs=1e-6)


async def test_stages_are_in_step(witness: Witness) -> None:
    """No worker sends for a stage before the last record of the stage before is in."""
    async with fleet_of(2, witness, "normal") as (fleet, records):
        for index in range(3):
            await fleet.stage(share(order(index, users=4, requests=8), 2))
            assert Counter(record.stage for record in records) == dict.fromkeys(range(index + 1), 8)
    ends = {
        index: max((r.sent_ms or 0.0) + (r.stream_end_ms or 0.0) for r in records if r.stage == index)
        for index in range(3)
    }
    begins = {index: min(r.sent_ms or 0.0 for r in records if r.stage == index) for index in range(3)}
    assert ends[0] < begins[1] < ends[1] < begins[2]


async def test_all_workers_start_a_stage_at_the_same_moment(witness: Witness) -> None:
    async with fleet_of(2, witness, "normal") as (fleet, records):
        meant = order(users=2, requests=2, lead_s=0.3)
        await fleet.stage(share(meant, 2))
        start_ms = (meant.start_ns - fleet._run_start_ns) / NS_PER_MS
    late_ms = [(record.sent_ms or 0.0) - start_ms for record in records]
    assert min(late_ms) >= 0
    assert max(late_ms) < 150, "the first send opens a connection; the clocks are one"


class Silent:
    """A view for runs nobody watches."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


async def test_a_run_of_two_processes_is_one_file(witness: Witness, tmp_path: Path) -> None:
    profile = parse_profile(
        {
            "name": "two",
            "workload": {"prompt_tokens": 8, "output_tokens": 4},
            "stages": [{"users": [2, 4], "requests": 12}],
        },
        "two",
    )
    options = RampOptions(
        base_url=witness.base_url,
        profile=profile,
        out=tmp_path / "run",
        model="normal",
        processes=2,
        scrape_interval_s=None,
    )
    run = Run(options, Silent())  # type: ignore[arg-type]
    await asyncio.wait_for(_whatever_the_verdict(run), 60)
    records = records_of(tmp_path / "run")
    assert Counter(record.stage for record in records) == {0: 12, 1: 12}
    assert {record.user for record in records if record.stage == 1} == {0, 1, 2, 3}
    assert [stage["requests"]["ok"] for stage in stages_of(tmp_path / "run")] == [12, 12]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "requests.jsonl",
        "run.json",
        "scrapes.jsonl",
        "summary.json",
    ]


async def _whatever_the_verdict(run: Run) -> None:
    """A busy machine makes the run invalid; its files are the matter here."""
    try:
        await run.execute()
    except RunInvalid:
        assert run.stages


# --- how many processes


def profile_of(*users: int) -> Profile:
    return parse_profile(
        {"name": "x", "stages": [{"users": list(users), "duration": "5s"}], "workload": {"prompt_tokens": 8}}, "x"
    )


@pytest.mark.parametrize(
    ("most", "cores", "processes"),
    [
        (1, 8, 1),
        (500, 8, 1),
        (501, 8, 2),
        (1000, 8, 2),
        (1001, 8, 3),
        (2000, 8, 4),
        (5000, 8, 7),
        (5000, 2, 1),
        (99, 1, 1),
    ],
)
def test_auto_is_a_worker_per_500_users_and_leaves_a_core(
    monkeypatch: pytest.MonkeyPatch, most: int, cores: int, processes: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert _processes("auto", profile_of(1, most)) == processes


def test_a_number_of_processes_is_taken_as_given() -> None:
    assert _processes("3", profile_of(1)) == 3


# --- the pipe


class Talk:
    """A worker started by hand, and everything it says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def stage(self, meant: StageOrder) -> list[bytes]:
        """The messages of one stage."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line(Tag.STAGE, meant))
        said = []
        while message := await asyncio.wait_for(self._process.stdout.readline(), 30):
            said.append(message)
            if message.startswith(Tag.STAGE_END.value):
                return said
        pytest.fail("the worker ended")


@asynccontextmanager
async def talking_worker(server: Witness, model: str) -> AsyncIterator[Talk]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "harness.load.worker", "auto"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**26,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(Tag.HELLO.value)
    setup = Setup(base_url=server.base_url, model=model, endpoint="completions", run_start_ns=now_ns())
    process.stdin.write(line(Tag.SETUP, setup))
    yield Talk(process)
    process.stdin.close()
    await asyncio.wait_for(process.wait(), 10)


async def test_no_line_is_sent_for_a_token(witness: Witness) -> None:
    """Twenty times the tokens in the same two seconds: the same few lines."""
    async with talking_worker(witness, "normal:ttft=0.01,itl=0.02") as worker:
        few = await worker.stage(order(users=1, requests=1, output_tokens=100))
    async with talking_worker(witness, "normal:ttft=0.01,itl=0.001") as worker:
        many = await worker.stage(order(users=1, requests=1, output_tokens=2000))
    for said in (few, many):
        kinds = Counter(message[:1] for message in said)
        assert kinds[Tag.RECORD.value] == kinds[Tag.GAPS.value] == kinds[Tag.STAGE_END.value] == 1
        seconds = max(Record.from_json(m[1:]).stream_end_ms or 0 for m in said if m[:1] == Tag.RECORD.value) / 1e3
        assert kinds[Tag.PROGRESS.value] <= 4 * (seconds + 1) + 1
        assert set(kinds) == {tag.value for tag in (Tag.RECORD, Tag.GAPS, Tag.STAGE_END, Tag.PROGRESS)}
    bytes_of = [sum(len(m) for m in said if m[:1] != Tag.GAPS.value) for said in (few, many)]
    assert bytes_of[1] < 2000 * 2, "less than two bytes a token"
    histogram = next(len(message) for message in many if message[:1] == Tag.GAPS.value)
    assert histogram < 2000 * 8, "counts by bin, not gaps"


def test_a_worker_that_was_suspended_shows_in_the_outcome() -> None:
    outcome = StageOutcome()
    outcome.add(StageEnd(stage=0, cpu_s=1.0, wall_s=10.0, loop_lag_ms_p99=4.0, loop_lag_ms_max=16_000.0))
    outcome.add(StageEnd(stage=0, cpu_s=2.0, wall_s=10.0, loop_lag_ms_p99=6.0, loop_lag_ms_max=9.0, not_sent=2))
    assert (outcome.away_s, outcome.loop_lag_ms_p99, outcome.cpu, outcome.not_sent) == (16.0, 6.0, 0.2, 2)
