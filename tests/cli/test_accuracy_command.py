"""``accuracy``: the document, the tables, and what is no table of measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from console import Cli

HEADER = (
    "source,url_or_path,gpu,num_gpus,tp,model,weight_dtype,kv_dtype,isl,osl,concurrency,request_rate,ttft_ms_mean,"
    "ttft_ms_p50,ttft_ms_p99,tpot_ms_mean,output_tok_s,total_tok_s,req_s,vllm_version,notes"
)
#: three levels of a published sweep that crosses the wall, and a row whose prompt length nobody stated
ROWS = [
    "gap-analysis,,H100-SXM-80GB,2,2,Qwen/Qwen3-32B,bf16,,4096,1024,8,,749,,,17.87,,,,0.12.0,gpu_mem_util=0.9",
    "gap-analysis,,H100-SXM-80GB,2,2,Qwen/Qwen3-32B,bf16,,4096,1024,32,,979,,,29.33,1100,,,0.12.0,gpu_mem_util=0.9",
    "gap-analysis,,H100-SXM-80GB,2,2,Qwen/Qwen3-32B,bf16,,4096,1024,64,,4376,,,52.57,,,,0.12.0,gpu_mem_util=0.9",
    "blog,,RTX A6000 48GB,1,1,Qwen/Qwen2.5-7B-Instruct,bf16,,,51,1,,,47,,,42.3,,,0.23.0,",
    "blog,,H100-SXM,1,1,meta-llama/Llama-3.1-8B-Instruct,bf16,,547,248,,8,,,,7.9,,,,0.15.1,",
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    path.write_text("\n".join([HEADER, *ROWS]) + "\n")
    return path


def test_json_is_the_document_of_the_contract_and_nothing_else(cli: Cli, table: Path) -> None:
    done = cli("accuracy", "--data", str(table), "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert {"overall", "by", "skipped", "rows"} <= set(found)
    assert found["overall"]["tpot"]["n"] == 4
    assert found["overall"]["tpot"]["mape_mean"] < 15
    assert found["overall"]["wall"] == {"n": 1, "bracketed": 1}
    assert [item["row"] for item in found["skipped"]] == [4]
    assert found["skipped"][0]["reason"] == "isl is not stated"
    assert set(found["by"]["model"]) == {"qwen3-32b", "llama-3.1-8b"}


def test_people_see_groups_and_walls(cli: Cli, table: Path) -> None:
    done = cli("accuracy", "--data", str(table))
    assert done.code == 0
    assert "gpu h100-sxm" in done.out
    assert "1 of 1" in done.out
    assert "qwen3-32b bf16 h100-sxm TP2" in done.out
    assert "32 - 64" in done.out
    assert "4 rows scored, 1 left out" in done.out


def test_every_row_is_printed_when_asked(cli: Cli, table: Path) -> None:
    done = cli("accuracy", "--data", str(table), "--rows")
    said = " ".join(done.out.split())
    assert "Every row: measured -> predicted" in said
    assert "8 /s" in said
    assert "left out: row 4 (Qwen/Qwen2.5-7B-Instruct, RTX A6000 48GB): isl is not stated" in said


def test_a_table_of_which_no_row_can_be_scored_is_vacuous(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("\n".join([HEADER, ROWS[3]]) + "\n")
    done = cli("accuracy", "--data", str(path))
    assert done.code == 4
    assert "1 are left out" in done.one_message()
    assert "isl is not stated" in done.one_message()
    path.write_text(HEADER + "\n")
    assert "expected rows" in cli("accuracy", "--data", str(path)).one_message()
    assert "levels four times apart" in cli("accuracy", "--data", str(path), "--calibrated").one_message()


#: a published sweep of one server (aiconfigurator gap analysis): shape, users -> TTFT and TPOT in ms
SERVER = {
    (1024, 128): {8: (154, 18.04), 16: (188, 22.18), 32: (250, 29.38), 64: (388, 46.02), 128: (692, 80.26)},
    (1024, 512): {8: (154, 16.48), 16: (190, 17.88), 32: (242, 21.0), 64: (386, 28.51), 128: (682, 42.29)},
    (1024, 1024): {8: (154, 15.9), 16: (187, 17.38), 32: (237, 20.06), 64: (381, 26.09), 128: (652, 37.84)},
}


def test_a_calibration_is_scored_four_times_further_out(cli: Cli, tmp_path: Path) -> None:
    lines = [
        f"gap-analysis,,H100-SXM-80GB,2,2,Qwen/Qwen3-32B,bf16,,{isl},{osl},{n},,{ttft},,,{tpot},,,,0.12.0,"
        for (isl, osl), levels in SERVER.items()
        for n, (ttft, tpot) in levels.items()
    ]
    path = tmp_path / "table.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n")
    done = cli("accuracy", "--data", str(path), "--calibrated", "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert {"overall", "by", "skipped", "rows"} <= set(found)
    assert [row["users"] for row in found["rows"]] == [128, 128, 128]
    assert found["overall"]["tpot"]["mape_mean"] < 8
    assert len(found["fits"][0]["fitted_rows"]) == 9
    assert found["held_out_shape"]["overall"]["tpot"]["n"] == 0
    shown = cli("accuracy", "--data", str(path), "--calibrated")
    assert "1 servers fitted on levels up to a quarter of each top level" in " ".join(shown.out.split())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        (b"", "columns gpu, tp, model, weight_dtype, isl, osl are missing"),
        (b"gpu,tp,model,isl\nH100,1,x,1\n", "columns weight_dtype, osl are missing"),
        (b"gpu,\xff\xfe\n", "is no CSV file in UTF-8"),
    ],
)
def test_what_is_no_table_is_refused(cli: Cli, tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "table.csv"
    if content is not None:
        path.write_bytes(content)
    done = cli("accuracy", "--data", str(path))
    assert done.code == 2
    assert said in done.one_message()


def test_rows_of_another_length_than_the_header_are_read(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("\n".join([HEADER, ROWS[0] + ",too,much", "blog,,H100"]) + "\n")
    done = cli("accuracy", "--data", str(path), "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert [row["row"] for row in found["rows"]] == [1]
    assert [item["row"] for item in found["skipped"]] == [2]


def test_priors_that_have_not_seen_a_row_score_it(cli: Cli, table: Path) -> None:
    done = cli("accuracy", "--data", str(table), "--left-out", "deployment", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["left_out"] == "deployment"
    assert found["overall"]["tpot"]["n"] == 4
    assert "priors that have not seen its model" in cli("accuracy", "--data", str(table), "--left-out", "model").out


def test_only_a_deployment_or_a_model_can_be_left_out(cli: Cli, table: Path) -> None:
    done = cli("accuracy", "--data", str(table), "--left-out", "gpu")
    assert done.code == 2
    assert "--left-out gpu, expected deployment or model" in done.one_message()
    assert cli("accuracy", "--data", str(table), "--left-out", "model", "--calibrated").code == 2
