"""The twin's scheduler decides as vLLM 0.32.0's own, step by step, on the recorded random workloads.

The recording was made by tests/vllm/scheduler_oracle.py with vLLM's Scheduler and AsyncScheduler themselves.
"""

from __future__ import annotations

import json
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from calibration.twin.config import EngineConfig, Speculation
from calibration.twin.content import Content, chained_keys
from calibration.twin.scheduler import Scheduler
from calibration.twin.sequence import Sequence
from calibration.twin.step import Step

DATA = Path(__file__).parents[1] / "data" / "twin_scheduler_vllm_032.json"
CASES = json.loads(DATA.read_text())["cases"]


def tokens_of(requests: list[dict[str, Any]], number: int) -> list[int]:
    """The same tokens as in the recording: equal where the text is."""
    request = requests[number]
    if request["parent"] is not None:
        head = tokens_of(requests, request["parent"])
    else:
        head = [10_000 + 1_000 * (request["prefix"] or 0) + i for i in range(request["prefix_tokens"])]
    own = request["total"] - len(head)
    return head + [20_000 + 500 * number + i for i in range(own)]


class Replay:
    """A recorded workload on the twin's scheduler, driven as the recording was."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.requests = case["requests"]
        flags = dict(case["config"])
        drafts, accepted = flags.pop("drafts", 0), flags.pop("accepted", 0)
        sure = tuple(float(position < accepted) for position in range(drafts))
        self.config = EngineConfig(**flags, speculation=Speculation(acceptance=sure) if drafts else None)
        self.scheduler = Scheduler(self.config, random.Random(0))
        self.seqs: dict[int, Sequence] = {}
        self.preemptions = 0
        self.flying: deque[Step] = deque()

    def add(self, number: int) -> None:
        request = self.requests[number]
        seq = Sequence(
            request["length"],
            request["output"],
            finish_reason="stop" if request["stop"] else "length",
            content=Content(chained_keys(tokens_of(self.requests, number), self.config.block_size)),
            priority=request["priority"],
            payload=number,
        )
        seq.arrived_s = float(number)
        self.seqs[number] = seq
        self.scheduler.add(seq)

    def arrives(self, number: int, step: int) -> bool:
        parent = self.requests[number]["parent"]
        ended = parent is None or (parent in self.seqs and self.seqs[parent].ended)
        return ended and bool(self.requests[number]["step"] <= step)

    def run(self) -> list[list[int]]:
        rows: list[list[int]] = []
        depth = 2 if self.config.async_scheduling else 1
        waiting = deque(range(len(self.requests)))
        while True:
            for number in [n for n in waiting if self.arrives(n, len(rows))]:
                waiting.remove(number)
                self.add(number)
            for number, request in enumerate(self.requests):
                if request["abort"] == len(rows) and number in self.seqs and not self.seqs[number].ended:
                    self.scheduler.abort(self.seqs[number], list(self.flying))
            step = self.scheduler.schedule(self.flying[-1] if self.flying else None)
            if step is not None:
                self.preemptions += len(step.preempted)
            if step is not None and step.scheduled_tokens:
                self.flying.append(step)
                if len(self.flying) == depth:
                    self.update()
            elif self.flying:
                self.update()
            rows.append(self.row(step))
            if not waiting and not self.flying and self.scheduler.idle:
                return rows

    def update(self) -> None:
        step = self.flying.popleft()
        self.scheduler.update(step, self.flying[0] if self.flying else None)

    def row(self, step: Step | None) -> list[int]:
        check = 0
        for seq in self.scheduler.running:
            check = (check * 31 + seq.payload + 1) % 1_000_003
        return [
            0 if step is None else step.scheduled_tokens,
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            self.scheduler.pool.free,
            self.preemptions,
            check,
        ]


def label(case: dict[str, Any]) -> str:
    config = case["config"]
    return "-".join(
        word
        for word, on in (
            (config["scheduling_policy"], True),
            ("cache", config["enable_prefix_caching"]),
            ("async", config["async_scheduling"]),
            ("watermark", config["watermark"]),
            ("drafts", "drafts" in config),
        )
        if on
    )


@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{label(case)}" for n, case in enumerate(CASES)])
def test_every_step_is_vllms(case: dict[str, Any]) -> None:
    replay = Replay(case)
    rows = replay.run()
    for number, (ours, theirs) in enumerate(zip(rows, case["steps"], strict=False)):
        assert ours == theirs, f"step {number}: (scheduled, running, waiting, free blocks, preemptions, order)"
    assert len(rows) == len(case["steps"])


@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{label(case)}" for n, case in enumerate(CASES)])
def test_prefix_counters_are_vllms(case: dict[str, Any]) -> None:
    replay = Replay(case)
    replay.run()
    assert (replay.scheduler.prefix_queries, replay.scheduler.prefix_hits) == (
        case["prefix_queries"],
        case["prefix_hits"],
    )
