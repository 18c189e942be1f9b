"""The design of stages: below the wall, within the budget, where they tell most."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calibration.calibrate import prior_of
from calibration.calibration_file import UNKNOWN_GPU
from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.design import START_LIVES, Design, Wish, design, most_users, scout
from calibration.errors import InputError
from calibration.queueing import Shape, closed_loop
from calibration.serving import Serving, serving


def served(**changes: Any) -> Serving:
    asked = {"gpu": find_gpu("h100-sxm"), "max_model_len": 8192, **changes}
    return serving(resolve_deployment(find_model("llama-3.1-8b"), **asked))


def designed(s: Serving, **wish: Any) -> Design:
    return design(s, prior_of(s.deployment, s), Wish(**{"budget_s": 120.0, **wish}))


def test_it_keeps_to_the_budget_and_uses_it() -> None:
    for budget_s in (60.0, 120.0, 300.0):
        found = designed(served(), budget_s=budget_s)
        assert 0.7 * budget_s < found.seconds <= budget_s + 1e-6


def test_more_time_makes_predictions_narrower() -> None:
    short, long = (designed(served(), budget_s=b, users=[1, 2, 4, 8]) for b in (40.0, 200.0))
    assert long.spread_after < short.spread_after < short.spread_before
    assert len(long.stages) > len(short.stages)


def test_it_stays_below_the_wall() -> None:
    small = served(num_gpu_blocks_override=600)
    found = designed(small)
    for stage in found.stages:
        shape = (stage.prompt_tokens, stage.output_tokens)
        assert stage.users <= most_users(small, shape)
    # 599 blocks of 16 hold 4.5 prompts of 2,096 tokens
    assert most_users(small, (2048, 48)) == 4


def test_it_runs_prompts_and_outputs_and_one_user_alone() -> None:
    stages = designed(served(), budget_s=300.0).stages
    assert any(s.users == 1 for s in stages)
    assert any(s.users >= 8 and s.prompt_tokens > 8 * s.output_tokens for s in stages)
    assert any(s.users >= 8 and s.output_tokens > s.prompt_tokens for s in stages)
    # one user, prompts on both sides of the token budget of 8,192: only one side fits the context here
    longer = served(max_model_len=32768)
    lengths = {s.prompt_tokens for s in designed(longer, budget_s=300.0).stages if s.users == 1}
    assert min(lengths) < 8192 < max(lengths)


def test_asked_users_and_shapes_are_the_only_ones() -> None:
    found = designed(served(), users=[1, 4, 16], shapes=[(100, 50), (1000, 20)])
    assert {s.users for s in found.stages} <= {1, 4, 16}
    assert {(s.prompt_tokens, s.output_tokens) for s in found.stages} == {(100, 50), (1000, 20)}


def test_the_order_is_the_seed_s() -> None:
    first, again, other = (designed(served(), seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert [s.load for s in first.stages] != [s.load for s in other.stages]
    assert {s.load for s in first.stages} == {s.load for s in other.stages}


def test_time_that_is_left_lengthens_every_window_and_runs_one_stage_twice() -> None:
    found = designed(served(), budget_s=200.0, users=[1, 4], shapes=[(64, 64), (1000, 32)])
    assert found.stages[0].load == found.stages[-1].load
    assert "again" in found.stages[-1].purpose
    assert all(s.duration_s - s.warm_up_s > 8 for s in found.stages)


def test_users_settle_before_they_are_measured() -> None:
    for stage in designed(served(), budget_s=300.0, users=[1, 2, 4, 8, 16]).stages:
        if stage.users > 1:
            life_s = stage.ramp_up_s / START_LIVES
            assert stage.warm_up_s == pytest.approx(stage.ramp_up_s + life_s)
            assert stage.duration_s - stage.warm_up_s >= 2.5 * life_s


def test_users_start_no_faster_than_requests_end() -> None:
    """Else those who start come into the prompts of the others, and begin together ever after."""
    s = served()
    factors = prior_of(s.deployment, s)
    for stage in designed(s, budget_s=300.0, users=[4, 16, 64]).stages:
        shape = Shape(prompt_tokens=stage.prompt_tokens, output_tokens=stage.output_tokens)
        point = closed_loop(s.server(factors, shape), shape, stage.users)
        if stage.users > 1:
            assert stage.users / stage.ramp_up_s < point.requests_per_s


def test_where_time_is_short_stages_are_brief_rather_than_few_shapes() -> None:
    s = served()
    slow = prior_of(s.deployment, s).scaled("step_overhead", 20.0).scaled("prefill_factor", 20.0)
    found = design(s, slow, Wish(budget_s=120.0, users=[1, 2, 4], shapes=[(64, 64), (1000, 32)]))
    assert {(stage.prompt_tokens, stage.output_tokens) for stage in found.stages} == {(64, 64), (1000, 32)}
    assert any(stage.users > 1 and stage.warm_up_s == 0.0 for stage in found.stages)


def test_a_scout_is_short_and_bounded_by_requests_too() -> None:
    s = served(gpu=UNKNOWN_GPU, num_gpu_blocks_override=5000)
    wish = Wish(budget_s=120.0)
    stages = scout(s, prior_of(s.deployment, s), wish)
    short, long = sorted({(stage.prompt_tokens, stage.output_tokens) for stage in stages})
    assert {stage.load for stage in stages} == {(n, *shape) for n in (1, 4) for shape in (short, long)}
    assert all(stage.duration_s <= 12.0 and stage.requests == 3 * stage.users for stage in stages)


def test_a_slower_server_gets_fewer_stages() -> None:
    s = served()
    prior = prior_of(s.deployment, s)
    slow = prior.scaled("step_overhead", 8.0).scaled("prefill_factor", 8.0)
    fast, late = (design(s, factors, Wish(budget_s=120.0)) for factors in (prior, slow))
    assert len(late.stages) < len(fast.stages)
    assert late.seconds <= 120.0 + 1e-6


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"budget_s": 2.0}, "budget = 2 s, expected more"),
        ({"users": [5000]}, "users = 5000, expected some that the pool holds"),
    ],
)
def test_what_cannot_be_run_is_refused(wish: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        designed(served(), **wish)


def test_a_tiny_context_still_has_a_design() -> None:
    s = served(max_model_len=128)
    found = design(s, prior_of(s.deployment, s), replace(Wish(budget_s=120.0), seed=3))
    assert all(stage.prompt_tokens + stage.output_tokens <= 128 for stage in found.stages)
