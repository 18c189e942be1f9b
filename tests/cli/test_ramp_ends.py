"""How a run ends that cannot go on: signals, a server that dies, limits and a full disk. Always in order, with the
contract's exit code, one message, and what was measured on disk."""

from __future__ import annotations

import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from console import Done, ended, only_document, records_of, stages_of, started, wait_until
from fault_thread import FaultThread

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and limits")


def load(served: FaultThread, model: str, out: Path, *more: str) -> tuple[str, ...]:
    """A run that goes on for a minute unless something ends it."""
    return (
        *("ramp", "--base-url", served.base_url, "--model", model, "--users", "3", "--duration", "60s"),
        *("--output-tokens", "10", "--prompt-tokens", "8", "--ramp-up", "0s", "--no-scrape", "--out", str(out), *more),
    )


def written(out: Path) -> int:
    """Records on disk."""
    path = out / "requests.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def streaming(served: FaultThread, streams: int) -> Callable[[], bool]:
    return lambda: served.server.stats.in_flight >= streams


# --- signals: 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_drains(tmp_path: Path, number: signal.Signals) -> None:
    """No new requests; the streams in flight end well."""
    out = tmp_path / "run"
    with FaultThread(models={"steady": "normal:ttft=0.05,itl=0.05"}) as served:
        process = started(*load(served, "steady", out, "--json"))
        wait_until(lambda: written(out) >= 3, "three records")
        wait_until(streaming(served, 3), "three streams")
        process.send_signal(number)
        done = ended(process, 20)
        asked = len(served.server.prompts)
    assert (done.code, done.one_message().splitlines()[0]) == (130, "vllm-harness: interrupted")
    records = records_of(out)
    assert {record.outcome for record in records} == {"ok"}
    assert len(records) == asked
    assert only_document(done.out)["stages"] == stages_of(out)
    assert stages_of(out)[0]["requests"]["ok"] == len(records)


