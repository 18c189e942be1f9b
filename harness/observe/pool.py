"""The KV pool of one engine, from what ``vllm:cache_config_info`` shows. Pure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from harness.observe.names import VersionFamily
from harness.observe.snapshot import Snapshot


class Pool(BaseModel):
    """One engine's KV cache; None is what the server does not show."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_size: int | None = None
    num_blocks: int | None = None
    #: blocks requests can hold: V1 keeps one null block back (vllm 0.32.0, v1/core/block_pool.py, null_block)
    usable_blocks: int | None = None
    tokens: int | None = None
    usable_tokens: int | None = None
    kv_cache_dtype: str | None = None
    kv_cache_memory_bytes: int | None = None
    #: set where the operator gave the number of blocks
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float | None = None
    prefix_caching: bool | None = None


def pool_of(snapshot: Snapshot, max_model_len: int | None) -> Pool | None:
    """The pool of one engine; None where the text has no cache_config_info.

    Tokens are blocks * block size, exact to the block, where ``kv_cache_size_tokens`` agrees with that (or is not
    shown); else the model has layers of several kinds or context parallelism, where a block holds another number of
    tokens, and vLLM's own ``kv_cache_size_tokens`` speaks, less the null block's share.
    """
    config = snapshot.cache_config
    if config is None:
        return None
    shown = Pool(
        block_size=config.block_size,
        kv_cache_dtype=config.cache_dtype,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        gpu_memory_utilization=config.gpu_memory_utilization,
        prefix_caching=config.enable_prefix_caching,
    )
    if not config.num_gpu_blocks or not config.block_size:
        return shown
    blocks = _blocks_of_one(snapshot, config.num_gpu_blocks, config.block_size, max_model_len)
    usable = blocks if snapshot.version_family == VersionFamily.V0 else blocks - 1
    said = config.kv_cache_size_tokens
    if said is None or _agrees(said, blocks, config.block_size, max_model_len):
        tokens, usable_tokens = blocks * config.block_size, usable * config.block_size
    else:
        tokens, usable_tokens = said, said * usable // blocks
    sizes = {"num_blocks": blocks, "usable_blocks": usable, "tokens": tokens, "usable_tokens": usable_tokens}
    return shown.model_copy(update=sizes)


def _blocks_of_one(snapshot: Snapshot, num_blocks: int, block_size: int, max_model_len: int | None) -> int:
    """V1 adds the blocks of all engines behind one front end into the same label (vllm 0.32.0, v1/engine/
    core_client.py, engine handshake), but not those of Ray replicas; ``kv_cache_size_tokens``, one engine's, decides
    where it can."""
    if snapshot.engines <= 1 or snapshot.via_ray:
        return num_blocks
    assert snapshot.cache_config is not None
    said = snapshot.cache_config.kv_cache_size_tokens
    if said is not None and _agrees(said, num_blocks, block_size, max_model_len):
        return num_blocks
    return num_blocks // snapshot.engines


def _agrees(said: int, blocks: int, block_size: int, max_model_len: int | None) -> bool:
    """Whether ``kv_cache_size_tokens`` is what plain attention over these blocks gives:
    int(blocks / ceil(max_model_len / block_size) * max_model_len) (vllm 0.32.0, v1/core/kv_cache_utils.py,
    get_kv_cache_capacity), or the product itself."""
    if said == blocks * block_size:
        return True
    if max_model_len is None:
        return False
    per_request = -(-max_model_len // block_size)
    return abs(int(blocks / per_request * max_model_len) - said) <= 1
