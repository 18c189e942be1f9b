"""Operating points: how many sequences run, how long a step, a first token and a request take under a load.

A closed loop of N users, each sending its next request a think time after the last one ended, settles where Little's law
holds: of N users, those running are the share of a request's life that is spent decoding,

    B = N * D / (F + D + Z),   D = (osl - 1) * T(B),   F = time to the first token,   Z = think time

and a step lasts what B sequences cost, plus the prompts that pass through it: every sequence that ends brings a new prompt,
so B / osl prompts a step, each of them stretching the steps of all that run. Both sides are continuous in B and the root
is bracketed by [0, N].

Where the pool or ``max_num_seqs`` holds fewer than would run, those are the sequences that run: throughput stands still and
the rest of the users wait, in front of their first token. What is given there is the mean of the plateau, without
preemption's cost: an extrapolation, and called so (:mod:`calibration.twin` simulates it).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from calibration.errors import InputError
from calibration.steptime import StepTime

Regime = Literal["below_limits", "kv_full", "max_num_seqs"]

#: a root is found to this share of its bracket
_TOLERANCE = 1e-9
_ROUNDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a request is: prompt and output tokens (means), and how users behave around it.

    ``requests_per_user`` is None for a steady state; a benchmark that starts all users at once and stops after a number of
    requests each has one wave of simultaneous prompts among that many requests, and its mean TTFT contains it. Of a prompt,
    ``cached_prompt_share`` is found in the prefix cache and not computed.

    Raises:
        InputError: a length or time that cannot be.
    """

    prompt_tokens: float
    output_tokens: float
    think_s: float = 0.0
    requests_per_user: float | None = None
    cached_prompt_share: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.cached_prompt_share < 1:
            raise InputError(f"cached_prompt_share = {self.cached_prompt_share!r}, expected 0 to below 1")
        if not self.prompt_tokens > 0:
            raise InputError(f"prompt_tokens = {self.prompt_tokens!r}, expected more than 0")
        if not self.output_tokens >= 1:
            raise InputError(f"output_tokens = {self.output_tokens!r}, expected at least 1")
        if not self.think_s >= 0:
            raise InputError(f"think_s = {self.think_s!r}, expected at least 0")

    @property
    def decode_steps(self) -> float:
        """Steps a request decodes after its first token; one for a single output token, so that it is there at all."""
        return max(1.0, self.output_tokens - 1)

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens that are computed."""
        return self.prompt_tokens * (1 - self.cached_prompt_share)

    @property
    def mean_context(self) -> float:
        """Tokens a running sequence holds on average: its prompt and half of its output."""
        return self.prompt_tokens + self.output_tokens / 2


class Server(NamedTuple):
    """What serves: the step of one replica, and what bounds a step or the number running.

    ``max_running`` is how many sequences of the shape the pool of one replica holds on average (None: not known, taken as
    unbounded). ``micro_batches`` share the sequences of a pipeline. ``steps_in_flight`` is 2 where the next step is
    scheduled while one runs.
    """

    step: StepTime
    request_overhead_s: float
    request_token_s: float
    wait_steps: float
    prompt_factor: float
    ahead_factor: float
    steps_in_flight: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_running: float | None = None
    replicas: int = 1
    micro_batches: int = 1

    @property
    def most_running(self) -> float:
        """Sequences one replica runs at most."""
        return min(float(self.max_num_seqs), math.inf if self.max_running is None else self.max_running)

    @property
    def full_regime(self) -> Regime:
        return "max_num_seqs" if self.most_running >= self.max_num_seqs else "kv_full"


class OperatingPoint(NamedTuple):
    """Where a load settles; means over requests, sums over replicas.

    ``running`` sequences decode, ``resident_tokens`` of cache are theirs, ``tpot_s`` is the mean step a running stream
    sees, prompts of others included.
    """

    users: float
    regime: Regime
    running: float
    resident_tokens: float
    tpot_s: float
    ttft_s: float
    requests_per_s: float
    output_tokens_per_s: float

    @property
    def output_tokens_per_s_per_user(self) -> float:
        """Tokens a second one running stream gets."""
        return 1.0 / self.tpot_s


class MeanStep(NamedTuple):
    """A mean step of one micro-batch at B running sequences, and the cost of a prompt beside them."""

    mean_s: float
    prompt_s: float
    prompt_load: float


def mean_step(server: Server, shape: Shape, running: float) -> MeanStep:
    """Decode alone, and the prompts that pass through: ``running / osl`` of them a step, in chunks of at most the token
    budget that decoding leaves. What a mixed step costs whatever the prompt's length is shared by prompts in one step."""
    step = server.step
    batch = running / server.micro_batches
    resident = batch * shape.mean_context
    decode = step.step_s(batch, resident, 0.0)
    budget = max(1.0, server.max_num_batched_tokens - batch)
    chunks = max(1, math.ceil(shape.computed_tokens / budget))
    chunk = shape.computed_tokens / chunks
    own = step.prompt_chunk_s(shape.computed_tokens, shape.prompt_tokens - shape.computed_tokens)
    shared = step.mixed_step_overhead_s + step.experts_s(batch + chunk) - step.experts_s(batch)
    prompts = batch / shape.output_tokens
    mixed = -math.expm1(-prompts * chunks)
    mean = decode + prompts * own + mixed * shared
    prompt = own + chunks * shared + (chunks - 1) * decode
    return MeanStep(mean, prompt, (prompts * own + mixed * shared) / mean)


