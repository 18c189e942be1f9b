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


def test_a_search_and_a_repetition_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    command("slo-search", json=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "most users with whom 90% of the requests meet TTFT <= 1000 ms, TPOT <= 100 ms" in out
    assert "first probe: 1 user, 256 prompt / 128 output tokens, 30 s" in out
    command("calibrate", json=False)
    assert "2 times, in an order drawn anew each time" in " ".join(capsys.readouterr().out.split())


def test_a_set_shows_in_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    command("soak", ["stages.0.users=64", "stages.0.requests=5000"], json=False)
    assert "64 users" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"stages\.0\.users"):
        command("soak", ["stages.0.users=none"], json=False)
    with pytest.raises(UsageError, match="none was named"):
        command(None, ["stages.0.users=3"], json=False)


def test_the_schema_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    command(schema=True)
    assert json.loads(capsys.readouterr().out)["title"] == "vllm-harness load profile"
