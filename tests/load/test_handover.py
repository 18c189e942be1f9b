"""A level that takes over from the one before it: nobody stops streaming who is wanted still, and nothing is counted in two
levels or in none."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from console import records_of, stages_of
from fault_thread import Witness
from hypothesis import given
from hypothesis import strategies as st

from harness.cli.demo import running_twin
from harness.clock import NS_PER_S
from harness.errors import Interrupted, RunInvalid
from harness.load.account import load_of
from harness.load.controller import Fleet, StageOutcome, _Shift, share
from harness.load.options import RampOptions
from harness.load.run import Run
from harness.load.stages import order_of, user_starts_s
from harness.measure.window import InFlight
from harness.observe.scrape import from_rows
from harness.record import Record
from harness.store import read_run
from loadprofiles.profile import Profile, ProfileError, Stage, load_profile, parse_profile, resolve

LEVELS = (2, 4, 8, 4)
#: between the end of a user's stream and its next send a busy machine may lie this long; no user is waited for
DIP_S = 0.2


def profile(levels: tuple[int, ...] = LEVELS, seconds: float = 1.0, **more: Any) -> Profile:
    stage = {"users": list(levels), "duration": seconds, "handover": True, "ramp_up": "100ms", **more.pop("stage", {})}
    return parse_profile(
        {"name": "relay", "workload": {"prompt_tokens": 8, "output_tokens": 20}, "stages": [stage], **more}, "relay"
    )


class Silent:
    """A view that keeps what it is told in words."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def says(self, message: str) -> None:
        self.said.append(message)

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


@pytest.fixture
async def witness() -> AsyncIterator[Witness]:
    async with Witness(models={"paced": "normal:ttft=0.05,itl=0.01"}) as server:
        yield server


def run_of(base_url: str, played: Profile, folder: Path, **more: Any) -> Run:
    given = {"model": "paced", "scrape_interval_s": None, "grace_s": 5.0, **more}
    return Run(RampOptions(base_url=base_url, profile=played, out=folder, **given), Silent())  # type: ignore[arg-type]


async def finish(run: Run) -> None:
    """A busy machine makes stages of a second invalid; what was sent and recorded is the matter here."""
    try:
        await asyncio.wait_for(run.execute(), 60)
    except RunInvalid:
        assert run.stages


def ends_ms(record: Record) -> float:
    assert record.sent_ms is not None
    assert record.stream_end_ms is not None
    return record.sent_ms + record.stream_end_ms


def dips_s(records: list[Record], level: int, span_s: tuple[float, float]) -> float:
    """The longest time in a span with fewer than ``level`` streams in flight."""
    flown = InFlight.of(
        np.array([(record.sent_ms or 0.0) / 1e3 for record in records]), np.array([ends_ms(r) / 1e3 for r in records])
    )
    longest = 0.0
    for (start, end), count in zip(pairwise(flown.times_s.tolist()), flown.counts.tolist(), strict=False):
        if count < level:
            longest = max(longest, min(end, span_s[1]) - max(start, span_s[0]))
    return longest


@pytest.mark.parametrize("processes", [1, 2, 3])
async def test_nobody_stops_streaming_between_levels_and_nothing_is_lost(
    witness: Witness, tmp_path: Path, processes: int
) -> None:
    await finish(run_of(witness.base_url, profile(), tmp_path / "run", processes=processes))
    records, stages = records_of(tmp_path / "run"), stages_of(tmp_path / "run")
    assert len(witness.prompts) == len(records), "one record a request, one request a record"
    assert len({record.request_id for record in records}) == len(records)
    assert {record.outcome for record in records} == {"ok"}
    sent = Counter(record.stage for record in records)
    assert [stage["requests"]["ok"] for stage in stages] == [sent[index] for index in range(4)]
    assert [stage["totals"]["output_tokens"] for stage in stages] == [20 * sent[index] for index in range(4)]
    assert {index: len({r.user for r in records if r.stage == index}) for index in range(4)} == dict(enumerate(LEVELS))
    starts_ms = [min(r.scheduled_ms for r in records if r.stage == index) for index in range(4)]
    for index, (before, after) in enumerate(pairwise(LEVELS), 1):
        # the first user of all may have been woken late, so borders are known that well
        border_s = starts_ms[0] / 1e3 + index
        assert starts_ms[index] / 1e3 >= border_s - DIP_S, "what is sent before the border is the level's before it"
        assert max((r.sent_ms or 0.0) for r in records if r.stage == index - 1) / 1e3 <= border_s + DIP_S
        assert dips_s(records, min(before, after), (border_s - 0.4, border_s + 0.4)) < DIP_S
    carried = [
        max(ends_ms(r) for r in records if r.stage == index - 1) - starts_ms[index] for index in range(1, len(LEVELS))
    ]
    assert max(carried) > 50, "the next level begins while streams of the one before go on"


