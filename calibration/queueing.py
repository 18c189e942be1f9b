"""Operating points: how many sequences run, how long a step, a first token and a request take under a load.

A closed loop of N users, each sending its next request a think time after the last one ended, settles where Little's law
holds: of N users, those running are the share of a request's life that is spent decoding,

    B = N * D / (F + D + Z),   D = (osl - 1) * T(B),   F = time to the first token,   Z = think time

and a step lasts what the sequences in it cost, plus the prompts that pass through it: every sequence that ends brings a
new prompt, which stretches the steps of all others that run. What is solved
for is the number that decode beside one stream, between 0 and N - 1.

Where the pool or ``max_num_seqs`` holds fewer than would run, those are the sequences that run: throughput stands still and
the rest of the users wait, in front of their first token. What is given there is the mean of the plateau, without
preemption's cost: an extrapolation, and called so (:mod:`calibration.twin` simulates it).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from calibration.errors import InputError
from calibration.steptime import StepTime

Regime = Literal["below_limits", "kv_full", "max_num_seqs"]

#: a root is found to this share of its bracket
_TOLERANCE = 1e-9
_ROUNDS = 60
_USER_ROUNDS = 12
#: of a start that are looked at
_MOST_STEPS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a request is: prompt and output tokens (means), and how users behave around it.

    ``requests_per_user`` is None for a steady state; a benchmark that starts all users at once and stops after a number of
    requests each has one wave of simultaneous prompts among that many requests, and its mean TTFT contains it. Of a prompt,
    ``cached_prompt_share`` is found in the prefix cache and not computed. ``start_gap_s`` is the time between the starts of
    two users, where their requests are equal and that says who stays with whom; None: they spread over a request's life.

    Raises:
        InputError: a length or time that cannot be.
    """

    prompt_tokens: float
    output_tokens: float
    think_s: float = 0.0
    requests_per_user: float | None = None
    cached_prompt_share: float = 0.0
    start_gap_s: float | None = None
    #: steps a request decodes after its first token; one for a single output token, so that it is there at all
    decode_steps: float = field(init=False, repr=False, compare=False)
    #: prompt tokens that are computed
    computed_tokens: float = field(init=False, repr=False, compare=False)
    #: tokens a running sequence holds on average: its prompt and half of its output
    mean_context: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.cached_prompt_share < 1:
            raise InputError(f"cached_prompt_share = {self.cached_prompt_share!r}, expected 0 to below 1")
        if not self.prompt_tokens > 0:
            raise InputError(f"prompt_tokens = {self.prompt_tokens!r}, expected more than 0")
        if not self.output_tokens >= 1:
            raise InputError(f"output_tokens = {self.output_tokens!r}, expected at least 1")
        if not self.think_s >= 0:
            raise InputError(f"think_s = {self.think_s!r}, expected at least 0")
        # kept, for a fixed point reads them thousands of times
        object.__setattr__(self, "decode_steps", max(1.0, self.output_tokens - 1))
        object.__setattr__(self, "computed_tokens", self.prompt_tokens * (1 - self.cached_prompt_share))
        object.__setattr__(self, "mean_context", self.prompt_tokens + self.output_tokens / 2)


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
    sees, prompts of others included; ``order_log_sd`` is how far it depends on how many of those fall into one step.
    """

    users: float
    regime: Regime
    running: float
    resident_tokens: float
    tpot_s: float
    ttft_s: float
    requests_per_s: float
    output_tokens_per_s: float
    order_log_sd: float

    @property
    def output_tokens_per_s_per_user(self) -> float:
        """Tokens a second one running stream gets."""
        return 1.0 / self.tpot_s


class MeanStep(NamedTuple):
    """A mean step of one micro-batch as a running stream sees it, and what a new prompt meets.

    ``mean_s``: between two tokens of a running stream. ``prompts`` of others are computed in such a step, ``prompt_load``
    is their share of its time, and ``work_s`` what one adds to a step that has another in it. ``beside_s``: a step of the
    others alone, in which a prompt is computed for ``prompt_s`` more, in ``chunks``. ``busy``: how likely there is
    somebody else when a request comes, with so many prompts ``ahead``. ``order_log_sd``: relative error of ``mean_s`` for
    not knowing whose prompts share a step.
    """

    mean_s: float
    prompt_s: float
    work_s: float
    prompt_load: float
    prompts: float
    ahead: float
    beside_s: float
    busy: float
    chunks: int
    order_log_sd: float


class Mix(NamedTuple):
    """What is in the mean step of one micro-batch, as a running stream sees it: ``seen`` sequences decode, itself among
    them; ``beside`` decode in a step that computes a prompt; ``prompts`` of others are computed in it, each in
    ``chunks``; the share ``mixed`` of steps has one in it, give or take ``mixed_sd``: how many prompts fall into one step
    depends on who began when, and ``prompts`` give or take ``prompts_sd`` for the same reason. A user goes round in a
    ``cycle`` of so many steps, infinitely many where it never comes back."""

    seen: float
    beside: float
    prompts: float
    chunks: int
    mixed: float
    mixed_sd: float
    prompts_sd: float
    cycle: float


class Bunch(NamedTuple):
    """Users who start faster than steps pass, as a stream of them sees it, and ever after: ``prompts`` of others in a
    step, the share ``mixed`` of steps that has some, ``met`` who decode beside it, and how many prompts are computed
    ``ahead`` of a first token, those in its own step among them."""

    prompts: float
    mixed: float
    met: float
    ahead: float


def mix_of(
    shape: Shape,
    others: float,
    users: float | None = None,
    *,
    budget: float,
    micro_batches: int,
    bunch: Bunch | None = None,
) -> Mix:
    """The mix where ``others`` decode beside a running stream on average. A stream's own prompt never stretches its own
    output. Prompts come in chunks of at most the token ``budget`` that decoding leaves.

    Each of ``users`` goes round in a cycle of equally many steps, so those who are at the same step as a stream stay there,
    their prompts come in its own, and it meets all the others' in the steps between. Spread evenly over the cycle, as users
    start, of N in a cycle of K steps one is at each, or N / K where they are more; anywhere, the others at a step would be
    (N - 1) / K. Steps of unequal length upset the order the more, the closer users are: where there is one at each step,
    the number of prompts that share one and of steps that have one are taken half-way. None: independent arrivals, as which
    requests of one token are taken too: they never decode, their step is a stand-in. Users who start faster than that are
    in a ``bunch`` (:func:`bunch_of`).
    """
    if users is None or others <= 0 or shape.output_tokens < 2:
        users, cycle, met, begun, beside = 1.0, math.inf, others, others / shape.decode_steps, others
    else:
        cycle = max(shape.decode_steps + 1.0, (users - 1.0) * shape.decode_steps / others)
        alike = max(1.0, users / cycle + 0.5 * (1.0 - 1.0 / cycle))
        begun = (users - alike) / (cycle - 1.0)
        met, beside = alike - 1.0 + begun * (shape.decode_steps - 1.0), begun * shape.decode_steps
    spread = begun
    if bunch is not None:
        met, begun, beside = bunch.met, bunch.prompts, bunch.met
    seen = (1.0 + met) / micro_batches
    chunks = max(1, math.ceil(shape.computed_tokens / max(1.0, budget - seen)))
    prompts = begun / micro_batches
    anywhere = -math.expm1(-prompts * chunks)
    if not math.isfinite(cycle):
        return Mix(seen, beside / micro_batches, prompts, chunks, anywhere, 0.0, 0.0, cycle)
    if bunch is not None:
        unsure = _OF_A_BUNCH * abs(spread - begun) / micro_batches
        mixed = min(1.0, bunch.mixed * chunks)
        return Mix(seen, beside / micro_batches, prompts, chunks, mixed, min(unsure * chunks, mixed), unsure, cycle)
    even = min(1.0, prompts * chunks)
    # two users meet each other's prompts twice a cycle, but once where one's comes while the other waits for its own, and
    # never at the same step: of few users it depends on where they are
    few = math.sqrt((1.0 + cycle - shape.decode_steps) / cycle * (users - 1.0) / users) / shape.decode_steps
    upset = min(1.0, users / cycle) / 2 * (even - anywhere)
    sd = math.hypot(upset, few * (1.0 - anywhere))
    return Mix(seen, beside / micro_batches, prompts, chunks, even - upset, sd, 0.0, cycle)


def bunch_of(server: Server, shape: Shape, users: float | None) -> Bunch | None:
    """How ``users`` of one replica whose starts are ``start_gap_s`` apart go round, or None where they are not said to start
    so. Equal requests keep the distance in steps that their first prompts had: who is computed together ends together.

    Of two, the first meets the prompt of the second; the second is away when the first one's comes again, unless it is
    more steps behind than a user is away for.
    """
    if shape.start_gap_s is None or users is None or users <= 1:
        return None
    users = max(2, round(users))
    sizes = _first_steps(server, shape, users, shape.start_gap_s)
    away = server.steps_in_flight
    reached, prompts, mixed, apart, ahead = 0.0, 0.0, 0.0, 0.0, 0.0
    for i, size in enumerate(sizes):
        before = sum(sizes[: max(0, i - away)])
        reached += size
        prompts += size * (users - reached + before)
        mixed += size * sum(each > 0 for k, each in enumerate(sizes) if k > i or k < i - away)
        apart += 2 * reached / users * (1 - reached / users)
        ahead += size * (max(0.0, size - 1.0) + sum(sizes[max(0, i - away) : i]))
    met = max(0.0, users * (1 - apart / shape.decode_steps) - 1)
    return Bunch(prompts / users / shape.decode_steps, mixed / users / shape.decode_steps, met, ahead / users)


def _first_steps(server: Server, shape: Shape, users: int, gap_s: float) -> list[int]:
    """Prompts that end in each step from the first on. The first user finds the server idle; a step has in it who had come
    when it was scheduled, as far as the token budget goes."""
    step, tokens = server.step, shape.computed_tokens
    work_s = step.prompt_chunk_s(tokens, shape.prompt_tokens - tokens)
    sizes: list[int] = []
    ends_s = [0.0] * server.steps_in_flight
    running, computed = 0, 0.0
    while running < users and len(sizes) < _MOST_STEPS:
        told_s = ends_s[-server.steps_in_flight]
        came = users if gap_s <= 0 else min(users, 1 + math.floor(told_s / gap_s))
        chunk = min(max(1.0, server.max_num_batched_tokens - running), came * tokens - computed)
        computed += chunk
        length_s = step.step_s(running, running * shape.mean_context, 0.0) + chunk / tokens * work_s
        length_s += mixed_s(step, running, chunk) if chunk else 0.0
        ends_s.append(ends_s[-1] + length_s)
        sizes.append(math.floor(computed / tokens + 1e-9) - running)
        running += sizes[-1]
    return sizes


#: where users start together, of what that changes so much is not known: they do not reach the engine on the dot
_OF_A_BUNCH = 0.1
#: a cycle is a whole number of steps, which the mean one is off by so much (standard deviation of rounding)
_OF_A_STEP = 12**-0.5


def mean_step(server: Server, shape: Shape, others: float, users: float | None = None) -> MeanStep:
    """Decode alone, and the prompts that pass through (:func:`mix_of`). What a mixed step costs whatever the prompt's
    length is shared by the prompts of one step.

    Args:
        others: sequences of one replica that decode beside a running stream.
        users: of one replica, where they are so many; None for independent arrivals.
    """
    step, tokens = server.step, shape.computed_tokens
    bunch = bunch_of(server, shape, users)
    mix = mix_of(
        shape,
        others,
        users,
        budget=server.max_num_batched_tokens,
        micro_batches=server.micro_batches,
        bunch=bunch,
    )
    chunk = tokens / mix.chunks
    own = step.prompt_chunk_s(tokens, shape.prompt_tokens - tokens)
    decode = step.step_s(mix.seen, mix.seen * shape.mean_context, 0.0)
    one_more = mixed_s(step, mix.seen, chunk)
    mean = decode + mix.prompts * own + mix.mixed * one_more
    beside = step.step_s(mix.beside, mix.beside * shape.mean_context, 0.0)
    return MeanStep(
        mean_s=mean,
        prompt_s=own + mix.chunks * mixed_s(step, mix.beside, chunk) + (mix.chunks - 1) * beside,
        work_s=own,
        prompt_load=(mean - decode) / mean,
        prompts=mix.prompts,
        ahead=mix.prompts if bunch is None else bunch.ahead,
        beside_s=beside,
        busy=_busy(others, users),
        chunks=mix.chunks,
        order_log_sd=math.hypot(mix.mixed_sd * one_more, mix.prompts_sd * own, (mean - decode) * _OF_A_STEP / mix.cycle)
        / mean,
    )


def _busy(others: float, users: float | None) -> float:
    """How likely at least one of the others is there."""
    if users is None:
        return -math.expm1(-others)
    return 0.0 if users <= 1 else 1.0 - (1.0 - min(1.0, others / (users - 1.0))) ** (users - 1.0)


def others_of(shape: Shape, users: float, step: MeanStep, ttft_s: float) -> float:
    """Sequences that decode beside a running stream, of ``users`` of one replica who have this step and first token.

    Counted in steps, as they are what a stream's tokens come in: every other user decodes ``osl - 1`` steps of a cycle
    that has besides the steps of its prompt, and the time it waits and thinks in mean steps. A prompt's step is one step
    however long it lasts, so in the time of steps fewer would seem to decode than a stream meets.
    """
    waited_s = max(0.0, ttft_s - step.prompt_s - step.beside_s) + shape.think_s
    cycle = shape.decode_steps + step.chunks + waited_s / step.mean_s
    return max(0.0, users - 1.0) * shape.decode_steps / cycle


def mixed_s(step: StepTime, decoding: float, chunk: float) -> float:
    """What a step costs more for a chunk of a prompt in it, whatever its length."""
    return step.mixed_step_overhead_s + step.experts_s(decoding + chunk) - step.experts_s(decoding)


#: steps that a request which comes at any moment waits less than one that comes when a step has just begun
_MISSED = 0.5


def _ttft_s(server: Server, shape: Shape, users: float, step: MeanStep, *, follows: bool) -> float:
    """Time to the first token below every limit: outside the steps, steps waited for, the prompt's own, those beside it."""
    factors = (
        server.request_overhead_s,
        server.request_token_s,
        server.wait_steps,
        server.prompt_factor,
        server.ahead_factor,
    )
    amounts = first_token_amounts(shape, users, step)
    told = sum(amount * factor for amount, factor in zip(amounts, factors, strict=True))
    return launched_s(server, step, follows=follows) + told


