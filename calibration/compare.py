"""Measured beside predicted saturation of a sweep over users.

The prediction is an interval: ``kv_full`` requests fit the pool at their full length, so that many never collide, not
even in lock step; ``kv_staggered`` fit it on average over their lives, so more than that collide even when spread evenly
(derived from vLLM 0.32.0 ``v1/core/sched/scheduler.py``, which admits a request when its current tokens fit and preempts
when growth finds no block; on a real server, 40 usable blocks of 32 and requests of 64 + 100 tokens, lock-step users
collided from 7 on and staggered ones from 10 on, where this gives 6.7 and 9.8). What is measured is an interval too: the
last level without a sign of the limit and the first with one. Where the two overlap, they do not contradict each other;
else the relative error is the distance between them over the measured end that is nearer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from calibration.errors import InputError
from calibration.kv_cache import Group, LayerCache, Pool
from calibration.kv_users import users_full, users_staggered
from calibration.saturation import Knee, Level, Limit, Onset, Sign, knee, onset, sign_of

Verdict = Literal["inside", "beside", "outside", "not_reached", "not_measured", "not_predicted"]
Binding = Literal["wall", "max_num_seqs", "knee"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPool:
    """The KV pool of one engine, and how many engines share the users evenly.

    ``usable_tokens`` differs from ``usable_blocks * block_size`` where layers of several kinds share the blocks; then
    tokens are all that can be reckoned with.
    """

    usable_blocks: int
    block_size: int
    usable_tokens: int
    engines: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted limits on users; None where unknown. ``source``: the pool the server showed, or a plan."""

    kv_full: float
    kv_staggered: float
    max_num_seqs: int | None = None
    source: Literal["probed", "planned"] = "probed"

    @property
    def interval(self) -> tuple[float, float]:
        """Users at which the first limit begins to show, at the earliest and at the latest."""
        cap = math.inf if self.max_num_seqs is None else self.max_num_seqs
        return min(self.kv_full, cap), min(self.kv_staggered, cap)

    @property
    def binding(self) -> Limit:
        return "max_num_seqs" if self.max_num_seqs is not None and self.max_num_seqs < self.kv_full else "wall"


def predict_wall(
    pool: KvPool, prompt_tokens: float, output_tokens: float, max_num_seqs: int | None = None
) -> Prediction:
    """The limits of a pool for requests of these mean lengths, without shared prefixes.

    Args:
        max_num_seqs: of one engine.
    """
    prompt, output = max(1, round(prompt_tokens)), max(1, round(output_tokens))
    if pool.usable_tokens == pool.usable_blocks * pool.block_size:
        plain = _plain_attention(pool, prompt + output)
        full, staggered = users_full(plain, prompt, output), users_staggered(plain, prompt, output)
    else:
        full, staggered = pool.usable_tokens / (prompt + output), pool.usable_tokens / (prompt + output / 2)
    return Prediction(
        kv_full=full * pool.engines,
        kv_staggered=staggered * pool.engines,
        max_num_seqs=None if max_num_seqs is None else max_num_seqs * pool.engines,
    )