def _ttft_s(server: Server, shape: Shape, users: float, step: MeanStep, *, follows: bool) -> float:
    """Time to the first token below every limit.

    Outside the steps: the request's overhead. Then ``wait_steps`` steps (its own decoding neighbours, what is left of the
    one under way, output); where it ``follows`` a user's last token at once, also the steps that were launched before that
    token came back. Then the prompt's own prefill, and that of prompts ahead: in a steady state those that fall into the
    same moment, as a queue with fixed service; in a first wave, half of everybody else.
    """
    fixed = server.request_overhead_s + server.request_token_s * shape.prompt_tokens
    steps = server.wait_steps + (server.steps_in_flight if follows else 0)
    prompts = server.prompt_factor + server.ahead_factor * ahead_of(shape, users, step)
    return fixed + steps * step.mean_s + step.prompt_s * prompts


def ahead_of(shape: Shape, users: float, step: MeanStep) -> float:
    """Prompts ahead of one on one replica, on average."""
    share = 0.0 if shape.requests_per_user is None else 1.0 / shape.requests_per_user
    load = min(step.prompt_load, 0.9)
    steady = load / (2 * (1 - load))
    wave = (users - 1) / 2
    return (1 - share) * steady + share * max(steady, wave)


def closed_loop(server: Server, shape: Shape, users: float) -> OperatingPoint:
    """Where ``users`` users settle; they spread evenly over the replicas.

    Raises:
        InputError: no users.
    """
    if not users > 0:
        raise InputError(f"users = {users!r}, expected more than 0")
    each = users / server.replicas
    limit = server.most_running
    low, high = 0.0, min(each, limit)
    if _wants(server, shape, each, high) >= high and high < each:
        return _full(server, shape, each, limit)
    running = falling_root(lambda batch: _wants(server, shape, each, batch) - batch, low, high)
    return _point(server, shape, each, running, None)


