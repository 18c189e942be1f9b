"""A run's folder: appended, replaced whole, read strictly, honest about a kill."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from harness.errors import LocalFault, UsageError
from harness.record import Record
from harness.store import RunWriter, read_run


def record(number: int) -> Record:
    return Record(
        request_id=f"0-{number}",
        stage=0,
        user=number,
        scheduled_ms=1.0,
        sent_ms=2.0,
        outcome="ok",
        warnings=("missing_done",),
    )


def written(folder: Path, count: int = 3) -> Path:
    writer = RunWriter(folder)
    writer.write_run({"versions": {}})
    for number in range(count):
        writer.add_record(record(number).to_json())
    writer.add_scrape({"at_s": 0.5})
    writer.write_summary([{"index": 0}])
    writer.close()
    return folder


def test_what_was_written_reads_back(tmp_path: Path) -> None:
    run = read_run(written(tmp_path / "a" / "run"))
    assert [r.request_id for r in run.records()] == ["0-0", "0-1", "0-2"]
    assert next(iter(run.records())) == record(0)
    assert list(run.scrapes()) == [{"at_s": 0.5}]
    assert run.stages == [{"index": 0}]
    assert run.run["schema_version"] == 1


def test_records_are_on_disk_after_a_flush(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    writer.add_record(record(0).to_json())
    writer.flush()
    assert (tmp_path / "run" / "requests.jsonl").read_bytes().count(b"\n") == 1
    mark = writer.mark()
    writer.add_record(record(1).to_json())
    writer.add_scrape({"at_s": 1.5})
    writer.flush()
    assert [r.request_id for r in writer.records_since(mark)] == ["0-1"]
    assert list(writer.scrapes_since(mark)) == [{"at_s": 1.5}]
    writer.close()


def test_a_line_cut_by_a_kill_is_left_out_and_the_rest_reads(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    path = folder / "requests.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [r.request_id for r in read_run(folder).records()] == ["0-0", "0-1"]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    with (folder / "requests.jsonl").open("ab") as stream:
        stream.write(b'{"request_id": 1}\n')
    with pytest.raises(UsageError, match=r"requests\.jsonl:4: not a record: missing key"):
        list(read_run(folder).records())
    (folder / "scrapes.jsonl").write_bytes(b"nonsense\n")
    with pytest.raises(UsageError, match=r"scrapes\.jsonl:1: not JSON"):
        list(read_run(folder).scrapes())


def test_a_folder_that_holds_a_run_is_never_overwritten(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    before = (folder / "requests.jsonl").read_bytes()
    with pytest.raises(UsageError, match="holds another run") as caught:
        RunWriter(folder)
    assert caught.value.exit_code == 2
    assert (folder / "requests.jsonl").read_bytes() == before


def test_a_file_in_the_way_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError):
        RunWriter(tmp_path / "file")
    with pytest.raises(UsageError):
        RunWriter(tmp_path / "file" / "below")


def test_a_full_disk_is_said_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path / "run")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LocalFault, match=r"the disk is full: .*run\.json"):
        writer.write_run({})
    assert not (tmp_path / "run" / ".run.json.draft").exists()
    monkeypatch.undo()
    writer.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_records_that_cannot_be_flushed_are_said(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    writer._requests.close()
    writer._requests = Path("/dev/full").open("wb")  # noqa: SIM115  the writer closes it
    writer.add_record(record(0).to_json())
    with pytest.raises(LocalFault, match=r"the disk is full: .*requests\.jsonl"):
        writer.flush()
    with pytest.raises(LocalFault, match="the disk is full"):
        writer.close()


def test_no_run_another_version_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        read_run(tmp_path)
    folder = written(tmp_path / "run")

    def replace(name: str, content: Any) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else orjson.dumps(content))

    replace("summary.json", {"schema_version": 1, "stages": 3})
    with pytest.raises(UsageError, match="stages: expected a list"):
        read_run(folder)
    replace("run.json", {"schema_version": 99})
    with pytest.raises(UsageError, match="schema_version 99, this version reads 1"):
        read_run(folder)
    replace("run.json", b"{")
    with pytest.raises(UsageError, match="is not JSON"):
        read_run(folder)


def test_a_run_killed_before_its_first_stage_ended_has_no_stages(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    writer.write_run({})
    writer.flush()
    run = read_run(tmp_path / "run")
    assert run.stages == []
    assert list(run.records()) == []
    writer.close()


def test_a_record_with_an_unknown_or_missing_key_does_not_read() -> None:
    row = orjson.loads(record(0).to_json())
    with pytest.raises(ValueError, match="unknown key 'extra'"):
        Record.from_json(orjson.dumps({**row, "extra": 1}))
    row.pop("chunks")
    with pytest.raises(ValueError, match="missing key 'chunks'"):
        Record.from_json(orjson.dumps(row))
    with pytest.raises(ValueError, match="a record is a JSON object"):
        Record.from_json(b"[]")


def test_columns_come_by_stage_and_name_the_file_of_a_bad_line(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    writer = RunWriter(folder)
    writer.write_run({})
    for number in range(3):
        writer.add_record(record(number).to_json())
    writer.close()
    stages = read_run(folder).requests()
    assert [len(requests.trace) for requests in stages.values()] == [3]
    assert stages[0].trace.source == "live"
    with (folder / "requests.jsonl").open("ab") as stream:
        stream.write(b'{"stage": 0}\n')
    with pytest.raises(UsageError, match=r"requests.jsonl:4: not a record: missing key"):
        read_run(folder).requests()
