"""Real vLLM servers for the tests: started once per set of flags, on a free port of loopback, stopped at the end.

``VLLM_PYTHON`` and ``VLLM_MODEL`` name the environment and the model that ``make test-vllm`` built.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
MODEL = Path(os.environ.get("VLLM_MODEL", ROOT / ".cache/smollm2"))
MODEL_NAME = "smollm2"
START_S = 300

#: one OpenMP thread: with two, the engine, the API server and the client starve each other on two cores
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def _dtype() -> tuple[str, ...]:
    """bfloat16 where the processor multiplies it; elsewhere (AVX2 only) it is emulated, and a prompt takes six times as
    long as in float32."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    return () if flags & {"avx512_bf16", "amx_bf16", "bf16"} else ("--dtype", "float32")


LARGE_POOL = ("--max-model-len", "2048", "--max-num-seqs", "64", "--enforce-eager")
SMALL_POOL = (
    *("--num-gpu-blocks-override", "41", "--block-size", "32", "--max-model-len", "512"),
    *("--max-num-batched-tokens", "512", "--enforce-eager"),
)


@dataclass(frozen=True)
class Vllm:
    base_url: str
    log: Path

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.base_url}/metrics", timeout=10) as answer:
            return str(answer.read().decode())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"vLLM ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass  # not up yet; the deadline decides
        time.sleep(0.5)
    pytest.fail(f"vLLM was not up after {START_S} s:\n{log.read_text()[-3000:]}")


@contextlib.contextmanager
def running_vllm(*flags: str, model: Path = MODEL) -> Iterator[Vllm]:
    """A real server with these flags, until the block ends."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "vllm.log"
        command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port), *_dtype(), *flags]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}, start_new_session=True
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_up(url, process, log)
            yield Vllm(url, log)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


@pytest.fixture(scope="session")
def large_pool() -> Iterator[Vllm]:
    with running_vllm(*LARGE_POOL) as server:
        yield server


@pytest.fixture(scope="session")
def small_pool() -> Iterator[Vllm]:
    with running_vllm(*SMALL_POOL) as server:
        yield server


@pytest.fixture(scope="session")
def start_vllm() -> Callable[..., contextlib.AbstractContextManager[Vllm]]:
    return running_vllm
