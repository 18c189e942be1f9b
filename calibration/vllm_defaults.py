"""What vLLM takes where nothing is asked for, by version and device. One place; each number names its evidence.

Read in vLLM 0.32.0: ``EngineArgs.get_batch_defaults`` and ``_set_default_max_num_seqs_and_batched_tokens_args``
(engine/arg_utils.py), ``CacheConfig`` (config/cache.py), ``VllmConfig.max_concurrent_batches`` (config/vllm.py),
``CpuPlatform.check_and_update_config`` (platforms/cpu.py). Other versions: public copies of the same functions, and
aiconfigurator's table of memory utilisation by version.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from calibration.errors import InputError
from calibration.gpu import Gpu

Device = Literal["cuda", "cpu"]
Version = tuple[int, int, int]

#: the version whose source these rules were read in
LATEST = "0.32.0"
OLDEST: Version = (0, 8, 0)
GIB = 1 << 30

#: gpu_memory_utilization is 0.92 from this version on; 0.9 before (0.19 and before: 0.9; 0.22 to 0.32: 0.92)
_UTILISATION_0_92: Version = (0, 22, 0)
#: the profiler subtracts an estimate of the CUDA graphs' memory from this version on
_CUDA_GRAPH_ESTIMATE: Version = (0, 21, 0)
#: schedules the next step while the current one runs, from this release on (its release notes; pull request 27614)
_ASYNC_SCHEDULING: Version = (0, 14, 0)
#: the second model runner, which overlaps steps across a pipeline too (read in this version; earlier ones not checked)
_PIPELINE_ASYNC: Version = (0, 32, 0)
#: a tier of its own for devices of 160 GiB and more (pull request 51726; seen at the tag v0.28.0)
_TIER_160_GIB: Version = (0, 28, 0)
#: layers that attend within chunks (Llama 4) have block tables of their own from this version on; before, the hybrid manager
#: was off for them by default (pull requests 21761 and 29627: blocks of a 0.15.1 server hold all layers, 0.22 to 0.23 changed
#: it, on in 0.32)
_CHUNKED_GROUPS: Version = (0, 23, 0)

#: architectures that a later vLLM dropped: name -> first version without it (registry.py, _PREVIOUSLY_SUPPORTED_MODELS)
DROPPED: dict[str, Version] = {"BambaForCausalLM": (0, 24, 0)}
#: architectures that are refused in float16, being numerically unstable in it (config/model.py,
#: _FLOAT16_NOT_SUPPORTED_MODELS: the model types gemma2, gemma3 and gemma3_text, and glm4, which is not known here)
NO_FLOAT16 = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"})


def parse_version(text: str) -> Version:
    """'0.32.0', 'v0.15.1', '0.15.1 (fork)' -> numbers.

    Raises:
        InputError: no version, or one of vLLM's V0 engine.
    """
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text.strip())
    if match is None:
        raise InputError(f"vllm_version = {text!r}, expected a version such as {LATEST}")
    version = (int(match[1]), int(match[2]), int(match[3] or 0))
    if version < OLDEST:
        raise InputError(
            f"vllm_version = {text!r}, expected {'.'.join(map(str, OLDEST))} or later",
            "the V0 engine before it sized its pool by other rules",
        )
    return version


class BatchDefaults(NamedTuple):
    """``max_num_batched_tokens`` and ``max_num_seqs`` of the API server, before they are held against each other."""

    max_num_batched_tokens: int
    max_num_seqs: int


def batch_defaults(version: Version, device: Device, gpu: Gpu | None, world_size: int) -> BatchDefaults:
    """The API server's batch limits on this device; a plan without a GPU takes the small ones, as vLLM does when it
    cannot tell the device."""
    if device == "cpu":
        return BatchDefaults(2048 * world_size, 128 * world_size)
    memory = gpu.usable_bytes if gpu is not None else 0
    if memory >= 160 * GIB and version >= _TIER_160_GIB:
        return BatchDefaults(16384, 1024)
    if gpu is not None and memory >= 70 * GIB and not gpu.is_a100:
        return BatchDefaults(8192, 1024)
    return BatchDefaults(2048, 256)


def memory_utilization(version: Version) -> float:
    return 0.92 if version >= _UTILISATION_0_92 else 0.9


def estimates_cuda_graphs(version: Version) -> bool:
    """Does the memory profiler subtract an estimate for CUDA graphs before it sizes the pool?"""
    return version >= _CUDA_GRAPH_ESTIMATE


def concurrent_batches(version: Version, device: Device, pp: int) -> int:
    """Steps that may be in flight at once: one per pipeline stage, and one more where the next step is scheduled while
    the current one runs (never on CPU; with a pipeline only by the second model runner, taken to be 0.32's default).

    ``VllmConfig.max_concurrent_batches``; CPU: one, as seen in 58 starts.
    """
    if device == "cpu" or version < _ASYNC_SCHEDULING:
        return pp
    if pp > 1 and version < _PIPELINE_ASYNC:
        return pp
    return pp + 1


def chunked_groups(version: Version) -> bool:
    """Do layers that attend within chunks give back what lies before the running one, by default?"""
    return version >= _CHUNKED_GROUPS
