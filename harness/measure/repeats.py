"""Levels that a run holds more than once, pooled into one estimate each. Pure.

A pass is one draw of what the server does at a level: what the requests within it say of its mean is not how far the next
pass will lie from it (caches, neighbours, temperature, how users fell into step). So the pooled value is the geometric mean
of the passes, and its interval is the wider of what the passes say of themselves and of how far they lie apart (Student's,
passes less one degrees of freedom; :func:`calibration.gate.repeated`, which compares two runs by the same rule).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from calibration.gate import LoadKey, Spot, repeated
from harness.measure.intervals import CONFIDENCE

Stage = Mapping[str, Any]

#: what is pooled: the means that a stage has an interval of
METRICS = ("output_tokens_per_s", "ttft_ms", "tpot_ms", "e2e_ms")
#: of a planned stage, what makes its load
_LOAD = ("users", "request_rate", "arrival", "burstiness", "replay", "think", "prompt_tokens", "output_tokens")


class Pooled(NamedTuple):
    """A metric over the passes of a level. ``spread``: standard deviation of the passes, relative; ``n`` of them."""

    value: float
    low: float
    high: float
    spread: float
    n: int

    def to_dict(self) -> dict[str, float | int]:
        return {
            "mean": self.value,
            "low": self.low,
            "high": self.high,
            "spread": self.spread,
            "n": self.n,
            "confidence": CONFIDENCE,
        }


class RepeatedLevel(NamedTuple):
    """A level with its passes: numbers of the stages that were pooled, and of those that are invalid or have no window."""

    load: LoadKey
    stages: tuple[int, ...]
    left_out: tuple[int, ...]
    metrics: Mapping[str, Pooled | None]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; a metric is null where fewer than two passes measured it."""
        return {
            **self.load._asdict(),
            "stages": list(self.stages),
            "left_out": list(self.left_out),
            **{name: None if found is None else found.to_dict() for name, found in self.metrics.items()},
        }


def repeated_levels(stages: Sequence[Stage], planned: Sequence[Mapping[str, Any]] = ()) -> list[RepeatedLevel]:
    """The levels that were held more than once, in the order of their first pass.

    Args:
        stages: as in ``summary.json``.
        planned: the stages of the profile in ``run.json``, by the same numbers: what was asked tells loads apart, whatever
            lengths were drawn. Where it is not known (an imported run), measured lengths do.
    """
    groups: list[tuple[bytes | None, LoadKey, list[Stage]]] = []
    for stage in stages:
        key = _key(stage)
        if key is None:
            continue
        load = _planned(planned, stage["index"])
        group = next(
            (rows for kind, first, rows in groups if kind == load and (load is not None or first.matches(key))), None
        )
        if group is None:
            groups.append((load, key, [stage]))
        else:
            group.append(stage)
    return [_pooled(load, group) for _, load, group in groups if len(group) > 1]


def pooled(passes: Sequence[Stage], metric: str) -> Pooled | None:
    """One metric over the passes of a level; None where fewer than two measured it."""
    spots = [spot for stage in passes if (spot := _spot(stage, metric)) is not None]
    if len(spots) < 2:
        return None
    found = repeated(spots, 1 - CONFIDENCE)
    logs = [math.log(spot.value) for spot in spots]
    middle = sum(logs) / len(logs)
    spread = math.sqrt(sum((x - middle) ** 2 for x in logs) / (len(logs) - 1))
    return Pooled(found.value, found.low, found.high, spread, len(spots))


def usable(stage: Stage) -> bool:
    """Does a pass count?"""
    return bool(stage["valid"]) and stage["window"] is not None


def _key(stage: Stage) -> LoadKey | None:
    """None without token counts: nothing is known of it to be alike."""
    lengths = stage["totals"]["prompt_tokens_mean"], stage["totals"]["output_tokens_mean"]
    if None in lengths:
        return None
    rate = stage["request_rate"]
    return LoadKey(stage["users"] if rate is None else None, rate, *lengths)


def _planned(planned: Sequence[Mapping[str, Any]], index: int) -> bytes | None:
    """What a stage was asked to be; None where only its level is known."""
    stage = planned[index] if index < len(planned) else {}
    return orjson.dumps([stage.get(key) or None for key in _LOAD]) if "repetition" in stage else None


def _pooled(load: LoadKey, group: Sequence[Stage]) -> RepeatedLevel:
    passes = [stage for stage in group if usable(stage)]
    return RepeatedLevel(
        load=load,
        stages=tuple(stage["index"] for stage in passes),
        left_out=tuple(stage["index"] for stage in group if not usable(stage)),
        metrics={metric: pooled(passes, metric) for metric in METRICS},
    )


def _spot(stage: Stage, metric: str) -> Spot | None:
    """A pass's value and interval; where it has none, its ends are the value and the other passes say how sure it is."""
    value = stage[metric] if metric == "output_tokens_per_s" else stage[metric]["mean"]
    if not value or value <= 0:
        return None
    interval = (stage.get("intervals") or {}).get(metric)
    half = 0.0 if interval is None else (interval["high"] - interval["low"]) / 2
    return Spot(value, value * math.exp(-half / value), value * math.exp(half / value))
