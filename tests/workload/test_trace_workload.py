"""Traces: lengths, times and shared beginnings come out as they were recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import UsageError
from harness.load.stages import order_of
from harness.workload.prepare import build, prepared
from harness.workload.text import TextPrompts
from harness.workload.trace import due_s, read_trace
from loadprofiles.profile import parse_profile
from loadprofiles.workload import Trace

SHARED = Path(os.environ.get("VLLM_HARNESS_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "traces"
AZURE = {
    "format": "columns",
    "timestamp_column": "TIMESTAMP",
    "prompt_tokens_column": "ContextTokens",
    "output_tokens_column": "GeneratedTokens",
}
MOONCAKE = [
    {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [0, 1, 2]},
    {"timestamp": 500, "input_length": 18, "output_length": 4, "hash_ids": [0, 1, 3]},
    {"timestamp": 2000, "input_length": 9, "output_length": 5, "hash_ids": [7, 8]},
]


def spec(file: Path, **more: Any) -> Trace:
    return Trace.model_validate({"kind": "trace", "file": str(file), **more})


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def mooncake(path: Path) -> Path:
    return written(path, "".join(json.dumps(row) + "\n" for row in MOONCAKE))


def bodies(workload: dict[str, Any], stage: dict[str, Any], count: int, index: int = 0) -> list[dict[str, Any]]:
    profile = parse_profile({"name": "x", "workload": {"kind": "trace", **workload}, "stages": [stage] * 2}, "x")
    with prepared(profile, seed=0, max_model_len=None) as known:
        endpoint: Any = workload.get("endpoint", "completions")
        made = build(known.for_workers(), model="m", endpoint=endpoint, seed=0, text=TextPrompts())
        made.begin(index, None, None, replay=bool(stage.get("replay")))
        return [json.loads(made.ask(index, number, 0).body) for number in range(count)]


def test_prompts_share_what_the_hashes_of_mooncake_share(tmp_path: Path) -> None:
    workload = {"file": str(mooncake(tmp_path / "m")), "hash_block_tokens": 8}
    first, second, third = (body["prompt"] for body in bodies(workload, {"replay": True}, 3))
    assert (len(first), len(second), len(third)) == (20, 18, 9)
    assert first[:16] == second[:16]
    assert first[16:18] != second[16:18]
    assert not set(first) & set(third) or first[:8] != third[:8]


def test_a_text_shares_whole_blocks_too(tmp_path: Path) -> None:
    workload = {"file": str(mooncake(tmp_path / "m")), "hash_block_tokens": 8, "endpoint": "chat"}
    first, second, _ = (body["messages"][0]["content"].split() for body in bodies(workload, {"replay": True}, 3))
    assert first[:16] == second[:16]
    assert (len(first), len(second)) == (20, 18)


def test_lengths_of_answers_are_the_traces(tmp_path: Path) -> None:
    asked = bodies({"file": str(mooncake(tmp_path / "m"))}, {"users": 1, "requests": 9}, 5)
    assert [body["max_tokens"] for body in asked] == [3, 4, 5, 3, 4], "round and round"
    later = bodies({"file": str(mooncake(tmp_path / "m"))}, {"users": 1, "requests": 9}, 2, index=1)
    assert [body["max_tokens"] for body in later] == [4, 5], "another stage begins elsewhere"
    replay = bodies({"file": str(mooncake(tmp_path / "m"))}, {"replay": True}, 2, index=1)
    assert [body["max_tokens"] for body in replay] == [3, 4], "but a replay with the first"


def test_times_become_absolute_deadlines_at_the_speed_asked(tmp_path: Path) -> None:
    table = read_trace(mooncake(tmp_path / "m"), spec(tmp_path / "m"))
    assert due_s(table, 1.0, None, None).tolist() == [0.0, 0.5, 2.0]
    assert due_s(table, 4.0, None, None).tolist() == [0.0, 0.125, 0.5]
    assert due_s(table, 1.0, 2.0, None).tolist() == [0.0, 0.5]
    assert due_s(table, 1.0, None, 1).tolist() == [0.0]
    profile = parse_profile(
        {
            "name": "x",
            "workload": {"kind": "trace", "file": str(tmp_path / "m"), "speed": 2.0},
            "stages": [{"replay": True, "users": 5}],
        },
        "x",
    )
    with prepared(profile, seed=0, max_model_len=None) as known:
        stage = profile.stages[0]
        order = order_of(stage, 0, start_ns=7_000, seed=0, grace_s=1.0, replay_s=known.due_s(stage))
        assert order.due_ns == [7_000, 250_007_000, 1_000_007_000]
        assert (order.open_loop, order.replay, order.max_in_flight) == (True, True, 5)
        assert known.mean_rate(stage) == pytest.approx(3.0)
        assert known.mean_lengths(stage) == (pytest.approx(47 / 3), pytest.approx(4.0))


def test_a_table_with_dates_or_seconds_is_read(tmp_path: Path) -> None:
    dates = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    table = read_trace(written(tmp_path / "a", dates), spec(tmp_path / "a", **AZURE))
    assert table.at_s.tolist() == pytest.approx([0.0, 0.052], abs=1e-6)
    assert table.prompt_tokens.tolist() == [4808, 3180]
    burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,x\n45,ChatGPT,1087,0,1087,x\n9,GPT-4,10,2,12,x\n"
    table = read_trace(written(tmp_path / "b", burst), spec(tmp_path / "b", format="burstgpt"))
    assert table.at_s.tolist() == [0.0, 4.0]
    assert table.output_tokens.tolist() == [18, 2]
    assert table.left_out == {"without tokens (the trace's own failures)": 1}


def test_what_the_server_cannot_hold_is_left_out_and_said(tmp_path: Path) -> None:
    profile = parse_profile(
        {
            "name": "x",
            "workload": {"kind": "trace", "file": str(mooncake(tmp_path / "m"))},
            "stages": [{"replay": True}],
        },
        "x",
    )
    with prepared(profile, seed=0, max_model_len=22) as known:
        assert known.notes == (f"{tmp_path / 'm'}: 1 requests left out: longer than the server's max_model_len of 22",)


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ('{"timestamp": 0, "input_length": 3}\n', {}, r"x:1: expected timestamp.*'output_length' is missing"),
        ('{"timestamp": "a", "input_length": 3, "output_length": 1}\n', {}, r"x:1: expected numbers"),
        ("a,b\n1,2\n", {"format": "burstgpt"}, r"x:1: column 'Timestamp' is missing; there are a, b"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n1,x,3\n", AZURE, r"x:3: ContextTokens: could not convert"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,2,3\n", AZURE, r"x:2: TIMESTAMP: Invalid isoformat"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", AZURE, r"x:2: 2 cells, 'GeneratedTokens' is missing"),
        ("", {}, r"x: no request that could be asked"),
    ],
)
def test_a_bad_line_is_named(text: str, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        read_trace(written(tmp_path / "x", text), spec(tmp_path / "x", **more))


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the public traces (VLLM_HARNESS_SHARED)")
def test_the_public_traces_are_read_whole() -> None:
    azure = read_trace(SHARED / "azure_2023_conv.csv", spec(SHARED / "azure_2023_conv.csv", **AZURE))
    lines = (SHARED / "azure_2023_conv.csv").read_text().splitlines()
    assert len(azure.at_s) == len(lines) - 1
    assert (azure.prompt_tokens[0], azure.output_tokens[0]) == (374, 44)
    cake = read_trace(SHARED / "mooncake_conversation.jsonl", spec(SHARED / "mooncake_conversation.jsonl"))
    assert (cake.prompt_tokens[0], cake.output_tokens[0], cake.at_s[0]) == (6758, 500, 0.0)
    assert cake.places is not None
    assert np.all(np.diff(cake.at_s) >= 0)
