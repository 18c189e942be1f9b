"""The pool as a server shows it, exact to the block."""

from __future__ import annotations

import pytest
from observe_servers import metrics_text

from harness.observe.cache_config import CacheConfig
from harness.observe.names import VersionFamily
from harness.observe.pool import Pool, pool_of
from harness.observe.snapshot import Snapshot, read


def snap(engines: int = 1, via_ray: bool = False, family: str = VersionFamily.V1, **config: int) -> Snapshot:
    return Snapshot(
        model="m",
        model_names=("m",),
        version_family=family,
        engines=engines,
        via_ray=via_ray,
        cache_config=CacheConfig(**config),  # type: ignore[arg-type]
    )


def test_one_block_of_v1_is_the_null_block() -> None:
    assert pool_of(read(metrics_text("vllm_032")), 2048) == Pool(
        block_size=128,
        num_blocks=364,
        usable_blocks=363,
        tokens=46592,
        usable_tokens=46464,
        kv_cache_dtype="auto",
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.92,
        prefix_caching=True,
    )


def test_v0_keeps_no_block_back() -> None:
    pool = pool_of(read(metrics_text("vllm_v0")), 8192)
    assert pool is not None
    assert (pool.num_blocks, pool.usable_blocks, pool.usable_tokens) == (2375, 2375, 38000)


def test_a_context_that_is_no_whole_number_of_blocks_does_not_mislead() -> None:
    """364 blocks of 128 at 1000 tokens of context: vLLM says int(364 / 8 * 1000) = 45,500, the blocks hold 46,592."""
    pool = pool_of(snap(num_gpu_blocks=364, block_size=128, kv_cache_size_tokens=45500), 1000)
    assert pool is not None
    assert (pool.tokens, pool.usable_tokens) == (46592, 46464)


def test_where_blocks_hold_other_numbers_of_tokens_the_server_speaks() -> None:
    """A hybrid model: half its layers need a window only, so the pool holds twice the product."""
    pool = pool_of(snap(num_gpu_blocks=100, block_size=16, kv_cache_size_tokens=3200), 1024)
    assert pool is not None
    assert (pool.tokens, pool.usable_tokens, pool.usable_blocks) == (3200, 3168, 99)


@pytest.mark.parametrize(("said", "blocks"), [(800, 50), (1600, 100), (None, 50)])
def test_blocks_summed_over_engines_are_shared_out(said: int | None, blocks: int) -> None:
    config = {"num_gpu_blocks": 100, "block_size": 16} | ({} if said is None else {"kv_cache_size_tokens": said})
    pool = pool_of(snap(engines=2, **config), 160)
    assert pool is not None
    assert (pool.num_blocks, pool.tokens) == (blocks, blocks * 16)


def test_a_live_server_with_two_engines_shows_the_sum_of_their_blocks() -> None:
    """Started with 41 blocks an engine; its label says 82."""
    snapshot = read(metrics_text("vllm_032_two_engines"))
    assert snapshot.cache_config is not None
    assert snapshot.cache_config.num_gpu_blocks == 82
    pool = pool_of(snapshot, 512)
    assert pool is not None
    assert (pool.num_blocks, pool.usable_blocks, pool.tokens, pool.usable_tokens) == (41, 40, 1312, 1280)


def test_a_live_server_whose_context_is_no_whole_number_of_blocks() -> None:
    """vLLM 0.32.0 with 41 blocks of 32 and --max-model-len 500 says 1281 = int(41 / 16 * 500)."""
    pool = pool_of(snap(num_gpu_blocks=41, block_size=32, kv_cache_size_tokens=1281), 500)
    assert pool is not None
    assert (pool.tokens, pool.usable_tokens) == (1312, 1280)


def test_blocks_of_ray_replicas_are_one_replicas() -> None:
    pool = pool_of(snap(engines=2, via_ray=True, num_gpu_blocks=100, block_size=16), None)
    assert pool is not None
    assert pool.num_blocks == 100


def test_blocks_that_are_not_shown_are_unknown() -> None:
    assert pool_of(snap(block_size=16), None) == Pool(block_size=16)


def test_no_cache_config_is_no_pool() -> None:
    assert pool_of(read('vllm:num_requests_running{model_name="m"} 0\n'), None) is None
