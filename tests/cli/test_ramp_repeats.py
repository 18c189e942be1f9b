"""A profile that repeats its levels: what a run, its comparison and its fit make of the passes."""

from __future__ import annotations

import json
from pathlib import Path

from console import Cli

from harness.calibration_file import read_calibration
from harness.cli.demo import running_twin

PROFILE = """
name: twice
about: two levels, two passes, in an order drawn anew
workload: {prompt_tokens: 64, output_tokens: 16}
stages:
  - {users: [1, 4], duration: 2s, ramp_up: 0s}
repeat: {times: 2, order: random}
"""


def test_passes_are_pooled_by_the_run_and_fitted_as_stages_of_their_own(cli: Cli, tmp_path: Path) -> None:
    profile, out = tmp_path / "twice.yaml", tmp_path / "run"
    profile.write_text(PROFILE)
    with running_twin(("--model", "llama-3.1-8b", "--gpu", "h100-sxm", "--max-model-len", "4096")) as twin:
        done = cli("ramp", "--profile", profile, "--base-url", twin.base_url, "--out", out, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    users = [stage["users"] for stage in document["stages"]]
    assert sorted(users) == [1, 1, 4, 4]
    repeats = {level["users"]: level for level in document["repeats"]}
    assert sorted(repeats) == [1, 4]
    for level, found in repeats.items():
        passes = [index for index, count in enumerate(users) if count == level]
        assert sorted([*found["stages"], *found["left_out"]]) == passes
        if len(found["stages"]) == 2:
            means = sorted(document["stages"][index]["tpot_ms"]["mean"] for index in passes)
            assert means[0] <= found["tpot_ms"]["mean"] <= means[1]
            assert found["tpot_ms"]["low"] <= means[0]
            assert found["tpot_ms"]["high"] >= means[1]
    assert any(len(found["stages"]) == 2 for found in repeats.values())
    compared = cli("compare", out, "--json")
    assert compared.code == 0, compared.err
    assert json.loads(compared.out)["repeats"] == document["repeats"]
    assert cli("calibrate", out, "--gpu", "h100-sxm", "--quiet").code == 0
    made = read_calibration(out)
    assert len(made.used) + len(made.left_out) == 4
    assert len({stage.observation.label for stage in made.used}) == len(made.used) >= 2
