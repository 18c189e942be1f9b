"""The OpenAI bodies of the twin: what is asked, what vLLM 0.32.0 refuses, and what the answers look like. Pure.

Rules and wording of errors: vLLM 0.32.0 ``renderers/params.py`` (TokenizeParams), ``sampling_params.py``
(SamplingParams._verify_args), ``entrypoints/serve/utils/api_utils.py`` (get_max_tokens) and
``entrypoints/serve/engine/serving.py`` (OpenAIServing). Unknown fields are ignored, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import orjson

from harness.twin_text import PIECE_BYTES, chat_tokens, text_of, tokenize, word_at

Endpoint = Literal["chat", "completions"]
#: vLLM 0.32.0 CompletionRequest.max_tokens
DEFAULT_COMPLETION_TOKENS = 16
#: the twin takes the ids of any model's tokenizer
MAX_TOKEN_ID = 2**31 - 1


class Refusal(Exception):
    """A request vLLM answers with an error.

    Args:
        status: of HTTP.
        message: in the body.
        param: field at fault, where vLLM names one.
    """

    _TYPES: ClassVar = {
        400: "BadRequestError",
        404: "NotFoundError",
        405: "Method Not Allowed",
        501: "NotImplementedError",
    }

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def body(self) -> bytes:
        kind = self._TYPES.get(self.status, "BadRequestError")
        return orjson.dumps(
            {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One accepted request. ``max_tokens`` is already cut to what the context leaves."""

    endpoint: Endpoint
    prompt: list[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    cache_salt: str
    priority: int


def read_ask(endpoint: Endpoint, body: bytes, model: str, max_model_len: int) -> Ask:
    """Check a body as vLLM does.

    Raises:
        Refusal: with vLLM's status and message.
    """
    fields = _object(body)
    if (asked := fields.get("model")) is not None and asked != model:
        raise Refusal(404, f"The model `{asked}` does not exist. Valid aliases: {model}.", "model")
    _refuse_unsupported(fields)
    stream = bool(fields.get("stream"))
    options = fields.get("stream_options") or {}
    if options and not stream:
        raise Refusal(400, "Stream options can only be defined when `stream=True`.", "stream_options")
    limit, name = _limit(endpoint, fields)
    if limit is not None and limit > max_model_len:
        raise Refusal(
            400,
            f"{name}={limit} cannot be greater than max_model_len={max_model_len}. Please request fewer output tokens."
            f" (parameter={name}, value={limit})",
            name,
        )
    prompt = _chat_prompt(fields) if endpoint == "chat" else _completion_prompt(fields)
    room = _room(len(prompt), max_model_len)
    max_tokens = room if limit is None else min(limit, room)
    min_tokens = _whole(fields, "min_tokens", 0)
    _check_lengths(max_tokens, min_tokens)
    include_usage = bool(options.get("include_usage"))
    return Ask(
        endpoint=endpoint,
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(fields.get("ignore_eos")),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options.get("continuous_usage_stats")),
        return_token_ids=bool(fields.get("return_token_ids")),
        cache_salt=str(fields.get("cache_salt") or ""),
        priority=_whole(fields, "priority", 0),
    )


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"JSON decode error: {error}") from None
    if not isinstance(fields, dict):
        raise Refusal(400, "the body must be a JSON object")
    return fields


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """What the twin cannot answer truly it refuses, rather than answer as if nothing had been asked."""
    for name, plain in (("n", 1), ("best_of", 1), ("logprobs", None), ("top_logprobs", None), ("echo", False)):
        if (value := fields.get(name)) not in (None, False, plain, 0):
            raise Refusal(400, f"the twin does not serve {name}={value!r}", name)
    for name in ("tools", "structured_outputs", "use_beam_search", "stop", "stop_token_ids"):
        if fields.get(name):
            raise Refusal(400, f"the twin does not serve {name}: its text means nothing", name)


