"""Every limit on users, which one binds, and what users get there.

    kv_full        the pool is full with all streams at their end        exact where vLLM is exact (calibration.kv_users)
    kv_staggered   the pool is full on average                           the same
    max_num_seqs   as many sequences as vLLM runs at once
    tpot           the mean time per output token reaches its limit      with an interval
    ttft           the mean time to the first token reaches its limit    with an interval
    knee           an added user brings less than a tenth of what the first one brings (calibration.knee)

Each is taken alone, as if the others were not there; the smallest binds. The pool counts once, as what it holds on average.
The knee stops nobody: where it binds, the smallest limit that does is shown beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from calibration.errors import InputError
from calibration.factors import Z90, Basis, FactorSet
from calibration.knee import KNEE_SLOPE
from calibration.kv_cache import longest_request
from calibration.plan import Load, Plan
from calibration.prediction import Estimate, Outcome, propagate
from calibration.priors import physics_of, prior_factors
from calibration.queueing import OperatingPoint, Server, Shape, closed_loop, falling_root
from calibration.serving import Serving

#: beyond this many users of one replica a limit is taken as not reached
_MOST_USERS = 1e6
#: step over which the slope at the knee is taken, as a share of the users
_SLOPE_STEP = 0.02
#: a limit is found where its quantity is within this share of it
_CLOSE = 1e-5

#: what an added user brings beyond the knee
BRINGS_LITTLE = f"under {KNEE_SLOPE:.0%} of the tokens per second that the first one brings"

#: what each limit is called in a sentence
NAMES: Mapping[str, str] = {
    "kv_staggered": "the KV pool",
    "max_num_seqs": "max_num_seqs",
    "tpot": "the limit on time per output token",
    "ttft": "the limit on time to first token",
    "knee": "the knee of throughput",
}


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits on means, in seconds; None: none.

    Raises:
        InputError: a limit that is not more than 0.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for key in ("ttft_s", "tpot_s"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise InputError(f"slo {key} = {value!r}, expected more than 0")


class Limits(NamedTuple):
    """Users over all replicas. ``tpot``, ``ttft`` and ``knee`` are None where not asked for, or not reached by any number
    of users; ``ranked`` are the limits that are reached, the smallest first."""

    kv_full: float
    kv_staggered: float
    max_num_seqs: float
    tpot: Estimate | None
    ttft: Estimate | None
    knee: Estimate | None
    ranked: tuple[tuple[str, float], ...]

    @property
    def binding(self) -> str:
        return self.ranked[0][0]

    @property
    def next(self) -> str:
        """The limit after the binding one: pool and ``max_num_seqs`` always are two."""
        return self.ranked[1][0]

    @property
    def users(self) -> float:
        """Users at the binding limit."""
        return self.ranked[0][1]

    @property
    def first_hard(self) -> tuple[str, float]:
        """The smallest limit that stops users, and how many it leaves."""
        return next(item for item in self.ranked if item[0] != "knee")


class AtLimit(NamedTuple):
    """What users get at a limit: whole users, at least one."""

    limit: str
    users: int
    throughput_tokens_per_s: Estimate
    tokens_per_s_per_user: Estimate
    tpot_s: Estimate
    ttft_s: Estimate


class Sizing(NamedTuple):
    """What a deployment does under a load: its limits, what users get at the binding one, and where that is the knee, which
    stops nobody, at the smallest that does. ``why`` says it in a sentence or two."""

    limits: Limits
    at_binding: AtLimit
    at_hard_limit: AtLimit | None
    why: str


def shape_of(load: Load, think_s: float = 0.0) -> Shape:
    """The plan's load in a steady state."""
    return Shape(prompt_tokens=load.prompt_tokens, output_tokens=load.output_tokens, think_s=think_s)


