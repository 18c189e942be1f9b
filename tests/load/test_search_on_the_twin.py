"""The searches against the twin's own engine on the virtual clock; tests/bench/test_searches.py does 20 of each."""

from __future__ import annotations

import numpy as np
import pytest
from virtual_deployments import draw, draw_with_limits, drive, true_knee, true_slo

from harness.load.search import Answer, search_of
from loadprofiles.search import KneeSearch, Slo, SloSearch


@pytest.mark.parametrize("number", [2, 15])
def test_a_knee_search_finds_the_engines_knee(number: int) -> None:
    deployment = draw(np.random.default_rng([number, 1]))
    *_, answer = drive(search_of(KneeSearch(kind="knee"), 1, 60.0), deployment, number)
    assert isinstance(answer, Answer)
    assert answer.users is not None
    truth = true_knee(deployment, 0.25, answer.users, 600)
    assert answer.users == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize("number", [0, 2])
def test_an_slo_search_finds_the_engines_limit(number: int) -> None:
    deployment = draw_with_limits(np.random.default_rng([number, 2]))
    spec = SloSearch(kind="slo", slo=Slo(**deployment.limits_ms))
    *_, answer = drive(search_of(spec, 1, 60.0), deployment, number)
    assert isinstance(answer, Answer)
    assert answer.users is not None
    truth = true_slo(deployment, spec.attainment, int(answer.users), 1000)
    assert abs(answer.users - truth) <= max(1, 0.05 * truth)
    assert answer.confidence is not None
    assert f"confidence {answer.confidence:.0%}" in answer.sentence
