"""How fast the twin is: an hour of 256 users on the virtual clock, and how late the server's writes are.

.venv/bin/pytest -m bench tests/bench/test_twin_speed.py -s
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from calibration.steptime import LinearStep
from calibration.twin.config import EngineConfig
from calibration.twin.engine import Engine
from calibration.twin.sequence import Sequence
from calibration.twin.simulate import closed_loop

pytestmark = pytest.mark.bench

STREAMS, TOKENS, STEP_S = 200, 250, 0.02


@pytest.fixture(autouse=True)
def only_when_asked(request: pytest.FixtureRequest) -> None:
    if "bench" not in request.config.getoption("-m"):
        pytest.skip("a measurement: only with -m bench")


def test_an_hour_of_256_users_takes_six_seconds() -> None:
    """1,000 in / 500 out, steps of about 30 ms; every second or so somebody ends in nearly every step."""
    engine = Engine(EngineConfig(num_gpu_blocks=40_000), LinearStep(0.017, 3e-5, 1e-9, 1e-5))
    began_s = time.process_time()
    run = closed_loop(
        [engine], lambda user, nth: Sequence(1000, 500), [n * 0.05 for n in range(256)], 3600.0, overhead_s=0.005
    )
    took_s = time.process_time() - began_s
    steps = run.steps[0]
    print(
        f"\n{len(steps)} steps of {1e3 * steps.length_s.mean():.1f} ms, {len(run.trace)} requests: {took_s:.2f} s of CPU,"
        f" {1e6 * took_s / len(steps):.0f} us a step"
    )
    assert took_s <= 6.0


@pytest.fixture
def address() -> Iterator[str]:
    flags = {
        "--step-ms": 1e3 * STEP_S,
        "--per-sequence-ms": 0,
        "--per-1k-kv-tokens-ms": 0,
        "--per-1k-prefill-tokens-ms": 0,
        "--max-num-seqs": 2048,
        "--num-gpu-blocks-override": 100_000,
    }
    options = [str(word) for flag in flags.items() for word in flag]
    with subprocess.Popen(
        [sys.executable, "-m", "harness.cli", "twin", "--port", "0", *options], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()


def seconds_of_a_send() -> float:
    """What this machine's kernel takes for one small write to each of many loopback sockets that somebody reads."""
    with socket.create_server(("127.0.0.1", 0), backlog=STREAMS) as server:
        if not (reader := os.fork()):
            read_all(server.getsockname())
            os._exit(0)
        connections = [server.accept()[0] for _ in range(STREAMS)]
        rounds = []
        for _ in range(20):
            time.sleep(STEP_S)
            began_ns = time.perf_counter_ns()
            for connection in connections:
                connection.send(b"x" * 250)
            rounds.append((time.perf_counter_ns() - began_ns) / STREAMS)
        for connection in connections:
            connection.close()
        os.waitpid(reader, 0)
    return statistics.median(rounds) / 1e9


def read_all(address: tuple[str, int]) -> None:
    """Read from many connections until all are closed."""
    with selectors.DefaultSelector() as selector:
        for _ in range(STREAMS):
            selector.register(socket.create_connection(address), selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                if not key.fileobj.recv(65_536):
                    selector.unregister(key.fileobj)


async def stream(address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": [1] * 16, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    while await reader.read(1 << 20):
        pass
    writer.close()


def test_writes_are_late_by_what_the_kernel_takes_for_them(address: str) -> None:
    """All streams of a step are due at one moment, so the n-th waits for n - 1 others to be written."""
    send_s = seconds_of_a_send()

    async def all_streams() -> None:
        await asyncio.gather(*(stream(address) for _ in range(STREAMS)))

    asyncio.run(all_streams())
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    name = "vllm_twin_write_lateness_seconds"
    count, total = (float(re.search(rf"^{name}_{part} (\S+)$", text, re.M)[1]) for part in ("count", "sum"))  # type: ignore[index]
    buckets = [(float(le), float(n)) for le, n in re.findall(rf'^{name}_bucket{{le="(\S+)"}} (\S+)$', text, re.M)]
    p99_s = next(le for le, n in buckets if n >= 0.99 * count)
    print(
        f"\n{STREAMS} streams of {1 / STEP_S:.0f} tok/s: mean {1e3 * total / count:.2f} ms, p99 <= {1e3 * p99_s:g} ms;"
        f" one send takes {1e6 * send_s:.1f} us here"
    )
    assert count == STREAMS * TOKENS
    # half of the others come before, on average; a millisecond to wake up, and Python's share of a write
    assert total / count <= 0.002 + STREAMS / 2 * (send_s + 15e-6)