def _plain_attention(pool: KvPool, tokens: int) -> Pool:
    """The pool as the model of the pool knows it: one block table of full attention, for requests up to ``tokens``."""
    table = Group(LayerCache("full", pool.block_size, page_bytes=1), layers=((0, 1),))
    return Pool(
        num_blocks=pool.usable_blocks + 1,
        block_size=pool.block_size,
        bytes_per_block=1,
        groups=(table,),
        max_model_len=tokens,
        max_in_flight_tokens=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitComparison:
    """Predicted interval and measured onset of the first limit on users.

    ``relative_error``: 0 where they overlap, above 0 where too many users were predicted, below 0 where too few; None
    where one of the two is missing. ``full_error`` and ``staggered_error`` relate each end of the interval to the first
    level that shows the limit.
    """

    verdict: Verdict
    relative_error: float | None = None
    full_error: float | None = None
    staggered_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A sweep held against its prediction."""

    prediction: Prediction | None
    levels: tuple[Level, ...]
    signs: tuple[Sign | None, ...]
    onset: Onset | None
    knee: Knee
    limit: LimitComparison
    #: what limited the measured sweep first, and the users that it bears; None where nothing did
    binding: Binding | None
    users: float | None

    def missed(self, tolerance: float) -> str | None:
        """Why a tolerance on the relative error is missed; None where it is met. Nothing to compare meets nothing."""
        error = self.limit.relative_error
        if error is None:
            return f"nothing to compare: {_MISSING[self.limit.verdict]}"
        if abs(error) <= tolerance:
            return None
        return f"predicted and measured saturation differ by {error:+.0%}, tolerance {tolerance:.0%}"

    def to_dict(self) -> dict[str, Any]:
        """The comparison as one JSON document; what is unknown is null."""
        prediction, found = self.prediction, self.onset
        return {
            "predicted": prediction
            and {**asdict(prediction), "interval": list(prediction.interval), "binding": prediction.binding},
            "measured": {
                "last_good": found and found.last_good,
                "first_bad": found and found.first_bad,
                "sign": found and found.sign and asdict(found.sign),
                "knee": asdict(self.knee),
                "binding": self.binding,
                "users": self.users,
            },
            **asdict(self.limit),
            "levels": [
                {**asdict(level), "sign": sign and asdict(sign)}
                for level, sign in zip(self.levels, self.signs, strict=True)
            ],
        }


_MISSING = {
    "not_measured": "no level of the run says whether requests waited or were preempted (was /metrics read?)",
    "not_predicted": "the server did not show its KV pool, and no plan was given",
}


def compare(levels: Sequence[Level], prediction: Prediction | None, request_share: float | None = None) -> Comparison:
    """Hold a sweep against a prediction.

    Args:
        levels: valid stages by users, in any order.
        prediction: None where neither pool nor plan is known.
        request_share: of one engine's pool that one request takes at its end; None where unknown.
    """
    ordered = tuple(sorted(levels, key=lambda level: level.users))
    cap = prediction.max_num_seqs if prediction else None
    signs = tuple(sign_of(level, request_share, cap) for level in ordered)
    found = onset(ordered, signs)
    bend = knee(*_best_throughputs(ordered))
    binding, users = _measured_binding(found, bend)
    swept = sorted({level.users for level in ordered if level.readable})
    return Comparison(
        prediction=prediction,
        levels=ordered,
        signs=signs,
        onset=found,
        knee=bend,
        limit=_compare_limit(prediction, found, swept),
        binding=binding,
        users=users,
    )


def _best_throughputs(levels: Sequence[Level]) -> tuple[list[int], list[float]]:
    """Levels with a throughput, each once: the best of several stages of one level."""
    best: dict[int, float] = {}
    for level in levels:
        if level.output_tokens_per_s is not None:
            best[level.users] = max(level.output_tokens_per_s, best.get(level.users, 0.0))
    return list(best), list(best.values())


def _measured_binding(found: Onset | None, bend: Knee) -> tuple[Binding | None, float | None]:
    """A knee binds where it lies below the onset of a limit: at a wall throughput bends as well."""
    limited = found is not None and found.sign is not None
    if bend.high is not None and (not limited or (found and found.last_good and bend.high <= found.last_good)):
        return "knee", bend.users
    if found is not None and found.sign is not None:
        return found.sign.limit, found.last_good
    return None, None


def _compare_limit(prediction: Prediction | None, found: Onset | None, swept: Sequence[int]) -> LimitComparison:
    if found is None:
        return LimitComparison(verdict="not_measured")
    if prediction is None:
        return LimitComparison(verdict="not_predicted")
    low, high = prediction.interval
    error = _distance(low, high, found)
    if found.first_bad is None:
        return LimitComparison(verdict="outside" if error else "not_reached", relative_error=error)
    return LimitComparison(
        verdict=_verdict(low, high, found.first_bad, swept),
        relative_error=error,
        full_error=low / found.first_bad - 1,
        staggered_error=high / found.first_bad - 1,
    )


def _distance(low: float, high: float, found: Onset) -> float:
    """How far the predicted interval lies from the measured one, relative to the measured end."""
    if found.first_bad is not None and low > found.first_bad:
        return low / found.first_bad - 1
    if found.last_good is not None and high < found.last_good:
        return high / found.last_good - 1
    return 0.0


def _verdict(low: float, high: float, first_bad: int, swept: Sequence[int]) -> Verdict:
    if low <= first_bad <= high:
        return "inside"
    above = min((users for users in swept if users > high), default=None)
    below = max((users for users in swept if users < low), default=None)
    return "beside" if first_bad in (above, below) else "outside"


def levels_of(stages: Sequence[Mapping[str, Any]]) -> tuple[list[Level], list[str]]:
    """The levels of ``summary.json`` that can be compared, and what was left out and why."""
    levels, left_out = [], []
    for stage in stages:
        name = f"stage {stage['index']}"
        if stage["users"] is None or stage["request_rate"] is not None:
            left_out.append(f"{name}: a rate, not users")
        elif not stage["valid"]:
            left_out.append(f"{name}: {stage['users']} users: invalid: {'; '.join(stage['reasons'])}")
        else:
            levels.append(_level(stage))
    return levels, left_out


def _level(stage: Mapping[str, Any]) -> Level:
    server = stage["server"] or {}
    waiting = server.get("waiting_capacity_mean")
    return Level(
        users=stage["users"],
        output_tokens_per_s=stage["output_tokens_per_s"],
        preemptions=server.get("preemptions"),
        waiting=server.get("waiting_mean") if waiting is None else waiting,
        kv_usage=server.get("kv_cache_usage_max"),
        running=server.get("running_max"),
    )


def mean_lengths(stages: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Mean prompt and output tokens of the good requests of all stages.

    Raises:
        InputError: no good request has its token counts.
    """
    weights = [
        (stage["requests"]["ok"], stage["totals"]["prompt_tokens_mean"], stage["totals"]["output_tokens_mean"])
        for stage in stages
    ]
    known = [row for row in weights if None not in row and row[0]]
    n = sum(ok for ok, _, _ in known)
    if not n:
        raise InputError(
            "no good request of the run has token counts: expected prompt and output lengths to predict from"
        )
    return sum(ok * prompt for ok, prompt, _ in known) / n, sum(ok * output for ok, _, output in known) / n
