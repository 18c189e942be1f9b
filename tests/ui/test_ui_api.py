"""The endpoints: the numbers of the commands, strict reading, and never a file outside results/."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
from contextlib import redirect_stdout
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE, calibration, hostile_folder, run_folder
from ui_client import LLAMA, serving

from calibration.calibration_file import calibration_to_json
from harness.calibration_file import write_calibration
from harness.cli.compare_gate import compared
from harness.cli.plan import run as plan
from harness.ui.runs import Results

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}

#: a sizing as the page asks it, and the same as ``plan``'s options
TEN = [
    (LLAMA, "--model llama-3.1-8b --gpu h100-sxm"),
    (LLAMA | {"slo_ttft_ms": 500.0, "slo_tpot_ms": 30.0}, "--model llama-3.1-8b --gpu h100-sxm --slo ttft:500,tpot:30"),
    (LLAMA | {"weights": "fp8", "kv": "fp8"}, "--model llama-3.1-8b --gpu h100-sxm --weights fp8 --kv fp8"),
    (LLAMA | {"model": "llama-3.3-70b", "tp": 4}, "--model llama-3.3-70b --gpu h100-sxm --tp 4"),
    (LLAMA | {"model": "llama-3.3-70b", "tp": 2, "pp": 2}, "--model llama-3.3-70b --gpu h100-sxm --tp 2 --pp 2"),
    (LLAMA | {"model": "qwen2.5-72b", "gpu": "a100-80-sxm", "tp": 8}, "--model qwen2.5-72b --gpu a100-80-sxm --tp 8"),
    (LLAMA | {"model": "deepseek-v3", "gpu": "h200-sxm", "tp": 8}, "--model deepseek-v3 --gpu h200-sxm --tp 8"),
    (LLAMA | {"gpu": "l40s", "dp": 2, "max_num_seqs": 64}, "--model llama-3.1-8b --gpu l40s --dp 2 --max-num-seqs 64"),
    (
        LLAMA | {"max_model_len": 8192, "gpu_memory_utilization": 0.98},
        "--model llama-3.1-8b --gpu h100-sxm --max-model-len 8192 --gpu-memory-utilization 0.98",
    ),
    (LLAMA | {"model": "llama-3.3-70b"}, "--model llama-3.3-70b --gpu h100-sxm"),
]


def planned(options: str) -> dict[str, Any]:
    said = io.StringIO()
    with redirect_stdout(said):
        plan([*options.split(), "--prompt-tokens", "1000", "--output-tokens", "500", "--json"])
    document: dict[str, Any] = json.loads(said.getvalue())
    return document


class Data(HTMLParser):
    """key -> (exact value, shown) of every number of a card."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: dict[str, tuple[float | None, str]] = {}
        self._open: tuple[str, str] | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        if tag == "data" and about.get("data-key"):
            self._open = str(about["data-key"]), str(about["value"])

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            key, value = self._open
            self.found[key] = None if value == "None" else float(value), data
            self._open = None


@pytest.mark.parametrize(("asked", "options"), TEN, ids=[options for _, options in TEN])
async def test_a_sizing_equals_plan_json(tmp_path: Path, asked: dict[str, Any], options: str) -> None:
    told = planned(options)
    async with serving(tmp_path) as client:
        status, answer = await client.post("/api/size", asked)
    assert status == 200
    assert answer["plan"] == told
    shown = Data(answer["html"]).found
    if not told["fits"]:
        assert "Does not fit" in answer["html"]
        return
    assert shown["users"][0] == told["users"][told["users"]["binding"]]
    for key in ("throughput_tokens_per_s", "throughput_tokens_per_s_per_user", "tpot_ms", "ttft_ms"):
        for end in ("value", "low", "high"):
            assert shown[f"{key}.{end}"][0] == told[key][end]
    assert shown["kv_pool_tokens"][0] == told["memory"]["cluster"]["kv_pool_tokens"]
    assert shown["max_context_tokens"][0] == told["max_context_tokens"]


async def test_a_config_json_is_sized_like_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    told = planned(f"--model {tmp_path / 'config.json'} --gpu l4")
    asked = {
        "config": CONFIG,
        "config_name": str(tmp_path / "config.json"),
        "gpu": "l4",
        "prompt_tokens": 1000,
        "output_tokens": 500,
    }
    async with serving(tmp_path) as client:
        _, answer = await client.post("/api/size", asked)
        assert answer["plan"] == told
        _, launch = await client.post("/api/launch", asked)
    assert sorted(launch["files"]) == ["docker-compose.yml", "run_vllm_cluster.sh"]
    assert str(tmp_path) not in launch["files"]["run_vllm_cluster.sh"]


