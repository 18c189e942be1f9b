"""The labels of ``vllm:cache_config_info``, typed. vLLM writes Python values as strings: "16", "0.92", "True", "None"."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any


def _boolean(text: str) -> bool:
    return {"True": True, "False": False}[text]


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is no finite number")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """What the engine says of its KV cache; None where the label is missing, "None", or listed in ``unread``.

    ``num_gpu_blocks`` holds the null block of V1, and behind one front end with several data-parallel engines it is the
    sum over all of them while ``kv_cache_size_tokens`` is one engine's (vllm 0.32.0, v1/engine/core_client.py, engine
    handshake). ``kv_cache_size_tokens`` = int(max concurrency of full-length requests * max_model_len) (v1/core/
    kv_cache_utils.py, get_kv_cache_capacity): equal to blocks * block size only where max_model_len is whole blocks.
    """

    block_size: int | None = None
    num_gpu_blocks: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_max_concurrency: float | None = None
    cache_dtype: str | None = None
    gpu_memory_utilization: float | None = None
    enable_prefix_caching: bool | None = None
    prefix_caching_hash_algo: str | None = None
    sliding_window: int | None = None
    is_attention_free: bool | None = None
    swap_space_bytes: float | None = None
    cpu_offload_gb: float | None = None
    mamba_block_size: int | None = None
    user_specified_block_size: bool | None = None
    #: labels whose value was not of the expected type, as 'label="value"': shown, never guessed
    unread: tuple[str, ...] = ()

    @classmethod
    def from_labels(cls, labels: Mapping[str, str]) -> CacheConfig:
        values: dict[str, Any] = {}
        unread = []
        for name, convert in _CONVERTERS.items():
            text = labels.get(name, "None")
            if text == "None":
                continue
            try:
                values[name] = convert(text)
            except (ValueError, KeyError):
                unread.append(f'{name}="{text}"')
        return cls(**values, unread=tuple(unread))


_BY_TYPE: dict[str, Callable[[str], Any]] = {
    "int | None": int,
    "float | None": _finite,
    "bool | None": _boolean,
    "str | None": str,
}
_CONVERTERS = {field.name: _BY_TYPE[str(field.type)] for field in fields(CacheConfig) if field.name != "unread"}
