"""Lengths drawn follow the distribution asked, and depend on the request's own generator alone."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from harness.workload.lengths import drawer, mean_length, plain
from loadprofiles.lengths import Empirical, LogNormal, Normal

SPREADS: list[dict[str, Any]] = [
    {"distribution": "fixed", "tokens": 7},
    {"distribution": "uniform", "low": 10, "high": 50},
    {"distribution": "normal", "mean_tokens": 200.0, "std_tokens": 40.0, "low": 100, "high": 400},
    {"distribution": "lognormal", "mean_tokens": 200.0, "std_tokens": 150.0, "low": 4, "high": 2000},
    {"distribution": "empirical", "values": [3, 5, 100], "weights": [1, 0, 3]},
    {"distribution": "empirical", "values": [3, 5, 100]},
]


@pytest.mark.parametrize("spread", SPREADS, ids=lambda spread: str(spread["distribution"]))
def test_the_mean_of_what_is_drawn_is_the_mean_asked(spread: dict[str, Any]) -> None:
    draw_one, draw = drawer(spread), Random(1)
    drawn = [draw_one(draw) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean_length(spread), rel=0.03)
    assert min(drawn) >= spread.get("low", 3)
    assert max(drawn) <= spread.get("high", 100)


def test_a_number_takes_nothing_from_the_generator() -> None:
    draw = Random(1)
    assert drawer(64)(draw) == 64
    assert draw.random() == Random(1).random()


def test_a_length_that_is_never_meant_never_comes() -> None:
    draw_one, draw = drawer(SPREADS[4]), Random(3)
    assert {draw_one(draw) for _ in range(2000)} == {3, 100}


def test_lengths_survive_the_way_to_a_worker() -> None:
    asked = Empirical(distribution="empirical", values=(1, 9))
    assert [drawer(plain(asked))(Random(n)) for n in range(20)] == [drawer(asked)(Random(n)) for n in range(20)]
    assert (plain(5), plain(None)) == (5, None)
    for spread, kind in ((SPREADS[2], Normal), (SPREADS[3], LogNormal)):
        assert plain(kind.model_validate(spread)) == spread
