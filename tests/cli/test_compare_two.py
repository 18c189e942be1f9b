"""`vllm-harness compare` of two runs, of a run and a calibration, of two calibrations: what it says, and how it exits."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import calibrated_files
import pytest
from calibrated_files import FLAGS, GPU, MODEL
from console import Cli, only_document

from calibration.factors import FactorSet
from calibration.predict import Predictor
from harness.load.account import description
from harness.load.options import RampOptions
from harness.simulated import Simulation
from harness.store import RunWriter
from loadprofiles.profile import Profile, parse_profile, resolve

SLOWER = (
    "step_overhead",
    "per_sequence",
    "kv_read_factor",
    "prefill_factor",
    "attention_factor",
    "mixed_step_overhead",
)


def profile(*stages: dict[str, Any], **more: Any) -> Profile:
    lengths = {"prompt_tokens": 192, "output_tokens": {"distribution": "uniform", "low": 64, "high": 128}}
    data = {"name": "test", "workload": lengths, "stages": list(stages), **more}
    return resolve(parse_profile(data, "test"), max_model_len=2048, pool_tokens=8192)


STAGES = profile({"users": [4, 16], "duration": "8s"})


def simulated(folder: Path, seed: int, *, slower: float = 1.0, played: Profile = STAGES) -> Path:
    """A run as `predict --simulate --noise 0.1` writes it, of the calibrated deployment, every step ``slower``."""
    from datetime import UTC, datetime

    from calibration.serving import serving

    calibration = calibrated_files.calibration()
    factors: FactorSet = calibration.factors
    for name in SLOWER:
        factors = factors.scaled(name, slower)
    served = serving(calibration.rebuild_deployment())
    writer = RunWriter(folder)
    simulation = Simulation(Predictor(served, factors), "the-model", seed=seed, noise=0.1, writer=writer)
    stages = [simulation.stage(index, stage) for index, stage in enumerate(played.stages)]
    options = RampOptions(base_url="twin", profile=played, out=folder, seed=seed)
    now = datetime(2026, 11, 30, tzinfo=UTC)
    run = description(options, simulation.probed(), played, started=now, ended=now, selftest=None)
    writer.write_run({**run, "predicted": {"by": "a test"}})
    writer.write_summary(stages)
    writer.close()
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run, another of the same server, and one of a server a tenth slower."""
    room = tmp_path_factory.mktemp("runs")
    return {
        "a": simulated(room / "a", 1),
        "b": simulated(room / "b", 2),
        "slow": simulated(room / "slow", 3, slower=1.1),
    }


def test_equal_servers_pass_and_every_metric_has_a_verdict(cli: Cli, runs: dict[str, Path]) -> None:
    done = cli("compare", runs["a"], runs["b"], "--fail-if", "worse", "--fail-if", "tpot_ms.mean > +5%", "--json")
    assert done.code == 0
    document = only_document(done.out)
    assert document["failed"] == []
    assert [rule["broken"] for rule in document["rules"]] == [False, False]
    assert document["verdicts"]["tpot_ms.mean"] == "same"
    loads = {(row["users"], row["metric"]) for row in document["rows"]}
    assert {users for users, _ in loads} == {4, 16}
    row = next(row for row in document["rows"] if row["metric"] == "tpot_ms.mean")
    assert row["low"] < row["change"] < row["high"]


def test_a_tenth_slower_fails_names_what_and_exits_3(cli: Cli, runs: dict[str, Path]) -> None:
    done = cli("compare", runs["a"], runs["slow"], "--fail-if", "tpot_ms.mean > +5%")
    assert done.code == 3
    assert "tpot_ms.mean > +5%: tpot_ms.mean +" in done.one_message()
    assert "worse" in done.out
    assert "FAILED  tpot_ms.mean > +5%" in done.out
    assert cli("compare", runs["a"], runs["slow"]).code == 0
    assert cli("compare", runs["slow"], runs["a"], "--fail-if", "worse").code == 0