def test_a_second_signal_cuts(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with FaultThread() as served:
        process = started(*load(served, "endless", out, "--json"))
        wait_until(streaming(served, 3), "three streams")
        process.send_signal(signal.SIGINT)
        time.sleep(0.7)
        assert process.poll() is None, "the streams in flight may end"
        process.send_signal(signal.SIGINT)
        done = ended(process, 20)
    assert done.code == 130
    assert Counter(record.outcome for record in records_of(out)) == {"incomplete": 3}
    assert only_document(done.out)["stages"][0]["requests"]["incomplete"] == 3


def test_a_signal_while_the_server_is_asked_what_it_is_ends_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        process = started("ramp", "--base-url", f"http://127.0.0.1:{port}", "--users", "1", "--out", tmp_path / "run")
        connection, _ = silent.accept()
        process.send_signal(signal.SIGINT)
        done = ended(process, 5)
        connection.close()
    assert (done.code, done.out) == (130, "")
    assert "interrupted before the first stage" in done.one_message()
    assert not (tmp_path / "run").exists()


def test_a_signal_while_workers_start_ends_at_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with FaultThread() as served:
        process = started(*load(served, "normal", out, "--quiet"))
        wait_until((out / "run.json").exists, "run.json")
        process.send_signal(signal.SIGTERM)
        done = ended(process, 20)
    assert (done.code, done.out) == (130, "")
    assert "interrupted" in done.one_message()
    assert {record.outcome for record in records_of(out)} <= {"ok", "incomplete"}


def test_a_signal_between_two_stages_is_not_lost(tmp_path: Path) -> None:
    """Stages of one request follow each other closely: most of the time goes between them."""
    out = tmp_path / "run"
    with FaultThread() as served:
        process = started(
            *("ramp", "--base-url", served.base_url, "--model", "normal", "--users", ",".join(["1"] * 60)),
            *("--requests", "1", "--output-tokens", "2", "--out", out, "--quiet"),
        )
        wait_until(lambda: written(out) >= 2, "two stages")
        process.send_signal(signal.SIGINT)
        done = ended(process, 20)
    assert done.code == 130
    assert 2 <= len(stages_of(out)) < 60


# --- the server dies: 5


def test_a_server_that_dies_ends_the_run_and_keeps_the_records(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with FaultThread(models={"steady": "normal:ttft=0.05,itl=0.02"}) as served:
        process = started(*load(served, "steady", out, "--json"))
        wait_until(lambda: written(out) >= 6, "six records")
        served.die()
        died = time.monotonic()
        done = ended(process, 30)
    assert done.code == 5
    assert time.monotonic() - died < 15
    assert "the server stopped answering" in done.one_message()
    outcomes = Counter((record.outcome, record.failure) for record in records_of(out))
    assert outcomes["ok", None] >= 6
    assert outcomes["failed", "connection"] >= 5
    stage = only_document(done.out)["stages"][0]
    assert stage["requests"]["ok"] == outcomes["ok", None]
    assert stages_of(out) == [stage]


def test_a_server_that_restarts_does_not_end_the_run(tmp_path: Path) -> None:
    """Its streams are lost and counted; a server that answers again is measured on."""
    out = tmp_path / "run"
    with FaultThread(models={"steady": "normal:ttft=0.1,itl=0.1"}) as served:
        process = started(*load(served, "steady", out, "--json", "--users", "8", "--duration", "6s"))
        wait_until(streaming(served, 8), "eight streams")
        wait_until(lambda: written(out) >= 8, "eight records")
        served.restart(down_s=0.3)
        done = ended(process, 30)
    failures = Counter(record.failure for record in records_of(out))
    assert failures["connection"] >= 8
    assert failures[None] >= 16
    assert done.code in (0, 4), "valid or not, by how busy this machine is"


# --- this machine: limits and disk


def limited(what: int, soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (soft, hard))


def many(served: FaultThread, out: Path) -> tuple[str, ...]:
    return (
        *("ramp", "--base-url", served.base_url, "--model", "all", "--users", "300", "--requests", "300"),
        *("--output-tokens", "2", "--prompt-tokens", "4", "--no-scrape", "--processes", "1", "--out", str(out)),
    )


def test_more_users_than_open_files_allow_are_refused_before_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with FaultThread(models={"all": "barrier:n=300"}) as served:
        done = ended(started(*many(served, out), preexec_fn=limited(resource.RLIMIT_NOFILE, 256, 256)))
        assert served.server.prompts == []
    assert (done.code, done.out) == (2, "")
    assert "300 streams at once need 364 open files, and this shell allows 256" in done.one_message()
    assert not out.exists()


def test_a_soft_limit_on_open_files_is_raised(tmp_path: Path) -> None:
    """The barrier answers nobody before 300 are in flight."""
    out = tmp_path / "run"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with FaultThread(models={"all": "barrier:n=300"}) as served:
        process = started(*many(served, out), "--quiet", preexec_fn=limited(resource.RLIMIT_NOFILE, 256, hard))
        done = ended(process, 60)
        assert served.server.stats.in_flight_max == 300
    assert done.code in (0, 4), "valid or not, by how busy this machine is"
    assert Counter(record.outcome for record in records_of(out)) == {"ok": 300}


def test_a_file_that_may_not_grow_is_said_at_once_and_the_rest_kept(tmp_path: Path) -> None:
    """As on a full disk, from the run's point of view; and it needs no disk."""
    out = tmp_path / "run"
    with FaultThread(models={"quick": "normal:ttft=0.01,itl=0"}) as served:
        process = started(
            *load(served, "quick", out, "--json"), preexec_fn=limited(resource.RLIMIT_FSIZE, 16_384, 16_384)
        )
        done = ended(process, 30)
    assert done.code == 1
    assert f"{out / 'requests.jsonl'} could not be written" in done.one_message()
    kept = records_of(out)
    assert len(kept) >= 10
    assert {record.outcome for record in kept} == {"ok"}
    stage = only_document(done.out)["stages"][0]
    assert stage["requests"]["ok"] == len(kept)
    assert stages_of(out) == [stage]


def test_a_full_disk_is_called_one(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    disk = tmp_path / "disk"
    disk.mkdir()
    in_own_mounts = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    mount = f"mount -t tmpfs -o size=32k tmpfs {disk}"
    if subprocess.run([*in_own_mounts, mount], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk")
    with FaultThread(models={"quick": "normal:ttft=0.01,itl=0"}) as served:
        command = [sys.executable, "-m", "harness.cli", *load(served, "quick", disk / "run", "--json")]
        # what is kept is read inside, before the disk goes with its namespace
        count = f"wc -l < {disk / 'run' / 'requests.jsonl'}"
        script = f'{mount} && "$@"; code=$?; {count} >&2; exit $code'
        process = subprocess.Popen(
            [*in_own_mounts, script, "sh", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        done = ended(process, 30)
    *said, kept = done.err.splitlines()
    message = Done(done.code, done.out, "\n".join(said)).one_message()
    assert done.code == 1
    assert "the disk is full:" in message
    assert int(kept) >= 10
    assert only_document(done.out)["stages"][0]["requests"]["ok"] == int(kept)


# --- a reader that has gone


def run_into(served: FaultThread, out: Path, read: bytes, *more: str) -> tuple[int, str]:
    """A run whose standard output is read so far and then closed, as ``| head`` does; its exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.cli", *load(served, "normal", out, "--duration", "1s", *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    if read:
        assert process.stdout.read(len(read)) == read
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    return process.wait(30), err


@pytest.mark.parametrize(("option", "read"), [("--json", b""), ("--json", b"{"), ("--seed=1", b"")])
def test_a_reader_that_has_gone_is_no_traceback(tmp_path: Path, option: str, read: bytes) -> None:
    out = tmp_path / "run"
    with FaultThread() as served:
        code, err = run_into(served, out, read, option)
    assert code in (0, 4), "valid or not, by how busy this machine is; not the reader's going"
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    assert "Exception ignored" not in err
    assert len(stages_of(out)) == 1


def test_a_reader_of_everything_that_has_gone_leaves_the_run_whole(tmp_path: Path) -> None:
    """``ramp ... 2>&1 | head -1``: the run is what matters, not its display."""
    out = tmp_path / "run"
    with FaultThread() as served:
        arguments: Any = load(served, "normal", out, "--users", "1,2", "--duration", "1s")
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.wait(60)
    assert [stage["users"] for stage in stages_of(out)] == [1, 2]
