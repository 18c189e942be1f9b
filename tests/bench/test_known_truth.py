"""Twins with random factors, calibrated as a live server is: do the intervals hold the truth, and the predictions it.

Twenty random factor sets on each of two models; the stages are designed for two minutes and up to 16 users, played on the
virtual clock with 2 % of noise on every step, read and fitted. Then 64 users, four times as many as were fitted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from known_truth import KNOWN, Server, calibrated, predicted_tpot_s, server_of, simulated_tpot_s

from calibration.calibrate import prior_of
from calibration.calibration_file import Calibration
from calibration.design import DesignedStage, Wish, most_users
from calibration.fit import OWN_STAGES, fit
from calibration.observation import Observation

SETS = 20
FAR = 64

Played = list[tuple[Server, Calibration, tuple[DesignedStage, ...]]]
Upset = Callable[[np.random.Generator, list[Observation]], list[Observation]]


@pytest.fixture(scope="module")
def played() -> Played:
    found = []
    for model in ("llama-3.1-8b", "qwen3-30b-a3b"):
        for seed in range(SETS):
            server = server_of(model, seed)
            found.append((server, *calibrated(server, Wish(budget_s=120.0, users=[1, 2, 4, 8, 16], seed=seed))))
    return found


@pytest.mark.bench
def test_known_truths_are_recovered(played: Played) -> None:
    inside: dict[str, list[bool]] = defaultdict(list)
    errors: list[float] = []
    for server, made, stages in played:
        for name, finding in made.fit.findings.items():
            if finding.identified and name in KNOWN:
                factor = made.factors[name]
                inside[name].append(factor.low <= server.truth.value(name) <= factor.high)
        shapes = dict.fromkeys((s.prompt_tokens, s.output_tokens) for s in stages if s.users > 1)
        for shape in shapes:
            if most_users(server.served, shape) >= FAR:
                truth = simulated_tpot_s(server, FAR, shape)
                errors.append(predicted_tpot_s(server, made.factors, FAR, shape) / truth - 1)
    for name, hits in inside.items():
        print(f"{name:20} {np.mean(hits):6.1%} of {len(hits)}")
    every = [hit for hits in inside.values() for hit in hits]
    sizes = np.abs(errors)
    print(f"{'all':20} {np.mean(every):6.1%} of {len(every)}")
    print(
        f"TPOT at {FAR} users: mean {np.mean(sizes):.2%}, median {np.median(sizes):.2%}, p90 {np.quantile(sizes, 0.9):.2%},"
        f" worst {np.max(sizes):.2%}; within 3 %: {np.sum(sizes <= 0.03)} of {len(sizes)}"
    )
    assert len(every) >= 200
    assert 0.85 <= np.mean(every) <= 0.95
    assert np.mean(sizes) <= 0.03


def _slower(o: Observation, times: float, ttft_times: float) -> Observation:
    return replace(o, tpot_s=o.tpot_s * times, ttft_s=None if o.ttft_s is None else o.ttft_s * ttft_times)


def _outlying(times: float, stages: int) -> Upset:
    """So many stages are slower, at all, than the others say."""

    def upset(rng: np.random.Generator, known: list[Observation]) -> list[Observation]:
        odd = set(rng.choice(len(known), stages, replace=False).tolist())
        return [_slower(o, times, times) if i in odd else o for i, o in enumerate(known)]

    return upset


def _heavy(freedom: float, sd: float) -> Upset:
    """Every stage is off by Student's t."""

    def upset(rng: np.random.Generator, known: list[Observation]) -> list[Observation]:
        return [
            _slower(o, np.exp(sd * rng.standard_t(freedom)), np.exp(2 * sd * rng.standard_t(freedom))) for o in known
        ]

    return upset


@pytest.mark.bench
@pytest.mark.parametrize(
    ("name", "upset"),
    [
        ("one stage 15 % slower", _outlying(1.15, 1)),
        ("one stage 50 % slower", _outlying(1.5, 1)),
        ("two stages 30 % slower", _outlying(1.3, 2)),
        ("errors of t3, 1 %", _heavy(3, 0.01)),
        ("errors of t2, 2 %", _heavy(2, 0.02)),
    ],
)
def test_errors_that_are_not_normal_leave_the_truth_inside(played: Played, name: str, upset: Upset) -> None:
    inside = []
    for i, (server, made, _) in enumerate(played):
        known = upset(np.random.default_rng((i, 5)), [stage.observation for stage in made.used])
        found = fit(server.served, prior_of(server.served.deployment, server.served), known, OWN_STAGES)
        for each, report in found.reports.items():
            if report.identified and each in KNOWN:
                factor = found.factors[each]
                inside.append(factor.low <= server.truth.value(each) <= factor.high)
    print(f"{name}: {np.mean(inside):.1%} of {len(inside)}")
    assert 0.85 <= np.mean(inside) <= 0.95
