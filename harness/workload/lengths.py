"""Lengths and think times as a profile asks for them -> drawn, a request at a time. What a distribution means is said in
:mod:`loadprofiles.lengths` and :mod:`loadprofiles.pauses`; here is only who draws: the request's own generator, so that its
length, and the pause after it, depend on seed, stage and number alone."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from itertools import accumulate
from random import Random
from typing import Any

from pydantic import TypeAdapter

from loadprofiles.lengths import Empirical, Lengths, mean_of, quantile_of
from loadprofiles.pauses import pauses_of

Draw = Callable[[Random], int]
#: seed of a request's pause -> seconds
Pause = Callable[[str], float]
_LENGTHS: TypeAdapter[Any] = TypeAdapter(Lengths)


def drawer(lengths: Any) -> Draw:
    """Who draws a length in tokens.

    Args:
        lengths: a number, a distribution, or its JSON form, as an order to a worker carries it.

    A number takes nothing from the generator; a distribution takes one uniform number and gives its quantile there.
    """
    known = lengths if isinstance(lengths, int) else _LENGTHS.validate_python(lengths)
    if isinstance(known, int):
        return lambda draw: known
    if isinstance(known, Empirical):
        return _empirical(known)
    return lambda draw: quantile_of(known, draw.random())


def _empirical(lengths: Empirical) -> Draw:
    """With its running weights kept: a list of 100,000 lengths is not summed up for every request."""
    values = lengths.values
    upto = list(accumulate(lengths.weights or (1.0,) * len(values)))

    def draw_one(draw: Random) -> int:
        return values[min(bisect.bisect_right(upto, draw.random() * upto[-1]), len(values) - 1)]

    return draw_one


def pauser(think: Any) -> Pause:
    """Who draws a think time in seconds.

    Args:
        think: seconds, a distribution, or its JSON form, as an order to a worker carries it.
    """
    known = pauses_of(think)
    if isinstance(known, float):
        return lambda seed: known
    return lambda seed: known.quantile_s(Random(seed).random())


def mean_length(lengths: Any) -> float:
    """Mean length in tokens of a number, a distribution or its JSON form."""
    return mean_of(lengths if isinstance(lengths, int) else _LENGTHS.validate_python(lengths))


def plain(lengths: Any) -> Any:
    """The JSON form of lengths or pauses, for an order."""
    return lengths if isinstance(lengths, int | float | None) else lengths.model_dump(mode="json")
