"""What can go wrong, by name. A request's ``model`` is ``mode`` or ``mode:parameter=number,parameter=number``.

Every mode is a coroutine ``mode(reply, script, p)``: it answers one request and returns; what happens to the connection
then is its own doing. ``p`` holds the parameters, numbers all, with the defaults of the table below. ``after`` counts
tokens, times are seconds.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fault_answers import DONE, GARBAGE, Script, error, event, unknown_model
from fault_reply import Reply

P = dict[str, float]
Mode = Callable[[Reply, Script, P], Awaitable[None]]
#: pace of every stream: first token, further tokens, how many (0: as many as asked)
PACE: P = {"ttft": 0.02, "itl": 0.005, "tokens": 0}


@dataclass(frozen=True)
class Entry:
    run: Mode
    defaults: P = field(default_factory=dict)


MODES: dict[str, Entry] = {}


def mode(**defaults: float) -> Callable[[Mode], Mode]:
    """Register a mode under its function's name; a trailing underscore keeps clear of Python's words."""

    def register(run: Any) -> Mode:
        MODES[run.__name__.rstrip("_")] = Entry(run, {**PACE, **defaults})
        return run  # type: ignore[no-any-return]

    return register


def parse(model: str) -> tuple[str, P] | None:
    """The mode and parameters a model names; None for a model that is none.

    Raises:
        ValueError: a known mode with an unknown parameter or a value that is no number.
    """
    name, _, rest = model.partition(":")
    if name not in MODES:
        return None
    p = dict(MODES[name].defaults)
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        if key not in p:
            raise ValueError(f"mode {name} has no parameter {key!r}; it has {', '.join(sorted(p))}")
        p[key] = float(value)
    return name, p


# --- good answers


async def stream(reply: Reply, script: Script, p: P, *, until: int | None = None) -> None:
    """Head, role, and tokens at their times: all of them and the finish, or the first ``until`` and nothing more.

    Parameters beyond PACE, where the mode has them: ``per_chunk`` tokens a chunk, ``reasoning`` tokens at first that are
    reasoning (chat), ``clamp`` at most so many tokens whatever was asked, as vLLM does at max_model_len.
    """
    total = int(p["tokens"]) or script.ask.tokens
    total = min(total, int(p.get("clamp") or total))
    step = int(p.get("per_chunk", 1))
    last = total if until is None else min(until, total)
    await reply.stream_head()
    if last > 0:
        await reply.at(p["ttft"])
        await reply.send(script.role())
    for number, begin in enumerate(range(0, last, step)):
        await reply.at(p["ttft"] + number * p["itl"])
        count = min(step, last - begin)
        finish = "length" if begin + count >= total and until is None else None
        await reply.send(script.tokens(count, finish=finish, reasoning=begin < p.get("reasoning", 0)))
        reply.count_tokens(script, count, first=begin == 0, finish=finish)


async def normal(reply: Reply, script: Script, p: P) -> None:
    """A true answer at a fixed rate. Parameters: ttft, itl, tokens, per_chunk, reasoning, clamp, usage=0, done=0."""
    await stream(reply, script, p)
    if p.get("usage", 1):
        await reply.send(script.end(done=False))
    if p.get("done", 1):
        await reply.send(DONE)
    await reply.end()


mode(per_chunk=1, reasoning=0, clamp=0, usage=1, done=1)(normal)


@mode()
async def one_write(reply: Reply, script: Script, p: P) -> None:
    """The whole answer in one write after ttft."""
    total = int(p["tokens"]) or script.ask.tokens
    await reply.at(p["ttft"])
    chunks = [script.role()] + [script.tokens(finish="length" if i + 1 == total else None) for i in range(total)]
    reply.count_tokens(script, total, first=True, finish="length")
    await reply.stream_head()
    await reply.send(b"".join([*chunks, script.end()]))
    await reply.end()


@mode(bytes=7)
async def trickle(reply: Reply, script: Script, p: P) -> None:
    """A true answer, each write cut into pieces of so many bytes, headers too."""
    reply.piece_bytes = int(p["bytes"])
    await normal(reply, script, p)


@mode(n=2)
async def barrier(reply: Reply, script: Script, p: P) -> None:
    """Answers nobody until ``n`` requests of this mode are waiting; then all of them, and the next ``n`` anew."""
    await reply.server.barrier(int(p["n"]))
    reply.restart_clock()
    await normal(reply, script, p)


@mode(rate=0.01, seed=0)
async def flaky(reply: Reply, script: Script, p: P) -> None:
    """A true answer, but for a share ``rate`` of requests that meet one of FLAKY; drawn from the request's number."""
    rng = random.Random(f"{p['seed']}/{reply.server.stats.requests['flaky']}")
    name = rng.choice(FLAKY) if rng.random() < p["rate"] else "normal"
    entry = MODES[name]
    reply.server.stats.requests[f"flaky/{name}"] += 1
    await entry.run(reply, script, {**entry.defaults, **{key: p[key] for key in PACE}})


