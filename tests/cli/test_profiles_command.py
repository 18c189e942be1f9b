"""`vllm-harness profiles`: what there is, and one of them stage by stage."""

from __future__ import annotations

import json

import pytest

from harness.cli.profiles import command
from harness.errors import UsageError


def test_every_shipped_profile_is_listed_with_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    command(None, json=False)
    out = capsys.readouterr().out
    for name in ("burst", "ramp", "smoke", "soak"):
        assert name in out


def test_one_profile_is_explained_stage_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    command("burst", json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "stage 2: as many users as hold 1.5 x the KV pool" in out
    assert "50% of the context" in out


def test_json_is_the_profiles_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    command("smoke", json=True)
    (profile,) = json.loads(capsys.readouterr().out)
    assert profile["name"] == "smoke"
    assert [stage["users"] for stage in profile["stages"]] == [1, 4]


def test_an_unknown_profile_is_refused_with_the_near_one() -> None:
    with pytest.raises(UsageError, match="no profile named 'smok'") as caught:
        command("smok", json=False)
    assert caught.value.hint == "did you mean 'smoke'?"
