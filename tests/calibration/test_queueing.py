"""Operating points: Little's law, the plateau, chunked prompts, closed against open loop."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.errors import InputError
from calibration.priors import prior_factors
from calibration.queueing import (
    OperatingPoint,
    Server,
    Shape,
    at_running,
    bunch_of,
    closed_loop,
    falling_root,
    mix_of,
    most_requests_per_s,
    open_loop,
)
from calibration.serving import serving
from calibration.steptime import step_time
from calibration.twin.deploy import engine_config
from calibration.twin.engine import Engine
from calibration.twin.sequence import Sequence
from calibration.twin.simulate import closed_loop as simulated


def server(model: str = "llama-3.1-70b", gpu: str = "h100-sxm", **changes: Any) -> Server:
    asked = {"tp": 2, "weights": "fp8", "max_model_len": 16384, **changes}
    served = serving(resolve_deployment(find_model(model), gpu=find_gpu(gpu), **asked))
    return served.server(prior_factors(served.deployment), Shape(prompt_tokens=1000, output_tokens=500))


SHAPE = Shape(prompt_tokens=1000, output_tokens=500)
DENSE, MIXTURE = server(), server("gpt-oss-120b", weights="auto")


def in_flight(point: OperatingPoint, shape: Shape) -> float:
    """Users by Little's law, from what the point says of one request."""
    life = point.ttft_s + shape.decode_steps * point.tpot_s + shape.think_s
    return point.requests_per_s * life


@given(
    users=st.floats(1, 2000),
    prompt=st.floats(1, 9000),
    output=st.floats(1, 4000),
    think=st.floats(0, 60),
    wave=st.sampled_from([None, 1.0, 10.0]),
)
@settings(max_examples=60, deadline=None)
def test_littles_law_holds_everywhere(
    users: float, prompt: float, output: float, think: float, wave: float | None
) -> None:
    shape = Shape(prompt_tokens=prompt, output_tokens=output, think_s=think, requests_per_user=wave)
    for each in (DENSE, MIXTURE):
        point = closed_loop(each, shape, users)
        assert in_flight(point, shape) == pytest.approx(users, rel=1e-6)
        decoding = point.requests_per_s * shape.decode_steps * point.tpot_s
        assert decoding <= users
        if point.regime == "below_limits":
            assert point.running == pytest.approx(decoding, rel=1e-4)
        else:
            assert point.running == pytest.approx(min(each.most_running, users))
        assert point.output_tokens_per_s == pytest.approx(point.requests_per_s * output)
        assert point.resident_tokens == pytest.approx(point.running * (prompt + output / 2))


def test_one_user_waits_for_nobody() -> None:
    point = closed_loop(DENSE, SHAPE, 1)
    step = DENSE.step
    # its own prompt stretches none of its own steps
    assert point.tpot_s == pytest.approx(step.step_s(1, SHAPE.mean_context, 0), rel=1e-9)
    own = DENSE.prompt_factor * (step.prompt_chunk_s(1000, 0) + step.mixed_step_overhead_s)
    fixed = DENSE.request_overhead_s + 1000 * DENSE.request_token_s
    assert point.ttft_s == pytest.approx(fixed + step.step_s(0, 0, 0) + own)
    assert point.running == pytest.approx(499 * point.tpot_s / (499 * point.tpot_s + point.ttft_s))


def test_of_two_users_each_sees_the_other_s_prompts() -> None:
    point = closed_loop(DENSE, SHAPE, 2)
    step = DENSE.step
    prompt = step.prompt_chunk_s(1000, 0) + step.mixed_step_overhead_s
    # of its cycle 499 steps decode, one computes the prompt, and it waits some more
    cycle = 500 + (point.ttft_s - prompt - step.step_s(1, SHAPE.mean_context, 0)) / point.tpot_s
    # the two are never at the same step: in any other the prompt may come, and 498 of them decode beside 499
    prompts, together = 1 / (cycle - 1), 1 + 498 / (cycle - 1)
    alone = step.step_s(together, together * SHAPE.mean_context, 0)
    assert point.tpot_s == pytest.approx(alone + prompt * prompts, rel=1e-5)


