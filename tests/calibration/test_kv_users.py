"""Streams a pool holds: lock step and staggered, over kinds of layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.catalog import find_model
from calibration.deployment import resolve_deployment
from calibration.errors import InputError
from calibration.kv_cache import CacheKind, Group, LayerCache, Pool, build_pool
from calibration.kv_users import blocks_held, blocks_per_request, mean_blocks, users_full, users_staggered


def pool(*caches: LayerCache, blocks: int = 41, max_model_len: int = 1 << 20) -> Pool:
    groups = tuple(Group(cache, ((0, 1),)) for cache in caches)
    return Pool(blocks, caches[0].block_size, 1, groups, max_model_len, 0)


FULL_32 = LayerCache("full", 32, 1)


def test_forty_blocks_of_32_hold_six_and_two_thirds_streams_in_lock_step_and_ten_staggered() -> None:
    # a real server preempted first between 6 and 7 in lock step, between 9 and 10 staggered
    assert users_full(pool(FULL_32), 64, 100) == pytest.approx(6.667, abs=0.001)
    assert users_staggered(pool(FULL_32), 64, 100) == pytest.approx(9.804, abs=0.001)


def test_82_gb_hold_125_streams_of_4000_tokens_at_163840_bytes() -> None:
    deployment = resolve_deployment(
        find_model("llama-3.3-70b"), kv="fp8", kv_cache_memory_bytes=82_000_000_000, max_model_len=4000
    )
    made = build_pool(deployment, [82_000_000_000])
    assert int(users_full(made, 2000, 2000)) == 125


def test_blocks_are_whole_and_the_last_token_counts() -> None:
    assert blocks_per_request(pool(FULL_32), 64, 96) == 5
    assert blocks_per_request(pool(FULL_32), 64, 97) == 6


def test_a_window_gives_back_the_blocks_before_it() -> None:
    sliding = LayerCache("sliding", 16, 1, window=100)
    assert blocks_held(pool(sliding).groups, 90) == 6
    # 1,000 tokens in 63 blocks; the first 900 are out of sight: 56 whole blocks are free
    assert blocks_held(pool(sliding).groups, 1000) == 63 - 56


def test_a_chunk_gives_back_the_chunks_before_it() -> None:
    chunked = LayerCache("chunked", 16, 1, window=64)
    assert [blocks_held(pool(chunked).groups, tokens) for tokens in (64, 65, 128, 129)] == [4, 1, 4, 1]


def test_a_state_keeps_its_pages_whatever_the_length() -> None:
    state = LayerCache("state", 400, 1, state_blocks=2)
    made = pool(state)
    assert (blocks_held(made.groups, 1), blocks_held(made.groups, 10**6)) == (2, 2)
    assert users_staggered(made, 10, 10) == users_full(made, 10, 10) == 20


def test_groups_draw_from_one_pool() -> None:
    both = pool(FULL_32, LayerCache("state", 32, 1, state_blocks=3))
    assert blocks_per_request(both, 64, 96) == 5 + 3


@pytest.mark.parametrize(("prompt", "output", "key"), [(0, 5, "prompt_tokens"), (5, 0, "output_tokens")])
def test_lengths_below_one_are_refused(prompt: int, output: int, key: str) -> None:
    with pytest.raises(InputError, match=f"{key} = 0, expected at least 1"):
        users_full(pool(FULL_32), prompt, output)


def test_a_request_longer_than_the_context_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"prompt_tokens \+ output_tokens = 300, expected at most max_model_len \(256\)"
    ):
        users_staggered(pool(FULL_32, max_model_len=256), 200, 100)


KINDS: list[CacheKind] = ["full", "mla", "sliding", "chunked", "state"]


@given(
    kind=st.sampled_from(KINDS),
    block=st.integers(1, 40),
    window=st.integers(1, 200),
    prompt=st.integers(1, 300),
    output=st.integers(1, 300),
)
def test_the_mean_is_the_mean_over_every_output_token(
    kind: CacheKind, block: int, window: int, prompt: int, output: int
) -> None:
    cache = LayerCache(kind, block, 1, window=window if kind in ("sliding", "chunked") else None, state_blocks=2)
    made = pool(cache)
    held = [blocks_held(made.groups, prompt + token) for token in range(1, output + 1)]
    assert mean_blocks(made, prompt, output) == pytest.approx(sum(held) / output)


@given(prompt=st.integers(1, 4000), output=st.integers(1, 4000))
def test_staggered_streams_are_never_fewer_than_in_lock_step(prompt: int, output: int) -> None:
    made = pool(FULL_32, blocks=1000)
    assert users_staggered(made, prompt, output) >= users_full(made, prompt, output)
