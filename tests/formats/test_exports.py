"""Runs written for other tools: nothing lost, nothing invented, and read back to the same numbers."""

from __future__ import annotations

import builtins
import csv
import io
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from harness.cli import export
from harness.errors import UsageError
from harness.formats.imported import write_folder
from harness.formats.read import read_files
from harness.formats.tables import COLUMNS, write_csv, write_parquet
from harness.record import Record
from harness.store import RunData, RunWriter, read_run

PEERS = Path(__file__).parent.parent / "data" / "peers"
GOOD = Record(
    request_id="0-0",
    stage=0,
    user=0,
    scheduled_ms=0.0,
    sent_ms=1.5,
    outcome="ok",
    http_status=200,
    prompt_tokens=7,
    output_tokens=3,
    output_tokens_source="usage",
    asked_output_tokens=3,
    ttft_ms=10.0,
    ttfa_ms=10.0,
    e2e_ms=30.0,
    tpot_ms=10.0,
    stream_end_ms=31.0,
    chunks=3,
    finish_reason="length",
    warnings=("no_usage", "missing_done"),
)
REFUSED = Record(
    request_id="0-1",
    stage=0,
    user=1,
    scheduled_ms=2.0,
    sent_ms=2.5,
    outcome="failed",
    failure="http_503",
    http_status=503,
    message='busy, "very"\nbusy',
)


def run_of(folder: Path, *records: Record) -> RunData:
    writer = RunWriter(folder)
    writer.write_run({})
    for record in records:
        writer.add_record(record.to_json())
    writer.close()
    return read_run(folder)


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    """A run made of the result of vllm bench serve."""
    write_folder(read_files([PEERS / "vllm_bench_detailed.json"]), tmp_path / "peer")
    return tmp_path / "peer"


def test_a_row_of_csv_is_a_record_and_null_is_an_empty_cell(tmp_path: Path) -> None:
    out = io.StringIO()
    assert write_csv(run_of(tmp_path / "run", GOOD, REFUSED), out) == 2
    out.seek(0)
    good, refused = csv.DictReader(out)
    assert tuple(good) == COLUMNS
    assert (good["ttft_ms"], good["output_tokens"], good["warnings"]) == ("10.0", "3", "no_usage missing_done")
    assert (refused["message"], refused["http_status"], refused["ttft_ms"]) == ('busy, "very"\nbusy', "503", "")


def test_saved_text_is_a_column_of_its_own(tmp_path: Path) -> None:
    from dataclasses import replace

    out = io.StringIO()
    write_csv(run_of(tmp_path / "run", REFUSED, replace(GOOD, content="hello")), out)
    out.seek(0)
    assert [row["content"] for row in csv.DictReader(out)] == ["", "hello"]