def first_token_amounts(shape: Shape, users: float, step: MeanStep) -> tuple[float, float, float, float, float]:
    """What each of :data:`calibration.factors.REQUEST_FACTORS` multiplies in the time to the first token."""
    return 1.0, shape.prompt_tokens, step.busy * step.mean_s, step.prompt_s, ahead_s(shape, users, step)


def launched_s(server: Server, step: MeanStep, *, follows: bool) -> float:
    """Of the time to the first token, the steps that are there whatever is waited for: the decoding beside the prompt's
    last chunk, and the steps that were scheduled already. A request that ``follows`` a user's last token at once just
    misses the step that then begins; one that comes at any moment waits half a step less."""
    missed = 0.0 if follows else _MISSED
    return max(0.0, step.beside_s + step.busy * (server.steps_in_flight - 1 - missed) * step.mean_s)


def ahead_s(shape: Shape, users: float, step: MeanStep) -> float:
    """Seconds of prompts of others before the first token comes, on average: in a steady state all that come during one
    step are computed together in the next (a bunch goes on as it began); a first wave trickles in, and half of everybody
    else comes before."""
    share = 0.0 if shape.requests_per_user is None else 1.0 / shape.requests_per_user
    steady = step.ahead * step.work_s
    return (1 - share) * steady + share * max(steady, (users - 1) / 2 * step.prompt_s)