def size(plan: Plan, slo: Slo | None = None, factors: FactorSet | None = None, think_s: float = 0.0) -> Sizing | None:
    """Limits and operating point of a plan; None where it does not fit, so that nothing runs.

    Args:
        slo: limits on means that count as limits on users.
        factors: the calibration; None: the priors.

    Raises:
        Unsupported: no device is known, so no step can be timed.
    """
    if plan.memory.pool is None or not plan.memory.fits:
        return None
    served = Serving(plan.deployment, physics_of(plan.deployment), plan.memory.pool)
    known = factors if factors is not None else prior_factors(plan.deployment, served.physics)
    shape = shape_of(plan.load, think_s)
    limits = limits_of(served, known, shape, slo or Slo())
    return Sizing(
        limits=limits,
        at_binding=_at(served, known, shape, *limits.ranked[0]),
        at_hard_limit=_at(served, known, shape, *limits.first_hard) if limits.binding == "knee" else None,
        why=explain(served, shape, limits),
    )


def _at(served: Serving, factors: FactorSet, shape: Shape, limit: str, reached: float) -> AtLimit:
    users = max(1, math.floor(reached + 1e-9))
    basis = factors.basis(users, shape.prompt_tokens, shape.output_tokens)
    found = propagate(lambda f: _outcome(served.server(f, shape), shape, users), factors, basis)
    return AtLimit(limit, users, found["throughput"], found["per_user"], found["tpot"], found["ttft"])


def _outcome(server: Server, shape: Shape, users: float) -> Outcome:
    point = closed_loop(server, shape, users)
    return {
        "throughput": point.output_tokens_per_s,
        "per_user": point.output_tokens_per_s_per_user,
        "tpot": point.tpot_s,
        "ttft": point.ttft_s,
    }


@dataclass(frozen=True, slots=True)
class _Loop:
    """The closed loop of a server over users, each number of them solved once: limits are looked for between the same ends."""

    replicas: int
    at: Callable[[float], OperatingPoint]

    @property
    def span(self) -> tuple[float, float]:
        """Logarithms of the users between which a limit is looked for: one of each replica, and more than anybody has."""
        return math.log(self.replicas), math.log(_MOST_USERS * self.replicas)


def limits_of(served: Serving, factors: FactorSet, shape: Shape, slo: Slo, *, intervals: bool = True) -> Limits:
    """Every limit on users; without ``intervals`` those of latency and the knee are points."""
    shape = replace(shape, requests_per_user=None)
    loop = _Loop(served.deployment.dp, cache(partial(closed_loop, _free(served, factors, shape), shape)))
    wall = served.wall(shape)
    full, staggered = wall if wall is not None else (0.0, 0.0)
    basis = factors.basis(1, shape.prompt_tokens, shape.output_tokens)

    def reach(of: Callable[[OperatingPoint], float], limit: float | None, name: str) -> Estimate | None:
        value = None if limit is None else _users_where(loop, of, limit)
        if value is None or limit is None:
            return None
        # where already one user is over the limit, it is that user's latency which is uncertain
        at = value or float(loop.replicas)
        sd = _log_sd(served, factors, shape, of, at, name) if intervals else 0.0
        return _with_ends(loop, of, limit, Estimate(value, value, value, basis), sd)

    tpot = reach(lambda point: point.tpot_s, slo.tpot_s, "tpot")
    ttft = reach(lambda point: point.ttft_s, slo.ttft_s, "ttft")
    bend = _knee(loop, basis)
    most = float(served.deployment.max_num_seqs * served.deployment.dp)
    found = [("kv_staggered", staggered), ("max_num_seqs", most)]
    found += [(name, at.value) for name, at in (("tpot", tpot), ("ttft", ttft), ("knee", bend)) if at is not None]
    return Limits(full, staggered, most, tpot, ttft, bend, tuple(sorted(found, key=lambda item: item[1])))


def _free(served: Serving, factors: FactorSet, shape: Shape) -> Server:
    """The server that no pool and no ``max_num_seqs`` bounds."""
    return served._replace(pool=None).server(factors, shape)._replace(max_num_seqs=int(_MOST_USERS))


def _log_sd(
    served: Serving,
    factors: FactorSet,
    shape: Shape,
    of: Callable[[OperatingPoint], float],
    users: float,
    name: str,
) -> float:
    """Spread of a quantity at so many users."""

    def again(changed: FactorSet) -> Outcome:
        return {name: of(closed_loop(_free(served, changed, shape), shape, users))}

    found = propagate(again, factors, "extrapolated")[name]
    return math.log(found.high / found.value) / Z90


