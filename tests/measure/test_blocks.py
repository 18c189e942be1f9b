"""A window in blocks, as the comparison of two runs reads it: the numbers are those of the summary."""

from __future__ import annotations

import numpy as np
import pytest

from calibration.gate import Sample, mean_spot
from calibration.trace import RequestTrace
from harness.measure.blocks import blocks_in, sample_of
from harness.measure.from_records import Deltas, Requests
from harness.measure.summary import summarise
from harness.measure.window import StageLoad


def stage_of(users: int, rounds: int, failed: int = 0) -> tuple[dict[str, object], Requests]:
    n = users * rounds
    rng = np.random.default_rng(1)
    sent = np.repeat(np.arange(rounds) * 1.0, users) + np.tile(np.linspace(0, 0.9, users), rounds)
    ttft = rng.uniform(0.05, 0.1, n)
    bad = np.arange(n) < failed
    trace = RequestTrace(
        source="live",
        user=np.tile(np.arange(users), rounds),
        scheduled_s=sent,
        sent_s=sent,
        ttft_s=ttft,
        ttfa_s=ttft,
        e2e_s=np.full(n, 1.0),
        stream_end_s=np.full(n, 1.0),
        tpot_s=(1.0 - ttft) / 49,
        prompt_tokens=np.full(n, 64.0),
        output_tokens=np.full(n, 50.0),
        ok=~bad,
        incomplete=np.zeros(n, dtype=bool),
        failure=np.where(bad, "http_500", "").astype(object),
    )
    requests = Requests(trace, Deltas(chunks=np.full(n, 50)), np.full(n, 50.0))
    return summarise(0, trace, StageLoad(users=users)), requests


def test_the_means_of_the_blocks_are_those_of_the_summary() -> None:
    stage, requests = stage_of(4, 30)
    found = sample_of(stage, requests)
    assert isinstance(found, Sample)
    assert (found.load.users, found.load.prompt_tokens, found.load.output_tokens) == (4, 64, 50)
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        blocked = found.latencies[name]
        assert mean_spot(blocked, 0.05).value == pytest.approx(stage[name]["mean"])  # type: ignore[index]
        assert len(blocked.values) == stage[name]["n"]  # type: ignore[index]
    assert found.rates["output_tokens_per_s"].mean() == pytest.approx(stage["output_tokens_per_s"], rel=0.01)
    assert found.blocks >= 8


def test_failures_are_counted_over_the_whole_stage() -> None:
    stage, requests = stage_of(4, 30, failed=6)
    found = sample_of(stage, requests)
    assert isinstance(found, Sample)
    assert (found.failed, found.ended) == (6, 120)


def test_an_invalid_stage_says_why_it_is_left_out() -> None:
    stage, requests = stage_of(2, 10)
    found = sample_of({**stage, "valid": False, "reasons": ["client: too slow"]}, requests)
    assert found == "invalid: client: too slow"


@pytest.mark.parametrize(
    ("length_s", "life_s", "blocks"), [(10.0, 1.0, 8), (16.0, 1.0, 8), (30.0, 1.0, 15), (200.0, 1.0, 20), (1.5, 1.0, 2)]
)
def test_blocks_last_at_least_a_life(length_s: float, life_s: float, blocks: int) -> None:
    assert blocks_in(length_s, np.full(9, life_s)) == blocks
    assert blocks_in(length_s, np.empty(0)) == 2
