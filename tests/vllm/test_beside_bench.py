"""`vllm bench serve` and `ramp` in turn against one server: do two clients read the same of it?

    VLLM_PYTHON=.venv-vllm/bin/python VLLM_MODEL=.cache/smollm2 .venv/bin/python -m pytest -m "vllm and bench" -s tests/vllm/test_beside_bench.py

The server is the twin, whose own histogram of the time to first token stands beside: what a client reads above it is the
client's. Needs a quiet machine: on a busy one both clients are late, each in its own way.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from calibration.gate import student
from harness.cli.demo import running_twin
from harness.formats.checks import whole_run
from harness.formats.imported import write_folder
from harness.formats.read import read_files
from harness.store import read_run

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python")).absolute()
MODEL = Path(os.environ.get("VLLM_MODEL", ROOT / ".cache/smollm2")).absolute()
PAIRS, USERS, REQUESTS, OUTPUT_TOKENS = 5, 8, 96, 64
#: as the twin counts the random text that `vllm bench serve` makes of 64 tokens
PROMPT_TOKENS, THEIR_PROMPT_TOKENS = 111, 64
METRICS = ("ttft_ms", "tpot_ms", "e2e_ms", "output_tokens_per_s")
#: a mean of one client over that of the other; a difference within 90 % of the pairs' own scatter is none. Of TTFT: who
#: sends just after a step began waits for the next one, so a client that is late to send is queued less, by a share of a
#: step (12.5 ms of 46), and reads its own lateness on top
CLOSE = {"ttft_ms": 0.10, "tpot_ms": 0.02, "e2e_ms": 0.02, "output_tokens_per_s": 0.02}
#: what our reading of the first token may lie above the server's own
MOST_LATE_MS = 5.0

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.bench,
    pytest.mark.skipif(not PYTHON.exists() or not MODEL.exists(), reason="vLLM's environment is not built"),
]

_BENCH = """
import argparse, sys
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""


class Read(NamedTuple):
    """What a client read, and the server's own mean time to first token of the same requests, ms."""

    client: dict[str, float]
    server_ttft_ms: float


def first_tokens(base_url: str) -> tuple[float, float]:
    """Sum (s) and count of the server's histogram."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    found = [
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:time_to_first_token_seconds_{part}"))
        for part in ("sum", "count")
    ]
    return found[0], found[1]


def read_of(folder: Path) -> dict[str, float]:
    """Means over all requests, fill and drain included: what both clients have."""
    whole: dict[str, Any] = whole_run(read_run(folder).requests()[0])
    assert whole["ok"] == REQUESTS
    return {name: whole[name]["mean"] if name.endswith("_ms") else whole[name] for name in METRICS}


def ours(base_url: str, folder: Path, seed: int) -> None:
    words: list[object] = [
        "--users",
        USERS,
        "--requests",
        REQUESTS,
        "--prompt-tokens",
        PROMPT_TOKENS,
        "--ramp-up",
        "0s",
    ]
    words += ["--output-tokens", OUTPUT_TOKENS, "--seed", seed, "--out", folder, "--quiet"]
    run(sys.executable, "-m", "harness.cli", "ramp", "--base-url", base_url, *words)


def theirs(base_url: str, folder: Path, seed: int) -> None:
    result = folder.with_suffix(".json")
    words: list[object] = [
        "--backend",
        "openai",
        "--base-url",
        base_url,
        "--endpoint",
        "/v1/completions",
        "--model",
        "llama-3.1-8b",
    ]
    words += ["--tokenizer", MODEL, "--dataset-name", "random", "--random-input-len", THEIR_PROMPT_TOKENS]
    words += ["--random-output-len", OUTPUT_TOKENS, "--num-prompts", REQUESTS, "--max-concurrency", USERS]
    words += ["--ignore-eos", "--disable-tqdm", "--seed", seed, "--save-result", "--save-detailed"]
    run(PYTHON, "-c", _BENCH, *words, "--result-filename", result)
    write_folder(read_files([result]), folder)


def run(*words: object) -> None:
    done = subprocess.run(
        [*map(str, words)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_two_clients_read_the_same_of_one_server(tmp_path: Path) -> None:
    found: dict[str, list[Read]] = {"ours": [], "theirs": []}
    with running_twin(("--model", "llama-3.1-8b")) as twin:
        for pair in range(PAIRS):
            for who in ("ours", "theirs") if pair % 2 == 0 else ("theirs", "ours"):
                before = first_tokens(twin.base_url)
                folder = tmp_path / f"{who}-{pair}"
                (ours if who == "ours" else theirs)(twin.base_url, folder, pair + 1)
                total, count = (b - a for a, b in zip(before, first_tokens(twin.base_url), strict=True))
                found[who].append(Read(read_of(folder), total / count * 1e3))
    for who, reads in found.items():
        late_ms = [read.client["ttft_ms"] - read.server_ttft_ms for read in reads]
        print(f"{who:6} TTFT {np.mean(late_ms):+.1f} ms above the server's own {[round(x, 1) for x in late_ms]}")
    apart = [] if np.mean([r.client["ttft_ms"] - r.server_ttft_ms for r in found["ours"]]) <= MOST_LATE_MS else ["late"]
    for name in METRICS:
        pairs = zip(found["ours"], found["theirs"], strict=True)
        logs = np.array([math.log(b.client[name] / a.client[name]) for a, b in pairs])
        half = student(0.95, PAIRS - 1) * float(logs.std(ddof=1)) / math.sqrt(PAIRS)
        mean = float(logs.mean())
        print(f"{name:20} theirs over ours {mean:+.2%} ({mean - half:+.2%} to {mean + half:+.2%})")
        if abs(mean) > max(CLOSE[name], half):
            apart.append(name)
    assert apart == []
