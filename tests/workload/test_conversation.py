"""Conversations: each turn is sent with the turns before it and with what the server answered to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from harness.workload.asked import Answer
from harness.workload.conversation import ConversationWorkload
from harness.workload.prepare import build, prepared
from harness.workload.text import TextPrompts
from loadprofiles.profile import parse_profile
from loadprofiles.workload import Conversation


def talk(max_model_len: int | None = None, seed: int = 0, **more: Any) -> ConversationWorkload:
    given = {"kind": "conversation", "turns": 3, "prompt_tokens": 10, "output_tokens": 5, **more}
    spec = Conversation.model_validate(given)
    return ConversationWorkload("m", spec, None, seed=seed, stages=1, max_model_len=max_model_len, text=TextPrompts())


def turn(
    workload: Any, user: int, text: str = "", number: int = 0, *, good: bool = True, **counted: int
) -> list[dict[str, str]]:
    """The messages of a user's next request, answered with ``text``."""
    asked = workload.ask(0, number, user)
    known = {"prompt_tokens": None, "output_tokens": None, **counted}
    workload.heard(asked, Answer(stage=0, user=user, good=good, text=text, **known))
    messages: list[dict[str, str]] = json.loads(asked.body)["messages"]
    return messages


def test_the_servers_answers_enter_the_next_prompt() -> None:
    workload = talk(system_tokens=4)
    first = turn(workload, 0, "said one")
    second = turn(workload, 0, "said two")
    third = turn(workload, 0, "said three")
    assert [message["role"] for message in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in third if m["role"] == "assistant"] == ["said one", "said two"]
    assert third[:4] == [*second[:2], {"role": "assistant", "content": "said one"}, second[3]]
    assert len(first) == 2
    fourth = turn(workload, 0, "said four")
    assert len(fourth) == 2, "after its last turn a user begins a new conversation"
    assert fourth[0] == first[0], "under the same system prompt"
    assert fourth[1] != first[1]


def test_users_talk_apart_and_the_same_in_any_worker() -> None:
    together, alone = talk(), talk()
    mixed = [turn(together, user, f"to {user}") for _ in range(3) for user in (0, 1)]
    mine = [turn(alone, 1, "to 1") for _ in range(3)]
    assert mixed[1::2] == mine
    assert mixed[0] != mixed[1]


def test_a_failed_answer_ends_the_conversation() -> None:
    workload = talk()
    turn(workload, 0, "x")
    turn(workload, 0, good=False)
    assert len(turn(workload, 0)) == 1


def test_history_may_be_made_up_or_left_out() -> None:
    made_up = talk(history="made_up")
    turn(made_up, 0, "whatever the server said")
    answer = turn(made_up, 0)[1]["content"]
    assert answer != "whatever the server said"
    assert len(answer.split()) == 5, "as long as was asked"
    none = talk(history="none")
    turn(none, 0, "x")
    assert [message["role"] for message in turn(none, 0)] == ["user"]


def test_the_oldest_turns_are_left_out_beyond_the_history_asked() -> None:
    workload = talk(turns=6, max_history_tokens=32)
    messages = [turn(workload, 0, f"said {n}") for n in range(5)][-1]
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["said 2", "said 3"]


def test_a_conversation_ends_when_the_context_is_full() -> None:
    """As the server counts: 40 + 5 tokens held, 10 + 5 more and 16 of the chat template are 76."""
    fits, full = talk(turns=9, max_model_len=76), talk(turns=9, max_model_len=75)
    for workload in (fits, full):
        turn(workload, 0, "x", prompt_tokens=40, output_tokens=5)
    assert len(turn(fits, 0)) == 3
    assert len(turn(full, 0)) == 1


def test_a_files_conversations_are_followed_turn_by_turn(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": r, "content": f"{r[0]}{n}{t}" * 8} for t in range(2) for r in ("user", "assistant")]}
        for n in range(4)
    ]
    file = tmp_path / "c.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    workload = {"kind": "conversation", "file": str(file), "order": "as_written", "turns": 8}
    profile = parse_profile({"name": "x", "workload": workload, "stages": [{"users": 2, "requests": 4}]}, "x")
    with prepared(profile, seed=0, max_model_len=None) as known:
        made = build(known.for_workers(), model="m", endpoint="chat", seed=0, text=TextPrompts())
        first, second = turn(made, 0, "s0", number=0), turn(made, 0, "s1", number=2)
        other = turn(made, 1, number=1)
        again = turn(made, 0, number=4)
    assert first == [{"role": "user", "content": "u00" * 8}]
    assert [message["content"] for message in second] == ["u00" * 8, "s0", "u01" * 8]
    assert other[0]["content"] == "u10" * 8
    assert again[0]["content"] == "u00" * 8, "the file goes round: four conversations, the fifth number is the first"


def test_arrivals_cannot_talk() -> None:
    profile = parse_profile(
        {"name": "x", "workload": {"kind": "conversation"}, "stages": [{"request_rate": 1.0, "duration": "5s"}]}, "x"
    )
    with pytest.raises(UsageError, match="a conversation needs users"), prepared(profile, seed=0, max_model_len=None):
        raise AssertionError("refused before")


def test_users_that_are_handed_over_go_on_with_what_they_were_saying() -> None:
    for takes_over in (True, False):
        workload = talk(turns=4)
        workload.begin(0, None, None)
        first = turn(workload, 0, "said one")
        workload.begin(1, None, None, takes_over=takes_over)
        asked = workload.ask(1, 0, 0)
        second = json.loads(asked.body)["messages"]
        assert (second[: len(first)] == first) == takes_over
        assert ([m["content"] for m in second if m["role"] == "assistant"] == ["said one"]) == takes_over
        workload.heard(
            asked, Answer(stage=1, user=0, good=True, text="said two", prompt_tokens=None, output_tokens=None)
        )
        third = json.loads(workload.ask(1, 1, 0).body)["messages"]
        assert len(third) == len(second) + 2
