"""Other tools' results become runs: their own printed means under our definitions, and what cannot be mapped is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from harness.errors import UsageError
from harness.formats.imported import Imported, slots, write_folder
from harness.formats.read import read_files
from harness.store import RunData, read_run

PEERS = Path(__file__).parent.parent / "data" / "peers"
VLLM, GUIDELLM = PEERS / "vllm_bench_detailed.json", PEERS / "guidellm.json"
AIPERF, AIPERF_SUMMARY = PEERS / "aiperf_profile_export.jsonl", PEERS / "aiperf_aiperf.json"


def imported(out: Path, *files: Path, **options: Any) -> tuple[Imported, RunData]:
    made = write_folder(read_files(files), out, **options)
    return made, read_run(out)


def written(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.mark.parametrize("file", [VLLM, GUIDELLM, AIPERF, AIPERF_SUMMARY], ids=lambda path: path.name)
def test_every_number_a_tool_printed_comes_out_of_its_requests(file: Path, tmp_path: Path) -> None:
    made, run = imported(tmp_path / "run", file)
    assert len(made.checks) >= 7
    assert [found.printed.theirs for found in made.checks if not found.agrees] == []
    exact = [found for found in made.checks if not found.printed.within]
    assert max(abs(found.value / found.printed.value - 1) for found in exact if found.value) < 1e-6
    assert len(list(run.records())) == 24
    assert run.run["source"] == "imported"
    assert run.requests()[0].trace.source == "imported"


def test_the_summary_of_a_vllm_bench_result_says_what_it_printed(tmp_path: Path) -> None:
    printed = orjson.loads(VLLM.read_bytes())
    stage = imported(tmp_path / "run", VLLM)[0].stages[0]
    assert (stage["users"], stage["valid"], stage["requests"]["ok"]) == (4, True, 24)
    for ours, theirs in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el"), ("chunk_gap", "itl")):
        assert stage[f"{ours}_ms"]["mean"] == pytest.approx(printed[f"mean_{theirs}_ms"], rel=1e-9)
        assert stage[f"{ours}_ms"]["p99"] == pytest.approx(printed[f"p99_{theirs}_ms"], rel=1e-9)
    assert stage["output_tokens_per_s"] == pytest.approx(printed["output_throughput"], rel=1e-3)
    assert stage["totals"]["output_tokens_mean"] == 64


def test_guidellms_tpot_contains_the_first_token_and_is_not_ours(tmp_path: Path) -> None:
    metrics = orjson.loads(GUIDELLM.read_bytes())["benchmarks"][0]["metrics"]
    made, run = imported(tmp_path / "run", GUIDELLM)
    stage = made.stages[0]
    assert stage["tpot_ms_token_weighted"] == pytest.approx(metrics["inter_token_latency_ms"]["successful"]["mean"])
    assert stage["tpot_ms"]["mean"] < 0.9 * metrics["time_per_output_token_ms"]["successful"]["mean"]
    assert any("contains the time to the first token" in warning for warning in run.run["warnings"])
    assert {record.asked_output_tokens for record in run.records()} == {64}


def test_tokens_weigh_in_guidellms_mean_where_lengths_differ(tmp_path: Path) -> None:
    """A long slow request beside a short quick one: their mean is (20 * 30 + 2 * 10) / 22, not (30 + 10) / 2."""
    document = orjson.loads(GUIDELLM.read_bytes())
    requests = document["benchmarks"][0]["requests"]["successful"][:2]
    for request, tokens, pace in zip(requests, (21, 3), (0.030, 0.010), strict=True):
        timing = request["info"]["timings"]
        timing["first_token_iteration"] = timing["request_start"] + 0.1
        timing["last_token_iteration"] = timing["first_token_iteration"] + (tokens - 1) * pace
        request["output_tokens"] = tokens
    document["benchmarks"][0]["requests"]["successful"] = requests
    made, _ = imported(tmp_path / "run", written(tmp_path / "few.json", document))
    assert made.stages[0]["tpot_ms_token_weighted"] == pytest.approx((20 * 30 + 2 * 10) / 22, rel=1e-3)
    assert made.stages[0]["tpot_ms"]["mean"] == pytest.approx(20, rel=1e-3)
    assert any("22 of 24 requests are not in the file" in warning for warning in made.warnings)


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    _, run = imported(tmp_path / "run", VLLM)
    record = next(run.records())
    unknown = (record.stream_end_ms, record.finish_reason, record.output_tokens_source, record.ttfa_ms)
    assert unknown == (None, None, None, None)
    assert run.run["deployment"]["pool"] is None
    assert run.run["deployment"]["max_num_seqs"] is None
    assert run.stages[0]["server"] is None


def test_a_result_without_details_carries_the_printed_numbers_over(tmp_path: Path) -> None:
    document = orjson.loads(VLLM.read_bytes())
    for key in ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"):
        del document[key]
    made, run = imported(tmp_path / "run", written(tmp_path / "plain.json", document))
    stage = made.stages[0]
    assert stage["ttft_ms"]["mean"] == document["mean_ttft_ms"]
    assert stage["ttft_ms"]["p95"] is None
    assert stage["tpot_ms"]["p50"] == document["median_tpot_ms"]
    assert stage["output_tokens_per_s"] == document["output_throughput"]
    assert (stage["valid"], stage["requests"]["ok"], stage["ttfa_ms"]["mean"]) == (True, 24, None)
    assert list(run.records()) == []
    assert any("without --save-detailed" in warning for warning in made.warnings)


def test_the_summary_of_aiperf_alone_is_carried_over(tmp_path: Path) -> None:
    alone = tmp_path / "profile_export_aiperf.json"
    alone.write_bytes(AIPERF_SUMMARY.read_bytes())
    stage = imported(tmp_path / "run", alone)[0].stages[0]
    assert stage["tpot_ms"]["mean"] == pytest.approx(18.96370654563492)
    assert (stage["users"], stage["requests"]["ok"]) == (4, 24)


def test_aiperfs_own_lateness_and_missing_streams_are_said(tmp_path: Path) -> None:
    made, _ = imported(tmp_path / "run", AIPERF)
    assert any("aiperf itself was late: 145 ms" in warning for warning in made.warnings)
    assert any("2.95 of 4 streams" in reason for reason in made.stages[0]["reasons"])


def test_several_results_are_a_stage_each(tmp_path: Path) -> None:
    document = orjson.loads(VLLM.read_bytes())
    lines = tmp_path / "appended.json"
    lines.write_bytes(b"\n".join(orjson.dumps(document | {"max_concurrency": users}) for users in (1, 2)))
    made, run = imported(tmp_path / "run", lines, written(tmp_path / "more.json", document))
    assert [stage["users"] for stage in made.stages] == [1, 2, 4]
    assert sorted({record.stage for record in run.records()}) == [0, 1, 2]
    assert len({record.request_id for record in run.records()}) == 72


def test_failed_requests_count_as_failures_of_their_kind(tmp_path: Path) -> None:
    document = orjson.loads(VLLM.read_bytes())
    texts = [
        "Service Unavailable",
        'Traceback (most recent call last):\n  File "x"\naiohttp.client_exceptions.ServerDisconnectedError: Server disconnected',
        "",
        "Traceback (most recent call last):\nTimeoutError",
        "Never received a valid chunk to calculate TTFT.This response will be marked as failed!",
    ]
    for number, text in enumerate(texts):
        document["errors"][number], document["output_lens"][number] = text, 0
    document |= {"completed": 19, "failed": 5}
    made, run = imported(tmp_path / "run", written(tmp_path / "failed.json", document))
    assert made.stages[0]["requests"]["failed"] == 5
    expected = {"http_503": 1, "connection": 1, "timeout": 1, "protocol": 2}
    assert made.stages[0]["requests"]["by_failure"] == expected
    refused = next(iter(run.records()))
    assert (refused.http_status, refused.ttft_ms, refused.output_tokens) == (503, None, None)


def test_an_aiperf_record_that_failed_or_was_cut_is_no_success(tmp_path: Path) -> None:
    records = [orjson.loads(line) for line in AIPERF.read_bytes().splitlines()]
    records[0]["error"] = {"code": 500, "type": "HTTPError", "message": "boom"}
    records[1]["metadata"]["was_cancelled"] = True
    records[2]["metadata"]["benchmark_phase"] = "warmup"
    path = tmp_path / "profile_export.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, records)))
    stage = imported(tmp_path / "run", path)[0].stages[0]
    assert stage["requests"] == {"ok": 21, "failed": 1, "by_failure": {"http_500": 1}, "incomplete": 1}
    assert stage["users"] == 4, "the most that were in flight, as no summary says the level"


def test_the_steady_part_can_be_asked_for(tmp_path: Path) -> None:
    whole = imported(tmp_path / "whole", VLLM)[0].stages[0]
    steady = imported(tmp_path / "steady", VLLM, window="steady")[0].stages[0]
    assert steady["window"]["end_s"] < whole["window"]["end_s"]
    assert steady["tpot_ms"]["n"] < whole["tpot_ms"]["n"] == 24


def test_a_rate_is_read_as_a_rate(tmp_path: Path) -> None:
    document = orjson.loads(VLLM.read_bytes()) | {"request_rate": 1.8, "max_concurrency": None}
    made, run = imported(tmp_path / "run", written(tmp_path / "rate.json", document))
    assert (made.stages[0]["users"], made.stages[0]["request_rate"]) == (None, 1.8)
    late = [record.sent_ms - record.scheduled_ms for record in run.records() if record.sent_ms is not None]
    assert late == pytest.approx([wait * 1e3 for wait in document["queue_times"]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}', "is not a result of"),
        ("nonsense", "not JSON"),
        ("", "is empty"),
        ('{"metadata": {"version": 1}, "benchmarks": []}', "of version 1, this reads 2"),
        ('{"metadata": {"version": 2}, "benchmarks": [{}]}', "not what guidellm 0.8 writes"),
        ("[1, 2]", "is not a result of"),
    ],
)
def test_what_is_no_result_is_refused_and_leaves_nothing(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        imported(tmp_path / "run", tmp_path / "x.json")
    assert not (tmp_path / "run").exists()


def test_a_bad_line_of_aiperf_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "profile_export.jsonl"
    path.write_bytes(AIPERF.read_bytes().splitlines()[0] + b"\n{nonsense\n")
    with pytest.raises(UsageError, match=r"profile_export.jsonl:2: not JSON"):
        imported(tmp_path / "run", path)
    assert not (tmp_path / "run").exists()


def test_another_tools_file_is_refused_where_one_was_named() -> None:
    with pytest.raises(UsageError, match="is not a result of vllm-bench"):
        read_files([GUIDELLM], "vllm-bench")
    with pytest.raises(UsageError, match="several tools"):
        read_files([GUIDELLM, VLLM])


def test_places_are_taken_again_when_they_are_free() -> None:
    assert slots([0.0, 0.0, 1.0, 2.5], [1.0, 3.0, 2.0, 4.0]) == [0, 1, 0, 0]
    assert slots([2.0, 0.0], [3.0, 5.0]) == [1, 0]
