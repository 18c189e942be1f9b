"""The page's server and a twin as processes of their own, as people run them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: a step of 10 ms and a pool that a dozen users of 64 + 64 tokens fill
TWIN = (
    *(
        "--served-model-name",
        "twin",
        "--max-model-len",
        "1024",
        "--block-size",
        "16",
        "--num-gpu-blocks-override",
        "97",
    ),
    *("--step-ms", "10", "--no-enable-prefix-caching"),
)


@dataclass
class Served:
    """A server in a process."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rsplit(":", 1)[1])

    def stop(self) -> int:
        """End it politely; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout=40)
        finally:
            if self.process.poll() is None:
                self.process.kill()


def start(*command: str) -> Served:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_HARNESS_UI")}
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.cli", *command], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found, f"{command[0]} said {line!r}"
    return Served(found[0].rstrip("/") + "/", process)


@contextmanager
def running(*command: str) -> Iterator[Served]:
    """A command that serves, ended with the block."""
    served = start(*command)
    try:
        yield served
    finally:
        served.stop()
        assert served.process.stdout is not None
        served.process.stdout.close()


def ui(results: Path, port: int = 0) -> tuple[str, ...]:
    return ("ui", "--port", str(port), "--results", str(results))
