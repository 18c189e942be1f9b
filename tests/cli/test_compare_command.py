"""`vllm-harness compare` on folders as ramp writes them: what it prints, as JSON and as text, and how it exits."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.trace import RequestTrace
from harness.cli.app import main
from harness.cli.compare_calibration import _asked
from harness.measure.summary import StageReadings, summarise
from harness.measure.window import StageLoad
from harness.store import RunData, RunWriter

POOL = {"usable_blocks": 40, "block_size": 32, "usable_tokens": 1280}
#: users -> preemptions and output tokens a second, as a real server with this pool gave them
REAL = {2: (0, 58.0), 4: (0, 120.0), 6: (0, 156.0), 8: (6, 166.0), 12: (15, 160.0)}


def stage(index: int, users: int, preemptions: float | None) -> dict[str, Any]:
    """Three rounds of lock-step users, 64 tokens in and 100 out."""
    rounds, n = 3, 3 * users
    sent = np.repeat(np.arange(rounds) * 2.0, users)
    trace = RequestTrace(
        source="live",
        user=np.tile(np.arange(users), rounds),
        scheduled_s=sent,
        sent_s=sent,
        ttft_s=np.full(n, 0.1),
        ttfa_s=np.full(n, 0.1),
        e2e_s=np.full(n, 2.0),
        stream_end_s=np.full(n, 2.0),
        tpot_s=np.full(n, 1.9 / 99),
        prompt_tokens=np.full(n, 64.0),
        output_tokens=np.full(n, 100.0),
        ok=np.ones(n, dtype=bool),
        incomplete=np.zeros(n, dtype=bool),
        failure=np.full(n, "", dtype=object),
    )
    server = None if preemptions is None else {"preemptions": preemptions, "waiting_mean": 0.0}
    return summarise(index, trace, StageLoad(users=users), StageReadings(server=server))


def write_run(folder: Path, *, pool: dict[str, int] | None = POOL, server: bool = True, stages: bool = True) -> Path:
    writer = RunWriter(folder)
    writer.write_run({"deployment": {"pool": pool, "engines": 1, "max_num_seqs": None}})
    if stages:
        summaries = [
            stage(i, users, preemptions if server else None) | {"output_tokens_per_s": rate}
            for i, (users, (preemptions, rate)) in enumerate(REAL.items())
        ]
        writer.write_summary(summaries)
    writer.close()
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["vllm-harness", "compare", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_both_sides_are_one_json_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, write_run(tmp_path / "run"), "--json") == 0
    document = json.loads(capfd.readouterr().out)
    assert document["predicted"]["kv_full"] == pytest.approx(40 / 6)
    assert document["predicted"]["kv_staggered"] == pytest.approx(9.80, abs=0.01)
    assert (document["measured"]["last_good"], document["measured"]["first_bad"]) == (6, 8)
    assert document["measured"]["binding"] == "wall"
    assert (document["verdict"], document["relative_error"], document["missed"]) == ("inside", 0, None)
    assert (document["prompt_tokens_mean"], document["output_tokens_mean"]) == (64, 100)


def test_both_sides_are_printed_and_the_binding_limit_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, write_run(tmp_path / "run"), "--tolerance", "0.25") == 0
    shown = capfd.readouterr().out
    assert "wall at 6.7 users in lock step, 9.8 staggered (probed pool)" in shown
    assert "wall: 6 users run freely, 8 do not (6 preemptions)" in shown
    assert "measured wall at 6 users, predicted wall" in shown
    assert "inside the predicted interval" in shown


def test_a_missed_tolerance_exits_3_after_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wide = {"usable_blocks": 400, "block_size": 32, "usable_tokens": 12_800}
    assert run(monkeypatch, write_run(tmp_path / "run", pool=wide), "--tolerance", "0.25", "--json") == 3
    captured = capfd.readouterr()
    assert json.loads(captured.out)["relative_error"] == pytest.approx(400 / 6 / 8 - 1)
    assert "predicted and measured saturation differ by +733%, tolerance 25%" in captured.err


def test_without_metrics_there_is_nothing_to_compare_and_no_tolerance_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", pool=None, server=False)
    assert run(monkeypatch, folder) == 0
    shown = capfd.readouterr().out
    assert "the server did not show its KV pool" in shown
    assert "nothing was measured to compare with" in shown
    assert run(monkeypatch, folder, "--tolerance", "1") == 3
    assert "nothing to compare" in capfd.readouterr().err


def test_a_plan_stands_in_for_a_pool_that_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"users": {"kv_full": 7.0, "kv_staggered": 9.0, "max_num_seqs": 4, "binding": "x"}}))
    assert run(monkeypatch, write_run(tmp_path / "run", pool=None), "--plan", plan, "--json") == 0
    assert json.loads(capfd.readouterr().out)["predicted"] == {
        "kv_full": 7.0,
        "kv_staggered": 9.0,
        "max_num_seqs": 4,
        "source": "planned",
        "interval": [4, 4],
        "binding": "max_num_seqs",
    }
    # a pool that is shown is believed, and the plan tells what the server does not: how many may run at once
    assert run(monkeypatch, write_run(tmp_path / "other"), "--plan", plan, "--json") == 0
    predicted = json.loads(capfd.readouterr().out)["predicted"]
    assert (predicted["source"], predicted["max_num_seqs"]) == ("probed", 4)
    assert predicted["kv_full"] == pytest.approx(40 / 6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "holds no run"),
        (["run", "--tolerance", "-1"], "--tolerance is -1, expected a share of 0 or more"),
        (["run", "--plan", "missing.json"], "missing.json cannot be read"),
        (["run", "--plan", "other.json"], "other.json is not what `plan --json` prints: KeyError: 'users'"),
        (["run", "--plan", "broken.json"], "broken.json is not what `plan --json` prints: JSONDecodeError"),
        (["killed"], "killed has no finished stage"),
    ],
)
def test_what_cannot_be_compared_exits_2_and_says_why(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"))
    write_run(Path("killed"), stages=False)
    Path("other.json").write_text("{}")
    Path("broken.json").write_text("{")
    assert run(monkeypatch, *words) == 2
    assert message in capfd.readouterr().err


def write_repeated(folder: Path) -> Path:
    """Two levels, three passes each, the second pass a tenth slower."""
    writer = RunWriter(folder)
    writer.write_run({"deployment": {"pool": POOL, "engines": 1, "max_num_seqs": None}})
    stages = []
    for index, (users, rate) in enumerate([(2, 58.0), (4, 120.0), (4, 110.0), (2, 52.0), (2, 57.0), (4, 121.0)]):
        stages.append(stage(index, users, 0) | {"output_tokens_per_s": rate})
    writer.write_summary(stages)
    writer.close()
    return folder


def test_repeated_levels_are_pooled_with_an_interval_as_wide_as_they_are_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_repeated(tmp_path / "run")
    assert run(monkeypatch, folder, "--json") == 0
    repeats = json.loads(capfd.readouterr().out)["repeats"]
    assert [(level["users"], level["stages"]) for level in repeats] == [(2, [0, 3, 4]), (4, [1, 2, 5])]
    rate = repeats[1]["output_tokens_per_s"]
    assert rate["mean"] == pytest.approx((120 * 110 * 121) ** (1 / 3))
    assert rate["low"] < 110
    assert rate["high"] > 121
    assert rate["n"] == 3
    assert run(monkeypatch, folder) == 0
    out = capfd.readouterr().out
    assert "repeated levels, pooled" in out
    assert "4 users, 64 + 100 tokens" in out
    assert "3 of 3" in out


def test_a_run_that_repeats_nothing_says_nothing_of_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, write_run(tmp_path / "run"), "--json") == 0
    assert "repeats" not in json.loads(capfd.readouterr().out)


@pytest.mark.parametrize(
    ("changes", "spread_s"),
    [
        ({}, 0.014),
        ({"ramp_up": 5.0}, 5.0),
        ({"output_tokens": {"kind": "normal", "mean": 64, "std": 8}}, None),
        ({"handover": True}, None),
    ],
)
def test_who_began_together_stays_together_only_where_requests_are_equal(
    changes: dict[str, Any], spread_s: float | None
) -> None:
    stage = {"users": 8, "prompt_tokens": 64, "output_tokens": 64, "duration": 30.0, **changes}
    asked = _asked(RunData(Path("run"), {"profile": {"stages": [stage]}}, []))
    assert asked[0].start_spread_s == (None if spread_s is None else pytest.approx(spread_s))
