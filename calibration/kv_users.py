"""How many streams a KV pool holds: in lock step, and on average.

A running request holds whole blocks. While it makes output token j its cache holds ``prompt + j`` tokens, so

* **full**: usable blocks / blocks at the end of a request. Up to here nothing is preempted, even if all streams started
  at once and end at once.
* **staggered**: usable blocks / mean blocks over a request's output. Where starts are spread, this many streams hold the
  pool full on average; preemptions come from about here.

Usable are all blocks but the null block. Seen on a real vLLM 0.32 (40 usable blocks of 32 tokens, 64 in / 100 out):
first preemptions between 6 and 7 streams in lock step (full: 6.67), between 9 and 10 staggered (9.80).
"""

from __future__ import annotations

from collections.abc import Sequence

from calibration.errors import InputError
from calibration.kv_cache import Group, LayerCache, Pool


def blocks_held(groups: Sequence[Group], tokens: int) -> int:
    """Blocks of a decoding request with ``tokens`` in its cache, over all groups: windows give back what lies before
    them (``SlidingWindowManager``, ``ChunkedLocalAttentionManager``: whole blocks of skipped tokens), a state keeps its
    pages whatever the length."""
    return sum(_held(group.cache, tokens) for group in groups)


def blocks_per_request(pool: Pool, prompt_tokens: int, output_tokens: int) -> int:
    """Blocks of a request at its end.

    Raises:
        InputError: lengths below 1, or a request longer than ``max_model_len``.
    """
    _check(pool, prompt_tokens, output_tokens)
    return blocks_held(pool.groups, prompt_tokens + output_tokens)


def mean_blocks(pool: Pool, prompt_tokens: int, output_tokens: int) -> float:
    """Blocks of a request, averaged over its output tokens."""
    _check(pool, prompt_tokens, output_tokens)
    last = prompt_tokens + output_tokens
    held = sum(_summed(group.cache, last) - _summed(group.cache, prompt_tokens) for group in pool.groups)
    return held / output_tokens


def users_full(pool: Pool, prompt_tokens: int, output_tokens: int) -> float:
    """Streams the pool holds when all are at their end: the conservative figure."""
    return pool.usable_blocks / blocks_per_request(pool, prompt_tokens, output_tokens)


def users_staggered(pool: Pool, prompt_tokens: int, output_tokens: int) -> float:
    """Streams the pool holds when they are spread evenly over their outputs."""
    return pool.usable_blocks / mean_blocks(pool, prompt_tokens, output_tokens)


def _check(pool: Pool, prompt_tokens: int, output_tokens: int) -> None:
    for key, value in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if value < 1:
            raise InputError(f"{key} = {value}, expected at least 1")
    if prompt_tokens + output_tokens > pool.max_model_len:
        raise InputError(
            f"prompt_tokens + output_tokens = {prompt_tokens + output_tokens}, expected at most max_model_len "
            f"({pool.max_model_len})"
        )


def _held(cache: LayerCache, tokens: int) -> int:
    if cache.kind == "state":
        return cache.state_blocks
    blocks = -(-tokens // cache.block_size)
    if cache.window is None or cache.kind in ("full", "mla"):
        return blocks
    skipped = tokens - cache.window if cache.kind == "sliding" else (tokens - 1) // cache.window * cache.window
    return blocks - max(0, skipped) // cache.block_size


def _summed(cache: LayerCache, last: int) -> int:
    """``_held`` summed over 1 .. ``last`` tokens, in closed form."""
    if cache.kind == "state":
        return cache.state_blocks * last
    held = _sum_ceil(last, cache.block_size)
    if cache.window is None or cache.kind in ("full", "mla"):
        return held
    if cache.kind == "sliding":
        return held - _sum_floor(max(0, last - cache.window), cache.block_size)
    chunks, rest = divmod(last, cache.window)
    given_back = sum(chunk * cache.window // cache.block_size for chunk in range(chunks)) * cache.window
    return held - given_back - chunks * cache.window // cache.block_size * rest


def _sum_ceil(last: int, size: int) -> int:
    """Sum of ceil(t / size) for t = 1 .. last."""
    whole, rest = divmod(last, size)
    return size * whole * (whole + 1) // 2 + rest * (whole + 1)


def _sum_floor(last: int, size: int) -> int:
    """Sum of floor(t / size) for t = 1 .. last."""
    whole, rest = divmod(last + 1, size)
    return size * whole * (whole - 1) // 2 + rest * whole