def closed_loop(server: Server, shape: Shape, users: float) -> OperatingPoint:
    """Where ``users`` users settle; they spread evenly over the replicas.

    Raises:
        InputError: no users.
    """
    if not users > 0:
        raise InputError(f"users = {users!r}, expected more than 0")
    each = users / server.replicas
    room, most = server.most_running - 1.0, max(0.0, each - 1.0)
    if room < most and _settled(server, shape, each, max(0.0, room)) >= room:
        return _full(server, shape, each, server.most_running)
    others = falling_root(lambda guess: _settled(server, shape, each, guess) - guess, 0.0, most)
    return _point(server, shape, each, mean_step(server, shape, others, each))


def _settled(server: Server, shape: Shape, users: float, others: float) -> float:
    """Of ``users`` users, those that would decode beside a stream if a step were that of ``others`` beside it."""
    step = mean_step(server, shape, others, users)
    return others_of(shape, users, step, _ttft_s(server, shape, users, step, follows=shape.think_s == 0))


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
    users, others = max(running, 1e-9), max(0.0, running - 1.0)
    for _ in range(_USER_ROUNDS):
        step = mean_step(server, steady, others, users)
        first = _ttft_s(server, steady, users, step, follows=shape.think_s == 0)
        others = others_of(steady, users, step, first)
        decoding = shape.decode_steps * step.mean_s
        users = running * (first + decoding + shape.think_s) / decoding
    return _point(server, steady, users, mean_step(server, steady, others, users))


