"""``kill -9`` for a whole run, and what its folder is worth afterwards. For tests/load and tests/bench/kill.py."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from console import alive, children_of, started, wait_until
from fault_thread import FaultThread

from harness.clock import NS_PER_S, now_ns
from harness.record import Record
from harness.store import read_run


@dataclass(frozen=True)
class Killed:
    """A folder whose writer was killed, held against what the server knows."""

    after_s: float
    #: answers the server had written to their end by the moment of the kill, and by one second before
    finished: int
    finished_1_s_before: int
    records: int
    distinct: int
    #: whole lines that are no record
    damaged: int
    #: an unfinished last line
    cut_lines: int
    stages: int

    @property
    def missing(self) -> int:
        return max(0, self.finished - self.records)

    @property
    def missing_older_than_1_s(self) -> int:
        return max(0, self.finished_1_s_before - self.records)


def load(served: FaultThread, out: Path, *, processes: int, model: str = "steady") -> tuple[str, ...]:
    """Twelve users for a minute, unless something ends them."""
    return (
        *("ramp", "--base-url", served.base_url, "--model", model, "--users", "12", "--duration", "60s"),
        *("--output-tokens", "10", "--prompt-tokens", "8", "--ramp-up", "0s", "--processes", str(processes)),
        *("--out", str(out), "--quiet"),
    )


def kill_whole_run(served: FaultThread, out: Path, after_s: float, *, processes: int = 2) -> Killed:
    """Start a run, kill all its processes so long after its first answer, and read the folder."""
    process = started(*load(served, out, processes=processes))
    wait_until(lambda: served.server.finished_ns, "the first answer")
    due_ns = now_ns() + int(after_s * NS_PER_S)
    time.sleep(after_s)
    family = [process.pid, *children_of(process.pid)]
    # stopped first: nobody writes on while the next is being killed
    moment = now_ns()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    process.communicate(timeout=10)
    wait_until(lambda: not any(map(alive, family)), "the end of all processes", 10)
    # a machine that woke this process late was as late with the run's own writes
    return judge(out, after_s, served.server.finished_ns, moment, max(0, moment - due_ns))


def judge(out: Path, after_s: float, finished_ns: list[int], moment_ns: int, late_ns: int) -> Killed:
    """What a folder holds of what the server had finished when its writer was killed."""
    run = read_run(out)
    lines = (out / "requests.jsonl").read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    records = [record for line in whole if (record := readable(line)) is not None]
    return Killed(
        after_s=after_s,
        finished=sum(stamp <= moment_ns for stamp in finished_ns),
        finished_1_s_before=sum(stamp <= moment_ns - late_ns - NS_PER_S for stamp in finished_ns),
        records=len(records),
        distinct=len({record.request_id for record in records}),
        damaged=len(whole) - len(records),
        cut_lines=len(lines) - len(whole),
        stages=len(run.stages),
    )


def readable(line: bytes) -> Record | None:
    try:
        return Record.from_json(line)
    except (ValueError, TypeError):
        return None
