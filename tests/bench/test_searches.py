"""How near the searches come to the twin's true limits, in 20 random deployments each, on the virtual clock.

.venv/bin/pytest -m bench tests/bench/test_searches.py -s    (some ten minutes of CPU, nearly all of it for the truth)
"""

from __future__ import annotations

import numpy as np
import pytest
from virtual_deployments import draw, draw_with_limits, drive, true_knee, true_slo

from harness.load.search import Answer, Ask, Search, search_of
from loadprofiles.search import KneeSearch, Slo, SloSearch

pytestmark = pytest.mark.bench

DEPLOYMENTS = 20


@pytest.fixture(autouse=True)
def only_when_asked(request: pytest.FixtureRequest) -> None:
    if "bench" not in request.config.getoption("-m"):
        pytest.skip("a measurement: only with -m bench")


def run(search: Search, deployment: object, number: int) -> tuple[Answer, int, float]:
    """The answer, how many probes it took and how many seconds of the virtual clock."""
    steps = list(drive(search, deployment, number))  # type: ignore[arg-type]
    asks = [step for step in steps if isinstance(step, Ask)]
    answer = steps[-1]
    assert isinstance(answer, Answer)
    return answer, len(asks), sum(ask.duration_s for ask in asks)


def test_a_knee_search_is_within_5_percent_in_20_deployments() -> None:
    errors, held = [], 0
    for number in range(DEPLOYMENTS):
        deployment = draw(np.random.default_rng([number, 1]))
        answer, probes, seconds = run(search_of(KneeSearch(kind="knee"), 1, 60.0), deployment, number)
        assert answer.users is not None
        assert answer.low is not None
        assert answer.high is not None
        truth = true_knee(deployment, 0.25, answer.users, 4000)
        errors.append(answer.users / truth - 1)
        held += answer.low <= truth <= answer.high
        print(
            f"{number:2}  found {answer.users:6.1f} ({answer.low:.1f} to {answer.high:.1f})  true {truth:6.1f}"
            f"  {errors[-1]:+.1%}  {probes} probes, {seconds:.0f} s",
            flush=True,
        )
    print(f"within 5 %: {sum(abs(error) <= 0.05 for error in errors)} of {DEPLOYMENTS}; interval holds it: {held}")
    assert max(map(abs, errors)) <= 0.05
    assert held >= 0.8 * DEPLOYMENTS


def test_an_slo_search_is_within_5_percent_in_20_deployments() -> None:
    errors, held, said, unlimited = [], 0, [], 0
    for number in range(DEPLOYMENTS):
        deployment = draw_with_limits(np.random.default_rng([number, 2]))
        spec = SloSearch(kind="slo", slo=Slo(**deployment.limits_ms))
        answer, probes, seconds = run(search_of(spec, 1, 60.0), deployment, number)
        assert answer.users is not None
        assert answer.low is not None
        if answer.high is None:
            # what runs at once is capped, so a limit on TPOT alone may be met by any number of users
            assert set(deployment.limits_ms) == {"tpot"}
            assert deployment.long_run(int(answer.users), 6 * int(answer.users))[1] >= spec.attainment
            unlimited += 1
            print(f"{number:2}  no limit up to {answer.users:4.0f}  {probes} probes, {seconds:.0f} s", flush=True)
            continue
        truth = true_slo(deployment, spec.attainment, int(answer.users), 3000)
        errors.append((answer.users - truth, max(1.0, 0.05 * truth)))
        held += answer.low <= truth < answer.high
        said.append(answer.confidence or 0.0)
        print(
            f"{number:2}  found {answer.users:4.0f} ({answer.low:.0f} do, {answer.high:.0f} do not, confidence {said[-1]:.0%})"
            f"  true {truth:4}"
            f"  {'+'.join(deployment.limits_ms)}  {probes} probes, {seconds:.0f} s",
            flush=True,
        )
    within = sum(abs(error) <= allowed for error, allowed in errors)
    limited = DEPLOYMENTS - unlimited
    print(f"within 5 % or one user: {within} of {limited}; in [low, high): {held}; confidence {np.mean(said):.0%}")
    assert within == limited
    assert held >= 0.8 * limited
