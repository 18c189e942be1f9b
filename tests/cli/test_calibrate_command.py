"""`vllm-harness calibrate`: a server measured and fitted, finished runs fitted, a fit checked; and how each is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from console import Cli, records_of
from scraping import Scraper, unused_port
from summaries import stages_of

from calibration.calibrate import prior_of
from calibration.calibration_file import Calibration
from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.factors import FactorSet
from calibration.serving import Serving, serving
from harness.calibration_file import read_calibration
from harness.cli.demo import running_twin
from harness.observe.probe import ProbeResult
from harness.store import RunWriter

FLAGS = ("--model", "llama-3.1-8b", "--gpu", "h100-sxm", "--max-model-len", "4096", "--no-enable-prefix-caching")
BLOCKS = 20_000


def known() -> tuple[Serving, FactorSet]:
    asked = {"max_model_len": 4096, "num_gpu_blocks_override": BLOCKS, "block_size": 16}
    s = serving(resolve_deployment(find_model("llama-3.1-8b"), gpu=find_gpu("h100-sxm"), **asked))
    return s, prior_of(s.deployment, s)


def write_run(folder: Path, *, version: str = "0.32.0", root: str = "llama-3.1-8b", **truth: Any) -> Path:
    """A finished run of a server that is the prior, but for what is scaled."""
    s, factors = known()
    for name, ratio in truth.items():
        factors = factors.scaled(name, ratio)
    probed = ProbeResult(
        base_url="http://127.0.0.1:1",
        model="served",
        model_root=root,
        max_model_len=4096,
        vllm_version=version,
        engines=1,
        pool={"block_size": 16, "num_blocks": BLOCKS, "kv_cache_dtype": "auto", "prefix_caching": True},
    )
    stages = stages_of(s, factors, shapes=[(64, 64), (2048, 48), (64, 8)], levels=[1, 4, 16])
    writer = RunWriter(folder)
    writer.write_run({"deployment": probed.to_dict(), "profile": {"stages": [{}] * len(stages)}, "started": "now"})
    writer.write_summary(stages)
    writer.close()
    return folder


def one_export_of_all_of_it(scraper: Scraper, out: Path, made: Calibration) -> None:
    """From the scout to the fit: one port that is never away, counters that never fall, and in the end the factors."""
    assert scraper.gaps == 0
    requests = scraper.values("vllm_harness_requests_total", "outcome")
    counts = [sum(reading.values()) for reading in requests]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == len(records_of(out / "scout")) + len(records_of(out))
    stages = [reading.get(("vllm_harness_stage", ())) for reading in scraper.readings]
    assert stages[-1] is None, "a moment that is over is shown"
    assert 0.0 in stages
    found = {name: factor.value for name, factor in made.factors.factors.items() if factor.identified}
    factors = scraper.values("vllm_harness_correction_factor", "factor")
    assert factors[0] == {}
    assert factors[-1] == pytest.approx(found)
    assert "step_overhead" in found


def test_a_server_is_measured_fitted_and_still_holds(cli: Cli, tmp_path: Path) -> None:
    out, port = tmp_path / "run", unused_port()
    with running_twin(FLAGS) as twin, Scraper(port) as scraper:
        done = cli(
            *("calibrate", "--base-url", twin.base_url, "--gpu", "h100-sxm", "--out", out, "--json"),
            *("--budget", "40s", "--users", "1,4,8", "--shapes", "64/32,512/16", "--prometheus-port", str(port)),
        )
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["file"] == str(out / "calibration.json")
    made = read_calibration(out)
    assert made.rebuild_deployment().architecture.catalog_name == "llama-3.1-8b"
    assert len(made.used) >= 3
    one_export_of_all_of_it(scraper, out, made)
    step = made.factors["step_overhead"]
    prior = prior_of(made.rebuild_deployment(), serving(made.rebuild_deployment()))
    # the twin's steps are the prior's, and the machine that runs it adds what it is late
    assert step.identified
    assert step.value == pytest.approx(prior.value("step_overhead"), rel=0.25)
    again = cli("calibrate", out, "--gpu", "h100-sxm", "--out", tmp_path / "again")
    assert again.code == 0, again.err
    assert read_calibration(tmp_path / "again").factors == made.factors
    held = cli("calibrate", "--check", out, "--calibration", out, "--json")
    assert held.code == 0, held.err
    assert json.loads(held.out)["holds"]


def test_finished_runs_are_fitted_and_explained(cli: Cli, tmp_path: Path) -> None:
    done = cli("calibrate", write_run(tmp_path / "a", step_overhead=1.1), "--gpu", "h100-sxm")
    assert done.code == 0, done.err
    assert "9 stages fitted, 0 left out" in done.out
    assert "every step: kernel launches, and the weights it reads" in done.out
    assert "Little's law, which no fit saw" in done.out
    assert f"written to {tmp_path / 'a' / 'calibration.json'}" in done.out
    _, prior = known()
    found = read_calibration(tmp_path / "a").factors
    assert found.value("step_overhead") == pytest.approx(1.1 * prior.value("step_overhead"), rel=0.02)


def test_several_runs_of_one_deployment_are_fitted_together(cli: Cli, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    assert cli("calibrate", *runs, "--gpu", "h100-sxm", "--out", tmp_path / "both", "--quiet").code == 0
    made = read_calibration(tmp_path / "both")
    assert [run.folder for run in made.runs] == [str(run) for run in runs]
    assert {stage.run for stage in made.used} == {0, 1}
    assert len({stage.observation.label for stage in made.used}) == 18


def test_runs_of_different_deployments_are_refused(cli: Cli, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", version="0.31.0")]
    done = cli("calibrate", *runs, "--gpu", "h100-sxm")
    assert done.code == 2
    assert "vllm_version is '0.32.0' in the first and '0.31.0' in the second" in done.one_message()


def test_drift_is_named_and_exits_3(cli: Cli, tmp_path: Path) -> None:
    assert cli("calibrate", write_run(tmp_path / "a"), "--gpu", "h100-sxm", "--quiet").code == 0
    held = cli("calibrate", "--check", write_run(tmp_path / "b"), "--calibration", tmp_path / "a")
    assert held.code == 0, held.err
    assert "The factors hold on 9 stages" in held.out
    moved = write_run(tmp_path / "c", step_overhead=1.25)
    done = cli("calibrate", "--check", moved, "--calibration", tmp_path / "a" / "calibration.json", "--json")
    assert done.code == 3
    assert "step_overhead moved by +2" in done.one_message()
    document = json.loads(done.out)
    assert (document["holds"], document["drift"]["moved"]) == (False, "step_overhead")


def test_another_version_is_said_before_any_statistics(cli: Cli, tmp_path: Path) -> None:
    assert cli("calibrate", write_run(tmp_path / "a"), "--gpu", "h100-sxm", "--quiet").code == 0
    later = write_run(tmp_path / "b", version="0.33.0", step_overhead=1.25)
    done = cli("calibrate", "--check", later, "--calibration", tmp_path / "a")
    assert done.code == 3
    assert "vllm_version was 0.32.0 and is 0.33.0" in done.one_message()
    assert "step_overhead" not in done.out + done.err


def test_without_a_gpu_the_priors_are_wide(cli: Cli, tmp_path: Path) -> None:
    assert cli("calibrate", write_run(tmp_path / "a"), "--quiet").code == 0
    made = read_calibration(tmp_path / "a")
    assert made.deployment.gpu == "unknown"
    assert made.factors["kv_read_factor"].prior_log_sd > 0.9


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "expected either --base-url or finished runs"),
        (["x", "--base-url", "http://127.0.0.1:1"], "expected either --base-url or finished runs"),
        (["--check", "x"], "--check and --calibration belong together"),
        (["--base-url", "http://127.0.0.1:1", "--users", "a"], "--users: expected whole numbers above 0"),
        (["--base-url", "http://127.0.0.1:1", "--shapes", "64"], "--shapes: expected PROMPT/OUTPUT tokens"),
        (["--base-url", "http://127.0.0.1:1", "--budget", "soon"], "--budget: expected a duration"),
        (["--base-url", "http://127.0.0.1:1", "--endpoint", "x"], "--endpoint: expected completions or chat"),
        (["nowhere"], "nowhere holds no run"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(cli: Cli, args: list[str], said: str) -> None:
    done = cli("calibrate", *args)
    assert done.code == 2
    assert said in done.one_message()


def test_an_unknown_model_is_refused_with_what_to_give(cli: Cli, tmp_path: Path) -> None:
    done = cli("calibrate", write_run(tmp_path / "a", root="/models/mine"))
    assert done.code == 2
    assert "the architecture of '/models/mine' is not known" in done.one_message()
    assert "--model-config" in done.one_message()


def test_a_damaged_calibration_is_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (tmp_path / "c.json").write_bytes(orjson.dumps({"schema_version": 9}))
    done = cli("calibrate", "--check", run, "--calibration", tmp_path / "c.json")
    assert done.code == 2
    assert "schema_version = 9, this version reads 1" in done.one_message()
