"""Three small pools of a real vLLM: the wall shows within one level of where the pool says it will.

A measurement (four minutes a pool), so it runs with ``make calibrate-vllm``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.bench]

CLI = (sys.executable, "-m", "harness.cli")
BLOCK = 32
#: requests of 64 + 64 tokens end with four blocks
LENGTHS = ("--prompt-tokens", "64", "--output-tokens", "64")
FLAGS = ("--block-size", f"{BLOCK}", "--max-model-len", "256", "--max-num-batched-tokens", "256", "--enforce-eager")
#: blocks of the pool, one of them vLLM's own, and the users to try around what the others hold
POOLS = ((13, (2, 3, 4, 6)), (21, (3, 4, 6, 8)), (33, (6, 8, 10, 12)))


def vllm_harness(*args: str) -> str:
    done = subprocess.run([*CLI, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("blocks", "users"), POOLS)
def test_saturation_shows_within_one_level_of_the_prediction(
    blocks: int, users: tuple[int, ...], start_vllm: Callable[..., AbstractContextManager[Any]], tmp_path: Path
) -> None:
    out = tmp_path / f"pool-{blocks}"
    with start_vllm(*FLAGS, "--num-gpu-blocks-override", f"{blocks}") as server:
        vllm_harness(
            *("ramp", "--base-url", server.base_url, "--users", ",".join(map(str, users)), *LENGTHS),
            *("--duration", "40s", "--grace", "3m", "--quiet", "--out", str(out)),
        )
    document = json.loads(vllm_harness("compare", str(out), "--json"))
    predicted, measured = document["predicted"], document["measured"]
    low, high = predicted["interval"]
    print(f"{blocks} blocks: predicted {low:.1f} to {high:.1f} users, measured good {measured['last_good']}")
    print(f"  bad {measured['first_bad']}, {document['verdict']}: {measured['sign']}")
    assert low == pytest.approx((blocks - 1) / 4)
    assert measured["sign"]["limit"] == "wall"
    # the level that is predicted to be the first bad one, at the earliest and at the latest
    earliest, latest = (next((i for i, n in enumerate(users) if n > end), len(users)) for end in (low, high))
    found = users.index(measured["first_bad"])
    assert earliest - 1 <= found <= latest + 1
