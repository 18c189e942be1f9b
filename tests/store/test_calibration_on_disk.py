"""calibration.json on disk."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from calibration.calibration_file import Calibration, FitRecord, calibration_to_json, record_deployment
from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.priors import prior_factors
from harness.calibration_file import NAME, read_calibration, write_calibration
from harness.errors import LocalFault, UsageError


def some() -> Calibration:
    deployment = resolve_deployment(find_model("llama-3.1-8b"), gpu=find_gpu("h100-sxm"))
    return Calibration(
        deployment=record_deployment(deployment, "llama-3.1-8b"),
        factors=prior_factors(deployment),
        used=(),
        left_out=(),
        held_out=(),
        fit=FitRecord(condition=None, scatter={}, findings={}),
        runs=(),
        notes=(),
        harness_version="0.1.0",
        created="2026-11-30T18:00:00+00:00",
    )


def test_what_is_written_reads_from_the_file_and_from_its_folder(tmp_path: Path) -> None:
    write_calibration(tmp_path / NAME, some())
    assert read_calibration(tmp_path / NAME) == some()
    assert read_calibration(tmp_path) == some()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_file_that_is_not_there_says_who_writes_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_calibration(tmp_path / "x.json")
    assert str(tmp_path / "x.json") in caught.value.message
    assert "vllm-harness calibrate" in caught.value.hint


def test_a_damaged_file_names_itself_and_the_key(tmp_path: Path) -> None:
    path = tmp_path / NAME
    content = calibration_to_json(some())
    del content["deployment"]["tp"]
    path.write_bytes(orjson.dumps(content))
    with pytest.raises(UsageError, match=r"deployment\.tp is missing") as caught:
        read_calibration(path)
    assert str(path) in caught.value.message
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match="is no JSON"):
        read_calibration(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write_calibration(path, some())
    before = path.read_bytes()
    (tmp_path / f".{NAME}.draft").mkdir()
    with pytest.raises(LocalFault, match=r"calibration\.json could not be written"):
        write_calibration(path, some())
    assert path.read_bytes() == before
