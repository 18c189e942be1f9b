"""A template gives for a read what the parser gives, or leaves it to the parser."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.wire.openai import Endpoint, read_event
from harness.wire.sse import SseParser
from harness.wire.template import Template, learn

ENDPOINTS: list[Endpoint] = ["chat", "completions"]


def read_of(
    endpoint: Endpoint, text: str, *, ids: list[int] | None = None, finish: str | None = None, **more: Any
) -> bytes:
    """One read with one chunk as vLLM 0.32 sends it; ``more`` goes beside choices."""
    place = {"delta": {"content": text}} if endpoint == "chat" else {"text": text}
    choice = {"index": 0, **place, "logprobs": None, "finish_reason": finish, "stop_reason": None, "token_ids": ids}
    chunk = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], **more}
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def learned(endpoint: Endpoint, read: bytes) -> Template | None:
    (event,) = SseParser().feed(0, read)
    return learn(endpoint, read, event.data, read_event(endpoint, event.type, event.data))


def template(endpoint: Endpoint, read: bytes) -> Template:
    found = learned(endpoint, read)
    assert found is not None
    return found


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("text", [" tok", "a", "中🙂", "{", "]}],", ":", "é"])
def test_another_text_at_the_same_place_is_seen(endpoint: Endpoint, text: str) -> None:
    found = template(endpoint, read_of(endpoint, "first"))
    assert found.text(read_of(endpoint, text)) == text
    assert (found.choice, found.is_answer, found.tokens) == (0, True, None)


def test_reasoning_stays_reasoning() -> None:
    read = b'data: {"choices":[{"index":3,"delta":{"reasoning":"Let"}}]}\n\n'
    found = template("chat", read)
    assert (found.choice, found.is_answer) == (3, False)
    assert found.text(read.replace(b"Let", b" me")) == " me"
    assert found.text(read.replace(b"reasoning", b"content")) is None


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_token_id_may_change_too(endpoint: Endpoint) -> None:
    found = template(endpoint, read_of(endpoint, "first", ids=[11]))
    assert found.tokens == 1
    assert found.text(read_of(endpoint, " tok", ids=[128_000])) == " tok"
    for ids in ([], [1, 2], None, [0]):
        assert found.text(read_of(endpoint, " tok", ids=ids)) is None


@pytest.mark.parametrize(
    "bad", [b"[]", b"[007]", b"[-1]", b"[1.5]", b"[1e3]", b"[1", b'["1"]', b"[ 1]", b"[9999999999999999]", b"[1]]"]
)
def test_what_is_no_plain_id_goes_the_long_way(bad: bytes) -> None:
    read = read_of("completions", "first", ids=[11])
    assert template("completions", read).text(read.replace(b"[11]", bad)) is None


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("text", ["", '"', "\\", "\n", "a\tb", "\x7f", "\u2028", "\u3000"])
def test_a_text_that_is_empty_or_needs_escapes_goes_the_long_way(endpoint: Endpoint, text: str) -> None:
    assert template(endpoint, read_of(endpoint, "first")).text(read_of(endpoint, text)) is None


@pytest.mark.parametrize(
    "raw",
    [
        b'a","finish_reason":"stop',
        b"\xff",
        b"\xe4\xb8",
        b"a\n\ndata: b",
        b"a\rb",
        b"a\x00b",
        b"a\\nb",
        b"",
        b'"',
        b"\\",
    ],
)
def test_no_bytes_can_pretend_to_be_a_text(raw: bytes) -> None:
    read = read_of("completions", "first")
    assert template("completions", read).text(read.replace(b"first", raw)) is None


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_other_difference_goes_the_long_way(endpoint: Endpoint) -> None:
    found = template(endpoint, read_of(endpoint, "first"))
    whole = read_of(endpoint, " tok")
    assert found.text(whole) == " tok"
    others = [
        read_of(endpoint, " tok", finish="length"),
        read_of(endpoint, " tok", ids=[5]),
        read_of(endpoint, " tok", created=2),
        read_of(endpoint, " tok", usage={"completion_tokens": 3}),
        b"data: [DONE]\n\n",
        b": ping\n\n",
        b"",
        whole + whole,
        whole[:-1],
        whole[1:],
        whole.replace(b"\n\n", b"\r\n\r\n"),
        whole.replace(b"data: ", b"data:"),
        b"event: x\n" + whole,
    ]
    assert [found.text(other) for other in others] == [None] * len(others)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_read_shorter_than_the_frame_is_no_match(endpoint: Endpoint) -> None:
    found = template(endpoint, read_of(endpoint, "first"))
    for length in range(len(found._head) + len(found._tail)):
        assert found.text((found._head + found._tail)[:length]) is None
    assert found.text(found._head[:-1] + found._tail) is None


NO_TEMPLATE = {
    "empty_text": read_of("completions", ""),
    "finish": read_of("completions", "a", finish="stop"),
    "usage": read_of("completions", "a", usage={"completion_tokens": 1}),
    "text_stands_twice": read_of("completions", "cmpl-1"),
    "text_is_escaped": read_of("completions", 'say "a"'),
    "two_ids": read_of("completions", "a", ids=[1, 2]),
    "two_choices": b'data: {"choices":[{"index":0,"text":"a"},{"index":1,"text":"b"}]}\n\n',
    "no_choices": b'data: {"choices":[]}\n\n',
    "crlf": b'data: {"choices":[{"index":0,"text":"a"}]}\r\n\r\n',
    "no_space": b'data:{"choices":[{"index":0,"text":"a"}]}\n\n',
    "comment_first": b': c\ndata: {"choices":[{"index":0,"text":"a"}]}\n\n',
    "a_key_is_the_literal": b'data: {"choices":[{"delta":null,"text":"\\u0074ext"}]}\n\n',
    "id_before_text": b'data: {"choices":[{"index":0,"token_ids":[1],"text":"first"}]}\n\n',
}


@pytest.mark.parametrize("name", NO_TEMPLATE)
def test_a_read_that_gives_no_template(name: str) -> None:
    assert learned("completions", NO_TEMPLATE[name]) is None


def test_a_raw_literal_elsewhere_is_not_taken_for_an_escaped_text() -> None:
    """The text is "A" written as an escape; the plain "A" is the model's name."""
    assert learned("completions", b'data: {"model":"A","choices":[{"index":0,"text":"\\u0041"}]}\n\n') is None


