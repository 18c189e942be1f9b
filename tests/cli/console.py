"""The command line as tests call it: in this process, or as one of its own where signals and limits are the matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.cli.app import main
from harness.record import Record
from harness.store import read_run


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    def one_message(self) -> str:
        """What it said of its failure: one line, and at most one more with a hint; never a traceback."""
        lines = self.err.splitlines()
        assert "Traceback" not in self.err, self.err
        assert lines, "nothing was said"
        assert lines[-1].startswith(("vllm-harness: ", "  ")), self.err
        said = lines[-2:] if lines[-1].startswith("  ") else lines[-1:]
        assert said[0].startswith("vllm-harness: "), self.err
        return "\n".join(said)


Cli = Callable[..., Done]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """cli("ramp", ...): the console script, in this process."""
    for name in ("OPENAI_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: str | os.PathLike[str]) -> Done:
        monkeypatch.setattr(sys, "argv", ["vllm-harness", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        streams = capfd.readouterr()
        code = ended.value.code
        assert isinstance(code, int | None)
        return Done(code or 0, streams.out, streams.err)

    return call


_STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """What a failed test leaves running is ended, its pipes read."""
    yield
    while _STARTED:
        process = _STARTED.pop()
        if process.poll() is None:
            process.kill()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        process.wait(10)


def started(*args: str | os.PathLike[str], **popen: Any) -> subprocess.Popen[str]:
    """The console script as a process, its output captured."""
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.cli", *map(str, args)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **popen},
    )
    _STARTED.append(process)
    return process


def ended(process: subprocess.Popen[str], within_s: float = 60.0) -> Done:
    """Wait for the end of a process; one that does not end is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the command did not end within {within_s:g} s; it said: {out}{err}")
    return Done(process.returncode, out, err)


def wait_until(holds: Callable[[], Any], what: str, within_s: float = 30.0) -> Any:
    """Wait for something to become true and return it. Counts its own looks: a machine that stops for a while stops
    what is waited for as well."""
    for _ in range(int(within_s / 0.01)):
        if value := holds():
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come about within {within_s:g} s")


def records_of(folder: Path) -> list[Record]:
    """Every record of a run, read strictly."""
    return list(read_run(folder).records())


def stages_of(folder: Path) -> list[dict[str, Any]]:
    return read_run(folder).stages


def only_document(text: str) -> dict[str, Any]:
    """The one JSON document that a text is."""
    document = json.loads(text)
    assert isinstance(document, dict)
    return document


def children_of(pid: int) -> list[int]:
    """Processes whose parent is ``pid``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
