"""What a run of a million records costs to read, compare, report on, calibrate from, export and import.

.venv/bin/pytest -m bench tests/bench/test_million.py -s
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from million import write

pytestmark = pytest.mark.bench
MOST_S, MOST_MIB = 30.0, 1500.0


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "bench" not in request.config.getoption("-m"):
        pytest.skip("a measurement: only with -m bench")
    folder = tmp_path_factory.mktemp("million") / "run"
    write(folder, 1_000_000)
    return folder


def cost(*words: str) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak MiB of a command, which has to succeed."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "harness.cli", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def test_a_million_records_take_under_30_seconds_and_1500_mib(run: Path, tmp_path: Path) -> None:
    commands = {
        "compare": ("compare", str(run)),
        "compare, two runs": ("compare", str(run), str(run)),
        "report": ("report", str(run), "--out", str(tmp_path / "report.html")),
        "calibrate": (
            *("calibrate", str(run), "--model", "llama-3.1-8b", "--gpu", "h100-sxm"),
            *("--out", str(tmp_path / "calibrated"), "--quiet"),
        ),
        "export csv": ("export", str(run), "--format", "csv", "--out", str(tmp_path / "x.csv")),
        "export parquet": ("export", str(run), "--format", "parquet", "--out", str(tmp_path / "x.parquet")),
        "export vllm-bench": ("export", str(run), "--format", "vllm-bench", "--out", str(tmp_path / "x.json")),
        "import vllm-bench": ("export", "--from", str(tmp_path / "x.json"), "--out", str(tmp_path / "again")),
    }
    over = []
    for name, words in commands.items():
        wall_s, cpu_s, mib = cost(*words)
        print(f"{name:20} {wall_s:6.1f} s  {cpu_s:6.1f} s of CPU  {mib:6.0f} MiB")
        if wall_s > MOST_S or mib > MOST_MIB:
            over.append(name)
    assert over == []