@pytest.mark.parametrize(
    ("output", "users", "seen", "prompts", "mixed"),
    [
        # stepped through one by one: users who start evenly over a request's life, steps of equal length
        (8, 4, 2.86, 0.35, 0.35),
        (8, 8, 5.67, 0.78, 0.69),
        (8, 16, 11.23, 1.57, 1.0),
        (8, 64, 44.96, 6.35, 1.0),
        (48, 16, 15.06, 0.314, 0.30),
        (48, 64, 60.20, 1.269, 1.0),
    ],
)
def test_a_stream_meets_the_prompts_of_all_that_are_at_other_steps(
    output: int, users: int, seen: float, prompts: float, mixed: float
) -> None:
    shape = Shape(prompt_tokens=64, output_tokens=output)
    # one step for the prompt, two that are missed
    others = (users - 1) * (output - 1) / (output + 2)
    mix = mix_of(shape, others, users, budget=8192, micro_batches=1)
    assert mix.seen == pytest.approx(seen, rel=0.05)
    assert mix.prompts == pytest.approx(prompts, rel=0.06)
    assert abs(mix.mixed - mixed) < 1.3 * mix.mixed_sd
    # all that decode begin a prompt each cycle: what one meets, all begin but those at its own step
    assert mix.prompts < users / (output + 1)


def test_independent_arrivals_share_steps_as_chance_has_it() -> None:
    mix = mix_of(Shape(prompt_tokens=64, output_tokens=11), 10.0, budget=8192, micro_batches=1)
    assert (mix.seen, mix.prompts, mix.mixed_sd) == (11, 1, 0)
    assert mix.mixed == pytest.approx(1 - math.exp(-1))


@pytest.mark.parametrize(
    ("users", "prompts", "mixed", "seen"),
    [
        # as the twin of such a server plays them, users 2 ms apart: 1 prompt, then 1, 3 or 7 in one step
        (2, 0.0036, 0.0036, 1.99),
        (4, 0.0063, 0.0021, 3.98),
        (8, 0.0071, 0.0010, 7.97),
    ],
)
def test_users_who_start_together_hardly_meet_each_other_s_prompts(
    users: int, prompts: float, mixed: float, seen: float
) -> None:
    shape = Shape(prompt_tokens=512, output_tokens=128, start_gap_s=0.002)
    one = server("llama-3.1-8b", tp=1, weights="auto", max_model_len=8192)
    bunch = bunch_of(one, shape, users)
    assert bunch is not None
    assert bunch.prompts == pytest.approx(prompts, rel=0.15)
    assert bunch.mixed == pytest.approx(mixed, rel=0.15, abs=0.007)
    assert 1 + bunch.met == pytest.approx(seen, rel=0.01)
    spread = closed_loop(one, Shape(prompt_tokens=512, output_tokens=128), users)
    together = closed_loop(one, shape, users)
    assert together.tpot_s < spread.tpot_s


@pytest.mark.parametrize(("users", "prompt"), [(4, 512), (16, 512), (24, 512), (6, 2048), (16, 64)])
def test_users_who_start_together_are_the_twin_s(users: int, prompt: int) -> None:
    served = serving(resolve_deployment(find_model("llama-3.1-8b"), gpu=find_gpu("h100-sxm"), max_model_len=8192))
    factors = prior_factors(served.deployment)
    shape = Shape(prompt_tokens=prompt, output_tokens=128, start_gap_s=0.002)
    engine = Engine(engine_config(served), step_time(served.physics, factors))
    starts_s = [0.002 * user for user in range(users)]
    run = simulated(
        [engine], lambda user, nth: Sequence(prompt, 128), starts_s, 20.0, overhead_s=factors.value("request_overhead")
    )
    trace = run.trace
    twin_s = float(np.nanmean(trace.tpot_s[trace.ok & (trace.sent_s > 2.0)]))
    one = served._replace(pool=None).server(factors, shape)
    point = closed_loop(one, shape, users)
    assert point.tpot_s == pytest.approx(twin_s, rel=0.015)
    spread = closed_loop(one, replace(shape, start_gap_s=None), users)
    assert abs(point.tpot_s - twin_s) < abs(spread.tpot_s - twin_s)


