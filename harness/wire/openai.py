"""Events of a chat or completions stream -> deltas, usage, finish reason, error. Pure; the state of a stream is decode's.

Shapes read: vLLM 0.32.0 (``entrypoints/openai/completion/protocol.py`` CompletionStreamResponse,
``entrypoints/openai/chat_completion/protocol.py`` ChatCompletionStreamResponse, ``entrypoints/generate/base/protocol.py``
DeltaMessage), older vLLM (``{"object": "error"}``, ``reasoning_content``), and servers that speak the same API with an
error as a plain string or as ``event: error``.
"""

from __future__ import annotations

import html
import re
from typing import Any, Final, Literal, NamedTuple

import orjson

Endpoint = Literal["chat", "completions"]

#: how much of a foreign message a record keeps, characters
MESSAGE_CHARS: Final = 500

_DONE: Final = b"[DONE]"
#: values of ``error`` that report none
_NO_ERROR: Final = (None, False, "")
#: where an error body keeps its message; FastAPI's validation errors are ``{"detail": [{"msg"}]}``
_MESSAGE_KEYS: Final = ("error", "message", "detail", "msg")
_MESSAGE_DEPTH: Final = 8
#: how much of an error body that is no JSON is looked at
_TEXT_BODY_BYTES: Final = 16 * 1024
#: a JSON error body above this is not parsed; its head is shown as text
_JSON_BODY_BYTES: Final = 1024 * 1024
_MARKUP: Final = re.compile(r"(?is)<(script|style)\b.*?</\1\s*>|<!--.*?-->|<[^<>]*>")


class WireError(ValueError):
    """The data of an event is not what this API sends; the message says what stood there and what was expected."""


class Usage(NamedTuple):
    """Token counts as the server states them: cumulative, of one choice or of the whole request."""

    prompt_tokens: int | None
    completion_tokens: int | None
    #: prompt tokens served from the prefix cache, where the server tells (``prompt_tokens_details``)
    cached_tokens: int | None


class Delta(NamedTuple):
    """What one choice gained by one chunk."""

    choice: int
    #: reasoning, then content, then tool-call names and arguments; "" for a role-only or empty delta
    text: str
    #: some of the text is content or a tool call, not reasoning
    is_answer: bool
    #: tokens of this chunk by its ``token_ids`` (vLLM: ``return_token_ids``); None where the server sent none
    tokens: int | None
    finish_reason: str | None


class Chunk(NamedTuple):
    """One event, read."""

    deltas: tuple[Delta, ...] = ()
    usage: Usage | None = None
    #: the server's message when the event reports an error
    error: str | None = None


#: what Chunk(...) and Delta(...) do, without a Python frame: they stand on the path of every token
_new = tuple.__new__

#: the event that ends a stream
END: Final = Chunk()
#: an event of this stream, but none of this API
UNKNOWN: Final = Chunk()


def read_event(endpoint: Endpoint, event_type: str, data: bytes) -> Chunk:
    """Read one event.

    Returns:
        :data:`END` for ``[DONE]``; :data:`UNKNOWN` for a JSON object without ``choices``, ``usage`` and ``error``, and for
        an event of a type other than ``message`` and ``error`` that cannot be read; both are to be compared by ``is``.

    Raises:
        WireError: the data is not JSON, no object, or a field has the wrong type.
    """
    if data == _DONE:
        return END
    if event_type == "error":
        return Chunk(error=error_message(data) or "event: error, without a message")
    try:
        return _read_object(endpoint, orjson.loads(data), data)
    except orjson.JSONDecodeError:
        if data.strip() == _DONE:
            return END
        problem = WireError(f"an event's data is not JSON: {one_line(data.decode('utf-8', 'replace'))[:100]!r}")
    except WireError as error:
        problem = error
    if event_type != "message":
        return UNKNOWN
    try:
        raise problem
    finally:
        del problem  # its traceback holds this frame: a cycle, and with it the whole request


def repair(data: bytes) -> bytes | None:
    """The data with bytes that are not UTF-8 as U+FFFD, as the event-stream standard reads it; None if there are none."""
    repaired = data.decode("utf-8", "replace").encode()
    return None if repaired == data else repaired


def _read_object(endpoint: Endpoint, obj: Any, data: bytes) -> Chunk:
    if type(obj) is not dict:
        raise WireError(f"an event's data is {_kind(obj)}, expected a JSON object")
    if ("error" in obj or obj.get("object") == "error") and _reports_error(obj):
        return Chunk(error=error_message(data))
    usage = obj.get("usage")
    counts = None if usage is None else _usage(usage)
    choices = obj.get("choices")
    if type(choices) is not list:
        if choices is not None:
            raise WireError(f"choices is {_kind(choices)}, expected a list")
        return UNKNOWN if counts is None and "choices" not in obj else Chunk((), counts)
    read = _text_delta if endpoint == "completions" else _chat_delta
    if len(choices) == 1:
        return _new(Chunk, ((read(choices[0]),), counts, None))
    return Chunk(tuple([read(choice) for choice in choices]), counts)


