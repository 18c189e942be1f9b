"""Which stages to run so that predictions get narrow, in the time there is. Pure.

Candidates are closed-loop stages below the predicted wall: a short, a decode-heavy and a prefill-heavy shape at geometric
users, and one user over prompt lengths on both sides of the token budget. Each costs the seconds the model of the moment
expects. They are chosen one by one: the one whose measurement narrows the predictions of all target loads most a second
(the greedy step of Bayesian I-optimal design, with the sensitivities of the closed form and the spread of the factors),
until the budget is spent. Run in a seeded random order, so that drift of the server does not pass for an effect of the
level; the first stage is run again at the end to show it.

A prior may be off by several times in speed, so the first stages are a scout's: few, short, bounded by requests and by
time. What they show replaces the prior, and the rest of the budget is planned anew.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from calibration.errors import InputError
from calibration.factors import FACTORS, FactorSet
from calibration.queueing import OperatingPoint, Shape, closed_loop
from calibration.serving import Serving

Floats = npt.NDArray[np.float64]

#: lives of a request: its users start over one and a little more, for who starts faster than requests end comes into the
#: prompts of the others, and equal requests that began together stay together; those who began before the last did live
#: another; then they are measured over these, and the last ones drain
START_LIVES = 1.2
SETTLE_LIVES = 1.0
MEASURED_LIVES = 3.0
_DRAIN_LIVES = 0.7
#: a window has some scrapes and some tokens, however fast the server
LEAST_WINDOW_S = 4.0
#: between two stages
_BETWEEN_S = 0.8
_MOST_STRETCH = 3.0
#: where the server is slow for the budget: little more than two lives measured, and whoever began early counts
BRIEF_START_LIVES, BRIEF_MEASURED_LIVES = 1.0, 2.6
#: no stage takes a larger share of the budget
_MOST_SHARE = 0.3
#: relative error of a stage's mean about the model, of TPOT and TTFT
_TPOT_LOG_SD, _TTFT_LOG_SD = 0.015, 0.06
#: a scout measures so many times worse, in variance
_SCOUT_NOISE = 25.0
#: users stay this far below what the pool holds at the requests' ends
_POOL_SHARE = 0.9
_MOST_USERS = 256
#: a stage that narrows the targets by less is not worth its time
_LEAST_GAIN = 1e-3
_SHORT, _LONG_OUTPUT, _SHORT_OUTPUT = 64, 256, 48
_LEAST_OUTPUT, _TINY_OUTPUT = 16, 8
#: sensitivities are taken over this share of a factor's spread, at most this much of its logarithm
_SMALL_MOVE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignedStage:
    """A stage to run: users of a shape, how long they start and how long it lasts, and what it is for.

    ``warm_up_s``: from its start, what is not measured. ``expected_s``: with the draining after it. ``requests`` bounds it
    by count as well; None: by time alone.
    """

    users: int
    prompt_tokens: int
    output_tokens: int
    ramp_up_s: float
    warm_up_s: float
    duration_s: float
    expected_s: float
    purpose: str
    requests: int | None = None

    @property
    def load(self) -> tuple[int, int, int]:
        return self.users, self.prompt_tokens, self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Stages in the order they are run. ``spread``: mean log sd of the target predictions before and after."""

    stages: tuple[DesignedStage, ...]
    spread_before: float
    spread_after: float

    @property
    def seconds(self) -> float:
        return sum(stage.expected_s for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a design may use: ``users`` and ``shapes`` (prompt, output tokens) that were asked for, None for our own."""

    budget_s: float
    users: Sequence[int] | None = None
    shapes: Sequence[tuple[int, int]] | None = None
    seed: int = 0


def scout(served: Serving, factors: FactorSet, wish: Wish) -> tuple[DesignedStage, ...]:
    """The first stages: one user and some, each at the shortest and at the longest prompt, over after a few requests or a
    tenth of the budget. Without some at the longest nothing tells what prompts cost those who decode, and with that how
    long a request lives among many, which every later stage is timed by."""
    shapes = _shapes(served, wish)
    short = min(shapes, key=lambda shape: (shape[1] <= _TINY_OUTPUT, sum(shape), shape))
    long = max(shapes, key=lambda shape: (shape[0], shape))
    chosen = dict.fromkeys(
        [(1, short), (1, long), (_some(served, short, wish), short), (_some(served, long, wish), long)]
    )
    bound_s = wish.budget_s / 10
    return tuple(
        _stage(served, factors, n, shape, "scout: how fast is it", bound_s=bound_s, requests=3 * n)
        for n, shape in chosen
    )


def _some(served: Serving, shape: tuple[int, int], wish: Wish) -> int:
    """Four users or the next level above; the most there are where they are fewer."""
    users = sorted(_levels(served, shape, wish))
    return next((n for n in users if n >= 4), users[-1])


def design(
    served: Serving,
    factors: FactorSet,
    wish: Wish,
    *,
    known: Sequence[tuple[int, int, int]] = (),
) -> Design:
    """The stages of a budget.

    Args:
        factors: the prior, or what a scout's stages made of it.
        known: loads (users, prompt, output tokens) that were measured already, as a scout does.

    Raises:
        InputError: nothing fits: no level below the wall, or no stage within the budget.
    """
    every = _candidates(served, factors, wish)
    candidates = [c for c in every if c.expected_s <= _MOST_SHARE * wish.budget_s]
    if not candidates:
        raise InputError(
            f"budget = {wish.budget_s:g} s, expected more: the shortest stage takes {min(c.expected_s for c in every):.0f} s, "
            f"and none may take more than {_MOST_SHARE:.0%}",
            "give a longer --budget, fewer or smaller --users, or shorter --shapes",
        )
    model = _Linear(served, factors)
    targets = model.rows(_targets(served, wish))
    state = _covariance(factors)
    before = _spread(targets, state)
    for load in known:
        state = _measured(state, model.rows([load]), _noise(_SCOUT_NOISE))
    chosen: list[DesignedStage] = []
    left_s = wish.budget_s
    rows = {c.load: model.rows([c.load]) for c in candidates}
    while True:
        open_ = [c for c in candidates if c not in chosen and c.expected_s <= left_s]
        gains = [_gain(targets, state, rows[c.load]) for c in open_]
        if not open_:
            break
        best = max(range(len(open_)), key=lambda i: gains[i] / open_[i].expected_s)
        if gains[best] < _LEAST_GAIN * max(_total(targets, state), 1e-12):
            break
        chosen.append(open_[best])
        left_s -= open_[best].expected_s
        state = _measured(state, rows[open_[best].load], _noise(1.0))
    ordered = _stretched(_ordered(chosen, left_s, wish.seed), wish.budget_s)
    return Design(stages=tuple(ordered), spread_before=before, spread_after=_spread(targets, state))


def _stretched(stages: Sequence[DesignedStage], budget_s: float) -> list[DesignedStage]:
    """Time that is left makes every window longer, up to three times."""
    measured_s = sum(stage.duration_s - stage.warm_up_s for stage in stages)
    spare_s = budget_s - sum(stage.expected_s for stage in stages)
    longer = min(_MOST_STRETCH - 1.0, max(0.0, spare_s / measured_s)) if measured_s else 0.0
    return [
        replace(
            stage,
            duration_s=stage.duration_s + longer * (stage.duration_s - stage.warm_up_s),
            expected_s=stage.expected_s + longer * (stage.duration_s - stage.warm_up_s),
        )
        for stage in stages
    ]


def _ordered(chosen: Sequence[DesignedStage], left_s: float, seed: int) -> list[DesignedStage]:
    """A seeded random order; where time is left the cheapest is run first and again last."""
    order = list(chosen)
    random.Random(seed).shuffle(order)
    again = [stage for stage in order if stage.expected_s <= left_s]
    if len(order) > 2 and again:
        cheapest = min(again, key=lambda stage: stage.expected_s)
        order.remove(cheapest)
        order = [cheapest, *order, replace(cheapest, purpose="the first one again: did the server drift")]
    return order


# --- candidates ------------------------------------------------------------------------------------------------------


def _shapes(served: Serving, wish: Wish) -> list[tuple[int, int]]:
    if wish.shapes is not None:
        return list(wish.shapes)
    context = served.deployment.max_model_len
    short = max(1, min(_SHORT, context // 4))
    long_output = max(_LEAST_OUTPUT, min(_LONG_OUTPUT, context // 2))
    long_prompt = max(short, min(2048, context // 2))
    found = [(short, short), (short, long_output), (long_prompt, max(_LEAST_OUTPUT, min(_SHORT_OUTPUT, context // 8)))]
    middle = round(math.sqrt(short * long_prompt))
    if middle > 2 * short:
        found.append((middle, max(_LEAST_OUTPUT, min(128, context // 8))))
    # every step has a prompt in it, though few users are there
    found.append((short, max(2, min(_TINY_OUTPUT, context // 8))))
    return list(dict.fromkeys(shape for shape in found if sum(shape) <= context))


def _alone(served: Serving, wish: Wish) -> list[tuple[int, int]]:
    """Shapes for one user: prompts of several lengths, on both sides of the token budget."""
    if wish.shapes is not None:
        return []
    deployment = served.deployment
    budget, context = deployment.max_num_batched_tokens, deployment.max_model_len
    lengths = [256, 1024, 4096, round(0.8 * budget), round(1.25 * budget)]
    return [(length, _LEAST_OUTPUT) for length in dict.fromkeys(lengths) if length + _LEAST_OUTPUT <= context]


def most_users(served: Serving, shape: tuple[int, int]) -> int:
    """Users below the wall and below ``max_num_seqs``, at least one."""
    load = Shape(prompt_tokens=shape[0], output_tokens=shape[1])
    wall = served.wall(load)
    seqs = served.deployment.max_num_seqs * served.deployment.dp
    limit = float(seqs) if wall is None else min(float(seqs), _POOL_SHARE * wall[0])
    return max(1, min(_MOST_USERS, math.floor(limit)))


def _levels(served: Serving, shape: tuple[int, int], wish: Wish) -> list[int]:
    most = most_users(served, shape)
    asked = wish.users if wish.users is not None else [2**k for k in range(most.bit_length())]
    levels = [n for n in asked if n <= most]
    if not levels:
        raise InputError(
            f"users = {', '.join(map(str, asked))}, expected some that the pool holds: at most {most} at "
            f"{shape[0]} + {shape[1]} tokens",
            "give smaller --users",
        )
    return levels


def _candidates(served: Serving, factors: FactorSet, wish: Wish) -> list[DesignedStage]:
    found = []
    for shape in _shapes(served, wish):
        levels = _levels(served, shape, wish)
        found += [_affordable(served, factors, users, shape, wish) for users in levels]
    found += [
        _stage(served, factors, 1, shape, "time to first token by prompt length") for shape in _alone(served, wish)
    ]
    return list({stage.load: stage for stage in reversed(found)}.values())


def _affordable(served: Serving, factors: FactorSet, users: int, shape: tuple[int, int], wish: Wish) -> DesignedStage:
    """A settled stage where the budget bears it, else a brief one."""
    settled = _stage(served, factors, users, shape, _purpose(users, shape))
    if settled.expected_s <= _MOST_SHARE / 2 * wish.budget_s:
        return settled
    return _stage(served, factors, users, shape, _purpose(users, shape), brief=True)


def _purpose(users: int, shape: tuple[int, int]) -> str:
    prompt, output = shape
    if users == 1:
        return "a step and a request alone"
    if output <= _TINY_OUTPUT:
        return "a prompt in every step: what a mixed step costs"
    if prompt > 4 * output:
        return "what prompts cost those who decode"
    if output >= 3 * prompt:
        return "long outputs: reading the cache"
    return "what each running sequence adds"


def _stage(
    served: Serving,
    factors: FactorSet,
    users: int,
    shape: tuple[int, int],
    purpose: str,
    *,
    bound_s: float = math.inf,
    requests: int | None = None,
    brief: bool = False,
) -> DesignedStage:
    life_s = _life_s(_point(served, factors, users, shape), shape)
    if users == 1:
        start, settle, measured = 0.0, 0.0, BRIEF_MEASURED_LIVES if brief else 4.0
    elif brief or bound_s < math.inf:
        start, settle, measured = BRIEF_START_LIVES, 0.0, BRIEF_MEASURED_LIVES
    else:
        start, settle, measured = START_LIVES, SETTLE_LIVES, MEASURED_LIVES
    start_s, warm_s = min(start * life_s, bound_s / 3), settle * life_s
    measured_s = start_s + warm_s + max(LEAST_WINDOW_S, measured * life_s)
    # a scout ends by count where it can, for how long that takes is what it is to find out
    duration_s = measured_s if requests is None else bound_s
    return DesignedStage(
        users=users,
        prompt_tokens=shape[0],
        output_tokens=shape[1],
        ramp_up_s=start_s,
        warm_up_s=start_s + warm_s if warm_s else 0.0,
        duration_s=duration_s,
        expected_s=min(duration_s, measured_s) + _DRAIN_LIVES * life_s + _BETWEEN_S,
        purpose=purpose,
        requests=requests,
    )


def _point(served: Serving, factors: FactorSet, users: float, shape: tuple[int, int]) -> OperatingPoint:
    load = Shape(prompt_tokens=shape[0], output_tokens=shape[1])
    return closed_loop(served._replace(pool=None).server(factors, load), load, users)


def _life_s(point: OperatingPoint, shape: tuple[int, int]) -> float:
    return point.ttft_s + max(1, shape[1] - 1) * point.tpot_s


# --- information -----------------------------------------------------------------------------------------------------


class _Linear:
    """Logarithms of TPOT and TTFT of loads, linear in the logarithms of the factors."""

    def __init__(self, served: Serving, factors: FactorSet) -> None:
        self._served = served
        self._factors = factors

    def rows(self, loads: Sequence[tuple[int, int, int]]) -> Floats:
        """d ln TPOT and d ln TTFT over d ln factor, two rows a load; shape (2 n, factors)."""
        return np.array([row for load in loads for row in self._of(load)]).reshape(-1, len(FACTORS))

    def _of(self, load: tuple[int, int, int]) -> Iterator[Floats]:
        users, *shape = load
        columns = [self._slope(name, users, (shape[0], shape[1])) for name in FACTORS]
        yield np.array([column[0] for column in columns])
        yield np.array([column[1] for column in columns])

    def _slope(self, name: str, users: int, shape: tuple[int, int]) -> tuple[float, float]:
        factor = self._factors[name]
        if factor.value <= 0 or factor.log_sd <= 0:
            return 0.0, 0.0
        move = min(_SMALL_MOVE, factor.log_sd)
        up, down = (
            _point(self._served, self._factors.scaled(name, math.exp(sign * move)), users, shape) for sign in (1, -1)
        )
        return (
            math.log(up.tpot_s / down.tpot_s) / (2 * move),
            math.log(up.ttft_s / down.ttft_s) / (2 * move),
        )


def _targets(served: Serving, wish: Wish) -> list[tuple[int, int, int]]:
    """Loads whose prediction matters: every shape from one user to what the pool holds, whatever users may be run."""
    found = []
    for shape in dict.fromkeys([*_shapes(served, wish), *_shapes(served, replace(wish, shapes=None))]):
        most = most_users(served, shape)
        found += [(users, *shape) for users in dict.fromkeys([1, max(1, round(math.sqrt(most))), most])]
    return found


def _covariance(factors: FactorSet) -> Floats:
    """Of the logarithms of all factors."""
    found = np.diag([factors[name].log_sd ** 2 for name in FACTORS])
    for c in factors.covariances:
        at = [FACTORS.index(name) for name in c.names]
        found[np.ix_(at, at)] = np.array(c.matrix)
    return found


def _noise(times: float) -> Floats:
    """Variances of the two measurements of a load."""
    return times * np.array([_TPOT_LOG_SD**2, _TTFT_LOG_SD**2])


def _measured(state: Floats, rows: Floats, noise: Floats) -> Floats:
    """The covariance after these measurements (Kalman's update)."""
    crossed = state @ rows.T
    spread = rows @ crossed + np.diag(np.resize(noise, len(rows)))
    return state - crossed @ np.linalg.solve(spread, crossed.T)


def _gain(targets: Floats, state: Floats, rows: Floats) -> float:
    """By how much the summed variance of the targets falls."""
    crossed = state @ rows.T
    spread = rows @ crossed + np.diag(_noise(1.0))
    seen = targets @ crossed
    return float(np.sum(seen * np.linalg.solve(spread, seen.T).T))


def _total(targets: Floats, state: Floats) -> float:
    return float(np.einsum("ij,jk,ik->", targets, state, targets))


def _spread(targets: Floats, state: Floats) -> float:
    """Mean log sd of the targets."""
    return float(np.mean(np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", targets, state, targets), 0.0))))
