"""The twin on the real clock, behind the OpenAI API and /metrics: to any client it is a vLLM 0.32.0.

    twin_http      bytes <-> requests
    twin_api       bodies <-> what is asked, and vLLM's refusals
    twin_text      text <-> token ids
    here           the engines' steps at their times, and one write a stream and step
    twin_metrics   counters -> /metrics

The engine's clock is the real one times ``time_scale``. Steps end at the engine's own due times, however late this
process gets to them, so lateness does not add up; each write's lateness is measured and exported.
"""

from __future__ import annotations

import asyncio
import math
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from calibration.errors import InputError
from calibration.steptime import LinearStep, StepModel
from calibration.twin.config import EngineConfig
from calibration.twin.content import Content, chained_keys
from calibration.twin.counters import Histogram
from calibration.twin.engine import Engine, Output
from calibration.twin.routing import Router
from calibration.twin.sequence import Sequence
from harness import clock
from harness.twin_api import Ask, Chunks, Endpoint, Refusal, read_ask, whole_answer
from harness.twin_http import STREAM_HEAD, Connection, Request, response
from harness.twin_live import LiveEngine
from harness.twin_metrics import CONTENT_TYPE, LATENESS_BUCKETS_S, Scrape, render
from harness.twin_text import WORDS, chat_tokens, pieces, tokenize

VERSION = "0.32.0"
_JSON = "application/json"
#: what vLLM's HTTP layer leaves out of http_requests_total
_UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
#: answers that may end by themselves: log-normal lengths, this standard deviation of the logarithm
FREE_LENGTH_SIGMA = 0.6
#: steps after which the lateness of their writes is put into its buckets
_SETTLE_EVERY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinConfig:
    """What is served.

    Attributes:
        model: name of the model, and of the API's ``model`` unless ``served_model_name`` is given.
        engine: flags of every engine.
        step_time: seconds of an engine step.
        data_parallel_size: engines behind the one front end.
        api_key: what clients must send as bearer; None for no check.
        seed: of everything drawn.
        noise: standard deviation of the logarithm of a step's time.
        time_scale: engine seconds in one real second.
        free_output_tokens: mean length of answers that may end by themselves (no ``ignore_eos``), in tokens; they end
            with ``stop`` where that is below ``max_tokens``.
    """

    model: str = "twin"
    served_model_name: str | None = None
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(num_gpu_blocks=28_000))
    step_time: StepModel = field(default_factory=lambda: LinearStep(0.012, 5e-5, 2e-8, 3e-5))
    data_parallel_size: int = 1
    api_key: str | None = None
    seed: int = 0
    noise: float = 0.0
    time_scale: float = 1.0
    free_output_tokens: float = 200.0

    def __post_init__(self) -> None:
        if self.data_parallel_size < 1:
            raise InputError(f"data_parallel_size is {self.data_parallel_size}: expected at least 1")
        if not self.time_scale > 0:
            raise InputError(f"time_scale is {self.time_scale}: expected a number > 0")
        if not self.free_output_tokens >= 1:
            raise InputError(f"free_output_tokens is {self.free_output_tokens}: expected at least 1")

    @property
    def name(self) -> str:
        return self.served_model_name or self.model


class Stream:
    """One request being answered."""

    __slots__ = ("ask", "chunks", "connection", "created", "engine", "model", "request", "request_id", "seq")

    def __init__(
        self,
        ask: Ask,
        connection: Connection,
        request: Request,
        request_id: str,
        created: int,
        model: str,
        word: int,
    ) -> None:
        self.ask = ask
        self.connection = connection
        self.request = request
        self.request_id = request_id
        self.created = created
        self.model = model
        self.chunks = Chunks(ask, request_id, created, model, word)
        self.engine: LiveEngine | None = None
        self.seq: Sequence | None = None

    def answer_ids(self, count: int) -> list[int]:
        return self.chunks.ids(0, count)