# --- slow, silent, endless


@mode(delay=1.0)
async def slow_headers(reply: Reply, script: Script, p: P) -> None:
    """The headers come only after ``delay``, then a true answer."""
    await reply.at(p["delay"])
    reply.restart_clock()
    await normal(reply, script, p)


@mode()
async def silent(reply: Reply, script: Script, p: P) -> None:
    """Takes the request and never answers."""
    await reply.hold()


@mode(after=1)
async def stall(reply: Reply, script: Script, p: P) -> None:
    """Some tokens, then nothing, with the connection open."""
    await stream(reply, script, p, until=int(p["after"]))
    await reply.hold()


@mode(after=0, every=0.02)
async def comments(reply: Reply, script: Script, p: P) -> None:
    """Some tokens, then comments without end: bytes, and no content."""
    await stream(reply, script, p, until=int(p["after"]))
    while True:
        await reply.send(b": keep-alive\n\n")
        await asyncio.sleep(p["every"])


@mode()
async def endless(reply: Reply, script: Script, p: P) -> None:
    """Tokens without end, whatever was asked. itl=0: as fast as they are read."""
    await reply.stream_head()
    number = 0
    while True:
        await reply.at(p["ttft"] + number * p["itl"])
        await reply.send(script.tokens())
        reply.count_tokens(script, 1, first=number == 0)
        number += 1


@mode()
async def done_hold(reply: Reply, script: Script, p: P) -> None:
    """All of a true answer, [DONE] too, but the body never ends."""
    await stream(reply, script, p)
    await reply.send(script.end())
    await reply.hold()


# --- connections


@mode(after=0.2)
async def close_idle(reply: Reply, script: Script, p: P) -> None:
    """A true answer; the connection is closed when it has been idle for ``after``."""
    await normal(reply, script, p)
    reply.close_when_idle(p["after"])


@mode()
async def drop_reused(reply: Reply, script: Script, p: P) -> None:
    """A true answer on a fresh connection; on one used before, the request is met by a close: a stale keep-alive."""
    if reply.reused:
        reply.close()
        return
    await normal(reply, script, p)


@mode()
async def rst_before_headers(reply: Reply, script: Script, p: P) -> None:
    reply.reset()


@mode()
async def close_before_headers(reply: Reply, script: Script, p: P) -> None:
    reply.close()


@mode(delay=0.05)
async def rst_after_headers(reply: Reply, script: Script, p: P) -> None:
    """RST so long after the headers that the client has read them."""
    await reply.stream_head()
    await reply.at(p["delay"])
    reply.reset()


@mode(after=2, delay=0.05)
async def rst(reply: Reply, script: Script, p: P) -> None:
    """RST in the middle of the stream, so long after its last token that it was read."""
    await stream(reply, script, p, until=int(p["after"]))
    await asyncio.sleep(p["delay"])
    reply.reset()


@mode(after=2)
async def close(reply: Reply, script: Script, p: P) -> None:
    """FIN in the middle of the stream: the last chunk of the framing never comes."""
    await stream(reply, script, p, until=int(p["after"]))
    reply.close()


@mode(after=2)
async def half_close(reply: Reply, script: Script, p: P) -> None:
    """The server ends its side in the middle and goes on listening."""
    await stream(reply, script, p, until=int(p["after"]))
    reply.half_close()
    await reply.hold()


@mode(after=2, down=0.2)
async def restart(reply: Reply, script: Script, p: P) -> None:
    """After some tokens the server dies with all its connections, is away for ``down``, and starts with counters at 0."""
    await stream(reply, script, p, until=int(p["after"]))
    reply.server.restart_soon(p["down"])
    await reply.hold()


# --- broken HTTP


@mode()
async def garbage(reply: Reply, script: Script, p: P) -> None:
    """Bytes that are no HTTP."""
    await reply.write(GARBAGE)
    reply.close()


@mode(after=2)
async def garbage_chunk(reply: Reply, script: Script, p: P) -> None:
    """The chunked framing turns into nonsense in the middle of the stream."""
    await stream(reply, script, p, until=int(p["after"]))
    await reply.write(b"zzzz\r\nnot a chunk\r\n")
    await reply.hold()


