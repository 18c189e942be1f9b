"""The first correction factor: a server's own pool in place of the prior."""

from __future__ import annotations

from typing import Any

import pytest

from calibration.catalog import find_gpu, find_model
from calibration.deployment import Deployment, resolve_deployment
from calibration.errors import InputError
from calibration.memory import plan_memory
from calibration.memory_correction import ShownPool, correct_memory

GIB = 1 << 30


def on(model: str = "llama-3.1-8b", gpu: str | None = "h100-sxm", **changes: Any) -> Deployment:
    return resolve_deployment(find_model(model), gpu=None if gpu is None else find_gpu(gpu), **changes)


def blocks_of(deployment: Deployment) -> int:
    pool = plan_memory(deployment).pool
    assert pool is not None
    return pool.num_blocks


@pytest.mark.parametrize(
    "deployment",
    [
        on(),
        on("llama-3.3-70b", tp=4, pp=2),
        on("gpt-oss-120b", tp=2),
        on("gemma-3-27b", max_model_len=8192),
        on("qwen3-30b-a3b", kv="fp8"),
        on("deepseek-v3", "h200-sxm", tp=8),
    ],
    ids=lambda d: d.architecture.catalog_name,
)
@pytest.mark.parametrize("change", [-1000, -1, 0, 1, 700])
def test_the_corrected_deployment_has_the_servers_pool_to_the_block(deployment: Deployment, change: int) -> None:
    blocks = blocks_of(deployment) + change
    found = correct_memory(deployment, ShownPool(num_blocks=blocks))
    after = plan_memory(found.deployment)
    assert after.pool is not None
    assert after.pool.num_blocks == blocks == found.shown.num_blocks
    assert found.predicted is not None
    assert found.predicted.num_blocks == blocks - change
    assert after.blocks_range == (blocks, blocks)


def test_the_factor_is_the_overhead_that_was_seen_over_the_prior() -> None:
    deployment = on()
    prior = plan_memory(deployment)
    overhead = prior.tightest.overhead
    assert overhead is not None
    assert prior.pool is not None
    lost = 100
    found = correct_memory(deployment, ShownPool(num_blocks=prior.pool.num_blocks - lost))
    slack = prior.tightest.kv_bytes - prior.pool.bytes
    assert found.prior_bytes == overhead.total_bytes
    assert found.difference_bytes == lost * prior.pool.bytes_per_block + slack
    assert found.ratio is not None
    assert found.ratio == pytest.approx(1 + found.difference_bytes / overhead.total_bytes)
    assert found.pool_error == pytest.approx(prior.pool.num_blocks / (prior.pool.num_blocks - lost) - 1)
    content = found.to_json()
    assert (content["factor"], content["value"], content["high"]) == ("memory_overhead", found.ratio, found.ratio)
    assert content["low"] == pytest.approx(found.ratio - prior.pool.bytes_per_block / overhead.total_bytes)
    assert content["server"]["num_blocks"] == prior.pool.num_blocks - lost


def test_the_correction_goes_with_the_deployment_to_other_flags() -> None:
    found = correct_memory(on(), ShownPool(num_blocks=blocks_of(on()) - 4096))
    smaller = on(gpu_memory_utilization=0.8, overhead_correction_bytes=found.deployment.overhead_correction_bytes)
    assert found.deployment.overhead_correction_bytes is not None
    without = plan_memory(on(gpu_memory_utilization=0.8)).tightest.kv_bytes
    assert plan_memory(smaller).tightest.kv_bytes == without - found.deployment.overhead_correction_bytes


def test_correcting_twice_changes_nothing() -> None:
    shown = ShownPool(num_blocks=20_000)
    once = correct_memory(on(), shown).deployment
    again = correct_memory(once, shown)
    assert again.deployment == once
    assert (again.difference_bytes, again.ratio) == (0, 1.0)


@pytest.mark.parametrize(
    ("deployment", "shown"),
    [
        (on(), ShownPool(num_blocks=9000, is_given=True)),
        (on(kv_cache_memory_bytes=20 * GIB), ShownPool(num_blocks=9000)),
        (on(gpu=None, num_gpu_blocks_override=9000), ShownPool(num_blocks=9000)),
    ],
    ids=["given to the server", "given to the plan", "no GPU"],
)
def test_a_pool_that_was_given_corrects_nothing(deployment: Deployment, shown: ShownPool) -> None:
    found = correct_memory(deployment, shown)
    assert found.ratio is found.difference_bytes is found.measured_bytes is None
    assert found.deployment.overhead_correction_bytes is None
    assert plan_memory(found.deployment).pool == found.shown
    assert found.to_json()["value"] is None


def test_a_server_that_fits_where_the_prior_sees_no_room_is_believed() -> None:
    deployment = on("qwen3-32b", gpu_memory_utilization=0.83, max_model_len=2048)
    assert plan_memory(deployment).pool is None
    found = correct_memory(deployment, ShownPool(num_blocks=200))
    assert found.predicted is None
    assert found.pool_error is None
    assert found.difference_bytes is not None
    assert found.difference_bytes < 0
    assert blocks_of(found.deployment) == 200


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        (ShownPool(num_blocks=0), "num_blocks = 0"),
        (ShownPool(num_blocks=40_000), "exceed the 78.2 GB that vLLM may use"),
        (ShownPool(num_blocks=20_000, block_size=32), "block_size = 32 on the server, 16 as planned"),
        (ShownPool(num_blocks=20_000, size_tokens=640_000), "640,000 tokens of its 20,000 blocks, this model 320,000"),
        (ShownPool(num_blocks=1000), "max_model_len = 131072"),
    ],
    ids=["none", "too many", "other blocks", "other tokens", "less than one request"],
)
def test_a_pool_of_another_deployment_is_refused(shown: ShownPool, message: str) -> None:
    with pytest.raises(InputError, match=message):
        correct_memory(on(), shown)