def _point(
    server: Server,
    shape: Shape,
    users: float,
    step: MeanStep,
    ttft_s: float | None = None,
    full: float | None = None,
) -> OperatingPoint:
    """The point at which a step is ``step``; beyond a limit ``full`` sequences run, and the first token takes ``ttft_s``."""
    first = _ttft_s(server, shape, users, step, follows=shape.think_s == 0) if ttft_s is None else ttft_s
    decoding = shape.decode_steps * step.mean_s
    rate = users / (first + decoding + shape.think_s)
    running = rate * decoding if full is None else full
    return OperatingPoint(
        users=users * server.replicas,
        regime="below_limits" if full is None else server.full_regime,
        running=running * server.replicas,
        resident_tokens=running * shape.mean_context * server.replicas,
        tpot_s=step.mean_s,
        ttft_s=first,
        requests_per_s=rate * server.replicas,
        output_tokens_per_s=rate * shape.output_tokens * server.replicas,
        order_log_sd=step.order_log_sd,
    )


def _full(server: Server, shape: Shape, users: float, running: float) -> OperatingPoint:
    """``running`` sequences run and no more: a request's life among them sets the rate, the users who are too many wait."""
    step = mean_step(server, shape, max(0.0, running - 1.0), running)
    decoding = shape.decode_steps * step.mean_s
    rate = running / (decoding + step.prompt_s)
    first = max(
        users / rate - decoding - shape.think_s, _ttft_s(server, shape, running, step, follows=shape.think_s == 0)
    )
    return _point(server, shape, users, step, first, running)


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
    step = mean_step(server, steady, _met(server, running))
    first = _ttft_s(server, steady, running, step, follows=False)
    users = rate * (first + steady.decode_steps * step.mean_s)
    return _point(server, steady, users, step, first)


def _served(server: Server, shape: Shape, running: float) -> float:
    """Requests a second that ``running`` sequences finish on one replica."""
    step = mean_step(server, shape, _met(server, running))
    return running / max(shape.decode_steps * step.mean_s, step.prompt_s)


def _met(server: Server, running: float) -> float:
    """Sequences beside a stream where arrivals are independent: as many as run on average, while there is room."""
    return min(running, max(0.0, server.most_running - 1.0))


def most_requests_per_s(server: Server, shape: Shape) -> float:
    """The rate beyond which an open loop grows without bound."""
    high = server.most_running if math.isfinite(server.most_running) else 1e6
    return _served(server, replace(shape, requests_per_user=None), high) * server.replicas
