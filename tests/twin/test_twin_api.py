"""What the twin accepts, and what it refuses as vLLM 0.32.0 does."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from harness.twin_api import Chunks, Refusal, read_ask, whole_answer
from harness.twin_text import text_of, word_at

LEN = 100


def ask(endpoint: str = "completions", **fields: Any) -> Any:
    if endpoint == "completions":
        fields = {"prompt": [1] * 10, **fields}
    else:
        fields = {"messages": [{"role": "user", "content": " baba"}], **fields}
    return read_ask(endpoint, orjson.dumps({"model": "m", **fields}), "m", LEN)  # type: ignore[arg-type]


def refusal(endpoint: str = "completions", **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as refused:
        ask(endpoint, **fields)
    return refused.value


def test_completions_default_to_16_tokens_and_chat_to_what_the_context_leaves() -> None:
    assert ask().max_tokens == 16
    assert ask("chat").max_tokens == LEN - 4


def test_more_than_the_context_leaves_is_cut_silently() -> None:
    assert ask(max_tokens=95).max_tokens == 90
    assert ask("chat", max_completion_tokens=99).max_tokens == 96


def test_the_newer_name_of_the_limit_wins_in_chat() -> None:
    assert ask("chat", max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert ask("chat", max_tokens=5).max_tokens == 5


def test_more_than_the_model_holds_is_refused_as_vllm_says_it() -> None:
    error = refusal(max_tokens=101)
    assert error.status == 400
    assert error.message == (
        "max_tokens=101 cannot be greater than max_model_len=100. Please request fewer output tokens."
        " (parameter=max_tokens, value=101)"
    )
    assert refusal("chat", max_completion_tokens=101).param == "max_completion_tokens"


def test_a_prompt_longer_than_the_context_is_refused_as_vllm_says_it() -> None:
    assert refusal(prompt=[1] * 101).message == (
        "This model's maximum context length is 100 tokens. However, your prompt contains 101 input tokens, which exceeds"
        " this limit even without any output tokens. Please reduce the length of the input prompt."
        " (parameter=input_tokens, value=101)"
    )


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    assert refusal(prompt=[1] * 100).message.startswith("max_tokens must be at least 1, got 0.")


def test_min_tokens_above_the_cut_limit_is_refused_so_a_client_can_notice_the_cut() -> None:
    error = refusal(max_tokens=95, min_tokens=95)
    assert error.message == "min_tokens must be less than or equal to max_tokens=90, got 95."
    assert refusal(min_tokens=-1).message == "min_tokens must be greater than or equal to 0, got -1."


def test_an_unknown_model_is_404() -> None:
    error = refusal(model="other")
    assert (error.status, error.param) == (404, "model")
    assert orjson.loads(error.body()) == {
        "error": {
            "message": "The model `other` does not exist. Valid aliases: m.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    }


def test_no_model_means_the_one_there_is() -> None:
    assert read_ask("completions", b'{"prompt":"hi"}', "m", LEN).max_tokens == 16


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": 1},
        {"echo": True},
        {"tools": [{}]},
        {"stop": ["x"]},
        {"prompt": [[1], [2]]},
        {"prompt": ["a", "b"]},
        {"prompt": []},
        {"prompt": ""},
        {"prompt": 5},
        {"prompt": [1, "a"]},
        {"prompt": [-1]},
        {"prompt": [2**31]},
        {"max_tokens": "5"},
        {"max_tokens": 0},
        {"stream_options": {"include_usage": True}},
    ],
)
def test_what_the_twin_cannot_answer_truly_it_refuses(fields: dict[str, Any]) -> None:
    assert refusal(**fields).status == 400


@pytest.mark.parametrize("fields", [{"n": 1}, {"logprobs": None}, {"echo": False}, {"stop": []}, {"ignored": 7}])
def test_defaults_and_unknown_fields_are_let_pass(fields: dict[str, Any]) -> None:
    assert ask(**fields).max_tokens == 16


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7"])
def test_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        read_ask("chat", body, "m", LEN)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", [{"content": "x"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [{"x": 1}]}]],
)
def test_messages_that_are_none_are_refused(messages: Any) -> None:
    assert refusal("chat", messages=messages).status == 400


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": " baba"}]
    assert ask("chat", messages=[{"role": "user", "content": parts}]).prompt == ask("chat").prompt


def test_one_prompt_in_a_list_is_one_prompt() -> None:
    assert ask(prompt=[[1, 2]]).prompt == [1, 2]
    assert len(ask(prompt=[" baba babe"]).prompt) == 2


def events(data: bytes) -> list[Any]:
    """Events of a chunked body, each frame's length checked."""
    found = []
    while data:
        size, _, data = data.partition(b"\r\n")
        payload, data = data[: int(size, 16)], data[int(size, 16) :]
        assert data.startswith(b"\r\n")
        data = data[2:]
        if not payload:
            break
        assert payload.startswith(b"data: ")
        assert payload.endswith(b"\n\n")
        text = payload[6:-2]
        found.append(text.decode() if text == b"[DONE]" else orjson.loads(text))
    return found