def test_junit_has_a_case_for_each_rule_and_load(cli: Cli, runs: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "gate.xml"
    rules = ("--fail-if", "tpot_ms.mean > +5%", "--fail-if", "ttft_ms.p99 > +10%")
    assert cli("compare", runs["a"], runs["slow"], *rules, "--junit", file).code == 3
    suite = Xml.parse(file).getroot()
    cases = suite.findall("testcase")
    assert len(cases) == 4
    assert suite.get("tests") == "4"
    failed = [case for case in cases if case.find("failure") is not None]
    assert suite.get("failures") == str(len(failed))
    assert {case.get("name") for case in failed} == {"tpot_ms.mean > +5%"}
    skipped = [case for case in cases if case.find("skipped") is not None]
    assert {case.get("name") for case in skipped} <= {"ttft_ms.p99 > +10%"}


def test_markdown_says_what_failed_first(cli: Cli, runs: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "gate.md"
    cli("compare", runs["a"], runs["slow"], "--fail-if", "worse", "--markdown", file)
    text = file.read_text()
    assert "**failed**" in text
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert table[0].startswith("| load | metric |")
    assert table[1].endswith("| worse |")
    assert all(line.count("|") == 8 for line in table)


def test_stated_noise_between_runs_forgives(cli: Cli, runs: dict[str, Path]) -> None:
    assert cli("compare", runs["a"], runs["slow"], "--fail-if", "worse", "--run-noise", "0.1").code == 0


def test_a_load_that_the_second_run_lacks_fails_the_gate(cli: Cli, runs: dict[str, Path], tmp_path: Path) -> None:
    short = simulated(tmp_path / "short", 4, played=profile({"users": 4, "duration": "8s"}))
    done = cli("compare", runs["a"], short, "--fail-if", "worse")
    assert done.code == 3
    assert "was not measured in the second run" in done.one_message()
    assert cli("compare", runs["a"], short).code == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--fail-if", "tpot > 5%"), "unknown metric 'tpot'"),
        (("--fail-if", "tpot_ms.mean > 5"), "expected METRIC > +N%"),
        (("--tolerance", "0.1"), "--tolerance says nothing of two runs"),
        (("--plan", "x"), "--plan says nothing of two runs"),
        (("--calibration", "x"), "--calibration says nothing of two runs"),
        (("--run-noise", "2"), "--run-noise: expected a share"),
        (("--run-noise", "-1"), "--run-noise: expected a share"),
    ],
)
def test_what_cannot_be_asked_of_two_runs_is_refused(
    cli: Cli, runs: dict[str, Path], options: tuple[str, ...], says: str
) -> None:
    done = cli("compare", runs["a"], runs["b"], *options)
    assert done.code == 2
    assert says in done.one_message()


def test_what_cannot_be_asked_of_one_run_is_refused(cli: Cli, runs: dict[str, Path]) -> None:
    for options in (("--fail-if", "worse"), ("--junit", "x"), ("--run-noise", "0.1"), ("--transfer",)):
        done = cli("compare", runs["a"], *options)
        assert done.code == 2
        assert "says nothing of" in done.one_message()


def test_runs_without_a_load_in_common_are_refused(cli: Cli, runs: dict[str, Path], tmp_path: Path) -> None:
    other = simulated(tmp_path / "other", 5, played=profile({"users": 3, "duration": "5s"}))
    done = cli("compare", runs["a"], other)
    assert done.code == 2
    assert "no load is in both runs" in done.one_message()


def test_a_file_that_cannot_be_written_is_said(cli: Cli, runs: dict[str, Path], tmp_path: Path) -> None:
    done = cli("compare", runs["a"], runs["b"], "--junit", tmp_path / "no" / "gate.xml")
    assert done.code == 1
    assert "could not be written" in done.one_message()