def test_users_who_start_at_once_are_one_bunch() -> None:
    shape = Shape(prompt_tokens=100, output_tokens=128, start_gap_s=0.0)
    assert bunch_of(DENSE, shape, 16) == (0, 0, 15, 15)
    point = closed_loop(DENSE, shape, 16)
    assert point.tpot_s == pytest.approx(DENSE.step.step_s(16, 16 * shape.mean_context, 0))
    # more than the token budget holds follow in the next step
    tight = DENSE._replace(max_num_batched_tokens=816)
    bunch = bunch_of(tight, shape, 16)
    assert bunch is not None
    assert bunch.prompts * 127 == pytest.approx(8 / 2, rel=0.2)


def test_nobody_bunches_who_is_not_said_to() -> None:
    assert bunch_of(DENSE, SHAPE, 16) is None
    assert bunch_of(DENSE, Shape(prompt_tokens=100, output_tokens=128, start_gap_s=0.0), 1) is None


def test_more_users_bring_more_tokens_and_longer_steps() -> None:
    points = [closed_loop(DENSE, SHAPE, users) for users in (1, 2, 8, 32, 128)]
    assert [p.output_tokens_per_s for p in points] == sorted(p.output_tokens_per_s for p in points)
    assert [p.tpot_s for p in points] == sorted(p.tpot_s for p in points)
    assert [p.ttft_s for p in points] == sorted(p.ttft_s for p in points)
    assert points[-1].output_tokens_per_s_per_user == 1 / points[-1].tpot_s


def test_beyond_the_pool_throughput_stands_still_and_the_rest_wait() -> None:
    small = DENSE._replace(max_running=30.0)
    below, full, over = (closed_loop(small, SHAPE, users) for users in (20, 60, 120))
    assert (below.regime, full.regime, over.regime) == ("below_limits", "kv_full", "kv_full")
    assert full.running == over.running == 30
    assert over.output_tokens_per_s == pytest.approx(full.output_tokens_per_s)
    assert over.tpot_s == full.tpot_s
    # sixty more users wait sixty requests' time longer
    assert over.ttft_s - full.ttft_s == pytest.approx(60 / full.requests_per_s)


def test_as_many_run_as_max_num_seqs_lets() -> None:
    point = closed_loop(DENSE._replace(max_num_seqs=8), SHAPE, 50)
    assert (point.regime, point.running) == ("max_num_seqs", 8)
    assert closed_loop(DENSE._replace(max_num_seqs=8, max_running=4.0), SHAPE, 50).regime == "kv_full"


def test_thinking_users_run_less() -> None:
    busy, idle = (closed_loop(DENSE, Shape(prompt_tokens=1000, output_tokens=500, think_s=z), 64) for z in (0, 60))
    assert idle.running < busy.running / 4
    assert idle.tpot_s < busy.tpot_s


def test_a_first_wave_waits_for_half_of_everybody() -> None:
    steady = closed_loop(DENSE, SHAPE, 64)
    wave = closed_loop(DENSE, Shape(prompt_tokens=1000, output_tokens=500, requests_per_user=1), 64)
    own = DENSE.step.prompt_chunk_s(1000, 0) + DENSE.step.mixed_step_overhead_s
    assert wave.ttft_s - steady.ttft_s == pytest.approx(DENSE.ahead_factor * 63 / 2 * own, rel=0.1)


def test_a_request_that_follows_at_once_waits_for_steps_already_launched() -> None:
    users = 32
    follows = closed_loop(DENSE, SHAPE, users)
    any_moment = closed_loop(DENSE, Shape(prompt_tokens=1000, output_tokens=500, think_s=1e-9), users)
    assert follows.ttft_s - any_moment.ttft_s == pytest.approx(follows.tpot_s / 2, rel=5e-3)
    one_ahead = DENSE._replace(steps_in_flight=1)
    assert closed_loop(one_ahead, SHAPE, users).ttft_s == pytest.approx(follows.ttft_s - follows.tpot_s, rel=5e-3)


def test_cached_prompts_are_held_but_not_computed() -> None:
    fresh = closed_loop(DENSE, SHAPE, 32)
    cached = closed_loop(DENSE, Shape(prompt_tokens=1000, output_tokens=500, cached_prompt_share=0.9), 32)
    assert cached.ttft_s < fresh.ttft_s
    assert cached.tpot_s < fresh.tpot_s
    assert cached.resident_tokens / cached.running == fresh.resident_tokens / fresh.running == 1250


