"""A sizing plan: the memory of a deployment, and the streams of a given length that its pool holds."""

from __future__ import annotations

from typing import NamedTuple

from calibration.deployment import Deployment
from calibration.errors import InputError
from calibration.kv_users import blocks_per_request, users_full, users_staggered
from calibration.memory import MemoryPlan, plan_memory

#: the request a plan is made for where none is asked
DEFAULT_PROMPT_TOKENS = 1000
DEFAULT_OUTPUT_TOKENS = 500


class Load(NamedTuple):
    """The requests in flight: mean prompt and output, tokens. ``given``: by the user, rather than assumed."""

    prompt_tokens: int
    output_tokens: int
    given: bool

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Plan(NamedTuple):
    """``kv_full`` and ``kv_staggered`` are streams over all replicas; 0 where there is no pool.

    ``stream_blocks`` and ``stream_bytes``: what one stream holds at its end, in blocks and in bytes on one GPU.
    """

    memory: MemoryPlan
    load: Load
    kv_full: float
    kv_staggered: float
    stream_blocks: int | None
    stream_bytes: int | None
    warnings: tuple[str, ...]

    @property
    def deployment(self) -> Deployment:
        return self.memory.deployment

    @property
    def max_num_seqs(self) -> int:
        """Streams that may run at once over all replicas."""
        return self.deployment.max_num_seqs * self.deployment.dp


def resolve_load(
    max_model_len: int, context: int | None = None, prompt_tokens: int | None = None, output_tokens: int | None = None
) -> Load:
    """The request length: prompt and output, or both as one ``context`` of which half is prompt.

    Raises:
        InputError: both ways at once, one of prompt and output alone, or longer than ``max_model_len``.
    """
    if context is not None and (prompt_tokens is not None or output_tokens is not None):
        raise InputError("context with prompt_tokens or output_tokens, expected one of the two ways")
    if (prompt_tokens is None) != (output_tokens is None):
        missing = "output_tokens" if output_tokens is None else "prompt_tokens"
        raise InputError(f"{missing} = None, expected both --prompt-tokens and --output-tokens, or --context")
    if context is not None:
        load = Load(context - context // 2, context // 2, True)
    elif prompt_tokens is not None and output_tokens is not None:
        load = Load(prompt_tokens, output_tokens, True)
    else:
        short = min(DEFAULT_PROMPT_TOKENS + DEFAULT_OUTPUT_TOKENS, max_model_len)
        output = max(1, short * DEFAULT_OUTPUT_TOKENS // (DEFAULT_PROMPT_TOKENS + DEFAULT_OUTPUT_TOKENS))
        load = Load(max(1, short - output), output, False)
    for key, value in (("prompt_tokens", load.prompt_tokens), ("output_tokens", load.output_tokens)):
        if value < 1:
            raise InputError(f"{key} = {value}, expected at least 1")
    if load.total_tokens > max_model_len:
        key = "context" if context is not None else "prompt_tokens + output_tokens"
        raise InputError(f"{key} = {load.total_tokens}, expected at most max_model_len ({max_model_len})")
    return load


def make_plan(deployment: Deployment, load: Load) -> Plan:
    """The plan of a deployment for requests of this length.

    Raises:
        InputError: the pool was given and vLLM would refuse to start with it.
        Unsupported: the model keeps no cache.
    """
    memory = plan_memory(deployment)
    pool = memory.pool
    if pool is None:
        return Plan(memory, load, 0.0, 0.0, None, None, _warnings(memory, load))
    blocks = blocks_per_request(pool, load.prompt_tokens, load.output_tokens)
    return Plan(
        memory=memory,
        load=load,
        kv_full=users_full(pool, load.prompt_tokens, load.output_tokens) * deployment.dp,
        kv_staggered=users_staggered(pool, load.prompt_tokens, load.output_tokens) * deployment.dp,
        stream_blocks=blocks,
        stream_bytes=blocks * pool.bytes_per_block,
        warnings=_warnings(memory, load),
    )


def _warnings(memory: MemoryPlan, load: Load) -> tuple[str, ...]:
    deployment = memory.deployment
    architecture, gpu = deployment.architecture, deployment.gpu
    found = list(deployment.warnings)
    if not memory.fits:
        found.append(f"vLLM would not start: {memory.reason}")
    if not load.given:
        found.append(
            f"no request length was given: {load.prompt_tokens} prompt and {load.output_tokens} output tokens are assumed"
        )
    held = deployment.tp * max(1, deployment.pp) * memory.kv_bytes_per_token_per_gpu
    if architecture.is_mla and deployment.tp > 1:
        found.append(f"MLA: every one of the {deployment.tp} tensor-parallel ranks holds the whole KV cache")
    elif deployment.pp == 1 and held > memory.kv_bytes_per_token:
        times = held / memory.kv_bytes_per_token
        found.append(f"fewer KV heads than tensor-parallel ranks: each token's KV is held {times:g} times")
    if architecture.unsized_parts:
        found.append(f"not counted, for its size is not in the configuration: {', '.join(architecture.unsized_parts)}")
    if any(weight.role == "vision" for weight in architecture.extra_weights) or architecture.unsized_parts:
        found.append("multimodal: the encoder's own activations are not in the overhead; seen to take 1 to 4 GiB")
    if gpu is not None and not gpu.usable_is_measured:
        found.append(
            f"{gpu.title}: what CUDA reports as total memory was not found; taken as 0.6 GiB under nvidia-smi's"
        )
    if deployment.gpu is not None and deployment.weights.name in ("fp8", "fp8-block", "nvfp4", "mxfp4"):
        found += _format_warning(deployment)
    return tuple(found)


def _format_warning(deployment: Deployment) -> list[str]:
    gpu, name = deployment.gpu, deployment.weights.name
    key = "fp8" if name.startswith("fp8") else "fp4"
    if gpu is None or key in gpu.flops_per_s:
        return []
    return [f"{gpu.title} has no {key.upper()} units: {name} weights save memory, computed in 16 bits"]
