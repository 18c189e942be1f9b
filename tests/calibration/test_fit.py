"""The fit: a known truth recovered, what data cannot tell refused, predictions far out, and what is held out left alone."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.errors import InputError, NotIdentifiable
from calibration.factors import FACTORS, FactorSet, factors_from_json
from calibration.fit import ADVICE, OWN_STAGES, Fit, fit, step_amounts
from calibration.observation import Observation
from calibration.prediction import propagate
from calibration.priors import prior_factors
from calibration.queueing import Shape, closed_loop
from calibration.serving import Serving, serving

SHAPES = (Shape(prompt_tokens=128, output_tokens=512), Shape(prompt_tokens=4000, output_tokens=200))
LEVELS = (1, 2, 4, 8, 16, 32)


def served(model: str = "llama-3.1-8b", **changes: Any) -> Serving:
    asked = {"max_model_len": 16384, "gpu": find_gpu("h100-sxm"), **changes}
    return serving(resolve_deployment(find_model(model), **asked))


def truth_of(s: Serving, seed: int) -> FactorSet:
    """A server that is not the prior."""
    rng = np.random.default_rng(seed)
    factors = prior_factors(s.deployment, s.physics)
    for name in FACTORS:
        factors = factors.scaled(name, float(np.exp(rng.normal(0, factors[name].log_sd))))
    return factors


def stages(
    s: Serving, truth: FactorSet, noise: float = 0.0, seed: int = 0, shapes: Any = SHAPES, levels: Any = LEVELS
) -> list[Observation]:
    rng = np.random.default_rng(seed)
    found = []
    for shape in shapes:
        for users in levels:
            point = closed_loop(s.server(truth, shape), shape, users)
            assert point.regime == "below_limits"
            found.append(
                Observation(
                    label=f"{shape.prompt_tokens}/{users}",
                    shape=shape,
                    users=users,
                    tpot_s=point.tpot_s * float(np.exp(rng.normal(0, noise))),
                    ttft_s=point.ttft_s * float(np.exp(rng.normal(0, noise))),
                )
            )
    return found


def fitted(s: Serving, observations: list[Observation]) -> Fit:
    return fit(s, prior_factors(s.deployment, s.physics), observations, OWN_STAGES)


def test_without_noise_the_truth_is_predicted_far_out() -> None:
    s = served()
    truth = truth_of(s, 1)
    found = fitted(s, stages(s, truth))
    for shape in SHAPES:
        for users in (64, 128):
            real, said = (closed_loop(s.server(f, shape), shape, users) for f in (truth, found.factors))
            assert said.tpot_s == pytest.approx(real.tpot_s, rel=0.03)
            assert said.ttft_s == pytest.approx(real.ttft_s, rel=0.10)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt-oss-20b"])
def test_intervals_of_told_factors_hold_the_truth(model: str) -> None:
    s = served(model)
    inside = []
    for seed in range(40):
        truth = truth_of(s, seed)
        found = fitted(s, stages(s, truth, noise=0.01, seed=seed))
        told = [name for name, report in found.reports.items() if report.identified]
        inside += [found.factors[n].low <= truth.value(n) <= found.factors[n].high for n in told]
        assert "step_overhead" in told
    assert len(inside) > 100
    assert 0.85 < np.mean(inside) <= 0.97


def test_predictions_four_times_further_out_hold_the_truth() -> None:
    s = served("gpt-oss-20b")
    shape = SHAPES[0]
    inside, errors = [], []
    for seed in range(30):
        truth = truth_of(s, seed)
        found = fitted(s, stages(s, truth, noise=0.01, seed=seed)).factors
        real = closed_loop(s.server(truth, shape), shape, 128).tpot_s
        said = propagate(lambda f: {"tpot": closed_loop(s.server(f, shape), shape, 128).tpot_s}, found, "extrapolated")[
            "tpot"
        ]
        inside.append(said.holds(real))
        errors.append(abs(said.value / real - 1))
    assert np.mean(inside) > 0.85
    assert np.median(errors) < 0.04


def test_one_shape_cannot_tell_the_other_and_says_which_stage_would() -> None:
    s = served()
    found = fitted(s, stages(s, truth_of(s, 2), noise=0.01, shapes=SHAPES[:1]))
    report = found.reports["prefill_factor"]
    assert not report.identified
    assert report.advice == f"not identifiable from this run: add {ADVICE['prefill_factor']}"
    prior, after = prior_factors(s.deployment, s.physics)["prefill_factor"], found.factors["prefill_factor"]
    assert not after.identified
    assert after.source.startswith("hardly moved from its prior of hopper")
    assert after.log_sd > 0.7 * prior.log_sd
    assert abs(np.log(after.value / prior.value)) < prior.log_sd
    assert (after.prior_value, after.prior_log_sd) == (prior.value, prior.log_sd)


def test_a_single_shape_is_wide_for_another() -> None:
    s = served()
    truth = truth_of(s, 3)
    found = fitted(s, stages(s, truth, noise=0.01, shapes=SHAPES[:1])).factors

    def width(shape: Shape) -> float:
        said = propagate(lambda f: {"tpot": closed_loop(s.server(f, shape), shape, 16).tpot_s}, found, "interpolated")
        return said["tpot"].high / said["tpot"].low

    assert width(SHAPES[1]) > 1.15 * width(SHAPES[0])
    assert found.basis(16, 128, 512) == "interpolated"
    assert found.basis(16, 4000, 200) == "extrapolated"
    assert found.basis(64, 128, 512) == "extrapolated"


def test_dense_models_have_no_factor_for_experts() -> None:
    s = served()
    found = fitted(s, stages(s, truth_of(s, 4)))
    assert "expert_read_factor" not in found.reports
    assert found.factors["expert_read_factor"] == prior_factors(s.deployment)["expert_read_factor"]


def test_an_outlying_stage_is_outvoted() -> None:
    s = served()
    truth = truth_of(s, 5)
    clean = stages(s, truth, noise=0.005)
    spoilt = [replace(o, tpot_s=o.tpot_s * 2.5) if i == 4 else o for i, o in enumerate(clean)]
    shape = SHAPES[0]
    one, other = (closed_loop(s.server(fitted(s, o).factors, shape), shape, 64).tpot_s for o in (clean, spoilt))
    assert other == pytest.approx(one, rel=0.05)
    assert fitted(s, spoilt).tpot_errors[spoilt[4].label] == pytest.approx(-0.6, abs=0.03)


def test_what_is_held_out_is_left_alone() -> None:
    s = served()
    known = stages(s, truth_of(s, 6), noise=0.01)
    more = [*known, replace(known[0], label="odd", tpot_s=1.0, held_out=True)]
    assert fitted(s, more).factors == fitted(s, known).factors
    assert fitted(s, more).used == len(known)


def test_ttft_may_be_missing() -> None:
    s = served()
    known = [replace(o, ttft_s=None, running=o.decoding) for o in stages(s, truth_of(s, 7), noise=0.01)]
    found = fitted(s, known)
    assert found.ttft_errors == {}
    assert found.factors.value("wait_steps") == pytest.approx(prior_factors(s.deployment).value("wait_steps"))
    assert not found.factors["wait_steps"].identified
    assert found.factors["step_overhead"].identified


def test_a_fit_is_the_same_every_time() -> None:
    s = served()
    known = stages(s, truth_of(s, 8), noise=0.02)
    assert fitted(s, known).factors == fitted(s, known).factors


def test_no_stage_tells_nothing() -> None:
    s = served()
    with pytest.raises(NotIdentifiable, match="no usable stage: there is nothing to fit"):
        fitted(s, [])


@pytest.mark.parametrize("number", [1, 2])
def test_few_stages_are_met_and_leave_what_they_do_not_tell_as_wide_as_its_prior(number: int) -> None:
    s = served()
    prior = prior_factors(s.deployment, s.physics)
    far = Shape(prompt_tokens=4096, output_tokens=64)
    inside = []
    for seed in range(40):
        truth = truth_of(s, seed)
        # levels of one shape, as another tool's file has them
        known = stages(s, truth, noise=0.005, seed=seed)[3 : 3 + number]
        assert len({o.shape for o in known}) == 1
        found = fit(s, prior, known, OWN_STAGES)
        assert max(abs(error) for error in found.tpot_errors.values()) < 0.05
        for name, report in found.reports.items():
            kept = found.factors[name].log_sd / prior[name].log_sd
            assert report.narrowed == pytest.approx(kept)
            assert report.identified == (kept <= 0.7)
            assert report.identified or report.advice.startswith("not identifiable from this run: add ")
        assert not found.reports["attention_factor"].identified
        real = closed_loop(s.server(truth, far), far, 32).tpot_s
        said = propagate(
            lambda f: {"tpot": closed_loop(s.server(f, far), far, 32).tpot_s}, found.factors, "extrapolated"
        )["tpot"]
        inside.append(said.holds(real))
    assert np.mean(inside) >= 0.8


def test_a_fitted_set_survives_a_file_with_its_covariance() -> None:
    s = served()
    found = fitted(s, stages(s, truth_of(s, 10), noise=0.01)).factors
    again = factors_from_json(json.loads(json.dumps(found.to_json())))
    assert again.covariances == found.covariances
    assert again.domain == found.domain
    assert all(again[name] == found[name] for name in FACTORS)


def test_the_amounts_are_the_steps() -> None:
    s = served("gpt-oss-20b")
    truth = truth_of(s, 11)
    for o in stages(s, truth):
        step = sum(amount * truth.value(name) for name, amount in step_amounts(s, truth, o).items())
        assert step == pytest.approx(o.tpot_s, rel=1e-4)


def test_littles_law_gives_those_that_run() -> None:
    shape = Shape(prompt_tokens=100, output_tokens=101, think_s=1.0)
    o = Observation(label="a", shape=shape, users=10, tpot_s=0.02, ttft_s=1.0)
    assert o.decoding == pytest.approx(10 * 2 / (2 + 1 + 1))
    assert replace(o, running=3.5).decoding == 3.5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tpot_s": 0}, "a: tpot_s = 0, expected more than 0"),
        ({"users": -1}, "a: users = -1"),
        ({"ttft_s": float("nan")}, "a: ttft_s = nan"),
        ({"running": 0}, "a: running = 0"),
        ({"tpot_log_sd": -0.1}, "a: tpot_log_sd = -0.1, expected at least 0"),
    ],
)
def test_an_observation_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    good = {"label": "a", "shape": SHAPES[0], "users": 1, "tpot_s": 0.01}
    with pytest.raises(InputError, match=said):
        Observation(**{**good, **changes})


def test_a_fit_of_forty_stages_takes_under_two_seconds_of_cpu() -> None:
    import time

    s = served("gpt-oss-20b")
    many = stages(s, truth_of(s, 12), noise=0.01, levels=np.linspace(1, 60, 20))
    begun = time.process_time()
    fitted(s, many)
    assert len(many) == 40
    assert time.process_time() - begun < 2
