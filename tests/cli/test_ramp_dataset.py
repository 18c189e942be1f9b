"""``ramp --dataset``: levels on the line, prompts from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli.ramp import _workload, command
from harness.errors import UsageError


def test_a_file_of_prompts_needs_no_profile(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "hello"}) + "\n", encoding="utf-8")
    chosen = _workload(None, 8, None, file)
    assert chosen == {"kind": "dataset", "file": str(file), "format": "jsonl", "output_tokens": 8, "endpoint": None}
    assert _workload(5, 8, "chat", None) == {"prompt_tokens": 5, "output_tokens": 8, "endpoint": "chat"}


def test_two_words_for_one_thing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--prompt-tokens and --dataset both say what the prompts are"):
        _workload(5, None, None, tmp_path / "p.jsonl")
    with pytest.raises(UsageError, match="--dataset and --profile both say what is asked"):
        command(base_url="http://127.0.0.1:1", profile="smoke", dataset=tmp_path / "p.jsonl")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere.json cannot be read"):
        command(base_url="http://127.0.0.1:1", users="1", dataset=tmp_path / "nowhere.json")