async def test_a_user_goes_on_the_moment_its_stream_of_the_level_before_ends(witness: Witness, tmp_path: Path) -> None:
    await finish(run_of(witness.base_url, profile((3, 5)), tmp_path / "run", processes=2))
    records = records_of(tmp_path / "run")
    for user in range(3):
        last = max((r for r in records if r.user == user and r.stage == 0), key=ends_ms)
        first = min((r for r in records if r.user == user and r.stage == 1), key=lambda r: r.scheduled_ms)
        assert first.scheduled_ms == pytest.approx(ends_ms(last), abs=1.0)


async def test_a_think_time_goes_on_over_the_border(witness: Witness, tmp_path: Path) -> None:
    played = profile((2, 2), stage={"think": "600ms", "ramp_up": 0})
    await finish(run_of(witness.base_url, played, tmp_path / "run"))
    records = records_of(tmp_path / "run")
    for user in range(2):
        mine = sorted((r for r in records if r.user == user), key=lambda r: r.scheduled_ms)
        pauses = [b.scheduled_ms - ends_ms(a) for a, b in pairwise(mine)]
        assert len(pauses) >= 2
        assert pauses == pytest.approx([600.0] * len(pauses), abs=1.0)


async def test_a_window_begins_when_all_have_begun_and_the_last_stream_sent_before_has_ended(
    witness: Witness, tmp_path: Path
) -> None:
    await finish(run_of(witness.base_url, profile((4, 8, 2), 2.0), tmp_path / "run"))
    records, stages = records_of(tmp_path / "run"), stages_of(tmp_path / "run")
    first_s = min(r.scheduled_ms for r in records) / 1e3
    for index in (1, 2):
        border_s, window = first_s + 2 * index, stages[index]["window"]
        carried_s = max(ends_ms(r) for r in records if r.stage == index - 1) / 1e3
        assert stages[index]["handover_s"] == pytest.approx(carried_s - border_s, abs=0.3)
        assert window["start_s"] >= max(carried_s, border_s + (0.1 if index == 1 else 0.0)) - 0.001
        assert window["end_s"] <= border_s + 2.001
    assert "handover_s" not in stages[0]
    windows = [(stage["window"]["start_s"], stage["window"]["end_s"]) for stage in stages]
    assert all(one[1] <= two[0] for one, two in pairwise(windows)), "no moment is of two windows"


async def test_a_limit_met_ends_the_level_that_took_over(witness: Witness, tmp_path: Path) -> None:
    played = profile((1, 2, 3), 2.0, limits={"ttft": "10ms"})
    await finish(run_of(witness.base_url, played, tmp_path / "run"))
    stages = stages_of(tmp_path / "run")
    assert len(stages) == 2, "the second had begun when the first was summed up; the third never did"
    assert any(reason.startswith("ended before its time: stage 1: the median TTFT") for reason in stages[1]["reasons"])
    records = records_of(tmp_path / "run")
    assert len(records) == len(witness.prompts)
    assert sum(stage["requests"]["ok"] for stage in stages) == len(records)


async def test_an_interrupt_at_a_border_loses_no_record(witness: Witness, tmp_path: Path) -> None:
    run = run_of(witness.base_url, profile((3, 6, 6)), tmp_path / "run", processes=2)
    executing = asyncio.ensure_future(run.execute())
    while len(witness.prompts) < 20:  # noqa: ASYNC110  well into the second level
        await asyncio.sleep(0.01)
    run._interrupt()
    with pytest.raises(Interrupted):
        await asyncio.wait_for(executing, 30)
    records = records_of(tmp_path / "run")
    assert len(records) == len(witness.prompts)
    assert {record.outcome for record in records} == {"ok"}
    assert len(stages_of(tmp_path / "run")) == 2


def test_the_twin_is_never_idle_and_counts_what_we_count(tmp_path: Path) -> None:
    """On a server with a pool and a scheduler, its own counters beside our records."""
    flags = ("--num-gpu-blocks-override", "4001", "--max-model-len", "4096", "--max-num-seqs", "64")
    with running_twin(flags) as twin:
        played = profile(LEVELS, 3.0, workload={"prompt_tokens": 32, "output_tokens": 40})
        run = run_of(twin.base_url, played, tmp_path / "run", model=None, scrape_interval_s=0.1, processes=2)
        asyncio.run(finish(run))
    records, stages = records_of(tmp_path / "run"), stages_of(tmp_path / "run")
    assert {record.outcome for record in records} == {"ok"}
    scrapes = [s for s in from_rows(read_run(tmp_path / "run").scrapes()) if s.snapshot is not None]
    counted = [s.snapshot.generation_tokens for s in scrapes if s.snapshot is not None]
    assert counted[-1] - counted[0] == sum(record.output_tokens or 0 for record in records)
    first_s = min(r.scheduled_ms for r in records) / 1e3
    inside = [s for s in scrapes if first_s + 0.3 < s.at_s < first_s + 11.9]
    assert len(inside) > 30
    assert all(s.snapshot is not None and s.snapshot.running for s in inside), "never idle"
    for index, (before, after) in enumerate(pairwise(LEVELS), 1):
        border_s = first_s + 3 * index
        assert dips_s(records, min(before, after), (border_s - 0.5, border_s + 0.5)) < DIP_S
    for stage, level in zip(stages, LEVELS, strict=True):
        assert stage["client"]["concurrency_mean"] == pytest.approx(level, rel=0.05)
        assert not [reason for reason in stage["reasons"] if reason.startswith("other_traffic")]
        assert stage["server"]["unaccounted_tokens"] is None, "streams went on over the borders"


