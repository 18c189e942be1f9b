"""Killed at any moment, a run's folder reads, short of at most the last second; and nobody goes on sending."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from console import alive, children_of, ended, only_document, records_of, stages_of, started, wait_until
from fault_thread import FaultThread
from killing import kill_whole_run, load

from harness.store import read_run

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")

MODELS = {"steady": "normal:ttft=0.03,itl=0.01"}


@pytest.mark.parametrize("moment", range(3))
def test_killed_with_all_its_workers_a_run_lacks_at_most_a_second(tmp_path: Path, moment: int) -> None:
    after_s = random.Random(moment).uniform(0.3, 2.5)
    with FaultThread(models=MODELS) as served:
        killed = kill_whole_run(served, tmp_path / "run", after_s)
    assert killed.damaged == 0, "every line but an unfinished last one is a record"
    assert killed.missing_older_than_1_s == 0
    assert killed.records == killed.distinct
    assert killed.records > 0
    assert read_run(tmp_path / "run").run["schema_version"] == 1


def test_a_killed_controller_leaves_no_load_behind(tmp_path: Path) -> None:
    with FaultThread(models=MODELS) as served:
        process = started(*load(served, tmp_path / "run", processes=2), stdin=None)
        wait_until(lambda: len(served.server.finished_ns) > 20, "twenty answers")
        workers = children_of(process.pid)
        assert len(workers) == 2
        process.kill()
        killed = time.monotonic()
        wait_until(lambda: not any(map(alive, workers)), "the end of the workers", within_s=10)
        assert time.monotonic() - killed < 2.0
        done = ended(process, 5)
        sent = len(served.server.prompts)
        time.sleep(0.3)
        assert len(served.server.prompts) == sent
        assert served.server.stats.in_flight == 0
    assert done.err == "", "the workers have nothing to say to a terminal that is no longer theirs"


def test_a_controller_killed_in_the_middle_of_endless_streams_leaves_none(tmp_path: Path) -> None:
    """Their ends do not come by themselves: the workers must cut them."""
    with FaultThread() as served:
        process = started(*load(served, tmp_path / "run", processes=1, model="endless"))
        wait_until(lambda: served.server.stats.in_flight == 12, "twelve streams")
        (worker,) = children_of(process.pid)
        process.kill()
        killed = time.monotonic()
        wait_until(lambda: not alive(worker), "the end of the worker", within_s=10)
        assert time.monotonic() - killed < 2.0
        wait_until(lambda: served.server.stats.in_flight == 0, "the end of the streams", within_s=2)
        ended(process, 5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_worker_is_said_and_the_run_ends_in_order(tmp_path: Path, number: signal.Signals) -> None:
    """Its users are counted failed, the others' streams end well, the summary is written: exit 1."""
    out = tmp_path / "run"
    with FaultThread(models=MODELS) as served:
        process = started(*load(served, out, processes=2), "--json")
        wait_until(lambda: len(served.server.finished_ns) > 30, "thirty answers")
        os.kill(children_of(process.pid)[1], number)
        died = time.monotonic()
        done = ended(process, 20)
    assert time.monotonic() - died < 10, "the other worker does not go on for the rest of the minute"
    assert done.code == 1
    assert f"load worker 1 died (killed by {number.name}" in done.one_message()
    records = records_of(out)
    by_failure = Counter(record.failure for record in records)
    assert by_failure["client"] == 6, "the users of the dead worker"
    assert {record.user for record in records if record.failure == "client"} == {1, 3, 5, 7, 9, 11}
    assert set(by_failure) == {None, "client"}
    stage = only_document(done.out)["stages"][0]
    assert stages_of(out) == [stage]
    assert stage["requests"]["by_failure"] == {"client": 6}
    assert stage["valid"] is False
    assert any("load worker 1 died" in reason for reason in stage["reasons"])


def test_a_worker_that_dies_between_stages_ends_the_run(tmp_path: Path) -> None:
    """Stages of one request each: the worker is idle for most of the time."""
    out = tmp_path / "run"
    with FaultThread() as served:
        process = started(
            *("ramp", "--base-url", served.base_url, "--model", "normal", "--users", ",".join(["1"] * 40)),
            *("--requests", "1", "--output-tokens", "1", "--out", out, "--quiet"),
        )
        wait_until(lambda: (out / "summary.json").exists(), "the first stage")
        (worker,) = children_of(process.pid)
        os.kill(worker, signal.SIGKILL)
        done = ended(process, 20)
    assert done.code == 1
    assert "load worker 0 died (killed by SIGKILL" in done.one_message()
    assert 1 <= len(stages_of(out)) < 40


def test_a_worker_that_cannot_start_is_said(tmp_path: Path) -> None:
    out = tmp_path / "run"
    broken = tmp_path / "broken"
    (broken / "asyncio_throttle").mkdir(parents=True)
    (broken / "asyncio_throttle" / "__init__.py").write_text("raise SystemExit(3)")
    with FaultThread(models=MODELS) as served:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(broken), *filter(None, sys.path)])}
        done = ended(started(*load(served, out, processes=1), env=environment), 30)
    assert done.code == 1
    assert "load worker 0 ended at once" in done.one_message()
    assert records_of(out) == []
