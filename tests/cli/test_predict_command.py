"""`vllm-harness predict`: from a plan, from a calibration, and on the virtual clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import calibrated_files
import pytest
from calibrated_files import FLAGS, GPU, MODEL
from console import Cli, only_document, records_of, stages_of

DEPLOYMENT = ("--model", MODEL, "--gpu", GPU, *FLAGS)
LENGTHS = ("--prompt-tokens", "192", "--output-tokens", "96")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated_files.write(tmp_path_factory.mktemp("calibrated") / "calibration.json")


def holds(estimate: dict[str, Any]) -> bool:
    return bool(estimate["low"] <= estimate["value"] <= estimate["high"])


def test_a_plan_alone_is_predicted_with_wide_intervals(cli: Cli) -> None:
    done = cli("predict", *DEPLOYMENT, *LENGTHS, "--users", "1,8", "--json")
    assert done.code == 0
    document = only_document(done.out)
    assert [one["users"] for one in document["predictions"]] == [1, 8]
    for one in document["predictions"]:
        assert one["basis"] == "extrapolated"
        assert holds(one["output_tokens_per_s"])
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            assert one[name].keys() == {"mean", "p50", "p90", "p95", "p99"}
            assert all(holds(estimate) for estimate in one[name].values())
    assert document["calibration"] is None
    assert document["users"]["binding"] == "kv_staggered"
    assert document["why"].startswith("The KV pool binds at 33 users")


def test_a_calibration_alone_means_its_own_deployment(cli: Cli, file: Path) -> None:
    done = cli("predict", "--calibration", file, *LENGTHS, "--users", "1,8,12,64", "--json")
    assert done.code == 0
    document = only_document(done.out)
    found = document["predictions"]
    assert [one["basis"] for one in found] == ["measured", "measured", "interpolated", "extrapolated"]
    assert [one["method"] for one in found] == ["closed_form", "closed_form", "closed_form", "twin"]
    assert document["calibration"]["stages"] == 3
    assert document["deployment"]["gpu"] == GPU
    prior = only_document(cli("predict", *DEPLOYMENT, *LENGTHS, "--users", "1", "--json").out)["predictions"][0]
    mean = found[0]["tpot_ms"]["mean"]
    # the step is 1.2 times slower, and known far better
    assert 1.1 < mean["value"] / prior["tpot_ms"]["mean"]["value"] < 1.25
    assert mean["high"] / mean["low"] < prior["tpot_ms"]["mean"]["high"] / prior["tpot_ms"]["mean"]["low"]


def test_a_calibration_of_another_deployment_is_refused_unless_it_is_carried_over(cli: Cli, file: Path) -> None:
    other = ("--model", "llama-3.1-8b", "--gpu", GPU, "--tp", "2", "--max-model-len", "2048")
    done = cli("predict", "--calibration", file, *other, "--users", "1")
    assert done.code == 2
    assert "tp: 1 when calibrated, 2 now" in done.one_message()
    assert "--transfer" in done.err
    carried = cli("predict", "--calibration", file, *other, "--transfer", "--users", "1", "--json")
    document = only_document(carried.out)
    assert document["calibration"]["transferred"] is True
    assert document["predictions"][0]["basis"] == "extrapolated"
    assert document["calibration"]["factors"]["step_overhead"]["source"].startswith("transferred")
    elsewhere = cli("predict", "--calibration", file, "--model", MODEL, "--gpu", "l4", *FLAGS, "--transfer")
    assert elsewhere.code == 2
    assert "gpu: h100-sxm when calibrated, l4 now" in elsewhere.one_message()


def test_people_get_a_table_with_intervals_and_what_binds(cli: Cli, file: Path) -> None:
    done = cli("predict", "--calibration", file, *LENGTHS, "--slo", "ttft:500,tpot:12")
    assert done.code == 0
    assert "measured" in done.out
    assert "extrapolated !, twin" in done.out
    assert "pool, staggered" in done.out
    assert "Within ttft:500,tpot:12 (means, ms) and every other limit fit" in done.out
    assert "corrected by" in done.out
    assert cli("predict", "--calibration", file, "--quiet").out == ""


def test_a_rate_beyond_what_is_served_says_so(cli: Cli) -> None:
    done = cli("predict", *DEPLOYMENT, *LENGTHS, "--request-rate", "20,500")
    assert done.code == 0
    assert "cannot be served: at most" in done.out
    document = only_document(cli("predict", *DEPLOYMENT, *LENGTHS, "--request-rate", "500", "--json").out)
    assert document["predictions"][0]["served"] is False


def test_a_profile_is_predicted_stage_by_stage(cli: Cli) -> None:
    document = only_document(cli("predict", *DEPLOYMENT, "--profile", "smoke", "--json").out)
    assert len(document["predictions"]) >= 1
    assert all(one["served"] for one in document["predictions"])


def test_a_simulated_profile_is_a_run_that_the_other_commands_read(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = cli(
        "predict", *DEPLOYMENT, *LENGTHS, "--simulate", "--users", "2,8", "--duration", "5s", "--out", folder, "--json"
    )
    assert done.code == 0
    document = only_document(done.out)
    marked = document["predicted"]
    assert marked.pop("stopped") is None
    assert marked["by"] == "twin on the virtual clock"
    assert document["stages"] == stages_of(folder)
    assert len(records_of(folder)) == sum(stage["requests"]["ok"] for stage in document["stages"])
    assert json.loads((folder / "summary.json").read_text())["predicted"] == document["predicted"]
    assert json.loads((folder / "run.json").read_text())["predicted"] == document["predicted"]
    assert only_document(cli("compare", folder, "--json").out)["verdict"] == "not_reached"
    assert cli("report", folder).code == 0
    again = cli("predict", *DEPLOYMENT, *LENGTHS, "--simulate", "--users", "2", "--duration", "5s", "--out", folder)
    assert again.code == 2
    assert "holds another run" in again.one_message()


def test_a_simulation_is_the_same_with_the_same_seed(cli: Cli) -> None:
    asked = (
        "predict",
        *DEPLOYMENT,
        "--simulate",
        "--request-rate",
        "20",
        "--duration",
        "3s",
        "--noise",
        "0.1",
        "--json",
    )
    one, two, other = (only_document(cli(*asked, "--seed", seed).out)["stages"] for seed in ("1", "1", "2"))
    assert one == two
    assert one != other


def test_a_simulation_ends_where_a_ramp_would(cli: Cli, tmp_path: Path) -> None:
    profile = tmp_path / "stops.yaml"
    profile.write_text(
        "name: stops\nworkload: {prompt_tokens: 192, output_tokens: 96}\nlimits: {saturation: stop}\n"
        "stages: [{users: [4, 64, 128], duration: 4s}]\n"
    )
    document = only_document(cli("predict", *DEPLOYMENT, "--simulate", "--profile", profile, "--json").out)
    assert [stage["users"] for stage in document["stages"]] == [4, 64]
    assert "saturated at 64 users" in document["predicted"]["stopped"]


def test_a_simulation_prints_what_a_ramp_prints(cli: Cli) -> None:
    done = cli("predict", *DEPLOYMENT, "--simulate", "--users", "2", "--duration", "3s")
    assert "predicted on the virtual clock" in done.out
    assert "tok/s/user" in done.out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--duration", "5s"), "--duration is given without --simulate"),
        (("--out", "x"), "--out is given without --simulate"),
        (("--noise", "0.1"), "--noise is given without --simulate"),
        (("--users", "1", "--request-rate", "1"), "--users and --request-rate are both given"),
        (("--users", "1", "--profile", "smoke"), "--profile and --users"),
        (("--users", "none"), "--users: expected whole numbers"),
        (("--users", "1.5"), "--users: expected whole numbers"),
        (("--request-rate", "-1"), "--request-rate: expected numbers above 0"),
        (("--simulate", "--noise", "2"), "--noise: expected a standard deviation"),
        (("--seed", "-1"), "--seed: expected 0 or more"),
        (("--tp", "1,2"), "tp = 1, 2, expected one of them"),
        (("--profile", "nosuch"), "no profile named 'nosuch'"),
        (("--transfer",), "--transfer is given without --calibration"),
        (("--slo", "soon"), "slo = 'soon'"),
        (("--prompt-tokens", "4000"), "max_model_len"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(cli: Cli, options: tuple[str, ...], says: str) -> None:
    done = cli("predict", *DEPLOYMENT, *options)
    assert done.code == 2
    assert says in done.one_message()


def test_a_calibration_that_is_alone_takes_no_flags(cli: Cli, file: Path) -> None:
    done = cli("predict", "--calibration", file, "--tp", "2")
    assert done.code == 2
    assert "--tp with --calibration alone" in done.one_message()


def test_a_deployment_that_does_not_fit_is_refused(cli: Cli) -> None:
    done = cli("predict", "--model", "llama-3.3-70b", "--gpu", "l4", "--users", "1")
    assert done.code == 2
    assert "vLLM would not start" in done.one_message()


# --- the other commands that take a calibration ------------------------------------------------------------------------


def test_a_plan_is_corrected_by_a_calibration(cli: Cli, file: Path) -> None:
    corrected = only_document(cli("plan", "--calibration", file, *LENGTHS, "--json").out)
    plain = only_document(cli("plan", *DEPLOYMENT, *LENGTHS, "--json").out)
    assert 1.05 < corrected["tpot_ms"]["value"] / plain["tpot_ms"]["value"] < 1.25
    assert corrected["memory"] == plain["memory"]
    assert corrected["calibration"]["transferred"] is False
    assert "calibration" not in plain
    same = only_document(cli("plan", "--calibration", file, *DEPLOYMENT, *LENGTHS, "--json").out)
    assert same["tpot_ms"] == corrected["tpot_ms"]
    assert "corrected by" in cli("plan", "--calibration", file, *LENGTHS).out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--tp", "2"), "--tp with --calibration alone"),
        (("--model", MODEL, "--gpu", "l4,l40s"), "--calibration with several deployments"),
        (("--model", MODEL, "--gpu", GPU), "pool:"),
        (("--fit",), "--fit with --calibration"),
    ],
)
def test_a_plan_refuses_what_a_calibration_is_not_of(cli: Cli, file: Path, options: tuple[str, ...], says: str) -> None:
    done = cli("plan", "--calibration", file, *options)
    assert done.code == 2
    assert says in done.one_message()


def test_other_bounds_keep_the_factors(cli: Cli, file: Path) -> None:
    """A larger pool prices no step: nothing is widened, and it is said."""
    asked = ("plan", "--calibration", file, "--model", MODEL, "--gpu", GPU, "--max-model-len", "2048", "--transfer")
    document = only_document(cli(*asked, *LENGTHS, "--json").out)
    assert document["calibration"]["transferred"] is False
    assert any(text.startswith("pool:") for text in document["calibration"]["differences"])
    assert "the factors hold, the bounds are other ones" in cli(*asked, *LENGTHS).out
