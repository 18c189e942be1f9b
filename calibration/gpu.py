"""A GPU as the model needs it: memory vLLM sees, bandwidth, dense peak rates, link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Gpu(NamedTuple):
    """One device.

    ``memory_bytes`` is what nvidia-smi shows; ``usable_bytes`` what CUDA reports as total, the number vLLM multiplies
    by ``gpu_memory_utilization`` (``usable_is_measured``: read from a driver, else NVML less the usual gap).
    Rates are dense (no 2:4 sparsity), accumulated in FP32; a format the device has no units for is absent.
    """

    name: str
    title: str
    memory_bytes: int
    usable_bytes: int
    usable_is_measured: bool
    bandwidth_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    link_bytes_per_s: float
    link: str
    compute_capability: str
    watts: float
    sources: tuple[str, ...]
    unverified: tuple[str, ...] = ()

    @property
    def is_a100(self) -> bool:
        """vLLM keeps its small batch defaults on an A100, whatever its memory (``EngineArgs.get_batch_defaults``)."""
        return self.name.startswith("a100")
