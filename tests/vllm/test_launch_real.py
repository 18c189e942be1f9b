"""``plan --write`` and then its script, with the real vLLM: healthy, with the planned pool, gone at a signal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from shlex import quote
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python")).absolute()
MODEL = Path(os.environ.get("VLLM_MODEL", ROOT / ".cache/smollm2")).resolve()
#: the pool is no whole GiB: it goes by --kv-cache-memory-bytes
POOL_BYTES = 200_000_000
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "7",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "SERVE_HOST": "127.0.0.1",
    "START_TIMEOUT_S": "300",
}
#: the console script `vllm`, which the CPU build does not bring: its package has another name than the one main() looks up
CONSOLE = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""


def planned(folder: Path) -> dict[str, Any]:
    """Plan with the command line, leave its launch files in ``folder``."""
    options = ["--model", str(MODEL), "--device", "cpu", "--kv-cache-memory-bytes", str(POOL_BYTES)]
    options += ["--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager", "--write", str(folder), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "plan", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def test_the_written_script_serves_the_plan(tmp_path: Path) -> None:
    plan = planned(tmp_path / "launch")
    console = tmp_path / "bin" / "vllm"
    console.parent.mkdir()
    console.write_text(f'#!/bin/sh\nexec {quote(str(PYTHON))} -c {quote(CONSOLE)} "$@"\n')
    console.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, **ENVIRONMENT, "SERVE_PORT": port, "PATH": f"{console.parent}:{os.environ['PATH']}"}
    log = tmp_path / "vllm.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [tmp_path / "launch" / "run_vllm_cluster.sh"],
            env=environment,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    try:
        assert process.stderr is not None
        said = next((line for line in process.stderr if line.startswith("run_vllm_cluster: ")), "")
        assert said == f"run_vllm_cluster: healthy: 127.0.0.1 port {port}, /health\n", log.read_text()[-3000:]
        assert json.loads(get(f"http://127.0.0.1:{port}/v1/models"))["data"][0]["max_model_len"] == 512
        info = next(
            line for line in get(f"http://127.0.0.1:{port}/metrics").splitlines() if "cache_config_info{" in line
        )
        assert f'num_gpu_blocks="{plan["memory"]["cluster"]["num_blocks"]}"' in info
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stderr is not None:
            process.stderr.close()
