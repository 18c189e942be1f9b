"""Every shipped profile against the twin, its times cut by `--set`, shows what it is for; a search on the real clock finds
the limit that the twin's step times mean."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cli.demo import Twin, running_twin
from harness.cli.ramp import execute
from harness.errors import RunInvalid
from harness.load.options import RampOptions
from harness.store import read_run
from loadprofiles.profile import builtin_names, load_profile

#: a pool of 12,000 tokens, so that a burst fills it; five engine seconds in each of ours
FLAGS = ("--num-gpu-blocks-override", "751", "--max-model-len", "4096", "--max-num-seqs", "64", "--time-scale", "5")

#: what each profile is cut down by
CUT = {
    "smoke": ["stages.0.duration=1500ms"],
    "ramp": ["stages.0.users={geometric: {start: 1, end: 4}}", "stages.0.duration=1500ms"],
    "burst": ["stages.*.duration=2500ms"],
    "soak": ["stages.0.duration=3s", "stages.0.users=4", "workload.output_tokens=32"],
    "calibrate": ["stages.0.users=[1, 4]", "stages.1.users=2", "stages.2.users=3", "stages.*.duration=1s"],
    "chat": ["stages.0.users=[2, 3]", "stages.0.think=50ms", "stages.0.duration=4s", "workload.output_tokens=24"],
    # the small pool keeps two documents of 1,536 tokens, not ten
    "rag": [
        "stages.0.users=[2]",
        "stages.0.duration=6s",
        "workload.output_tokens=8",
        "workload.shared_prefix.prefixes=2",
    ],
    "code": [
        "stages.0.users=[2]",
        "stages.0.duration=4s",
        "workload.output_tokens={distribution: lognormal, mean_tokens: 100, std_tokens: 30, low: 32, high: 200}",
    ],
    "trace": ["workload.speed=20", "workload.max_rows=60"],
}


@pytest.fixture(scope="module")
def twin() -> Iterator[Twin]:
    with running_twin(FLAGS) as served:
        yield served


def run(twin: Twin, name: str, folder: Path, *overrides: str, **options: Any) -> list[dict[str, Any]]:
    """The stages of a run as written. A busy machine may make a stage invalid: what it measured is there all the same."""
    profile = load_profile(name, overrides)
    given = RampOptions(
        base_url=twin.base_url,
        profile=profile,
        out=folder,
        grace_s=2.0,
        scrape_interval_s=0.2,
        seed=len(name),
        **options,
    )
    with contextlib.suppress(RunInvalid):
        execute(given, json=False, quiet=True, report=False)
    return read_run(folder).stages


def found_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())["search"]
    return found


def test_every_shipped_profile_is_run_here() -> None:
    assert {*CUT, "knee", "slo-search"} == set(builtin_names())


@pytest.mark.parametrize("name", CUT)
def test_a_profile_shows_what_it_is_for(twin: Twin, name: str, tmp_path: Path) -> None:
    stages = run(twin, name, tmp_path / name, *CUT[name])
    assert all(stage["requests"]["failed"] == 0 for stage in stages)
    assert all(stage["requests"]["ok"] for stage in stages)
    assert all(stage["server"]["steps"] for stage in stages)
    SHOWS[name](stages)


def _smoke(stages: list[dict[str, Any]]) -> None:
    assert [stage["users"] for stage in stages] == [1, 4]


def _ramp(stages: list[dict[str, Any]]) -> None:
    assert [stage["users"] for stage in stages] == [1, 2, 4]
    assert stages[2]["output_tokens_per_s"] > 1.5 * stages[0]["output_tokens_per_s"]


def _burst(stages: list[dict[str, Any]]) -> None:
    calm, burst, after = (stage["server"] for stage in stages)
    assert burst["kv_cache_usage_max"] > 0.8 > after["kv_cache_usage_max"]
    assert burst["preemptions"] + burst["waiting_mean"] > 0
    assert calm["preemptions"] == after["preemptions"] == 0


def _soak(stages: list[dict[str, Any]]) -> None:
    assert stages[0]["window"] is not None
    assert stages[0]["intervals"]["ttft_ms"] is not None


def _calibrate(stages: list[dict[str, Any]]) -> None:
    assert [stage["repetition"] for stage in stages] == [0] * 4 + [1] * 4
    passes = [
        [(s["users"], round(s["totals"]["prompt_tokens_mean"])) for s in part] for part in (stages[:4], stages[4:])
    ]
    assert sorted(passes[0]) == sorted(passes[1]) == [(1, 64), (2, 1638), (3, 1024), (4, 64)]
    assert passes[0] != passes[1]


def _chat(stages: list[dict[str, Any]]) -> None:
    assert stages[0]["server"]["prefix_hit_ratio"] > 0.2
    # the history makes prompts longer than a turn and the system prompt
    assert stages[0]["totals"]["prompt_tokens_mean"] > 180


def _rag(stages: list[dict[str, Any]]) -> None:
    assert 0.2 < stages[0]["server"]["prefix_hit_ratio"] < 0.9 * 1536 / 2048


def _code(stages: list[dict[str, Any]]) -> None:
    assert stages[0]["tpot_ms"]["n"] > 0
    assert stages[0]["output_tokens_per_s"] > 0


def _trace(stages: list[dict[str, Any]]) -> None:
    assert stages[0]["requests"]["ok"] == 60
    assert stages[0]["request_rate"] > 5
    assert stages[0]["client"]["schedule_delay_ms_p99"] is not None


SHOWS = {
    "smoke": _smoke,
    "ramp": _ramp,
    "burst": _burst,
    "soak": _soak,
    "calibrate": _calibrate,
    "chat": _chat,
    "rag": _rag,
    "code": _code,
    "trace": _trace,
}

#: a step of 20 ms and 5 ms more for each stream, whatever it holds
STEPS = ("--step-ms", "20", "--per-sequence-ms", "5", "--per-1k-kv-tokens-ms", "0", "--per-1k-prefill-tokens-ms", "0")
SHORT = ["workload.prompt_tokens=16", "workload.output_tokens=9", "search.min_residences=3", "stages.0.duration=2s"]


def test_an_slo_search_finds_the_limit_of_a_live_server(tmp_path: Path) -> None:
    """A token takes 20 + 5 N ms: 6 users are within 52.5 ms, 7 are not."""
    with running_twin(STEPS) as served:
        stages = run(served, "slo-search", tmp_path / "slo", *SHORT, "stages.0.users=3", slo_ms={"tpot": 52.5})
        found = found_in(tmp_path / "slo")
    assert found["kind"] == "slo"
    assert abs(found["users"] - 6) <= 1
    assert found["low"] < found["high"] <= 8
    assert found["confidence"] > 0.5
    assert "users meet TPOT <= 52.5 ms in 90% of the requests" in found["sentence"]
    assert found["probes"] == len(stages)


def test_a_knee_search_finds_the_bend_of_a_live_server(tmp_path: Path) -> None:
    """Steps of 20 + 5 N ms bring N / (20 + 5 N) tokens a ms: the slope is a quarter of the first user's at 4.9 users, and a
    little later for the step that a new prompt waits for."""
    with running_twin(STEPS) as served:
        run(served, "knee", tmp_path / "knee", *SHORT, "search.precision=0.15", "search.max_probes=9")
        found = found_in(tmp_path / "knee")
    assert found["kind"] == "knee"
    assert 3.5 <= found["users"] <= 7
    assert found["low"] < found["users"] < found["high"]