def falling_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that is >= 0 at ``low`` and <= 0 at ``high`` crosses zero: regula falsi, halving the weight of an
    end that stays (Illinois), so the bracket closes from both sides."""
    at_low, at_high = function(low), function(high)
    if at_low <= 0:
        return low
    if at_high >= 0:
        return high
    tolerance = _TOLERANCE * (high - low)
    kept = 0
    for _ in range(_ROUNDS):
        middle = high - at_high * (high - low) / (at_high - at_low)
        value = function(middle)
        if value == 0 or high - low < tolerance or abs(value) < tolerance:
            return middle
        if value > 0:
            low, at_low = middle, value
            at_high = at_high / 2 if kept == 1 else at_high
            kept = 1
        else:
            high, at_high = middle, value
            at_low = at_low / 2 if kept == -1 else at_low
            kept = -1
    return (low + high) / 2


def at_running(server: Server, shape: Shape, running: float) -> OperatingPoint:
    """The operating point at which ``running`` sequences of one replica decode, in a steady state below every limit: the
    users that keep so many running follow."""
    steady = replace(shape, requests_per_user=None)
    step = mean_step(server, steady, running)
    first = _ttft_s(server, steady, running, step, follows=shape.think_s == 0)
    decoding = shape.decode_steps * step.mean_s
    users = running * (first + decoding + shape.think_s) / decoding
    return _point(server, steady, users, running, None)


def _wants(server: Server, shape: Shape, users: float, running: float) -> float:
    """Of ``users`` users, those that would run if a step were that of ``running`` sequences."""
    step = mean_step(server, shape, running)
    decoding = shape.decode_steps * step.mean_s
    return (
        users * decoding / (decoding + _ttft_s(server, shape, users, step, follows=shape.think_s == 0) + shape.think_s)
    )


def _point(server: Server, shape: Shape, users: float, running: float, ttft_s: float | None) -> OperatingPoint:
    step = mean_step(server, shape, running)
    first = _ttft_s(server, shape, users, step, follows=shape.think_s == 0) if ttft_s is None else ttft_s
    decoding = shape.decode_steps * step.mean_s
    rate = users / (first + decoding + shape.think_s)
    return OperatingPoint(
        users=users * server.replicas,
        regime="below_limits" if ttft_s is None else server.full_regime,
        running=running * server.replicas,
        resident_tokens=running * shape.mean_context * server.replicas,
        tpot_s=step.mean_s,
        ttft_s=first,
        requests_per_s=rate * server.replicas,
        output_tokens_per_s=rate * shape.output_tokens * server.replicas,
    )


def _full(server: Server, shape: Shape, users: float, running: float) -> OperatingPoint:
    """``running`` sequences run and no more: a request's life among them sets the rate, the users who are too many wait."""
    step = mean_step(server, shape, running)
    decoding = shape.decode_steps * step.mean_s
    rate = running / (decoding + step.prompt_s)
    first = max(
        users / rate - decoding - shape.think_s, _ttft_s(server, shape, running, step, follows=shape.think_s == 0)
    )
    return _point(server, shape, users, running, first)


def open_loop(server: Server, shape: Shape, requests_per_s: float) -> OperatingPoint | None:
    """Where a stream of independent arrivals settles, or None where none does: more arrive than can be served.

    Raises:
        InputError: a rate that is not more than 0.
    """
    if not requests_per_s > 0:
        raise InputError(f"requests_per_s = {requests_per_s!r}, expected more than 0")
    rate = requests_per_s / server.replicas
    steady = replace(shape, requests_per_user=None)
    high = server.most_running if math.isfinite(server.most_running) else 1e6
    if _served(server, steady, high) <= rate:
        return None
    running = falling_root(lambda batch: rate - _served(server, steady, batch), 0.0, high)
    step = mean_step(server, steady, running)
    first = _ttft_s(server, steady, running, step, follows=False)
    users = rate * (first + steady.decode_steps * step.mean_s)
    return _point(server, steady, users, running, first)._replace(regime="below_limits")


def _served(server: Server, shape: Shape, running: float) -> float:
    """Requests a second that ``running`` sequences finish on one replica."""
    step = mean_step(server, shape, running)
    return running / max(shape.decode_steps * step.mean_s, step.prompt_s)


def most_requests_per_s(server: Server, shape: Shape) -> float:
    """The rate beyond which an open loop grows without bound."""
    high = server.most_running if math.isfinite(server.most_running) else 1e6
    return _served(server, replace(shape, requests_per_user=None), high) * server.replicas