# --- who goes where


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_a_user_stays_with_its_worker(before: int, after: int, processes: int) -> None:
    def homes(users: int) -> dict[int, int]:
        stage = Stage(users=users, duration=1.0, prompt_tokens=1, output_tokens=1)
        shares = share(order_of(stage, 0, start_ns=0, seed=0, grace_s=1.0), processes)
        return {user: worker for worker, part in enumerate(shares) for user in part.users}

    one, two = homes(before), homes(after)
    assert all(one[user] == two[user] for user in range(min(before, after)))


def test_only_new_users_are_spread_over_the_ramp_up() -> None:
    stage = Stage(users=6, duration=10.0, ramp_up=2.0, prompt_tokens=1, output_tokens=1)
    assert user_starts_s(stage, 3).tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 2.0]
    assert user_starts_s(stage, 9).tolist() == [0.0] * 6
    assert user_starts_s(stage).tolist() == pytest.approx([0.0, 0.4, 0.8, 1.2, 1.6, 2.0])
    order = order_of(stage, 1, start_ns=5 * NS_PER_S, seed=0, grace_s=1.0, taken_over=3)
    assert order.takes_over
    assert order.user_start_ns == [5 * NS_PER_S] * 4 + [6 * NS_PER_S, 7 * NS_PER_S]


def test_what_is_measured_begins_after_the_last_stream_of_before() -> None:
    stage = Stage(users=6, duration=10.0, ramp_up=2.0, prompt_tokens=1, output_tokens=1)
    assert load_of(stage, 100.0, taken_over=(103.5, 3)).not_before_s == 103.5
    assert load_of(stage, 100.0, taken_over=(101.0, 3)).not_before_s == 102.0
    assert load_of(stage, 100.0, taken_over=(101.0, 8)).not_before_s == 101.0
    assert load_of(stage, 100.0).not_before_s is None


def test_a_dead_worker_loses_one_request_a_user_whatever_it_ran() -> None:
    """In the second of an overlap a user is in both stages and has one request in flight."""
    outcome = StageOutcome()
    orders = [
        order_of(Stage(users=n, duration=1.0, prompt_tokens=1, output_tokens=1), i, start_ns=0, seed=0, grace_s=1.0)
        for i, n in enumerate((2, 4))
    ]
    shifts = {order.index: _Shift(order, outcome) for order in orders}
    worker: Any = SimpleNamespace(number=0, dead="load worker 0 died", shifts=shifts, progress=None)
    lost = list(Fleet(1, "auto", lambda line: None)._lost(worker))
    assert [(record.stage, record.user) for record in lost] == [(0, 0), (0, 1), (1, 2), (1, 3)]


# --- what a profile may say


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"users": 4, "duration": 5, "handover": True}], "no level before it"),
        ([{"request_rate": 2, "duration": 5}, {"users": 4, "duration": 5, "handover": True}], "no users to take over"),
        ([{"users": 2, "requests": 5}, {"users": 4, "duration": 5, "handover": True}], "to end by duration alone"),
        ([{"users": 2, "duration": 5}, {"request_rate": 4, "duration": 5, "handover": True}], "takes over users"),
    ],
)
def test_a_handover_that_cannot_be_is_refused(stages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        parse_profile({"name": "x", "stages": stages}, "x")


def test_a_search_hands_nothing_over() -> None:
    with pytest.raises(ProfileError, match="leave handover out"):
        load_profile("knee", ["stages.0.handover=true"])


def test_a_shuffle_that_puts_a_count_before_a_handover_is_refused() -> None:
    stages = [{"users": 1, "duration": 5}, {"users": 2, "duration": 5, "handover": True}, {"users": 3, "requests": 9}]
    parsed = parse_profile({"name": "x", "stages": stages, "repeat": {"times": 20, "order": "random"}}, "x")
    with pytest.raises(ProfileError, match="has to end by duration alone"):
        resolve(parsed, max_model_len=None, pool_tokens=None)