def stream(endpoint: str, counts: list[int], ready: bool = False, **fields: Any) -> list[Any]:
    chunks = Chunks(ask(endpoint, stream=True, **fields), "id", 5, "m", 42)
    data = b""
    for number, count in enumerate(counts):
        if chunks.ready is not None and number < len(counts) - 1:
            data += chunks.ready
            chunks.take_ready()
            continue
        data += chunks.tokens(count, "length" if number == len(counts) - 1 else None)
        if ready:
            chunks.make_ready()
    return events(data)


@pytest.mark.parametrize("ready", [False, True])
def test_a_completion_stream_is_one_event_a_step(ready: bool) -> None:
    got = stream("completions", [1, 1, 1], ready)
    assert got[-1] == "[DONE]"
    assert [event["choices"][0]["text"] for event in got[:-1]] == [text_of([word_at(42, i)]) for i in range(3)]
    assert [event["choices"][0]["finish_reason"] for event in got[:-1]] == [None, None, "length"]
    assert got[0] == {
        "id": "id",
        "object": "text_completion",
        "created": 5,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": text_of([42]),
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
                "prompt_token_ids": None,
                "token_ids": None,
            }
        ],
    }


@pytest.mark.parametrize("ready", [False, True])
def test_a_chat_stream_names_its_role_first(ready: bool) -> None:
    got = stream("chat", [1, 1], ready)
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in got[:-1]) == text_of([42, word_at(42, 1)])
    assert got[-2]["choices"][0]["finish_reason"] == "length"


def test_usage_comes_last_where_asked_for() -> None:
    got = stream("completions", [1, 2], stream_options={"include_usage": True})
    assert got[-2]["choices"] == []
    assert got[-2]["usage"] == {"prompt_tokens": 10, "total_tokens": 13, "completion_tokens": 3}


def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = stream("chat", [1, 2], stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in got[:-1]] == [0, 1, 3, 3]


def test_token_ids_come_with_every_chunk_and_the_prompt_with_the_first() -> None:
    got = stream("completions", [1, 2], return_token_ids=True)
    choices = [event["choices"][0] for event in got[:-1]]
    assert [choice["token_ids"] for choice in choices] == [[42], [word_at(42, 1), word_at(42, 2)]]
    assert choices[0]["prompt_token_ids"] == [1] * 10
    assert choices[1]["prompt_token_ids"] is None
    assert stream("chat", [1], return_token_ids=True)[0]["prompt_token_ids"] == ask("chat").prompt


def test_one_token_alone_is_first_and_last() -> None:
    got = stream("completions", [1])
    assert len(got) == 2
    assert got[0]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_whole_answer_has_text_usage_and_reason(endpoint: str) -> None:
    body = orjson.loads(whole_answer(ask(endpoint, return_token_ids=True), "id", 5, "m", [1, 2, 3], "stop"))
    choice = body["choices"][0]
    assert (choice["message"]["content"] if endpoint == "chat" else choice["text"]) == text_of([1, 2, 3])
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == [1, 2, 3]
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 3