def _text_delta(choice: Any) -> Delta:
    if type(choice) is not dict:
        raise WireError(f"a choice is {_kind(choice)}, expected an object")
    text = choice.get("text")
    if type(text) is not str:
        if text is not None:
            raise WireError(f"text is {_kind(text)}, expected a string")
        if "delta" in choice:
            raise WireError("a choice has delta and no text: chat chunks on the completions endpoint")
        text = ""
    return _delta(choice, text, text != "")


def _chat_delta(choice: Any) -> Delta:
    if type(choice) is not dict:
        raise WireError(f"a choice is {_kind(choice)}, expected an object")
    delta = choice.get("delta")
    if type(delta) is not dict:
        delta = _whole_message(choice, delta)
    answer = delta.get("content") or ""
    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
    if type(answer) is not str or type(reasoning) is not str:
        raise WireError(f"content is {_kind(answer)} and reasoning is {_kind(reasoning)}, expected strings")
    if calls := delta.get("tool_calls"):
        answer += _tool_text(calls)
    return _delta(choice, reasoning + answer, answer != "")


def _whole_message(choice: dict[str, Any], delta: Any) -> dict[str, Any]:
    """What stands for a missing delta: the whole answer as the only event (vLLM: beam search with stream), or nothing."""
    if delta is not None:
        raise WireError(f"delta is {_kind(delta)}, expected an object")
    if choice.get("text") is not None:
        raise WireError("a choice has text and no delta: completions chunks on the chat endpoint")
    message = choice.get("message")
    if message is None:
        return {}
    if type(message) is not dict:
        raise WireError(f"message is {_kind(message)}, expected an object")
    return message


def _delta(choice: dict[str, Any], text: str, is_answer: bool) -> Delta:
    index = choice.get("index") or 0
    if type(index) is not int:
        raise WireError(f"index is {_kind(index)}, expected an integer")
    ids = choice.get("token_ids")
    if ids is not None and type(ids) is not list:
        raise WireError(f"token_ids is {_kind(ids)}, expected a list")
    finish = choice.get("finish_reason") or None
    if finish is not None and type(finish) is not str:
        raise WireError(f"finish_reason is {_kind(finish)}, expected a string")
    return _new(Delta, (index, text, is_answer, None if ids is None else len(ids), finish))


def _tool_text(calls: Any) -> str:
    """Names and arguments of the tool calls of one delta, run together."""
    if not isinstance(calls, list):
        raise WireError(f"tool_calls is {_kind(calls)}, expected a list")
    parts = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else call
        if function is None:
            continue
        if not isinstance(function, dict):
            raise WireError(f"a tool call is {_kind(function)}, expected an object with a function")
        for part in (function.get("name"), function.get("arguments")):
            if part is not None and not isinstance(part, str):
                raise WireError(f"a tool call's name or arguments is {_kind(part)}, expected a string")
            parts.append(part or "")
    return "".join(parts)


def _usage(usage: Any) -> Usage:
    if type(usage) is not dict:
        raise WireError(f"usage is {_kind(usage)}, expected an object")
    details = usage.get("prompt_tokens_details")
    return Usage(
        _count(usage.get("prompt_tokens"), "prompt_tokens"),
        _count(usage.get("completion_tokens"), "completion_tokens"),
        None if type(details) is not dict else _count(details.get("cached_tokens"), "cached_tokens"),
    )


def _count(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if type(value) is int and value >= 0:
        return value
    raise WireError(f"{name} is {value!r}, expected a count")


def _kind(value: Any) -> str:
    """What JSON calls the type of a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def is_error(body: bytes) -> bool:
    """Whether a body is a JSON object that reports an error: ``{"error": ...}`` or ``{"object": "error"}``."""
    try:
        obj = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return type(obj) is dict and _reports_error(obj)


def _reports_error(obj: dict[str, Any]) -> bool:
    return ("error" in obj and obj["error"] not in _NO_ERROR) or obj.get("object") == "error"


def error_message(body: bytes) -> str:
    """The message of an error body, for people: one line of at most 500 characters, "" for an empty body.

    Known JSON: ``{"error": {"message"}}``, ``{"error": "..."}``, ``{"message"}``, ``{"detail"}``; other JSON is shown as it
    is; HTML and XML reduced to their text; anything else as text, with bytes that are not UTF-8 as U+FFFD.
    """
    if len(body) <= _JSON_BODY_BYTES:
        try:
            message = _message_in(orjson.loads(body))
        except orjson.JSONDecodeError:
            message = None
        if message is not None:
            return one_line(message)
    text = body[:_TEXT_BODY_BYTES].decode("utf-8", "replace").lstrip()
    return one_line(_without_markup(text) if text.startswith("<") else text)


def one_line(text: str) -> str:
    """Foreign text made safe to keep and print: no control characters, single spaces, at most 500 characters."""
    head = text[: 8 * MESSAGE_CHARS]
    return " ".join("".join(c if c.isprintable() else " " for c in head).split())[:MESSAGE_CHARS]


def _message_in(obj: Any) -> str | None:
    for _ in range(_MESSAGE_DEPTH):
        if isinstance(obj, dict):
            obj = next((obj[key] for key in _MESSAGE_KEYS if obj.get(key)), None)
        elif isinstance(obj, list) and obj:
            obj = obj[0]
        else:
            break
    return obj if isinstance(obj, str) else None


def _without_markup(text: str) -> str:
    return html.unescape(_MARKUP.sub(" ", text))