class TwinServer:
    """Answers requests. Made inside a running event loop; see :func:`serve` for the way to run it."""

    def __init__(self, config: TwinConfig) -> None:
        self.config = config
        self.connections: set[Connection] = set()
        self.lateness = Histogram(LATENESS_BUCKETS_S)
        self._start_ns = clock.now_ns()
        self._created_s = clock.wall_time().timestamp()
        self._rng = random.Random(f"{config.seed}/answers")
        self._unsettled = 0
        self._answered: Counter[tuple[str, str, str]] = Counter()
        call_later = asyncio.get_running_loop().call_later
        self.engines = [
            LiveEngine(self._engine(rank), self._now_s, config.time_scale, self._deliver, call_later)
            for rank in range(config.data_parallel_size)
        ]
        self._router = Router([live.engine for live in self.engines])

    def _engine(self, rank: int) -> Engine:
        config = self.config
        seed = config.seed * 1_000 + rank
        return Engine(config.engine, config.step_time, seed=seed, noise=config.noise, keep_members=True)

    def now_ns(self) -> int:
        return clock.now_ns()

    def _now_s(self) -> float:
        return (clock.now_ns() - self._start_ns) / clock.NS_PER_S * self.config.time_scale

    # ------------------------------------------------------------------ requests

    def handle(self, connection: Connection, request: Request) -> None:
        """Answer one request."""
        try:
            self._route(connection, request)
        except Refusal as refusal:
            self._finish(connection, request, refusal.status, refusal.body())

    def _route(self, connection: Connection, request: Request) -> None:
        path = request.path.rstrip("/") or "/"
        if path.startswith("/v1") and not self._authorised(request):
            self._finish(connection, request, 401, b'{"error":"Unauthorized"}')
        elif request.method == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
            self._generate(connection, request, "chat" if "chat" in path else "completions")
        elif request.method == "POST" and path == "/tokenize":
            self._finish(connection, request, 200, self._tokenize(request.body))
        elif request.method in ("GET", "HEAD") and path in _PAGES:
            content_type, page = _PAGES[path]
            self._finish(connection, request, 200, page(self), content_type)
        else:
            self._finish(connection, request, 404, b'{"detail":"Not Found"}')

    def _authorised(self, request: Request) -> bool:
        return self.config.api_key is None or request.headers.get("authorization") == f"Bearer {self.config.api_key}"

    def _finish(
        self, connection: Connection, request: Request, status: int, body: bytes, content_type: str = _JSON
    ) -> None:
        answer = response(status, body, content_type)
        connection.write(answer if request.method != "HEAD" else answer[: len(answer) - len(body)])
        self._done(connection, request, status)

    def _done(self, connection: Connection, request: Request, status: int) -> None:
        """The answer is complete: count it, as vLLM's HTTP layer does, and read on."""
        if request.path not in _UNCOUNTED:
            self._answered[(request.path, request.method, f"{status // 100}xx")] += 1
        connection.done()

    def _generate(self, connection: Connection, request: Request, endpoint: Endpoint) -> None:
        if "json" not in request.headers.get("content-type", "application/json"):
            raise Refusal(400, "Unsupported Media Type: Only 'application/json' is allowed")
        ask = read_ask(endpoint, request.body, self.config.name, self.config.engine.max_model_len)
        kind = "chatcmpl" if endpoint == "chat" else "cmpl"
        request_id = request.headers.get("x-request-id") or f"{self._rng.getrandbits(128):032x}"
        created = int(clock.wall_time().timestamp())
        word = self._rng.randrange(WORDS)
        stream = Stream(ask, connection, request, f"{kind}-{request_id}", created, self.config.name, word)
        stream.engine = self._choose(request)
        stream.seq = self._sequence(ask, stream)
        connection.state = stream
        if ask.stream:
            connection.write(STREAM_HEAD)
        stream.engine.submit(stream.seq)

    def _choose(self, request: Request) -> LiveEngine:
        rank = request.headers.get("x-data-parallel-rank")
        if rank is None:
            return self.engines[self._router.choose()]
        if not rank.isdigit() or int(rank) >= len(self.engines):
            raise Refusal(400, f"X-data-parallel-rank is {rank!r}: expected 0 to {len(self.engines) - 1}")
        return self.engines[int(rank)]

    def _sequence(self, ask: Ask, stream: Stream) -> Sequence:
        length, reason = self._length(ask)
        content = Content()
        if self.config.engine.enable_prefix_caching:
            tokens = [*ask.prompt, *stream.answer_ids(length)]
            content = Content(chained_keys(tokens, self.config.engine.block_size, ask.cache_salt))
        return Sequence(
            len(ask.prompt),
            length,
            max_tokens=ask.max_tokens,
            finish_reason=reason,
            content=content,
            priority=ask.priority,
            payload=stream,
        )

    def _length(self, ask: Ask) -> tuple[int, str]:
        """Tokens of the answer, and why it ends. Drawn only where the model may end it."""
        if ask.ignore_eos or ask.min_tokens == ask.max_tokens:
            return ask.max_tokens, "length"
        mu = math.log(self.config.free_output_tokens) - FREE_LENGTH_SIGMA**2 / 2
        drawn = max(1, ask.min_tokens, round(self._rng.lognormvariate(mu, FREE_LENGTH_SIGMA)))
        return (drawn, "stop") if drawn < ask.max_tokens else (ask.max_tokens, "length")

    def gone(self, connection: Connection) -> None:
        """The client has left: its request is aborted."""
        stream = connection.state
        connection.state = None
        if isinstance(stream, Stream) and stream.engine is not None and stream.seq is not None:
            stream.engine.abort(stream.seq)

    # ------------------------------------------------------------------ outputs

    def _deliver(self, output: Output) -> None:
        """Write what a step put out: at its due time only writes, the making ready for the next one after it."""
        ended = set(output.finished)
        due_ns = self._start_ns + round(output.at_s / self.config.time_scale * clock.NS_PER_S)
        add, now_ns = self.lateness.add, clock.MonotonicClock.now_ns
        written: list[Chunks] = []
        for seq in output.decoded or ():
            stream: Stream = seq.payload
            chunks = stream.chunks
            if chunks.ready is not None and seq not in ended and output.tokens is None:
                stream.connection.write(chunks.ready)
                written.append(chunks)
            elif not seq.ended or seq in ended:
                self._emit(seq, 1 if output.tokens is None else output.tokens[seq], seq in ended)
            add((now_ns() - due_ns) / clock.NS_PER_S)
        for chunks in written:
            chunks.take_ready()
        for seq in (*output.started, *output.resumed):
            self._emit(seq, 1, seq in ended)
            add((now_ns() - due_ns) / clock.NS_PER_S)
        self._unsettled += 1
        if self._unsettled == _SETTLE_EVERY:
            self._unsettled = 0
            self.lateness.settle()

    def _emit(self, seq: Sequence, count: int, last: bool) -> None:
        stream: Stream = seq.payload
        connection = stream.connection
        if stream.ask.stream:
            connection.write(stream.chunks.tokens(count, seq.finish_reason if last else None))
            if not last:
                stream.chunks.make_ready()
        elif last:
            ids = stream.answer_ids(seq.output_tokens)
            body = whole_answer(stream.ask, stream.request_id, stream.created, stream.model, ids, seq.finish_reason)
            connection.write(response(200, body))
        if last:
            self._done(connection, stream.request, 200)

    # ------------------------------------------------------------------ pages

    def _tokenize(self, body: bytes) -> bytes:
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise Refusal(400, f"JSON decode error: {error}") from None
        if not isinstance(fields, dict):
            raise Refusal(400, "the body must be a JSON object")
        if isinstance(fields.get("messages"), list):
            turns = [(str(m.get("role")), str(m.get("content") or "")) for m in fields["messages"]]
            tokens, texts = chat_tokens(turns, fields.get("add_generation_prompt", True) is not False), None
        elif isinstance(fields.get("prompt"), str):
            tokens, texts = tokenize(fields["prompt"]), pieces(fields["prompt"])
        else:
            raise Refusal(400, "expected prompt (a text) or messages (a list)")
        count = {"count": len(tokens), "max_model_len": self.config.engine.max_model_len, "tokens": tokens}
        return orjson.dumps(count | {"token_strs": texts if fields.get("return_token_strs") else None})

    def _models(self) -> bytes:
        card = {
            "id": self.config.name,
            "object": "model",
            "created": int(clock.wall_time().timestamp()),
            "owned_by": "vllm",
            "root": self.config.model,
            "parent": None,
            "max_model_len": self.config.engine.max_model_len,
            "permission": [],
        }
        return orjson.dumps({"object": "list", "data": [card]})

    def _metrics(self) -> bytes:
        return render(
            Scrape(
                model_name=self.config.name,
                engines=[(live.engine.config, live.engine.counters) for live in self.engines],
                lateness=self.lateness,
                created_s=self._created_s,
                cpu_s=clock.process_cpu_s(),
                http_requests=self._answered,
            )
        )

    def _version(self) -> bytes:
        return orjson.dumps({"version": VERSION})

    def _empty(self) -> bytes:
        return b""

    def _load(self) -> bytes:
        # as a vLLM without --enable-server-load-tracking, which counts nothing
        return b'{"server_load":0}'

    # ------------------------------------------------------------------ life

    async def start(self, host: str, port: int) -> asyncio.Server:
        """Listen; port 0 takes a free one."""
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: Connection(self, self.connections), host, port, backlog=4096)

    def stop(self) -> None:
        """Drop every connection and stop every engine, at once."""
        for live in self.engines:
            live.stop()
        for connection in list(self.connections):
            connection.abort()


_PAGES: dict[str, tuple[str, Callable[[TwinServer], bytes]]] = {
    "/v1/models": (_JSON, TwinServer._models),
    "/version": (_JSON, TwinServer._version),
    "/health": ("text/plain; charset=utf-8", TwinServer._empty),
    "/ping": ("text/plain; charset=utf-8", TwinServer._empty),
    "/load": (_JSON, TwinServer._load),
    "/metrics": (CONTENT_TYPE, TwinServer._metrics),
}


async def serve(
    config: TwinConfig, host: str = "127.0.0.1", port: int = 8000, ready: Callable[[int], None] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM, or until cancelled; then end at once.

    Args:
        ready: called with the port once connections are taken.

    Raises:
        OSError: the address cannot be used.
    """
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    server = TwinServer(config)
    listener = await server.start(host, port)
    try:
        if ready is not None:
            ready(listener.sockets[0].getsockname()[1])
        await stopped.wait()
    finally:
        listener.close()
        server.stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