async def test_a_calibration_corrects_as_that_of_plan_does(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    slower = replace(calibration(), factors=calibration().factors.scaled("step_overhead", 1.5))
    write_calibration(folder / "calibration.json", slower)
    told = planned(f"--model llama-3.1-8b --gpu h100-sxm --calibration {folder / 'calibration.json'}")
    del told["calibration"]
    async with serving(tmp_path) as client:
        _, plain = await client.post("/api/size", LLAMA)
        _, by_run = await client.post("/api/size", LLAMA | {"calibration_run": "run"})
        _, by_file = await client.post("/api/size", LLAMA | {"calibration": calibration_to_json(slower)})
        status, refused = await client.post("/api/size", LLAMA | {"tp": 2, "calibration_run": "run"})
        assert status == 422
        assert "is of another deployment: tp: 1 when calibrated, 2 now" in refused["error"]
        _, carried = await client.post("/api/size", LLAMA | {"tp": 2, "calibration_run": "run", "transfer": True})
    assert by_run["plan"] == by_file["plan"] == told
    assert by_run["plan"] != plain["plan"]
    assert "Carried over as wide priors" in carried["html"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu": "abacus"}, "gpu = 'abacus' is not in the catalog"),
        ({"model": "/etc/passwd"}, "model = '/etc/passwd' is not in the catalog"),
        ({"model": "../../etc"}, "is not in the catalog"),
        ({"tp": 3}, "tp = 3, expected a divisor"),
        ({"tp": 0}, "tp: input should be greater than or equal to 1"),
        ({"tp": "2"}, "tp: input should be a valid integer"),
        ({"prompt_tokens": 10**8}, "expected at most max_model_len"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: input should be less than or equal to 1"),
        ({"wheels": 4}, "wheels: extra inputs are not permitted"),
        ({"weights": HOSTILE[:30]}, "weights"),
        ({"model": None}, "expected either model"),
        ({"config": CONFIG}, "expected either model"),
        ({"model": None, "config": {}}, "config.json"),
        ({"model": None, "config": {"architectures": ["Abacus"]}}, "Abacus"),
        ({"model": None, "config": CONFIG | {"num_hidden_layers": "many"}}, "num_hidden_layers"),
        ({"model": None, "config": CONFIG | {"hidden_size": -1}}, "hidden_size"),
        ({"calibration": {"schema_version": 99}}, "this version reads 1"),
        ({"calibration": {}}, "schema_version is missing"),
        ({"calibration_run": "../../etc"}, "there is no run"),
        ({"calibration_run": "nowhere"}, "there is no run"),
    ],
)
async def test_what_cannot_be_sized_is_refused_by_name(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    asked = {key: value for key, value in (LLAMA | change).items() if value is not None}
    async with serving(tmp_path) as client:
        status, answer = await client.post("/api/size", asked)
    assert status == 422
    assert said in answer["error"]
    assert "Traceback" not in json.dumps(answer)


@pytest.mark.parametrize("body", ["", "{", "[1", '{"a": NaN}', "[" * 100_000, "\x00", "null", "7", '"x"'])
async def test_what_is_no_request_is_refused(tmp_path: Path, body: str) -> None:
    async with serving(tmp_path) as client:
        for path in ("/api/size", "/api/curves", "/api/launch", "/api/compare", "/api/ramps/check", "/api/ramps/start"):
            status, answer = await client.ask("POST", path, data=body, headers={"Content-Type": "application/json"})
            assert status == 422
            assert answer["error"]


async def test_a_config_json_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        body = io.BytesIO(json.dumps(LLAMA | {"config": {"padding": "x" * (3 << 20)}}).encode())
        status, answer = await client.ask("POST", "/api/size", data=body, headers={"Content-Type": "application/json"})
    assert status == 413
    assert answer["error"]


async def test_up_to_four_stand_side_by_side(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        _, answer = await client.post(
            "/api/curves", [LLAMA, LLAMA | {"gpu": "l40s"}, LLAMA | {"dp": 2}, LLAMA | {"kv": "fp8"}]
        )
        assert answer["html"].count("<polygon") == 3 * 4
        assert "deployment 4" in answer["html"]
        for wrong in ([], [LLAMA] * 5):
            assert (await client.post("/api/curves", wrong))[0] == 422


async def test_what_does_not_fit_has_no_curve_and_no_launch_file(tmp_path: Path) -> None:
    asked = LLAMA | {"model": "llama-3.3-70b"}
    async with serving(tmp_path) as client:
        assert (await client.post("/api/curves", [asked]))[1]["html"] == ""
        status, answer = await client.post("/api/launch", asked)
    assert status == 422
    assert "does not fit" in answer["error"]


async def test_launch_files_are_those_that_plan_writes(tmp_path: Path) -> None:
    with redirect_stdout(io.StringIO()):
        options = "--model llama-3.1-8b --gpu h100-sxm --prompt-tokens 1000 --output-tokens 500 --json"
        plan([*options.split(), "--write", str(tmp_path / "launch")])
    async with serving(tmp_path) as client:
        _, answer = await client.post("/api/launch", LLAMA)
    for name, text in answer["files"].items():
        assert text == (tmp_path / "launch" / name).read_text(encoding="utf-8")


async def test_a_thousand_at_once_are_answered_or_asked_to_come_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        asked = [client.post("/api/size", LLAMA | {"prompt_tokens": 1000 + i % 200}) for i in range(1000)]
        statuses = [status for status, _ in await asyncio.gather(*asked)]
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) >= 64
        assert (await client.post("/api/size", LLAMA))[0] == 200


# --- runs ------------------------------------------------------------------------------------------------------------


async def test_runs_are_listed_newest_first_with_what_is_wrong_with_them(tmp_path: Path) -> None:
    run_folder(tmp_path / "good")
    run_folder(tmp_path / "reference" / "kept")
    broken = run_folder(tmp_path / "broken")
    (broken / "run.json").write_text("{")
    newest = run_folder(tmp_path / "newest")
    document = json.loads((newest / "run.json").read_text())
    (newest / "run.json").write_text(json.dumps(document | {"started": "2031-01-01T00:00:00+00:00", "ended": None}))
    for file in newest.iterdir():
        os.utime(file, (1, 1))
    (tmp_path / "notes.txt").write_text("no run")
    async with serving(tmp_path) as client:
        _, answer = await client.get("/api/runs")
    states = [(run["name"], run["state"]) for run in answer["runs"]]
    assert states == [("newest", "cut"), ("reference/kept", "valid"), ("good", "valid"), ("broken", "unreadable")]
    assert "is not JSON" in answer["runs"][-1]["why"]


async def test_a_runs_report_is_shown_and_served(tmp_path: Path) -> None:
    run_folder(tmp_path / "reference" / "kept")
    async with serving(tmp_path) as client:
        _, answer = await client.get("/api/runs/reference/kept")
        assert "6 users can stream at once" in answer["html"]
        status, page = await client.get("/api/runs/reference/kept/report.html")
    assert status == 200
    assert page.startswith("<!doctype html>")


@pytest.mark.parametrize(
    "name",
    [
        "..",
        "../secret",
        "..%2Fsecret",
        "%2e%2e/secret",
        "%2e%2e%2fsecret",
        "run/../../secret",
        "/etc",
        "%2Fetc",
        "run%00",
        "link",
        ".hidden",
        "a/b/c",
    ],
)
async def test_no_name_leads_out_of_results(tmp_path: Path, name: str) -> None:
    results = tmp_path / "results"
    run_folder(results / "run")
    run_folder(tmp_path / "secret")
    run_folder(results / ".hidden")
    (results / "link").symlink_to(tmp_path / "secret")
    async with serving(results) as client:
        for path in (
            f"/api/runs/{name}",
            f"/api/runs/{name}/report.html",
            f"/api/runs/{name}/events",
            f"/static/{name}",
        ):
            status, answer = await client.get(path)
            assert status in (404, 422), (path, status)
            assert "users can stream" not in json.dumps(answer)


def test_a_file_of_a_run_that_leads_out_of_results_hides_the_run(tmp_path: Path) -> None:
    results = tmp_path / "results"
    folder = run_folder(results / "run")
    assert [*Results(results).folders()] == ["run"]
    (tmp_path / "outside.json").write_bytes((folder / "summary.json").read_bytes())
    (folder / "summary.json").unlink()
    (folder / "summary.json").symlink_to(tmp_path / "outside.json")
    assert [*Results(results).folders()] == []


async def test_hostile_texts_of_a_run_stay_text_in_list_and_report(tmp_path: Path) -> None:
    hostile_folder(tmp_path / "run")
    async with serving(tmp_path) as client:
        _, listed = await client.get("/api/runs")
        _, shown = await client.get("/api/runs/run")
    for html in (listed["html"], shown["html"]):
        assert not re.search(r"<(script|img)", html)
        assert "&lt;script&gt;" in html


async def test_two_runs_stand_side_by_side_with_what_compare_finds(tmp_path: Path) -> None:
    a, b = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")
    found = compared(a, b)
    async with serving(tmp_path) as client:
        _, answer = await client.post("/api/compare", {"a": "a", "b": "b"})
        assert answer["html"].count("<svg") >= 3
        assert answer["html"].count("<td>same</td>") == sum(row.verdict == "same" for row in found.rows)
        assert len(found.rows) > 10
        (b / "requests.jsonl").write_bytes(b"")
        _, answer = await client.post("/api/compare", {"a": "a", "b": "b"})
        assert "Not compared number by number" in answer["html"]
        assert (await client.post("/api/compare", {"a": "a", "b": "../b"}))[0] == 422


async def test_a_run_that_has_ended_is_followed_to_its_end(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    async with serving(tmp_path) as client:
        status, text = await client.get("/api/runs/run/events")
    assert status == 200
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert [event["going"] for event in events] == [False]
    assert "KV cache in use" in events[0]["html"]


async def test_a_bug_of_ours_is_a_sentence_and_not_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Results) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Results, "entries", broken)
    async with serving(tmp_path) as client:
        status, answer = await client.get("/api/runs")
    assert status == 500
    assert "secret" not in json.dumps(answer)
    assert "bug of ours" in answer["error"]
    assert "ZeroDivisionError: secret" in caplog.text
