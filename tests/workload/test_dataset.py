"""Datasets: what a row asks, how long its answer is to be, and what is refused by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from harness.workload.asked import Workload
from harness.workload.dataset import format_of
from harness.workload.prepare import Prepared, build, prepared
from harness.workload.text import TextPrompts
from loadprofiles.profile import parse_profile

SHAREGPT = [
    {"id": str(n), "conversations": [{"from": "human", "value": f"q{n}"}, {"from": "gpt", "value": "x" * 4 * (n + 1)}]}
    for n in range(8)
]


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def asked(
    workload: dict[str, Any], stages: int = 1, seed: int = 0, count: int = 8, stage: int = 0
) -> list[dict[str, Any]]:
    """Bodies of the first requests of a stage."""
    profile = parse_profile({"name": "x", "workload": workload, "stages": [{"users": 1, "requests": 1}] * stages}, "x")
    with prepared(profile, seed=seed, max_model_len=None) as known:
        made = built(known, workload.get("endpoint", "chat"), seed)
        made.begin(stage, None, None)
        return [json.loads(made.ask(stage, number, 0).body) for number in range(count)]


def built(known: Prepared, endpoint: Any, seed: int) -> Workload:
    carried = json.loads(json.dumps(known.for_workers()))
    return build(carried, model="m", endpoint=endpoint, seed=seed, text=TextPrompts())


def test_a_question_of_sharegpt_is_asked_and_its_answer_says_how_long(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(SHAREGPT), encoding="utf-8")
    bodies = asked({"kind": "dataset", "format": "sharegpt", "file": str(file), "order": "as_written"})
    assert [body["messages"] for body in bodies] == [[{"role": "user", "content": f"q{n}"}] for n in range(8)]
    assert [body["max_tokens"] for body in bodies] == list(range(1, 9)), "four characters a token"
    assert bodies[0]["ignore_eos"] is True


def test_a_shuffled_file_is_asked_whole_before_it_comes_again(tmp_path: Path) -> None:
    file = lines(tmp_path / "p.jsonl", [{"prompt": f"p{n}"} for n in range(8)])
    workload = {"kind": "dataset", "file": str(file), "output_tokens": 4, "endpoint": "completions"}
    first = [body["prompt"] for body in asked(workload, seed=1)]
    assert sorted(first) == [f"p{n}" for n in range(8)] != first
    assert [body["prompt"] for body in asked(workload, seed=1, count=16)] == first * 2, "same seed, same requests"
    assert [body["prompt"] for body in asked(workload, seed=2)] != first
    second = [body["prompt"] for body in asked(workload, seed=1, stages=2, stage=1)]
    assert second == first[4:] + first[:4], "the next stage begins elsewhere"


def test_a_line_may_give_text_token_ids_or_messages_and_a_length(tmp_path: Path) -> None:
    ids = lines(tmp_path / "ids", [{"p": [5, 6, 7], "n": 3}])
    workload = {
        "kind": "dataset",
        "file": str(ids),
        "prompt_field": "p",
        "output_field": "n",
        "endpoint": "completions",
    }
    (body,) = asked(workload, count=1)
    assert (body["prompt"], body["max_tokens"]) == ([5, 6, 7], 3)
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    (body,) = asked({"kind": "dataset", "file": str(lines(tmp_path / "m", [{"prompt": said}]))}, count=1)
    assert body["messages"] == said
    assert "max_tokens" not in body, "its end is the model's where nobody says a length"


def test_the_profiles_lengths_come_before_the_files(tmp_path: Path) -> None:
    file = lines(tmp_path / "x", [{"prompt": "a", "n": 3}])
    workload = {"kind": "dataset", "file": str(file), "output_field": "n", "output_tokens": 9}
    assert asked(workload, count=1)[0]["max_tokens"] == 9


@pytest.mark.parametrize(
    ("rows", "workload", "message"),
    [
        ([{"prompt": "a"}, {"text": "b"}], {}, r"x:2: expected 'prompt': text, token ids or messages, not nothing"),
        ([{"prompt": [1, 2]}], {}, r"x:1: prompt: token ids can only be sent to completions"),
        ([{"prompt": "a", "n": 0}], {"output_field": "n"}, r"x:1: expected 'n': text or a number of tokens, not 0"),
        ([{"prompt": "a"}], {"endpoint": "completions"}, r"x:1: no answer to take the length from"),
        ([{"a": 1}], {"format": "sharegpt"}, r"x:1: expected 'conversations' or 'messages', a list"),
        ([{"conversations": [{"from": 1}]}], {"format": "sharegpt"}, r"x:1: expected 'from' and 'value'"),
        ([{"prompt": ""}], {}, r"x: no row asks anything"),
    ],
)
def test_a_row_that_cannot_be_asked_is_refused_before_the_run(
    rows: list[Any], workload: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = lines(tmp_path / "x", rows)
    with pytest.raises(UsageError, match=message):
        asked({"kind": "dataset", "file": str(file), **workload})


def test_no_more_rows_are_read_than_asked_for(tmp_path: Path) -> None:
    file = lines(tmp_path / "x", [{"prompt": "a"}, {"prompt": "b"}, 3])
    workload = {"kind": "dataset", "file": str(file), "max_rows": 2, "order": "as_written"}
    assert [body["messages"][0]["content"] for body in asked(workload, count=3)] == ["a", "b", "a"]


def test_a_file_says_itself_which_format_it_is(tmp_path: Path) -> None:
    assert format_of(lines(tmp_path / "a", SHAREGPT)) == "sharegpt"
    assert format_of(lines(tmp_path / "b", [{"messages": [{"role": "user", "content": "u"}]}])) == "sharegpt"
    assert format_of(lines(tmp_path / "c", [{"prompt": "p"}])) == "jsonl"
    with pytest.raises(UsageError, match="is empty"):
        format_of(lines(tmp_path / "d", []))


def test_the_probes_of_a_search_begin_at_rows_of_their_own(tmp_path: Path) -> None:
    """A search's profile has one stage; its probes are as many as it may take."""
    file = lines(tmp_path / "p.jsonl", [{"prompt": f"p{n}"} for n in range(80)])
    workload = {"kind": "dataset", "file": str(file), "output_tokens": 4, "endpoint": "completions"}
    search = {"kind": "slo", "slo": {"ttft": 100}, "max_probes": 20}
    played = parse_profile(
        {"name": "x", "workload": workload, "stages": [{"users": 1, "duration": 5}], "search": search}, "x"
    )
    asked_of = []
    with prepared(played, seed=0, max_model_len=None) as known:
        made = built(known, "completions", 0)
        for probe in range(20):
            made.begin(probe, None, None)
            asked_of += [json.loads(made.ask(probe, number, 0).body)["prompt"] for number in range(4)]
    assert sorted(asked_of) == sorted(f"p{n}" for n in range(80)), "none again before the file is through"