# --- a run and a calibration -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated_files.write(tmp_path_factory.mktemp("calibrated") / "calibration.json")


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calibrated server itself, users apart as the closed form has them; 192 + 96 tokens, up to beyond the wall."""
    played = resolve(
        parse_profile(
            {
                "name": "steady",
                "workload": {"prompt_tokens": 192, "output_tokens": 96},
                "stages": [{"users": [1, 8, 24], "duration": "12s", "ramp_up": "1s"}],
            },
            "test",
        ),
        max_model_len=2048,
        pool_tokens=8192,
    )
    return simulated(tmp_path_factory.mktemp("steady") / "run", 6, played=played)


def test_a_run_is_held_against_a_calibration_level_by_level(cli: Cli, steady: Path, file: Path) -> None:
    done = cli("compare", steady, "--calibration", file, "--tolerance", "0.25", "--json")
    document = only_document(done.out)
    assert done.code == 0, document["missed"]
    assert [level["users"] for level in document["levels"]] == [1, 8, 24]
    for level in document["levels"]:
        for metric in ("output_tokens_per_s", "tpot_ms", "ttft_ms"):
            held = level[metric]
            assert held["inside"] == (held["predicted"]["low"] <= held["measured"] <= held["predicted"]["high"])
            assert held["error"] == pytest.approx(held["predicted"]["value"] / held["measured"] - 1)
            assert held["predicted"]["basis"] == "measured"
        assert abs(level["tpot_ms"]["error"]) < 0.05
    assert document["summary"]["tpot_ms"]["n"] == 3


def test_a_calibration_that_no_longer_holds_exits_3(
    cli: Cli, runs: dict[str, Path], steady: Path, tmp_path: Path
) -> None:
    wrong = calibrated_files.write(tmp_path / "wrong.json", slower=1.8)
    done = cli("compare", steady, "--calibration", wrong, "--tolerance", "0.1")
    assert done.code == 3
    assert "tolerance 10%" in done.one_message()
    assert "OUT" in done.out


def test_bars_stand_for_the_numbers(cli: Cli, steady: Path, file: Path) -> None:
    done = cli("compare", steady, "--calibration", file)
    assert done.code == 0
    assert "measured over predicted" in done.out
    lengths = [line.count("█") for line in done.out.splitlines() if "█" in line and "in, " in line]
    assert lengths[0] < lengths[1] < lengths[2]
    assert "inside the 90 % interval" in done.out


def test_a_run_of_another_server_is_refused_unless_told_otherwise(
    cli: Cli, steady: Path, file: Path, tmp_path: Path
) -> None:
    import orjson

    content = orjson.loads(file.read_bytes())
    content["deployment"]["max_num_seqs"] = 8
    other = tmp_path / "other.json"
    other.write_bytes(orjson.dumps(content))
    done = cli("compare", steady, "--calibration", other)
    assert done.code == 2
    assert "max_num_seqs: 8 when calibrated" in done.one_message()
    held = only_document(cli("compare", steady, "--calibration", other, "--transfer", "--json").out)
    assert held["differences"]
    # the run's own bound holds in what is predicted
    assert abs(held["levels"][2]["tpot_ms"]["error"]) < 0.05


# --- two calibrations --------------------------------------------------------------------------------------------------


def test_two_calibrations_say_which_factor_moved(cli: Cli, file: Path, tmp_path: Path) -> None:
    other = calibrated_files.write(tmp_path / "other.json", slower=1.5)
    document = only_document(cli("compare", file, other, "--json").out)
    moved = {row["name"]: row["verdict"] for row in document["factors"]}
    assert moved["step_overhead"] == "moved"
    assert moved["per_sequence"] == "same"
    row = next(row for row in document["factors"] if row["name"] == "step_overhead")
    assert row["ratio"] == pytest.approx(1.25)
    assert row["low"] < 1.25 < row["high"]
    assert document["differences"] == []
    assert "step_overhead" in cli("compare", file, other).out


def test_a_calibration_and_a_run_are_no_pair(cli: Cli, runs: dict[str, Path], file: Path) -> None:
    done = cli("compare", runs["a"], file)
    assert done.code == 2
    assert "one is a run, one a calibration" in done.one_message()
    refused = cli("compare", file, file, "--fail-if", "worse")
    assert refused.code == 2


def test_the_twin_of_a_calibration_is_refused_other_flags(cli: Cli, file: Path) -> None:
    done = cli("twin", "--calibration", file, "--max-num-seqs", "4")
    assert done.code == 2
    assert "--max-num-seqs with --calibration alone" in done.one_message()
    assert "step-ms" in cli("twin", "--calibration", file, "--step-ms", "4").one_message()
    other = cli("twin", "--calibration", file, "--model", MODEL, "--gpu", GPU, "--tp", "2", *FLAGS[:2])
    assert other.code == 2
    assert "tp: 1 when calibrated, 2 now" in other.one_message()
