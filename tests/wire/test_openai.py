"""Events of chat and completions streams, as vLLM and its neighbours send them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.wire.openai import (
    END,
    MESSAGE_CHARS,
    UNKNOWN,
    Chunk,
    Delta,
    Endpoint,
    Usage,
    WireError,
    error_message,
    is_error,
    one_line,
    read_event,
    repair,
)


def chat(delta: Any, finish: str | None = None, **more: Any) -> bytes:
    return orjson.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]})


def text(value: Any, finish: str | None = None, **more: Any) -> bytes:
    return orjson.dumps({"choices": [{"index": 0, "text": value, "finish_reason": finish, **more}]})


def only(endpoint: Endpoint, data: bytes) -> Delta:
    chunk = read_event(endpoint, "message", data)
    assert chunk.error is None
    assert len(chunk.deltas) == 1
    return chunk.deltas[0]


CHAT_DELTAS: dict[str, tuple[Any, str, bool]] = {
    "content": ({"content": "Hi"}, "Hi", True),
    "role_only": ({"role": "assistant", "content": ""}, "", False),
    "role_and_null": ({"role": "assistant", "content": None}, "", False),
    "empty": ({}, "", False),
    "reasoning": ({"reasoning": "Let"}, "Let", False),
    "reasoning_content": ({"reasoning_content": "Let"}, "Let", False),
    "both_names_of_reasoning": ({"reasoning": "Let", "reasoning_content": "Let"}, "Let", False),
    "reasoning_null_content": ({"content": None, "reasoning": "Let"}, "Let", False),
    "reasoning_and_content": ({"reasoning": "so", "content": "Hi"}, "soHi", True),
    "tool_name": ({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}, "f", True),
    "tool_arguments": ({"tool_calls": [{"index": 0, "function": {"arguments": '{"a'}}]}, '{"a', True),
    "two_tools": ({"tool_calls": [{"function": {"name": "f"}}, {"function": {"name": "g"}}]}, "fg", True),
    "tool_id_only": ({"tool_calls": [{"index": 0, "id": "call-1", "type": "function"}]}, "", False),
    "tool_function_empty": ({"tool_calls": [{"index": 0, "function": {"name": None, "arguments": ""}}]}, "", False),
    "no_tools": ({"content": "Hi", "tool_calls": []}, "Hi", True),
    "null_tools": ({"content": "Hi", "tool_calls": None}, "Hi", True),
    "a_space_is_content": ({"content": " "}, " ", True),
}


@pytest.mark.parametrize("name", CHAT_DELTAS)
def test_what_a_chat_delta_brings(name: str) -> None:
    delta, content, is_answer = CHAT_DELTAS[name]
    assert only("chat", chat(delta)) == Delta(0, content, is_answer, None, None)


def test_a_whole_chat_answer_as_the_only_event_is_read() -> None:
    data = b'{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"Hi"},"finish_reason":"stop"}]}'
    assert only("chat", data) == Delta(0, "Hi", True, None, "stop")


@pytest.mark.parametrize("delta", [b'"delta":null', b'"message":null', b'"index":0'])
def test_a_chat_choice_without_a_delta_is_an_empty_one(delta: bytes) -> None:
    assert only("chat", b'{"choices":[{' + delta + b',"finish_reason":"stop"}]}') == Delta(0, "", False, None, "stop")


@pytest.mark.parametrize(("value", "content"), [("A", "A"), ("", ""), (None, "")])
def test_what_a_completions_delta_brings(value: str | None, content: str) -> None:
    assert only("completions", text(value)) == Delta(0, content, content != "", None, None)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_finish_reason_stands_in_any_chunk(endpoint: Endpoint) -> None:
    data = chat({"content": "b"}, "stop") if endpoint == "chat" else text("b", "stop")
    assert only(endpoint, data) == Delta(0, "b", True, None, "stop")


def test_an_empty_finish_reason_is_none() -> None:
    assert only("completions", text("a", "")).finish_reason is None


@pytest.mark.parametrize(("ids", "tokens"), [([7], 1), ([7, 8, 9], 3), ([], 0), (None, None)])
def test_token_ids_count_the_tokens_of_the_chunk(ids: list[int] | None, tokens: int | None) -> None:
    assert only("completions", text("a", token_ids=ids)).tokens == tokens
    assert only("chat", chat({"content": "a"}, token_ids=ids)).tokens == tokens


def test_choices_may_be_empty_or_null_beside_usage() -> None:
    usage = Usage(5, 2, None)
    for choices in (b"[]", b"null"):
        data = b'{"choices":%b,"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}' % choices
        assert read_event("chat", "message", data) == Chunk((), usage)
    assert read_event("chat", "message", b'{"usage":{"prompt_tokens":5,"completion_tokens":2}}') == Chunk((), usage)
    assert read_event("chat", "message", b'{"choices":[]}') == Chunk()


def test_usage_may_ride_on_a_content_chunk_and_hold_nulls_and_details() -> None:
    data = b'{"choices":[{"index":0,"text":"a"}],"usage":{"prompt_tokens":5,"completion_tokens":null,"prompt_tokens_details":{"cached_tokens":4}}}'
    assert read_event("completions", "message", data).usage == Usage(5, None, 4)
    assert read_event(
        "completions", "message", b'{"choices":[],"usage":{"prompt_tokens_details":null}}'
    ).usage == Usage(None, None, None)


def test_several_choices_come_apart() -> None:
    data = b'{"choices":[{"index":1,"text":"a"},{"index":0,"text":"","finish_reason":"length"}]}'
    assert read_event("completions", "message", data).deltas == (
        Delta(1, "a", True, None, None),
        Delta(0, "", False, None, "length"),
    )


def test_done_ends_the_stream() -> None:
    for data in (b"[DONE]", b" [DONE]", b"[DONE] \t"):
        assert read_event("chat", "message", data) is END
    assert read_event("chat", "message", b'{"choices":[]}') is not END


ERRORS = {
    "vllm": (b'{"error":{"message":"boom","type":"BadRequestError","param":null,"code":400}}', "boom"),
    "string": (b'{"error":"boom"}', "boom"),
    "old_vllm": (b'{"object":"error","message":"boom","type":"x","param":null,"code":500}', "boom"),
    "old_vllm_nested": (b'{"object":"error","error":{"message":"boom"}}', "boom"),
    "beside_choices": (b'{"choices":[],"error":{"message":"boom"}}', "boom"),
    "no_message": (b'{"error":{"code":7}}', '{"error":{"code":7}}'),
    "empty": (b'{"error":{}}', '{"error":{}}'),
    "number": (b'{"error":500}', '{"error":500}'),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_object_is_an_error(name: str) -> None:
    data, message = ERRORS[name]
    assert read_event("completions", "message", data) == Chunk(error=message)
    assert is_error(data)


def test_no_error_is_no_error() -> None:
    for value in (b"null", b'""', b"false"):
        data = b'{"error":%b,"choices":[{"index":0,"text":"a"}]}' % value
        assert read_event("completions", "message", data) == Chunk((Delta(0, "a", True, None, None),))
        assert not is_error(data)


@pytest.mark.parametrize(
    ("data", "message"), [(b"boom", "boom"), (b'{"message":"boom"}', "boom"), (b'{"choices":[]}', '{"choices":[]}')]
)
def test_an_event_of_type_error_is_an_error_whatever_it_says(data: bytes, message: str) -> None:
    assert read_event("chat", "error", data) == Chunk(error=message)


def test_an_event_of_type_error_without_data_says_so() -> None:
    assert read_event("chat", "error", b"").error == "event: error, without a message"


REFUSED: dict[str, tuple[Endpoint, bytes, str]] = {
    "no_json": ("chat", b"hello", "not JSON: 'hello'"),
    "half_json": ("chat", b'{"choices":[', "not JSON"),
    "empty": ("chat", b"", "not JSON"),
    "nan": ("chat", b'{"choices":[],"x":NaN}', "not JSON"),
    "list": ("chat", b"[1]", "is a list, expected a JSON object"),
    "string": ("chat", b'"x"', "is a string, expected a JSON object"),
    "null": ("chat", b"null", "is null, expected"),
    "true": ("chat", b"true", "is a boolean, expected"),
    "choices_object": ("chat", b'{"choices":{}}', "choices is an object, expected a list"),
    "choice_string": ("chat", b'{"choices":["a"]}', "a choice is a string, expected an object"),
    "choice_null": ("completions", b'{"choices":[null]}', "a choice is null, expected an object"),
    "text_number": ("completions", b'{"choices":[{"text":5}]}', "text is a number, expected a string"),
    "delta_string": ("chat", b'{"choices":[{"delta":"a"}]}', "delta is a string, expected an object"),
    "message_string": ("chat", b'{"choices":[{"message":"a"}]}', "message is a string, expected an object"),
    "content_list": ("chat", b'{"choices":[{"delta":{"content":[1]}}]}', "content is a list"),
    "reasoning_number": ("chat", b'{"choices":[{"delta":{"reasoning":1.5}}]}', "reasoning is a number"),
    "tools_string": ("chat", b'{"choices":[{"delta":{"tool_calls":"f"}}]}', "tool_calls is a string, expected a list"),
    "tool_number": ("chat", b'{"choices":[{"delta":{"tool_calls":[1]}}]}', "a tool call is a number"),
    "arguments_object": (
        "chat",
        b'{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":{}}}]}}]}',
        "arguments is an object",
    ),
    "index_string": ("completions", b'{"choices":[{"index":"0","text":""}]}', "index is a string"),
    "token_ids_number": ("completions", b'{"choices":[{"token_ids":1,"text":""}]}', "token_ids is a number"),
    "finish_number": ("completions", b'{"choices":[{"finish_reason":1,"text":""}]}', "finish_reason is a number"),
    "usage_list": ("chat", b'{"choices":[],"usage":[]}', "usage is a list"),
    "count_float": (
        "chat",
        b'{"choices":[],"usage":{"completion_tokens":1.5}}',
        "completion_tokens is 1.5, expected a count",
    ),
    "count_negative": ("chat", b'{"choices":[],"usage":{"prompt_tokens":-1}}', "prompt_tokens is -1, expected a count"),
    "count_boolean": (
        "chat",
        b'{"choices":[],"usage":{"prompt_tokens":true}}',
        "prompt_tokens is True, expected a count",
    ),
    "chat_on_completions": (
        "completions",
        b'{"choices":[{"delta":{"content":"a"}}]}',
        "chat chunks on the completions endpoint",
    ),
    "completions_on_chat": ("chat", b'{"choices":[{"text":"a"}]}', "completions chunks on the chat endpoint"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_this_api_never_sends_is_refused_with_what_stood_there(name: str) -> None:
    endpoint, data, message = REFUSED[name]
    with pytest.raises(WireError) as caught:
        read_event(endpoint, "message", data)
    assert message in str(caught.value)
    assert read_event(endpoint, "ping", data) is UNKNOWN  # an event of another type may say what it likes


def test_an_object_of_another_api_is_unknown_and_no_failure() -> None:
    assert read_event("chat", "message", b'{"type":"ping"}') is UNKNOWN


def test_an_event_of_another_type_is_read_when_it_can_be() -> None:
    assert read_event("completions", "completion", text("a")).deltas[0].text == "a"


MESSAGES = {
    "vllm_404": (
        b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","param":"model","code":404}}',
        "The model `x` does not exist.",
    ),
    "vllm_401": (b'{"error":"Unauthorized"}', "Unauthorized"),
    "message": (b'{"message":"no route"}', "no route"),
    "detail": (b'{"detail":"Not Found"}', "Not Found"),
    "detail_list": (
        b'{"detail":[{"loc":["body","prompt"],"msg":"Field required","type":"missing"}]}',
        "Field required",
    ),
    "json_string": (b'"queue full"', "queue full"),
    "other_json": (b'{"code": 7}', '{"code": 7}'),
    "html": (
        b"<html><head><title>502 Bad Gateway</title><style>p {x}</style></head><body>\r\n<h1>Bad &amp; worse</h1><!-- pad --></body></html>",
        "502 Bad Gateway Bad & worse",
    ),
    "xml": (b"<?xml version='1.0'?><Error><Code>SlowDown</Code></Error>", "SlowDown"),
    "text": (b"upstream connect error\n", "upstream connect error"),
    "text_with_less_than": (b"a < b", "a < b"),
    "not_utf8": (b"bad \xff byte", "bad \ufffd byte"),
    "control": (b"\x1b[31mred\x1b[0m\0 bell\x07", "[31mred [0m bell"),
    "empty": (b"", ""),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_message_of_an_error_body(name: str) -> None:
    body, message = MESSAGES[name]
    assert error_message(body) == message


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"' + b"x" * 9000 + b'"}}',
        b"x" * 10_000_000,
        b'{"error":{"message":"' + b"x" * 10_000_000 + b'"}}',
        b"<" * 10_000_000,
    ],
)
def test_a_huge_error_body_costs_little_and_gives_500_characters(body: bytes) -> None:
    assert 0 < len(error_message(body)) <= MESSAGE_CHARS


def test_deeply_nested_errors_end() -> None:
    body = b'{"error":' * 200 + b'"x"' + b"}" * 200
    assert error_message(body).startswith('{"error":{"error":')


@given(st.binary(max_size=200))
def test_an_error_message_is_one_printable_line_of_any_bytes(body: bytes) -> None:
    message = error_message(body)
    assert message == one_line(message)
    assert message.isprintable()


OUTER = ["choices", "usage", "error", "object", "message", "prompt_tokens", "completion_tokens"]
INNER = ["delta", "text", "content", "reasoning", "tool_calls", "function", "name", "arguments", "index", "token_ids"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*OUTER, *INNER, "finish_reason"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON, st.sampled_from(["chat", "completions"]), st.sampled_from(["message", "error", "ping"]))
def test_any_json_is_read_or_refused(value: Any, endpoint: Endpoint, event_type: str) -> None:
    try:
        chunk = read_event(endpoint, event_type, orjson.dumps(value))
    except WireError:
        return
    assert isinstance(chunk, Chunk)
    assert all(delta.is_answer <= (delta.text != "") for delta in chunk.deltas)


def test_repair_reads_bad_utf8_as_the_replacement_character() -> None:
    assert repair(b'{"a":"\xff"}') == '{"a":"\ufffd"}'.encode()
    assert repair("中".encode()) is None
