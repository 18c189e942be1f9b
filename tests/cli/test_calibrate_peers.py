"""`calibrate` fits results that people have of other tools: what they tell, and what has to be told beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from console import Cli

from calibration.calibration_file import Calibration
from calibration.predict import Load, Prediction, Predictor
from calibration.queueing import Shape
from calibration.serving import serving
from harness.calibration_file import read_calibration

PEERS = Path(__file__).parent.parent / "data" / "peers"
VLLM, GUIDELLM, AIPERF = (
    PEERS / name for name in ("vllm_bench_detailed.json", "guidellm.json", "aiperf_profile_export.jsonl")
)
#: the server that all three measured: vLLM on two cores of a CPU
SERVER = ("--model", "smollm2-135m", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks", "4096")


def tpot(made: Calibration, shape: Shape, users: int) -> Prediction:
    predictor = Predictor(serving(made.rebuild_deployment()), made.factors)
    found = predictor.predict(Load(shape=shape, users=users), percentiles=False)
    assert isinstance(found, Prediction)
    return found


@pytest.mark.parametrize(
    ("file", "tpot_ms", "ttft_ms"),
    [(VLLM, 30.905, 294.5), (GUIDELLM, 33.758, 418.0)],
    ids=["vllm-bench", "guidellm"],
)
def test_one_file_of_one_level_is_accepted(
    cli: Cli, tmp_path: Path, file: Path, tpot_ms: float, ttft_ms: float
) -> None:
    done = cli("calibrate", file, *SERVER, "--out", tmp_path)
    assert done.code == 0, done.err
    assert "1 stages fitted, 0 left out" in done.out
    assert "fitted at one level, 4 users" in done.out
    assert "prefill_factor: not identifiable from this run: add long prompts with short outputs" in done.out
    made = read_calibration(tmp_path)
    (used,) = made.used
    assert used.observation.tpot_s * 1e3 == pytest.approx(tpot_ms, rel=0.005)
    assert used.observation.ttft_s is not None
    assert used.observation.ttft_s * 1e3 == pytest.approx(ttft_ms, rel=0.005)
    assert made.runs[0].folder == str(file)
    findings = made.fit.findings
    left = [name for name in findings if not findings[name].identified]
    assert len(left) >= 8
    assert all(findings[name].advice.startswith("not identifiable from this run: add ") for name in left)
    assert all(made.factors[name].log_sd > 0.7 * made.factors[name].prior_log_sd for name in left)
    # where it was measured it is met, far from there it is not sure
    here = tpot(made, used.observation.shape, 4).tpot_s
    assert here.low <= used.observation.tpot_s <= here.high
    far = tpot(made, Shape(prompt_tokens=2000, output_tokens=64), 32).tpot_s
    assert far.high / far.low > 2 * here.high / here.low


def test_a_client_that_was_late_tells_the_first_token_badly(cli: Cli, tmp_path: Path) -> None:
    done = cli("calibrate", AIPERF, *SERVER, "--out", tmp_path, "--quiet")
    assert done.code == 0, done.err
    observation = read_calibration(tmp_path).used[0].observation
    assert observation.ttft_log_sd > 0.5
    assert observation.tpot_log_sd > 0.1


def test_files_of_several_tools_are_fitted_together(cli: Cli, tmp_path: Path) -> None:
    done = cli("calibrate", VLLM, GUIDELLM, AIPERF, *SERVER, "--out", tmp_path, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["file"] == str(tmp_path / "calibration.json")
    made = read_calibration(tmp_path)
    assert [run.folder for run in made.runs] == [str(VLLM), str(GUIDELLM), str(AIPERF)]
    assert [stage.observation.shape.prompt_tokens for stage in made.used] == [64, 94, 94]
    alone = tmp_path / "alone"
    assert cli("calibrate", VLLM, *SERVER, "--out", alone, "--quiet").code == 0
    one = read_calibration(alone).factors["step_overhead"]
    assert made.factors["step_overhead"].log_sd != one.log_sd


def plain(path: Path, **changes: Any) -> Path:
    """The result of vllm bench serve as it is without --save-detailed."""
    document = orjson.loads(VLLM.read_bytes())
    for key in ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"):
        del document[key]
    path.write_bytes(orjson.dumps(document | changes))
    return path


def test_levels_saved_without_details_are_fitted_for_what_they_are_worth(cli: Cli, tmp_path: Path) -> None:
    document = orjson.loads(VLLM.read_bytes())
    files = [plain(tmp_path / "four.json")]
    for users, name in ((1, "one.json"), (8, "eight.json")):
        scaled = {key: document[key] * users / 4 for key in ("output_throughput", "request_throughput")}
        files.append(plain(tmp_path / name, max_concurrency=users, **scaled))
    done = cli("calibrate", *files, *SERVER, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    made = read_calibration(tmp_path / "out")
    assert [stage.observation.users for stage in made.used] == [4, 1, 8]
    assert all(stage.observation.tpot_log_sd >= 0.05 for stage in made.used)


def test_without_out_it_gets_a_folder_of_its_own(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("calibrate", VLLM, *SERVER, "--quiet").code == 0
    (folder,) = (tmp_path / "results").iterdir()
    assert len(read_calibration(folder).used) == 1


def test_a_calibration_of_a_file_is_checked_by_another(cli: Cli, tmp_path: Path) -> None:
    assert cli("calibrate", VLLM, *SERVER, "--out", tmp_path, "--quiet").code == 0
    done = cli("calibrate", "--check", VLLM, "--calibration", tmp_path)
    assert done.code == 0, done.err
    assert "The factors hold on 1 stages" in done.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "the architecture of 'smollm2' is not known"),
        ((), "of finished runs also --model"),
        (("--model", "smollm2-135m"), "give --gpu or --num-gpu-blocks"),
        (("--model", "smollm2-135m", "--device", "cpu"), "give --num-gpu-blocks"),
        (("--model", "smollm2-135m", "--gpu", "h1000"), "h1000"),
        (("--model", "a", "--model-config", "b"), "give one of them"),
    ],
)
def test_what_a_file_does_not_hold_is_asked_for_by_its_option(
    cli: Cli, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    done = cli("calibrate", VLLM, *options, "--out", tmp_path / "out")
    assert done.code == 2
    assert said in done.one_message()
    assert not (tmp_path / "out").exists()


def test_files_of_different_models_are_refused(cli: Cli, tmp_path: Path) -> None:
    other = plain(tmp_path / "other.json", model_id="llama")
    done = cli("calibrate", VLLM, other, *SERVER)
    assert done.code == 2
    assert "model is 'smollm2' in the first and 'llama' in the second" in done.one_message()


def test_a_file_that_is_no_result_is_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    done = cli("calibrate", tmp_path / "x.json", *SERVER)
    assert done.code == 2
    assert "x.json is not a result of vllm bench serve, guidellm or aiperf" in done.one_message()
