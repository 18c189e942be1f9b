"""The flags of ``vllm serve`` that a deployment means, in the words of its vLLM version.

A default is not repeated: a flag stands here because the user asked for it, or because the plan cannot be without it. The
model is no flag but the positional argument; host and port belong to whoever starts the server.
"""

from __future__ import annotations

from calibration.artifacts import since
from calibration.artifacts.checkpoint import checkpoint_of
from calibration.artifacts.nodes import GPUS_PER_NODE, Nodes, place
from calibration.deployment import Deployment
from calibration.errors import InputError, Unsupported
from calibration.formats import declared_kv

_GIB = 1 << 30


def vllm_flags(deployment: Deployment, gpus_per_node: int = GPUS_PER_NODE) -> list[str]:
    """Flags and values, one item each, for ``vllm serve MODEL`` of ``deployment.version``.

    Raises:
        InputError: a value this version's parser refuses.
        Unsupported: a flag or value that this version does not know yet, or a placement on nodes it does not do.
    """
    checkpoint = checkpoint_of(deployment, None)
    flags = _parallel(deployment, place(deployment, gpus_per_node))
    if checkpoint.dtype is not None:
        flags += ["--dtype", checkpoint.dtype]
    if checkpoint.quantization is not None:
        flags += ["--quantization", checkpoint.quantization]
    flags += [*_kv(deployment), *_pool(deployment), *_engine(deployment)]
    if deployment.version < since.LOGS_NO_REQUESTS:
        flags.append("--disable-log-requests")
    return flags


def cpu_pool_environment(deployment: Deployment) -> dict[str, str]:
    """The pool of a CPU deployment in whole GiB, as every version takes it: ``VLLM_CPU_KVCACHE_SPACE``."""
    size = deployment.kv_cache_memory_bytes
    if deployment.device != "cpu" or size is None or size % _GIB:
        return {}
    return {"VLLM_CPU_KVCACHE_SPACE": str(size // _GIB)}


def _flag(deployment: Deployment, flag: str, *values: object) -> list[str]:
    """The flag, refused where the version does not know it."""
    if flag in since.FLAGS:
        since.require(flag, since.FLAGS[flag], deployment.version)
    return [flag, *map(str, values)]


def _parallel(deployment: Deployment, nodes: Nodes) -> list[str]:
    flags: list[str] = []
    for flag, field, size in (
        ("--tensor-parallel-size", "tp", deployment.tp),
        ("--pipeline-parallel-size", "pp", deployment.pp),
        ("--data-parallel-size", "dp", deployment.dp),
    ):
        if field in deployment.given:
            flags += _flag(deployment, flag, size)
    if deployment.expert_parallel:
        flags += _flag(deployment, "--enable-expert-parallel")
    if nodes.spans:
        flags += _flag(deployment, "--distributed-executor-backend", "ray")
    elif nodes.is_cluster:
        flags += _flag(deployment, "--data-parallel-backend", "ray")
        flags += _flag(deployment, "--data-parallel-size-local", nodes.replicas)
    return flags


def _kv(deployment: Deployment) -> list[str]:
    """``--kv-cache-dtype`` where one was asked for; "auto" is the dtype or what the checkpoint declares."""
    name = deployment.kv.name
    if "kv" not in deployment.given:
        return []
    if name in ("bfloat16", "float16", "float32") and name == declared_kv(
        deployment.architecture.quantization, deployment.dtype
    ):
        return []
    if name == "float32":
        raise Unsupported(
            f"kv = 'float32' with dtype = {deployment.dtype!r}: vLLM keeps a 32-bit cache only beside a 32-bit dtype"
        )
    if name in since.KV_DTYPES:
        since.require(f"kv = {name!r}", since.KV_DTYPES[name], deployment.version)
    # the plain name of e4m3, as every version and backend knows it
    return ["--kv-cache-dtype", "fp8" if name == "fp8_e4m3" else name]


def _pool(deployment: Deployment) -> list[str]:
    """Blocks, and the pool where it was given rather than left over."""
    flags: list[str] = []
    if deployment.block_size is not None:
        flags += ["--block-size", str(_block_size(deployment, deployment.block_size))]
    if deployment.num_gpu_blocks_override is not None:
        flags += _flag(deployment, "--num-gpu-blocks-override", deployment.num_gpu_blocks_override)
    size = deployment.kv_cache_memory_bytes
    if size is None or cpu_pool_environment(deployment):
        return flags
    if deployment.device == "cpu" and deployment.version < since.CPU_POOL_FLAG:
        raise InputError(
            f"kv_cache_memory = {size} with vLLM {deployment.vllm_version}, expected whole GiB",
            "on CPU this version takes its pool from VLLM_CPU_KVCACHE_SPACE alone",
        )
    return flags + _flag(deployment, "--kv-cache-memory-bytes", size)


def _block_size(deployment: Deployment, size: int) -> int:
    if deployment.version >= since.ANY_BLOCK_SIZE:
        return size
    sizes = since.BLOCK_SIZES + ((256,) if deployment.version >= since.BLOCK_SIZE_256 else ())
    if size not in sizes:
        known = ", ".join(map(str, sizes))
        raise InputError(f"block_size = {size} with vLLM {deployment.vllm_version}, expected one of {known}")
    return size


def _engine(deployment: Deployment) -> list[str]:
    given = deployment.given
    flags: list[str] = []
    for flag, field, value in (
        ("--max-model-len", "max_model_len", deployment.max_model_len),
        ("--max-num-seqs", "max_num_seqs", deployment.max_num_seqs),
        ("--max-num-batched-tokens", "max_num_batched_tokens", deployment.max_num_batched_tokens),
    ):
        if field in given:
            flags += [flag, str(value)]
    if "gpu_memory_utilization" in given:
        flags += ["--gpu-memory-utilization", str(deployment.gpu_memory_utilization)]
    if "enable_prefix_caching" in given:
        flags.append(f"--{'' if deployment.enable_prefix_caching else 'no-'}enable-prefix-caching")
    if not deployment.hybrid_kv_cache_manager:
        flags += _flag(deployment, "--disable-hybrid-kv-cache-manager")
    if deployment.enforce_eager:
        flags.append("--enforce-eager")
    return flags + _state_dtype(deployment)


def _state_dtype(deployment: Deployment) -> list[str]:
    if "mamba_ssm_cache_dtype" not in deployment.given or not deployment.architecture.state_layers:
        return []
    name = deployment.mamba_ssm_cache_dtype
    since.require(f"mamba_ssm_cache_dtype = {name!r}", since.STATE_DTYPES[name], deployment.version)
    return _flag(deployment, "--mamba-ssm-cache-dtype", name)
