"""Calibrate a real vLLM on up to 16 users and two shapes, then hold it to 32 and 64 users and to a third shape.

Long (about a quarter of an hour) and a measurement of the machine as much as of the model, so it runs by itself:
``make calibrate-vllm``. The limits below are what is asked of a quiet machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from calibration.queueing import Shape, closed_loop
from calibration.serving import serving
from harness.calibration_file import read_calibration

pytestmark = [pytest.mark.vllm, pytest.mark.bench]

FLAGS = ("--max-model-len", "2048", "--max-num-seqs", "64", "--enforce-eager", "--no-enable-prefix-caching")
FITTED = "32/32,128/16"
#: users, prompt and output tokens that the fit does not see
HELD_OUT = ((32, 32, 32), (64, 32, 32), (32, 128, 16), (64, 128, 16), (16, 64, 24), (32, 64, 24))
#: of a request at the level, as the calibration has it
START_LIVES, MEASURED_LIVES = 1.2, 2.6
CALIBRATE_S = 360.0
LIMITS = {"tpot": 0.10, "throughput": 0.10, "ttft": 0.15}


def harness(*args: str) -> None:
    done = subprocess.run([sys.executable, "-m", "harness.cli", *args], env=os.environ, check=False)
    assert done.returncode == 0


def held_out_profile(folder: Path, lives_s: list[float]) -> Path:
    stages = [
        {
            "users": users,
            "prompt_tokens": prompt,
            "output_tokens": output,
            # slower than requests end: equal requests that begin together stay together, and wait for each other
            "ramp_up": round(START_LIVES * life_s, 1),
            "duration": round((START_LIVES + MEASURED_LIVES) * life_s, 1),
        }
        for (users, prompt, output), life_s in zip(HELD_OUT, lives_s, strict=True)
    ]
    path = folder / "held-out.yaml"
    path.write_text(json.dumps({"name": "held-out", "stages": stages}))
    return path


def test_a_real_server_is_predicted_where_nobody_measured(
    start_vllm: Callable[..., AbstractContextManager[Any]], tmp_path: Path
) -> None:
    with start_vllm(*FLAGS) as server:
        url, began_s = server.base_url, time.monotonic()
        told = ("--device", "cpu", "--enforce-eager", "--max-num-seqs", "64")
        levels = ("--users", "1,2,4,8,16", "--shapes", FITTED, "--budget", "330s")
        harness("calibrate", "--base-url", url, *told, *levels, "--out", str(tmp_path / "calibrate"))
        took_s = time.monotonic() - began_s
        print(f"calibrated in {took_s:.0f} s")
        made = read_calibration(tmp_path / "calibrate")
        served = serving(made.rebuild_deployment())
        loads = [(users, Shape(prompt_tokens=prompt, output_tokens=output)) for users, prompt, output in HELD_OUT]
        points = [closed_loop(served.server(made.factors, shape), shape, users) for users, shape in loads]
        lives = [p.ttft_s + shape.decode_steps * p.tpot_s for p, (_, shape) in zip(points, loads, strict=True)]
        profile = held_out_profile(tmp_path, lives)
        harness("ramp", "--base-url", url, "--profile", str(profile), "--seed", "5", "--out", str(tmp_path / "held"))
    stages = json.loads((tmp_path / "held" / "summary.json").read_text())["stages"]
    missed = []
    for stage, point, load in zip(stages, points, HELD_OUT, strict=True):
        measured = {
            "tpot": stage["chunk_gap_ms"]["mean"] / 1e3,
            "ttft": stage["ttft_ms"]["mean"] / 1e3,
            "throughput": stage["output_tokens_per_s"],
        }
        said = {"tpot": point.tpot_s, "ttft": point.ttft_s, "throughput": point.output_tokens_per_s}
        errors = {name: said[name] / measured[name] - 1 for name in measured}
        print(load, {name: f"{error:+.1%}" for name, error in errors.items()})
        missed += [(load, name, error) for name, error in errors.items() if abs(error) > LIMITS[name]]
    assert missed == []
    assert took_s <= CALIBRATE_S
