"""A ruler for clients: every stream's first token leaves a fixed time after its request, then one token each fixed interval,
by absolute deadlines, whatever the load.

Runs as a process of its own (``python -m harness.fixed_rate TTFT_MS ITL_MS [CORE]``): says its port on stdout, serves
until its stdin closes. Speaks /v1/models and streamed /v1/completions and /v1/chat/completions; ``GET /late`` answers how
late its own writes left since the last call, so that a late ruler is not taken for a client that lies.

On a core of its own it spins through the last moments before a deadline: timers of event loops are good to a
millisecond, which is 2 % of a time to first token of 50 ms.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import orjson

from harness.clock import NS_PER_MS, NS_PER_S, now_ns
from harness.measure.stats import describe
from harness.twin_http import STREAM_HEAD, Connection, Request, response

MODEL = "fixed"
#: before a deadline this much is spent spinning
SPIN_NS = 3 * NS_PER_MS // 2
#: tokens between two looks at the sockets
BATCH = 64


def _frame(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


def _chunk(chat: bool, choices: list[dict[str, Any]], **more: Any) -> bytes:
    kind = "chat.completion.chunk" if chat else "text_completion"
    body = {"id": "fixed-1", "object": kind, "created": 1, "model": MODEL, "choices": choices, **more}
    return _frame(b"data: " + orjson.dumps(body) + b"\n\n")


def _token(chat: bool, finish: str | None = None) -> bytes:
    said = {"delta": {"content": " tok"}} if chat else {"text": " tok"}
    return _chunk(chat, [{"index": 0, **said, "logprobs": None, "finish_reason": finish}])


_TOKEN = {chat: _token(chat) for chat in (True, False)}
_LAST = {chat: _token(chat, "length") for chat in (True, False)}
_DONE = _frame(b"data: [DONE]\n\n") + b"0\r\n\r\n"
_MODELS = orjson.dumps(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": MODEL, "max_model_len": 1_000_000}]}
)


@dataclass(slots=True, eq=False)
class _Answer:
    connection: Connection
    start_ns: int
    chat: bool
    tokens: int
    prompt_tokens: int
    usage: bool
    sent: int = 0
    gone: bool = False

    def end(self) -> bytes:
        counts = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
        }
        return _LAST[self.chat] + (_chunk(self.chat, [], usage=counts) if self.usage else b"") + _DONE


class FixedRate:
    """The application behind :class:`~harness.twin_http.Connection`.

    Args:
        ttft_ns, itl_ns: from the request's arrival to its first token, and between tokens.
        spin: this process has a core of its own.
    """

    now_ns = staticmethod(now_ns)

    def __init__(self, ttft_ns: int, itl_ns: int, *, spin: bool) -> None:
        self._ttft_ns = ttft_ns
        self._itl_ns = itl_ns
        self._spin_ns = SPIN_NS if spin else 0
        #: (deadline, number of the token over all, answer), a heap
        self._due: list[tuple[int, int, _Answer]] = []
        self._numbered = 0
        self._timer: asyncio.Handle | None = None
        self._late_ns: list[int] = []

    # what connections ask

    def handle(self, connection: Connection, request: Request) -> None:
        if request.path in ("/v1/completions", "/v1/chat/completions") and request.method == "POST":
            self._stream(connection, request)
            return
        known = {"/v1/models": _MODELS, "/health": b"{}"}
        if request.path == "/late":
            connection.write(response(200, orjson.dumps(self._lateness())))
        elif request.path in known:
            connection.write(response(200, known[request.path]))
        else:
            connection.write(response(404, b'{"detail":"Not Found"}'))
        connection.done()

    def gone(self, connection: Connection) -> None:
        if isinstance(connection.state, _Answer):
            connection.state.gone = True

    def _stream(self, connection: Connection, request: Request) -> None:
        try:
            ask = orjson.loads(request.body)
            prompt = ask.get("prompt")
            answer = _Answer(
                connection,
                start_ns=request.arrived_ns,
                chat="chat" in request.path,
                tokens=int(ask.get("max_completion_tokens") or ask.get("max_tokens") or 16),
                prompt_tokens=len(prompt) if isinstance(prompt, list) else 16,
                usage=bool((ask.get("stream_options") or {}).get("include_usage")),
            )
        except (ValueError, AttributeError, TypeError) as error:
            connection.write(response(400, orjson.dumps({"error": {"message": str(error), "code": 400}})))
            connection.done()
            return
        connection.state = answer
        connection.write(STREAM_HEAD)
        self._plan(answer)
        self._arm()

    # tokens at their deadlines

    def _plan(self, answer: _Answer) -> None:
        due_ns = answer.start_ns + self._ttft_ns + answer.sent * self._itl_ns
        self._numbered += 1
        heappush(self._due, (due_ns, self._numbered, answer))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._due:
            return
        loop = asyncio.get_running_loop()
        left_ns = self._due[0][0] - now_ns()
        if left_ns <= self._spin_ns:
            self._timer = loop.call_soon(self._emit)
        else:
            self._timer = loop.call_later((left_ns - self._spin_ns) / NS_PER_S, self._emit)

    def _emit(self) -> None:
        self._timer = None
        for _ in range(BATCH):
            if not self._due or self._due[0][0] > (now := now_ns()):
                break
            due_ns, _, answer = heappop(self._due)
            if answer.gone:
                continue
            answer.sent += 1
            if answer.sent < answer.tokens:
                answer.connection.write(_TOKEN[answer.chat])
                self._plan(answer)
            else:
                answer.connection.write(answer.end())
                answer.connection.done()
            self._late_ns.append(now - due_ns)
        self._arm()

    def _lateness(self) -> dict[str, float | int | None]:
        """Of the writes since the last call, in ms: how long after its deadline each was begun."""
        stats = describe(np.asarray(self._late_ns, dtype=np.float64) / NS_PER_MS)
        self._late_ns = []
        return {key: stats[key] for key in ("n", "mean", "p99", "max")}


async def serve(ttft_ms: float, itl_ms: float, *, spin: bool) -> None:
    """Listen on a free port of the loopback, say which, serve until stdin closes."""
    app = FixedRate(round(ttft_ms * NS_PER_MS), round(itl_ms * NS_PER_MS), spin=spin)
    connections: set[Connection] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(app, connections), "127.0.0.1", 0, backlog=65_535)
    async with server:
        sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()
        closed = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(closed), sys.stdin.buffer)
        await closed.read()
        for connection in list(connections):
            connection.abort()


def main(arguments: list[str]) -> None:
    """TTFT_MS ITL_MS [CORE]: with a core, run there and nowhere else, and spin."""
    ttft_ms, itl_ms = map(float, arguments[:2])
    core = int(arguments[2]) if len(arguments) > 2 else None
    if core is not None:
        os.sched_setaffinity(0, {core})
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    work = serve(ttft_ms, itl_ms, spin=core is not None)
    if sys.platform != "win32":
        import uvloop

        uvloop.run(work)
    else:
        asyncio.run(work)


if __name__ == "__main__":
    main(sys.argv[1:])
