"""What the fault server says: the bytes of models, chunks, errors and /metrics, as vLLM 0.32.0 sends them.

Shapes from vLLM 0.32.0: ``entrypoints/openai/completion/serving.py`` and ``chat_completion/serving.py`` (streams),
``entrypoints/serve/engine/protocol.py`` ErrorResponse, ``entrypoints/openai/models/serving.py`` (unknown model),
``entrypoints/serve/middleware/authenticate.py`` (401), ``v1/metrics/loggers.py`` (names of metrics).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import orjson

MAX_MODEL_LEN = 100_000


@dataclass(slots=True)
class Stats:
    """What the server counts; tests compare it with what the client says. ``restart`` clears the ``engine_*`` ones."""

    #: TCP connections accepted since the start, and open now
    connections: int = 0
    connections_open: int = 0
    #: requests whose answer has not ended, now and at most
    in_flight: int = 0
    in_flight_max: int = 0
    #: POST requests by mode, without parameters
    requests: Counter[str] = field(default_factory=Counter)
    #: answers the client left before their end
    left: int = 0
    #: GET requests by path
    gets: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    engine_prompt_tokens: int = 0
    engine_generation_tokens: int = 0
    engine_finished: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Ask:
    """A completion request, read."""

    chat: bool
    model: str
    #: tokens to generate, and of the prompt: its ids, or its words
    tokens: int
    prompt_tokens: int
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool

    @classmethod
    def of(cls, path: str, body: bytes) -> Ask:
        """Raises ValueError for a body that is no JSON object."""
        obj = orjson.loads(body)
        if not isinstance(obj, dict):
            raise ValueError("the body is no object")
        options = obj.get("stream_options") or {}
        prompt = obj.get("prompt") or " ".join(str(m.get("content")) for m in obj.get("messages") or [])
        return cls(
            chat="chat" in path,
            model=str(obj.get("model")),
            tokens=obj.get("max_completion_tokens") or obj.get("max_tokens") or 16,
            prompt_tokens=len(prompt if isinstance(prompt, list) else prompt.split()),
            include_usage=bool(options.get("include_usage")),
            continuous_usage=bool(options.get("continuous_usage_stats")),
            return_token_ids=bool(obj.get("return_token_ids")),
        )


def event(obj: Any) -> bytes:
    return b"data: " + orjson.dumps(obj) + b"\n\n"


DONE = b"data: [DONE]\n\n"
#: what comes in place of HTTP
GARBAGE = b"\x16\x03\x01\x02\x00SSH-2.0-OpenSSH_9.6\r\n\xff\xfe\x00 this is not HTTP\r\n\r\n"


@dataclass(slots=True)
class Script:
    """The events of one answer, in order."""

    ask: Ask
    sent: int = 0

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self.ask.chat else "text_completion"
        return event(
            {"id": "cmpl-1", "object": kind, "created": 1, "model": self.ask.model, "choices": choices, **more}
        )

    def usage(self) -> dict[str, int]:
        prompt, done = self.ask.prompt_tokens, self.sent
        return {"prompt_tokens": prompt, "total_tokens": prompt + done, "completion_tokens": done}

    def role(self) -> bytes:
        """The role chunk of a chat answer; nothing for completions."""
        if not self.ask.chat:
            return b""
        return self._chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def tokens(
        self, count: int = 1, *, finish: str | None = None, reasoning: bool = False, text: str | None = None
    ) -> bytes:
        """One chunk of ``count`` tokens."""
        said = " tok" * count if text is None else text
        self.sent += count
        delta: dict[str, Any] = {"text": said}
        if self.ask.chat:
            delta = {"delta": {"reasoning" if reasoning else "content": said}}
        ids = list(range(1000 + self.sent - count, 1000 + self.sent)) if self.ask.return_token_ids else None
        choice = {"index": 0, **delta, "logprobs": None, "finish_reason": finish, "stop_reason": None, "token_ids": ids}
        return self._chunk([choice], **({"usage": self.usage()} if self.ask.continuous_usage else {}))

    def end(self, *, done: bool = True) -> bytes:
        """The usage chunk where it was asked for, and [DONE]."""
        usage = self._chunk([], usage=self.usage()) if self.ask.include_usage else b""
        return usage + (DONE if done else b"")


def error(message: str, kind: str, code: int, param: str | None = None) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def unknown_model(model: str) -> bytes:
    return error(f"The model `{model}` does not exist.", "NotFoundError", 404, "model")


def models(names: list[str]) -> bytes:
    cards = [
        {"id": name, "object": "model", "created": 1, "owned_by": "vllm", "root": name, "max_model_len": MAX_MODEL_LEN}
        for name in names
    ]
    return orjson.dumps({"object": "list", "data": cards})


def metrics(stats: Stats, model: str) -> bytes:
    """The families of vLLM 0.32 that this server can know; a restart has set its counters back."""
    label = f'engine="0",model_name="{model}"'
    rows: list[tuple[str, str, list[tuple[str, str, float]]]] = [
        ("num_requests_running", "gauge", [("", label, stats.in_flight)]),
        ("num_requests_waiting", "gauge", [("", label, 0)]),
        ("kv_cache_usage_perc", "gauge", [("", label, 0.0)]),
        ("num_preemptions", "counter", [("_total", label, 0)]),
        ("prompt_tokens", "counter", [("_total", label, stats.engine_prompt_tokens)]),
        ("generation_tokens", "counter", [("_total", label, stats.engine_generation_tokens)]),
        (
            "request_success",
            "counter",
            [
                ("_total", f'{label},finished_reason="{reason}"', stats.engine_finished[reason])
                for reason in ("stop", "length", "abort")
            ],
        ),
    ]
    lines: list[str] = []
    for name, kind, samples in rows:
        lines += [f"# HELP vllm:{name} {name}.", f"# TYPE vllm:{name} {kind}"]
        lines += [f"vllm:{name}{suffix}{{{labels}}} {value}" for suffix, labels, value in samples]
    return ("\n".join(lines) + "\n").encode()
