"""The 24 streams through the whole command, on both event loops: ``ramp --users 1 --requests 1 --model CASE``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "wire"))

from console import Cli, only_document, records_of
from fault_thread import FaultThread
from stream_cases import CASES, Case, differences

from harness.record import Record

#: ms; what the command may be off by
NEAR_MS = 10.0
LOOPS = ["uvloop", "asyncio"] if sys.platform != "win32" else ["asyncio"]


@pytest.fixture(scope="module")
def replaying() -> Iterator[FaultThread]:
    with FaultThread() as served:
        yield served


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_a_stream_gives_its_record_through_the_command(
    replaying: FaultThread, cli: Cli, tmp_path: Path, case: Case, loop: str
) -> None:
    done = cli(
        *("ramp", "--base-url", replaying.base_url, "--out", tmp_path / "run", "--no-scrape", "--json"),
        *("--users", "1", "--requests", "1", "--model", case.id, "--endpoint", case.endpoint, "--prompt-tokens", "5"),
        *("--save-content", "--save-gaps", "--stall-timeout", "1s", "--loop", loop, "--processes", "1"),
    )
    record = only_record(tmp_path / "run")
    assert late(record, case) == {}
    assert differences(record, {key: value for key, value in case.expect.items() if not is_time(key)}) == {}
    stage = only_document(done.out)["stages"][0]
    assert stage["requests"]["ok"] == (record.outcome == "ok")
    assert "Traceback" not in done.err


def only_record(folder: Path) -> Record:
    records = records_of(folder)
    assert len(records) == 1
    return records[0]


def is_time(key: str) -> bool:
    return key.endswith("_ms")


def late(record: Record, case: Case) -> dict[str, tuple[object, object]]:
    """Times that are not within NEAR_MS of what they must be -> (expected, found)."""
    wrong: dict[str, tuple[object, object]] = {}
    for key, expected in case.expect.items():
        if is_time(key):
            found = getattr(record, key)
            found = list(found) if isinstance(found, tuple) else found
            if found != pytest.approx(expected, abs=NEAR_MS):
                wrong[key] = (expected, found)
    return wrong