@mode(after=2)
async def chunk_cut(reply: Reply, script: Script, p: P) -> None:
    """A chunk is announced, half of it comes, then FIN."""
    await stream(reply, script, p, until=int(p["after"]))
    chunk = script.tokens()
    await reply.write(b"%x\r\n" % len(chunk) + chunk[: len(chunk) // 2])
    reply.close()


@mode(off=100)
async def wrong_length(reply: Reply, script: Script, p: P) -> None:
    """A whole answer with a content-length that is ``off`` bytes too long (then FIN) or, below 0, too short."""
    total = int(p["tokens"]) or script.ask.tokens
    chunks = [script.role()] + [script.tokens(finish="length" if i + 1 == total else None) for i in range(total)]
    body = b"".join([*chunks, script.end()])
    reply.count_tokens(script, total, first=True, finish="length")
    await reply.head(200, {"content-type": "text/event-stream", "content-length": str(len(body) + int(p["off"]))})
    await reply.write(body)
    reply.close()


# --- bad streams over good HTTP


@mode(after=1)
async def no_json(reply: Reply, script: Script, p: P) -> None:
    """An event that is no JSON."""
    await stream(reply, script, p, until=int(p["after"]))
    await reply.send(b"data: {oops\n\n" + DONE)
    await reply.end()


@mode(after=1)
async def truncated(reply: Reply, script: Script, p: P) -> None:
    """The body ends well, with no finish_reason, no usage, no [DONE]."""
    await stream(reply, script, p, until=int(p["after"]))
    await reply.end()


@mode(after=1)
async def error_in_stream(reply: Reply, script: Script, p: P) -> None:
    """An error object where a token should be, as when vLLM's engine dies."""
    await stream(reply, script, p, until=int(p["after"]))
    await reply.send(
        event(
            {
                "error": {
                    "message": "EngineCore encountered an issue.",
                    "type": "InternalServerError",
                    "param": None,
                    "code": 500,
                }
            }
        )
        + DONE
    )
    await reply.end()


@mode(after=1)
async def abort(reply: Reply, script: Script, p: P) -> None:
    """finish_reason abort."""
    await stream(reply, script, p, until=int(p["after"]))
    await reply.send(script.tokens(0, finish="abort", text="") + DONE)
    await reply.end()


@mode()
async def not_a_stream(reply: Reply, script: Script, p: P) -> None:
    """200 with a page: a proxy's login, say."""
    await reply.plain(200, b"<html><body><h1>Please log in</h1></body></html>", "text/html")


# --- statuses


@mode()
async def html_502(reply: Reply, script: Script, p: P) -> None:
    await reply.plain(502, b"<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>", "text/html")


@mode()
async def unauthorized(reply: Reply, script: Script, p: P) -> None:
    await reply.plain(401, b'{"error":"Unauthorized"}')


@mode()
async def model_not_found(reply: Reply, script: Script, p: P) -> None:
    await reply.plain(404, unknown_model(script.ask.model))


@mode()
async def too_long(reply: Reply, script: Script, p: P) -> None:
    await reply.plain(400, error("This model's maximum context length is 512 tokens.", "BadRequestError", 400))


@mode(retry_after=1, times=0)
async def too_many(reply: Reply, script: Script, p: P) -> None:
    """429 with Retry-After; after ``times`` refusals (0: always) true answers."""
    if p["times"] and reply.server.stats.requests["too_many"] > p["times"]:
        await normal(reply, script, p)
        return
    await reply.plain(429, error("Too many requests", "RateLimitError", 429), retry_after=f"{p['retry_after']:g}")


@mode(retry_after=0)
async def unavailable(reply: Reply, script: Script, p: P) -> None:
    """503; with Retry-After where one is given."""
    after = f"{p['retry_after']:g}" if p["retry_after"] else None
    await reply.plain(503, error("queue full", "ServiceUnavailable", 503), retry_after=after)


@mode(status=500, bytes=10_000_000)
async def big_error(reply: Reply, script: Script, p: P) -> None:
    """An error status with megabytes of body."""
    body = b'{"error":{"message":"' + b"x" * int(p["bytes"]) + b'"}}'
    await reply.plain(int(p["status"]), body)


@mode(status=418)
async def http(reply: Reply, script: Script, p: P) -> None:
    """Any status, with a short text."""
    await reply.plain(int(p["status"]), b"short and stout", "text/plain")


#: what flaky draws from: failures that end by themselves and that a client cannot take for a stale keep-alive
FLAKY = [
    "rst",
    "close",
    "truncated",
    "error_in_stream",
    "abort",
    "no_json",
    "unavailable",
    "html_502",
    "chunk_cut",
    "garbage",
]