def test_a_text_made_of_two_parts_is_not_learned() -> None:
    assert learned("chat", b'data: {"choices":[{"delta":{"reasoning":"a","content":"b"}}]}\n\n') is None


JSON_TEXT = st.text(max_size=8) | st.sampled_from(["first", '"', "\\", "{}", "],", "\n", "中"])


@given(
    st.sampled_from(ENDPOINTS),
    JSON_TEXT,
    JSON_TEXT,
    st.lists(st.integers(0, 200_000), max_size=2) | st.none(),
    st.lists(st.integers(0, 200_000), max_size=2) | st.none(),
    st.binary(max_size=6),
    st.integers(0, 400),
)
def test_a_match_is_exactly_what_the_parser_reads(
    endpoint: Endpoint, first: str, then: str, ids: list[int] | None, more: list[int] | None, noise: bytes, at: int
) -> None:
    found = learned(endpoint, read_of(endpoint, first, ids=ids))
    if found is None:
        return
    clean = read_of(endpoint, then, ids=more)
    for read in (clean, clean[:at] + noise + clean[at:], clean[:at] + noise + clean[at + len(noise) :]):
        text = found.text(read)
        if text is not None:
            (event,) = SseParser().feed(0, read)
            chunk = read_event(endpoint, event.type, event.data)
            assert chunk.usage is None
            assert chunk.deltas == ((found.choice, text, found.is_answer, found.tokens, None),)
