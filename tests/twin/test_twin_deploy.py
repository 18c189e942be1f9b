"""The twin of a planned deployment."""

from __future__ import annotations

from typing import Any

import pytest

from calibration.catalog import find_gpu, find_model
from calibration.deployment import Deployment, resolve_deployment
from calibration.errors import Unsupported
from calibration.memory import plan_memory
from calibration.priors import physics_of, prior_factors
from calibration.steptime import prior_step_time
from calibration.twin.deploy import twin_of
from calibration.twin.engine import Engine
from calibration.twin.sequence import Sequence
from calibration.twin.simulate import closed_loop


def deployment(model: str = "llama-3.1-8b", **options: Any) -> Deployment:
    return resolve_deployment(find_model(model), gpu=find_gpu("h100-sxm"), **options)


def test_the_pool_and_the_flags_are_the_plans() -> None:
    planned = deployment(max_model_len=8192)
    config, _ = twin_of(planned)
    pool = plan_memory(planned).pool
    assert pool is not None
    assert (config.num_gpu_blocks, config.block_size) == (pool.num_blocks, pool.block_size)
    assert config.max_model_len == 8192
    assert config.max_num_seqs == planned.max_num_seqs
    assert config.max_num_batched_tokens == planned.max_num_batched_tokens
    assert config.async_scheduling == (planned.concurrent_batches > 1)


def test_the_step_is_the_priors_until_a_calibration_corrects_it() -> None:
    planned = deployment(max_model_len=8192)
    _, step = twin_of(planned)
    assert step.step_s(8, 8000, 0) == prior_step_time(planned).step_s(8, 8000, 0)
    slower = prior_factors(planned, physics_of(planned)).scaled("step_overhead", 2.0)
    _, corrected = twin_of(planned, slower)
    assert corrected.step_s(8, 8000, 0) > 1.5 * step.step_s(8, 8000, 0)


def test_a_simulated_user_sees_the_time_a_step_takes() -> None:
    config, step = twin_of(deployment(max_model_len=8192))
    run = closed_loop([Engine(config, step)], lambda user, nth: Sequence(500, 200), [0.0], 60.0, max_requests=3)
    context = 500 + 100
    assert run.trace.tpot_s[0] == pytest.approx(step.step_s(1, context, 0), rel=0.01)


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gemma-3-27b"])
def test_a_cache_of_several_kinds_is_refused(model: str) -> None:
    with pytest.raises(Unsupported, match="one group of full attention"):
        twin_of(deployment(model, tp=2, max_model_len=8192))


def test_several_pipeline_stages_are_refused() -> None:
    with pytest.raises(Unsupported, match="pp = 2"):
        twin_of(deployment(pp=2, max_model_len=8192))