def test_a_prompt_over_the_budget_takes_several_steps() -> None:
    long = Shape(prompt_tokens=8000, output_tokens=500)
    whole, chunked = (closed_loop(DENSE._replace(max_num_batched_tokens=n), long, 1) for n in (16384, 2048))
    step = DENSE.step
    # four chunks: three more steps, and what a mixed step costs
    more = DENSE.prompt_factor * 3 * (step.step_s(0, 0, 0) + step.mixed_step_overhead_s)
    assert chunked.ttft_s - whole.ttft_s == pytest.approx(more)


def test_replicas_serve_side_by_side() -> None:
    one, two = closed_loop(DENSE, SHAPE, 32), closed_loop(DENSE._replace(replicas=2), SHAPE, 64)
    assert two.tpot_s == pytest.approx(one.tpot_s)
    assert two.output_tokens_per_s == pytest.approx(2 * one.output_tokens_per_s)
    assert two.running == pytest.approx(2 * one.running)


def test_a_pipeline_splits_the_batch() -> None:
    whole, halves = closed_loop(DENSE, SHAPE, 64), closed_loop(DENSE._replace(micro_batches=2), SHAPE, 64)
    assert halves.tpot_s < whole.tpot_s


def test_the_users_of_a_number_running_keep_that_number_running() -> None:
    for running in (0.5, 10.0, 200.0):
        point = at_running(MIXTURE, SHAPE, running)
        free = MIXTURE._replace(max_running=None)
        assert closed_loop(free, SHAPE, point.users).running == pytest.approx(running, rel=1e-5)


def test_an_open_loop_serves_what_arrives() -> None:
    point = open_loop(DENSE, SHAPE, 2.0)
    assert point is not None
    assert point.requests_per_s == pytest.approx(2.0)
    assert point.running == pytest.approx(2.0 * 499 * point.tpot_s)
    assert point.users == pytest.approx(2.0 * (point.ttft_s + 499 * point.tpot_s))


def test_an_open_loop_is_stable_up_to_what_can_be_served() -> None:
    most = most_requests_per_s(DENSE, SHAPE)
    assert open_loop(DENSE, SHAPE, 0.99 * most) is not None
    assert open_loop(DENSE, SHAPE, 1.01 * most) is None
    full = closed_loop(DENSE, SHAPE, 10_000)
    assert full.requests_per_s == pytest.approx(most, rel=0.02)
    assert most_requests_per_s(DENSE._replace(replicas=3), SHAPE) == pytest.approx(3 * most)


def test_an_unbounded_server_serves_prompts_as_fast_as_it_computes_them() -> None:
    free = DENSE._replace(max_running=None, max_num_seqs=10**9)
    own = DENSE.step.prompt_chunk_s(1000, 0)
    assert most_requests_per_s(free, SHAPE) < 1 / own
    assert math.isfinite(most_requests_per_s(free._replace(max_running=math.inf), SHAPE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens = 0, expected more than 0"),
        ({"output_tokens": 0}, "output_tokens = 0, expected at least 1"),
        ({"think_s": -1}, "think_s = -1, expected at least 0"),
        ({"cached_prompt_share": 1}, "cached_prompt_share = 1, expected 0 to below 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Shape(**{"prompt_tokens": 10, "output_tokens": 10, **changes})


def test_nobody_is_no_load() -> None:
    with pytest.raises(InputError, match="users = 0, expected more than 0"):
        closed_loop(DENSE, SHAPE, 0)
    with pytest.raises(InputError, match="requests_per_s = 0, expected more than 0"):
        open_loop(DENSE, SHAPE, 0)


@given(root=st.floats(0.01, 99.99), bend=st.floats(-0.9, 5))
def test_a_root_is_found_whatever_the_bend(root: float, bend: float) -> None:
    def falling(x: float) -> float:
        return (root - x) * (1 + bend * x / 100)

    assert falling_root(falling, 0, 100) == pytest.approx(root, abs=1e-5)


def test_an_end_that_is_the_root_is_returned() -> None:
    assert falling_root(lambda x: -x, 0, 1) == 0
    assert falling_root(lambda x: 1 - x, 0, 1) == 1
    assert falling_root(lambda x: 0.5 - x, 0, 1) == 0.5


def test_a_step_function_is_pinned_to_its_jump() -> None:
    assert falling_root(lambda x: 1.0 if x < 0.3 else -1.0, 0, 1) == pytest.approx(0.3, abs=1e-6)