def _with_ends(
    loop: _Loop, of: Callable[[OperatingPoint], float], limit: float, at: Estimate, log_sd: float
) -> Estimate:
    """Users at which a quantity reaches its limit; the ends of the interval are those at which it would, if the model were
    that much too fast or too slow."""
    if log_sd == 0:
        return at
    low, high = (_users_where(loop, of, limit * math.exp(sign * Z90 * log_sd)) for sign in (-1.0, 1.0))
    return at._replace(low=low if low is not None else at.value, high=high if high is not None else math.inf)


def _users_where(loop: _Loop, of: Callable[[OperatingPoint], float], limit: float) -> float | None:
    """Users at which a quantity that grows with them reaches ``limit``; 0 where one user is over it, None where none is."""

    def left(log_users: float) -> float:
        return _settled(math.log(limit / of(loop.at(math.exp(log_users)))))

    low, high = loop.span
    if left(low) < 0:
        return 0.0
    return None if left(high) >= 0 else math.exp(falling_root(left, low, high))


def _settled(distance: float) -> float:
    """0 where what is left to a limit is less than anybody reads: each further round costs a dozen steps."""
    return 0.0 if abs(distance) < _CLOSE else distance


def _knee(loop: _Loop, basis: Basis) -> Estimate | None:
    """Users at which an added user brings ``KNEE_SLOPE`` of what the first one brings."""
    low, high = loop.span
    first = loop.at(loop.replicas).output_tokens_per_s / loop.replicas

    def above(log_users: float) -> float:
        users = math.exp(log_users)
        more = loop.at(users * (1 + _SLOPE_STEP)).output_tokens_per_s - loop.at(users).output_tokens_per_s
        gained = more / (users * _SLOPE_STEP)
        return _settled(math.log(max(gained / first, _CLOSE) / KNEE_SLOPE))

    if above(high) >= 0:
        return None
    users = math.exp(falling_root(above, low, high))
    return Estimate(users, users, users, basis)


def max_context(plan: Plan) -> int:
    """Tokens of the longest request the pool holds, at most what the model takes; 0 where there is no pool."""
    pool, architecture = plan.memory.pool, plan.deployment.architecture
    if pool is None:
        return 0
    limit = max(architecture.context, plan.deployment.max_model_len)
    return longest_request(pool.groups, pool.usable_blocks, plan.deployment.max_in_flight_tokens, limit)


def explain(served: Serving, shape: Shape, limits: Limits) -> str:
    """What binds, why, and what would bind next."""
    users = limits.users
    at = f"at {math.floor(users):,} users" if users >= 1 else "before a single user"
    length = f"{shape.prompt_tokens:,.0f} + {shape.output_tokens:,.0f} tokens"
    holds = (
        f"the pool holds {limits.kv_full:.1f} streams of {length} at their end, {limits.kv_staggered:.1f} on average"
    )
    sentences = {
        "kv_staggered": f"The KV pool binds {at}: {_pool_tokens(served)}; {holds}",
        "max_num_seqs": f"max_num_seqs ({math.floor(users):,}) binds: {holds}, more than vLLM runs at once",
        "tpot": f"The limit on time per output token binds {at}: each running stream adds to every step, and a step then "
        "takes as long as is allowed",
        "ttft": f"The limit on time to first token binds {at}: a new prompt waits for the steps of those that run and for "
        "prompts before it as long as is allowed",
        "knee": f"The knee of throughput binds {at}: an added user brings {BRINGS_LITTLE}. Nobody is stopped there; the first "
        f"limit that stops users is {NAMES[limits.first_hard[0]]} at {math.floor(limits.first_hard[1]):,}; {holds}",
    }
    said = sentences[limits.binding]
    if limits.binding == "knee" and limits.next == limits.first_hard[0]:
        return f"{said}."
    return f"{said}. Next is {NAMES[limits.next]} at {math.floor(limits.ranked[1][1]):,}."


def _pool_tokens(served: Serving) -> str:
    tokens = 0 if served.pool is None else served.pool.size_tokens * served.deployment.dp
    engines = f" on {served.deployment.dp} engines" if served.deployment.dp > 1 else ""
    return f"{tokens:,} tokens{engines}"
