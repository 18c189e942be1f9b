"""`vllm-harness twin` as a process: it says where it is, serves, and ends at once."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request

import pytest


def start(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "harness.cli", "twin", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_serves_and_ends_at_once_on_a_signal(number: int) -> None:
    with start("--model", "org/m", "--served-model-name", "m", "--max-model-len", "256") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"twin: serving m at (http://127\.0\.0\.1:\d+)\n", line)
        assert found, line
        with urllib.request.urlopen(found[1] + "/v1/models", timeout=10) as response:
            assert json.load(response)["data"][0]["max_model_len"] == 256
        process.send_signal(number)
        assert process.wait(timeout=5) == 0


def test_with_a_gpu_it_is_the_twin_of_the_plan() -> None:
    with start("--gpu", "h100-sxm", "--model", "llama-3.1-8b", "--max-model-len", "4096") as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with urllib.request.urlopen(address + "/metrics", timeout=10) as response:
            text = response.read().decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=5) == 0
    found = re.search(r'num_gpu_blocks="(\d+)"', text)
    assert found
    # 80 GB less weights and overhead, by 2 MiB a block of 16 tokens
    assert 20_000 < int(found[1]) < 35_000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--num-gpu-blocks-override", "3"], "num_gpu_blocks is 3"),
        (["--scheduling-policy", "lifo"], "scheduling_policy is 'lifo'"),
        (["--speculative-acceptance", "high"], "--speculative-acceptance is 'high'"),
        (["--time-scale", "0"], "time_scale is 0.0"),
        (["--step-ms", "-1"], "base_s is -0.001"),
        (["--tp", "2"], "--tp is given without --gpu"),
        (["--gpu", "h100-sxm", "--model", "llama-3.1-8b", "--step-ms", "5"], "--step-ms and --gpu are both given"),
        (["--gpu", "h100-sxm", "--model", "llama-3.1-8b", "--calibration", "no.json"], "no.json"),
        (["--gpu", "h100-sxm", "--model", "no-such-model"], "no-such-model"),
    ],
)
def test_values_that_cannot_be_end_with_2_and_say_which(options: list[str], says: str) -> None:
    with start(*options) as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert says in errors