def test_parquet_holds_what_the_records_hold(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra parquet is not installed")
    from dataclasses import replace

    run = run_of(tmp_path / "run", replace(GOOD, chunk_gaps_ms=(9.5, 10.5)), REFUSED)
    assert write_parquet(run, tmp_path / "x.parquet") == 2
    rows = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    assert rows[0] == {**orjson.loads(GOOD.to_json()), "chunk_gaps_ms": [9.5, 10.5]}
    assert rows[1] == {**orjson.loads(REFUSED.to_json()), "chunk_gaps_ms": None}


def test_without_pyarrow_parquet_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def lacking(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(UsageError, match="Parquet needs pyarrow") as error:
        write_parquet(run_of(tmp_path / "run", GOOD), tmp_path / "x.parquet")
    assert "vllm-harness[parquet]" in error.value.hint


def test_a_result_of_vllm_bench_serve_goes_round_and_stays_the_same(peer: Path, tmp_path: Path) -> None:
    export.command(run=peer, format_="vllm-bench", out=tmp_path / "again.json")
    printed, again = (
        json.loads(path.read_text()) for path in (PEERS / "vllm_bench_detailed.json", tmp_path / "again.json")
    )
    for key in ("model_id", "num_prompts", "max_concurrency", "request_rate", "completed", "failed", "input_lens"):
        assert again[key] == printed[key], key
    for name in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("mean", "median", "std", "p50", "p90", "p99"):
            assert again[f"{kind}_{name}_ms"] == pytest.approx(printed[f"{kind}_{name}_ms"], rel=1e-9)
    assert again["ttfts"] == pytest.approx(printed["ttfts"])
    assert again["itls"][3] == pytest.approx(printed["itls"][3])
    assert again["output_throughput"] == pytest.approx(printed["output_throughput"], rel=1e-3)
    made = write_folder(read_files([tmp_path / "again.json"]), tmp_path / "round")
    assert [found.printed.theirs for found in made.checks if not found.agrees] == []


def test_failures_are_in_a_vllm_bench_result_as_it_leaves_them(tmp_path: Path) -> None:
    document = json.loads((PEERS / "vllm_bench_detailed.json").read_text())
    document["errors"][2], document["output_lens"][2] = "Service Unavailable", 0
    (tmp_path / "one.json").write_text(json.dumps(document | {"completed": 23, "failed": 1}))
    write_folder(read_files([tmp_path / "one.json"]), tmp_path / "run")
    export.command(run=tmp_path / "run", format_="vllm-bench", out=tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    assert (again["completed"], again["failed"], again["errors"][2]) == (23, 1, "http_503")
    assert (again["output_lens"][2], again["ttfts"][2]) == (0, 0.0)


def test_several_stages_are_a_line_each(tmp_path: Path) -> None:
    source = PEERS / "vllm_bench_detailed.json"
    write_folder(read_files([source, source]), tmp_path / "run")
    export.command(run=tmp_path / "run", format_="vllm-bench", out=tmp_path / "two.json")
    assert [json.loads(line)["stage"] for line in (tmp_path / "two.json").read_text().splitlines()] == [0, 1]


def test_openmetrics_is_what_its_own_parser_reads(peer: Path, tmp_path: Path) -> None:
    export.command(run=peer, format_="openmetrics", out=tmp_path / "x.om")
    families = {family.name: family for family in text_string_to_metric_families((tmp_path / "x.om").read_text())}
    (sample,) = families["vllm_harness_finished_stage_ttft_mean_seconds"].samples
    assert sample.value == pytest.approx(0.29449, rel=1e-4)


def test_an_import_prints_the_tools_numbers_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export.command(source=[PEERS / "guidellm.json"], out=tmp_path / "run")
    shown = capsys.readouterr().out
    assert "inter_token_latency_ms.mean" in shown
    assert "differs" not in shown
    assert "contains the time to the first token" in shown
    export.command(source=[PEERS / "guidellm.json"], out=tmp_path / "again", json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["stages"][0]["ttft_ms"]["mean"] == pytest.approx(418.0219, rel=1e-6)
    assert all(found["agrees"] for found in document["checks"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to export"),
        ({"run": Path("x"), "source": [Path("y")]}, "not both at once"),
        ({"source": [PEERS / "guidellm.json"]}, "--from needs --out"),
        (
            {"source": [PEERS / "guidellm.json"], "out": Path("z"), "window": "some"},
            "--window: expected whole or steady",
        ),
        (
            {"source": [PEERS / "guidellm.json"], "out": Path("z"), "format_": "csv"},
            "--format: expected auto, vllm-bench",
        ),
        ({"source": [Path("nowhere.json")], "out": Path("z")}, "nowhere.json does not exist"),
        ({"run": Path("nowhere")}, "--format: expected csv, parquet, vllm-bench or openmetrics, not nothing"),
        ({"run": Path("nowhere"), "format_": "csv"}, "nowhere holds no run"),
    ],
)
def test_a_wrong_word_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        export.command(**options)


def test_the_run_itself_is_not_written_over(peer: Path) -> None:
    with pytest.raises(UsageError, match="is the run itself"):
        export.command(run=peer, format_="csv", out=peer / "requests.jsonl")
    with pytest.raises(UsageError, match="Parquet is no text"):
        export.command(run=peer, format_="parquet")
