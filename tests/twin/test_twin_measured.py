"""The twin beside a real vLLM 0.32.0 under a small pool: SmolLM2-135M on two CPU cores, 64 in / 100 out, 40 blocks.

tests/data/twin_preemption_vllm_032.json holds, per level, what that server counted and when its users sent. The step
time was fitted to the staggered levels alone (mean time between tokens and TTFT), so every lock-step level is held out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.steptime import LinearStep
from calibration.twin.config import EngineConfig
from calibration.twin.engine import Engine
from calibration.twin.sequence import Sequence
from calibration.twin.simulate import Run, closed_loop

RECORD = json.loads((Path(__file__).parents[1] / "data" / "twin_preemption_vllm_032.json").read_text())
CONFIG = EngineConfig(num_gpu_blocks=41, block_size=32, max_model_len=512, max_num_seqs=64, max_num_batched_tokens=512)
STAGGERED_FIT = LinearStep(0.02897, 4.5e-4, 4.3e-6, 1.246e-3)
LOCK_STEP_FIT = LinearStep(0.02917, 9.06e-4, 9.45e-7, 1.22e-3)
#: from a user's last token to its next request, and from there to the engine, on that machine
THINK_S, OVERHEAD_S = 0.011, 0.004

LOCK = [level for level in RECORD["levels"] if level["mode"] == "lock"]
STAGGER = [level for level in RECORD["levels"] if level["mode"] == "stagger"]


def simulate(level: dict[str, Any], step: LinearStep) -> Run:
    lock = level["mode"] == "lock"
    return closed_loop(
        [Engine(CONFIG, step)],
        lambda user, nth: Sequence(64, 100),
        starts_s(level),
        1e9 if lock else level["duration_s"],
        think_s=THINK_S,
        overhead_s=OVERHEAD_S,
        # a lock-step level ends in the middle of a round: its length in requests, not in seconds, is what was held
        max_requests=level["requests"] if lock else None,
        drain=True,
    )


def starts_s(level: dict[str, Any]) -> list[float]:
    """When the users began. In lock-step the first ``first_batch`` of them got into the engine's first step."""
    users, first = level["users"], level["first_batch"]
    if level["mode"] == "stagger":
        return [0.011 + n * level["stagger_s"] for n in range(users)]
    return [0.011] * first + [0.0115 + n * 1e-4 for n in range(users - first)]


def users(level: dict[str, Any]) -> str:
    return str(level["users"])


@pytest.mark.parametrize("level", LOCK, ids=users)
def test_lock_step_levels_have_exactly_the_preemptions_and_steps_of_the_server(level: dict[str, Any]) -> None:
    counters = simulate(level, STAGGERED_FIT).engines[0].counters
    assert counters.num_preemptions == level["preemptions"]
    assert counters.iteration_tokens.count == level["steps"]
    assert counters.generation_tokens == level["generation_tokens"]
    assert counters.prompt_tokens == level["prompt_tokens"]


def test_preemptions_begin_at_the_level_they_began_at() -> None:
    def onset(levels: list[dict[str, Any]], step: LinearStep) -> int:
        return min(int(level["users"]) for level in levels if simulate(level, step).engines[0].counters.num_preemptions)

    assert onset(LOCK, STAGGERED_FIT) == 7
    assert onset(STAGGER, STAGGERED_FIT) == 10


@pytest.mark.parametrize("level", [level for level in STAGGER if level["users"] >= 4], ids=users)
def test_staggered_levels_have_the_servers_means(level: dict[str, Any]) -> None:
    """Held out as well: the step time is fitted to the lock-step levels. The server was sampled five times a second."""
    steps = simulate(level, LOCK_STEP_FIT).steps[0]
    place = np.searchsorted(steps.end_s, level["sampled_s"], side="right") - 1

    def mean(column: Any) -> float:
        return float(np.where(place >= 0, column[place], 0.0).mean())

    assert mean(steps.running) == pytest.approx(level["running_mean"], rel=0.05)
    assert mean(steps.kv_cache_usage) == pytest.approx(level["kv_usage_mean"], rel=0.05)
    # waiting is a small number of long waits: half a tenth of the users, not of itself
    assert mean(steps.waiting) == pytest.approx(level["waiting_mean"], abs=0.05 * level["users"])
