"""From the stages of a run to a calibration: what it says of itself, and the interval of what it does not know."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import pytest
from summaries import LEVELS, calibration_of, stages_of

from calibration.calibrate import prior_of
from calibration.calibration_file import UNKNOWN_GPU, calibration_from_json, calibration_to_json
from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.errors import NotIdentifiable
from calibration.factors import STEP_FACTORS, FactorSet
from calibration.priors import prior_factors
from calibration.queueing import Shape, closed_loop
from calibration.serving import Serving, serving


def served(model: str = "llama-3.1-8b", gpu: Any = None, **flags: Any) -> Serving:
    asked = {"gpu": gpu or find_gpu("h100-sxm"), "max_model_len": 8192, **flags}
    return serving(resolve_deployment(find_model(model), **asked))


def truth_of(s: Serving, seed: int) -> FactorSet:
    rng = np.random.default_rng(seed)
    factors = prior_of(s.deployment, s)
    for name in STEP_FACTORS:
        factors = factors.scaled(name, math.exp(rng.normal(0, factors[name].log_sd)))
    return factors


def test_a_calibration_says_what_it_was_made_from() -> None:
    s = served()
    stages = stages_of(s, truth_of(s, 1))
    stages[3]["valid"], stages[3]["reasons"] = False, ["client: lag"]
    made = calibration_of(s, "llama-3.1-8b", stages)
    assert len(made.used) == 19
    assert [(row.label, row.reason) for row in made.left_out] == [
        ("stage 4: 8 users, 64 + 64 tokens", "invalid: client: lag")
    ]
    assert made.runs[0].folder == "results/known"
    assert made.factors.domain is not None
    assert made.factors.domain.users == (1, 16)
    assert made.fit.condition is not None
    assert made.fit.findings["step_overhead"].identified
    assert all(stage.little_error == pytest.approx(0.0, abs=0.02) for stage in made.used)
    assert all(stage.tpot_error == pytest.approx(0.0, abs=0.05) for stage in made.used)
    assert calibration_from_json(json.loads(json.dumps(calibration_to_json(made)))) == made


def test_a_factor_that_stayed_at_its_prior_says_which_stage_would_tell_it() -> None:
    s = served()
    made = calibration_of(s, "llama-3.1-8b", stages_of(s, truth_of(s, 1), shapes=[(64, 64)]))
    finding = made.fit.findings["prefill_factor"]
    assert not finding.identified
    assert finding.advice == "not identifiable from this run: add long prompts with short outputs"
    assert made.factors["prefill_factor"].log_sd > 0.7 * made.factors["prefill_factor"].prior_log_sd


def test_one_stage_is_fitted_and_says_how_little_it_tells() -> None:
    s = served()
    made = calibration_of(s, "llama-3.1-8b", stages_of(s, truth_of(s, 2), shapes=[(64, 64)], levels=[4]))
    assert len(made.used) == 1
    assert made.used[0].tpot_error == pytest.approx(0.0, abs=0.02)
    assert [note.split(":")[0].split(",")[0] for note in made.notes] == [
        "holds for one shape only",
        "fitted at one level",
    ]
    for name, finding in made.fit.findings.items():
        assert finding.identified or made.factors[name].log_sd > 0.7 * made.factors[name].prior_log_sd
    assert calibration_from_json(json.loads(json.dumps(calibration_to_json(made)))) == made


def test_repeats_of_a_level_are_a_stage_each_and_what_lies_between_them_is_scatter() -> None:
    """Three passes 5 % apart: each counts, and a single stage is said to scatter as they do."""
    s = served()
    calm = [stage for seed in range(3) for stage in stages_of(s, truth_of(s, 2), noise=0.002, seed=seed)]
    wild = [stage for seed in range(3) for stage in stages_of(s, truth_of(s, 2), noise=0.05, seed=seed)]
    for stages in (calm, wild):
        for index, stage in enumerate(stages):
            stage["index"] = index
    quiet, noisy = (calibration_of(s, "llama-3.1-8b", stages) for stages in (calm, wild))
    assert len(quiet.used) == len(noisy.used) == 60
    assert quiet.fit.scatter["tpot"] < 0.01
    assert 0.03 < noisy.fit.scatter["tpot"] < 0.07


def test_one_shape_holds_for_that_shape_only() -> None:
    s = served()
    one = calibration_of(s, "llama-3.1-8b", stages_of(s, truth_of(s, 2), shapes=[(64, 64)]))
    assert one.single_shape
    assert one.notes[0].startswith("holds for one shape only: 64 prompt and 64 output tokens")
    two = calibration_of(s, "llama-3.1-8b", stages_of(s, truth_of(s, 2)))
    assert not two.single_shape
    assert two.notes == ()


def test_little_s_law_is_held_against_the_throughput() -> None:
    s = served()
    stages = stages_of(s, truth_of(s, 3))
    stages[0]["output_tokens_per_s"] *= 0.8
    made = calibration_of(s, "llama-3.1-8b", stages)
    assert made.used[0].little_error == pytest.approx(0.25, abs=0.02)
    assert "Little's law misses the throughput of 1 of 20 stages" in made.notes[0]


def test_a_server_far_off_its_priors_is_found_all_the_same() -> None:
    s = served(gpu=UNKNOWN_GPU, num_gpu_blocks_override=20_000)
    truth = prior_of(s.deployment, s)
    for name, ratio in (("step_overhead", 6.0), ("prefill_factor", 0.2), ("per_sequence", 8.0)):
        truth = truth.scaled(name, ratio)
    made = calibration_of(s, "llama-3.1-8b", stages_of(s, truth))
    for shape in (Shape(prompt_tokens=64, output_tokens=64), Shape(prompt_tokens=2048, output_tokens=48)):
        real, said = (closed_loop(s.server(f, shape), shape, 64).tpot_s for f in (truth, made.factors))
        assert said == pytest.approx(real, rel=0.05)


def test_an_unknown_gpu_has_wide_priors() -> None:
    s = served(gpu=UNKNOWN_GPU, num_gpu_blocks_override=20_000)
    wide, named = prior_of(s.deployment, s), prior_factors(s.deployment, s.physics)
    assert all(wide[name].log_sd > max(0.9, named[name].log_sd) for name in STEP_FACTORS)


def test_without_a_usable_stage_it_is_said_why_each_was_left_out() -> None:
    s = served()
    stages = stages_of(s, truth_of(s, 4), shapes=[(64, 64)], levels=[1, 2, 4])
    for stage in stages:
        stage["window"]["steady"], stage["reasons"] = False, ["not steady: token rate moves by +20% over the window"]
    with pytest.raises(NotIdentifiable) as caught:
        calibration_of(s, "llama-3.1-8b", stages)
    assert "no usable stage: there is nothing to fit" in caught.value.message
    assert (
        "stage 2: 2 users, 64 + 64 tokens: not steady: token rate moves by +20% over the window" in caught.value.message
    )


def test_stages_beyond_the_wall_are_left_out_though_nothing_showed_it() -> None:
    s = served(num_gpu_blocks_override=1200)
    made = calibration_of(s, "llama-3.1-8b", stages_of(s, truth_of(s, 5)))
    assert {row.reason for row in made.left_out} == {"beyond the wall: the pool holds 9.2 streams on average"}
    assert {row.users for row in made.left_out} == {16}


def test_forty_stages_take_under_two_seconds_and_are_the_same_every_time() -> None:
    s = served("qwen3-30b-a3b")
    stages = stages_of(s, truth_of(s, 6), levels=np.linspace(1, 16, 10).round().astype(int).tolist())
    begun = time.process_time()
    first = calibration_of(s, "qwen3-30b-a3b", stages)
    took_s = time.process_time() - begun
    assert len(first.used) == 40
    assert took_s < 2.0
    assert calibration_of(s, "qwen3-30b-a3b", stages) == first


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_intervals_of_told_factors_hold_a_known_truth(model: str) -> None:
    s = served(model)
    inside = []
    for seed in range(36):
        truth = truth_of(s, seed)
        made = calibration_of(s, model, stages_of(s, truth, seed=seed, levels=LEVELS[:4]))
        told = [name for name in STEP_FACTORS if name in made.fit.findings and made.fit.findings[name].identified]
        inside += [made.factors[name].low <= truth.value(name) <= made.factors[name].high for name in told]
    assert len(inside) > 100
    assert 0.83 < np.mean(inside) < 0.97