def _limit(endpoint: Endpoint, fields: Mapping[str, Any]) -> tuple[int | None, str]:
    if endpoint == "chat" and fields.get("max_completion_tokens") is not None:
        return _whole(fields, "max_completion_tokens", 0), "max_completion_tokens"
    if fields.get("max_tokens") is not None:
        return _whole(fields, "max_tokens", 0), "max_tokens"
    return (None if endpoint == "chat" else DEFAULT_COMPLETION_TOKENS), "max_tokens"


def _whole(fields: Mapping[str, Any], name: str, default: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refusal(400, f"{name}: Input should be a valid integer, got {value!r}", name)
    return value


def _completion_prompt(fields: Mapping[str, Any]) -> list[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        tokens = tokenize(prompt)
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        tokens = prompt
        if tokens and not 0 <= min(tokens) <= max(tokens) <= MAX_TOKEN_ID:
            raise Refusal(400, f"Token id {max(tokens)} is out of vocabulary", "prompt")
    elif isinstance(prompt, list):
        raise Refusal(400, "the twin serves one prompt a request: a text or a list of token ids", "prompt")
    else:
        raise Refusal(400, "Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if not tokens:
        raise Refusal(400, "The decoder prompt cannot be empty", "prompt")
    return tokens


def _chat_prompt(fields: Mapping[str, Any]) -> list[int]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, "messages: expected a list of at least one message", "messages")
    return chat_tokens([_turn(message) for message in messages], fields.get("add_generation_prompt", True) is not False)


def _turn(message: Any) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refusal(400, "messages: every message needs a role", "messages")
    content = message.get("content")
    if content is None:
        return message["role"], ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refusal(400, "the twin reads text only: a content part has no text", "messages")
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refusal(400, "messages: content must be a text or a list of text parts", "messages")
    return message["role"], content


def _room(prompt_tokens: int, max_model_len: int) -> int:
    if prompt_tokens > max_model_len:
        raise Refusal(
            400,
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains"
            f" {prompt_tokens} input tokens, which exceeds this limit even without any output tokens. Please reduce the"
            f" length of the input prompt. (parameter=input_tokens, value={prompt_tokens})",
            "input_tokens",
        )
    return max_model_len - prompt_tokens


def _check_lengths(max_tokens: int, min_tokens: int) -> None:
    if max_tokens < 1:
        raise Refusal(
            400,
            f"max_tokens must be at least 1, got {max_tokens}. (parameter=max_tokens, value={max_tokens})",
            "max_tokens",
        )
    if min_tokens < 0:
        raise Refusal(400, f"min_tokens must be greater than or equal to 0, got {min_tokens}.")
    if min_tokens > max_tokens:
        raise Refusal(400, f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.")


# ---------------------------------------------------------------------- answers


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def frame(payload: bytes) -> bytes:
    """One chunk of HTTP/1.1's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def _event(chunk: Any) -> bytes:
    return frame(b"data: " + orjson.dumps(chunk) + b"\n\n")


_MARK = "\u0000"
_MARK_JSON = b"\\u0000"


class Chunks:
    """Builds the events of one stream. A plain token's event is three byte strings joined, and can be made ready before
    its time.

    Args:
        ask: the request.
        request_id, created, model: as in every chunk.
        first_word: where in the twin's language this answer begins; the rest follows in order.
    """

    __slots__ = ("_ask", "_base", "_head", "_plain", "_tail", "_word", "ready", "sent")

    def __init__(self, ask: Ask, request_id: str, created: int, model: str, first_word: int) -> None:
        chat = ask.endpoint == "chat"
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._base = {"id": request_id, "object": kind, "created": created, "model": model}
        self._ask = ask
        self._word = first_word
        self.sent = 0
        payload = b"data: " + orjson.dumps(self._chunk(_MARK, None, None)) + b"\n\n"
        head, tail = payload.split(_MARK_JSON)
        size = len(head) + len(PIECE_BYTES[0]) + len(tail)
        self._head = b"%x\r\n" % size + head
        self._tail = tail + b"\r\n"
        self._plain = ask.stream and not ask.return_token_ids and not ask.continuous_usage
        #: the event of the next token, should it be a single one and not the last; None where it is made when due
        self.ready: bytes | None = None

    def _chunk(self, text: str, finish: str | None, tokens: list[int] | None) -> dict[str, Any]:
        # the fields vLLM sets, null ones included, in its order (exclude_unset)
        choice: dict[str, Any] = {"index": 0}
        if self._ask.endpoint == "chat":
            choice |= {"delta": {"content": text}, "logprobs": None, "finish_reason": finish}
            choice |= {} if finish is None else {"stop_reason": None}
        else:
            choice |= {"text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
            choice |= {"prompt_token_ids": None}
        return {**self._base, "choices": [choice | {"token_ids": tokens}]}

    def opening(self) -> bytes:
        """What comes before the first token: chat names the role."""
        if self._ask.endpoint != "chat":
            return b""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        chunk: dict[str, Any] = {**self._base, "choices": [choice]}
        if self._ask.return_token_ids:
            chunk["prompt_token_ids"] = self._ask.prompt
        if self._ask.continuous_usage:
            chunk["usage"] = usage(len(self._ask.prompt), 0)
        return _event(chunk)

    def make_ready(self) -> None:
        """Make the next plain token's event, once the stream has begun."""
        if self._plain and self.sent:
            self.ready = self._head + PIECE_BYTES[word_at(self._word, self.sent)] + self._tail

    def take_ready(self) -> None:
        """The event that was ready has been sent."""
        self.sent += 1
        self.ready = self._head + PIECE_BYTES[word_at(self._word, self.sent)] + self._tail

    def tokens(self, count: int, finish: str | None) -> bytes:
        """The event of ``count`` more tokens, with what follows it where they are the last."""
        opening = b"" if self.sent else self.opening()
        self.ready = None
        if count == 1 and finish is None and self._plain:
            word = PIECE_BYTES[word_at(self._word, self.sent)]
            self.sent += 1
            return opening + self._head + word + self._tail
        return opening + self._general(count, finish) + (self._closing() if finish else b"")

    def _general(self, count: int, finish: str | None) -> bytes:
        ids = self.ids(self.sent, count)
        chunk = self._chunk(text_of(ids), finish, ids if self._ask.return_token_ids else None)
        if self._ask.return_token_ids and not self.sent and self._ask.endpoint == "completions":
            chunk["choices"][0]["prompt_token_ids"] = self._ask.prompt
        self.sent += count
        if self._ask.continuous_usage:
            chunk["usage"] = usage(len(self._ask.prompt), self.sent)
        return _event(chunk)

    def ids(self, start: int, count: int) -> list[int]:
        """Token ids of the answer from position ``start`` on."""
        return [word_at(self._word, position) for position in range(start, start + count)]

    def _closing(self) -> bytes:
        end = frame(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        if not self._ask.include_usage:
            return end
        return _event({**self._base, "choices": [], "usage": usage(len(self._ask.prompt), self.sent)}) + end


def whole_answer(ask: Ask, request_id: str, created: int, model: str, ids: list[int], finish: str) -> bytes:
    """The body of a request without streaming."""
    text = text_of(ids)
    choice: dict[str, Any] = {"index": 0}
    if ask.endpoint == "chat":
        choice |= {"message": {"role": "assistant", "content": text, "refusal": None}}
    else:
        choice |= {"text": text}
    choice |= {"logprobs": None, "finish_reason": finish, "stop_reason": None}
    if ask.return_token_ids:
        choice["token_ids"] = ids
    body: dict[str, Any] = {
        "id": request_id,
        "object": "chat.completion" if ask.endpoint == "chat" else "text_completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage(len(ask.prompt), len(ids)) | {"prompt_tokens_details": None},
    }
    if ask.return_token_ids:
        (body if ask.endpoint == "chat" else choice)["prompt_token_ids"] = ask.prompt
    return orjson.dumps(body)
