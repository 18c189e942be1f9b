"""What is served, validated and complete: model, device, parallelism, formats and every engine flag that decides memory
or speed. What was not asked for is filled with vLLM's default for that version and device, and marked as such.

    resolve_deployment(architecture, gpu=..., tp=2, max_num_seqs=256)  ->  Deployment
"""

from __future__ import annotations

from dataclasses import dataclass

from calibration import vllm_defaults
from calibration.architecture import Architecture
from calibration.errors import InputError, Unsupported
from calibration.formats import (
    KvFormat,
    WeightFormat,
    declared_format,
    declared_kv,
    kv_format,
    weight_format,
)
from calibration.gpu import Gpu
from calibration.vllm_defaults import Device, Version


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One vLLM deployment, every field resolved. ``given`` names the fields the user set; the others are defaults.

    One replica is ``tp * pp`` GPUs; ``dp`` replicas serve side by side. With ``expert_parallel`` the routed experts are
    spread whole over the ``tp * dp`` ranks instead of being sliced over ``tp``.
    """

    architecture: Architecture
    gpu: Gpu | None
    device: Device
    vllm_version: str
    version: Version
    tp: int
    pp: int
    dp: int
    expert_parallel: bool
    #: dtype of activations and of the weights no format covers: bfloat16, float16, float32
    dtype: str
    weights: WeightFormat
    kv: KvFormat
    kv_asked: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    #: None: the device's own default (see :mod:`calibration.kv_cache`)
    block_size: int | None
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    enable_prefix_caching: bool
    hybrid_kv_cache_manager: bool
    enforce_eager: bool
    #: dtype of recurrent states: bfloat16, float16, float32
    mamba_ssm_cache_dtype: str
    concurrent_batches: int
    given: frozenset[str]
    warnings: tuple[str, ...] = ()
    #: what a server was seen to take beside weights and pool, less the prior, on each GPU; None: nobody looked
    #: (:mod:`calibration.memory_correction`)
    overhead_correction_bytes: int | None = None

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.tp * self.pp * self.dp

    @property
    def expert_ranks(self) -> int:
        """Ranks the routed experts are spread or sliced over."""
        return self.tp * self.dp if self.expert_parallel else self.tp

    @property
    def max_in_flight_tokens(self) -> int:
        """Tokens that can be scheduled and not yet settled: a full budget for every concurrent step."""
        return self.concurrent_batches * self.max_num_batched_tokens

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2


def resolve_deployment(
    architecture: Architecture,
    *,
    gpu: Gpu | None = None,
    device: str | None = None,
    vllm_version: str | None = None,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    expert_parallel: bool = False,
    dtype: str | None = None,
    weights: str = "auto",
    kv: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    gpu_memory_utilization: float | None = None,
    block_size: int | None = None,
    num_gpu_blocks_override: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    enable_prefix_caching: bool | None = None,
    hybrid_kv_cache_manager: bool = True,
    enforce_eager: bool = False,
    mamba_ssm_cache_dtype: str | None = None,
    overhead_correction_bytes: int | None = None,
) -> Deployment:
    """A complete deployment; None asks for vLLM's default.

    Args:
        gpu: the device; None where the pool is given (``kv_cache_memory_bytes`` or ``num_gpu_blocks_override``).
        weights, kv: formats by name; "auto" takes what the checkpoint declares.
        kv_cache_memory_bytes: bytes of the pool on one GPU; it bypasses the memory profile, as in vLLM.
        mamba_ssm_cache_dtype: dtype of recurrent states; None: the model's own, float32 on CPU.
        overhead_correction_bytes: what a server was seen to take more, on each GPU, than the prior of the overhead says.

    Raises:
        InputError: a value that cannot be, or that vLLM refuses at start: key, value, what was expected.
        Unsupported: a combination vLLM or this model does not know.
    """
    defaults = {"tp": 1, "pp": 1, "dp": 1, "expert_parallel": False, "weights": "auto", "kv": "auto"}
    defaults |= {"hybrid_kv_cache_manager": True, "enforce_eager": False, "architecture": architecture}
    given = frozenset(key for key, value in locals().items() if value is not None and value != defaults.get(key))
    given -= {"defaults"}
    kind = _device(device, gpu)
    version_text = vllm_version or vllm_defaults.LATEST
    version = vllm_defaults.parse_version(version_text)
    _check_served(architecture, version, kind)
    for key, value in (("tp", tp), ("pp", pp), ("dp", dp)):
        _at_least(key, value, 1)
    _check_parallel(architecture, tp, pp, expert_parallel)
    number = _dtype(dtype, architecture)
    fmt = _weights(weights, architecture, number)
    cache = _kv(kv, architecture, number, fmt, kind)
    context = _context(max_model_len, architecture)
    seqs, budget = _batch(max_num_seqs, max_num_batched_tokens, context, version, kind, gpu, tp * pp)
    caching = _prefix_caching(enable_prefix_caching, architecture)
    if kind == "cpu" and architecture.is_mla:
        # CpuPlatform.check_and_update_config: reference MLA runs without chunked prefill and prefix caching
        budget, caching = max(context, 2048), False
    share = gpu_memory_utilization if gpu_memory_utilization is not None else vllm_defaults.memory_utilization(version)
    if not 0 < share <= 1:
        raise InputError(f"gpu_memory_utilization = {share!r}, expected a fraction above 0, at most 1")
    for key, number_asked in (
        ("block_size", block_size),
        ("num_gpu_blocks_override", num_gpu_blocks_override),
        ("kv_cache_memory_bytes", kv_cache_memory_bytes),
    ):
        if number_asked is not None:
            _at_least(key, number_asked, 1)
    if gpu is None and kv_cache_memory_bytes is None and num_gpu_blocks_override is None:
        raise InputError(
            "gpu = None, expected a GPU, or the pool itself (kv_cache_memory_bytes)", "`vllm-harness gpus` lists them"
        )
    return Deployment(
        architecture=architecture,
        gpu=gpu,
        device=kind,
        vllm_version=version_text,
        version=version,
        tp=tp,
        pp=pp,
        dp=dp,
        expert_parallel=expert_parallel,
        dtype=number,
        weights=fmt,
        kv=cache,
        kv_asked=kv,
        max_model_len=context,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        gpu_memory_utilization=share,
        block_size=block_size,
        num_gpu_blocks_override=num_gpu_blocks_override,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        enable_prefix_caching=caching,
        hybrid_kv_cache_manager=hybrid_kv_cache_manager,
        enforce_eager=enforce_eager,
        mamba_ssm_cache_dtype=_state_dtype(mamba_ssm_cache_dtype, architecture, kind, number),
        concurrent_batches=vllm_defaults.concurrent_batches(version, kind, pp),
        given=given,
        warnings=_warnings(architecture, version_text, version, kind, mamba_ssm_cache_dtype),
        overhead_correction_bytes=overhead_correction_bytes,
    )


def _at_least(key: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise InputError(f"{key} = {value!r}, expected a whole number of at least {minimum}")


def _device(device: str | None, gpu: Gpu | None) -> Device:
    if device is None:
        return "cuda"
    if device == "cpu":
        if gpu is not None:
            raise InputError(f"device = 'cpu' with gpu = {gpu.name!r}, expected one of them")
        return "cpu"
    if device == "cuda":
        return "cuda"
    raise InputError(f"device = {device!r}, expected cuda or cpu")


def _check_served(architecture: Architecture, version: Version, device: Device) -> None:
    """Refuse an architecture that this vLLM does not serve (any more, or on this device)."""
    gone = vllm_defaults.DROPPED.get(architecture.name)
    if gone is not None and version >= gone:
        raise Unsupported(
            f"architecture {architecture.name!r} is not served by vLLM {'.'.join(map(str, gone))} and later",
            "--vllm-version names an older one",
        )
    if device == "cpu" and architecture.has_ungated_experts:
        raise Unsupported(f"{architecture.name}: experts without a gate are served on GPUs only")


def _check_parallel(architecture: Architecture, tp: int, pp: int, expert_parallel: bool) -> None:
    """What vLLM refuses at start (``ModelConfig.verify_with_parallel_config`` and the models' own checks)."""
    for attention in set(architecture.attention_layers):
        if attention.heads % tp:
            raise InputError(f"tp = {tp}, expected a divisor of the {attention.heads} attention heads")
        if attention.kind != "mla" and attention.kv_heads % tp and tp % attention.kv_heads:
            raise InputError(f"tp = {tp}, expected a divisor or a multiple of the {attention.kv_heads} KV heads")
    for state in set(architecture.state_layers):
        if state.heads % tp:
            raise InputError(f"tp = {tp}, expected a divisor of the {state.heads} heads of the recurrent state")
        if state.kind == "mamba2" and state.groups % tp and state.groups != 1:
            raise InputError(f"tp = {tp}, expected a divisor of the {state.groups} Mamba groups")
    if pp > architecture.num_layers:
        raise InputError(f"pp = {pp}, expected at most the {architecture.num_layers} layers")
    if expert_parallel and not architecture.is_moe:
        raise InputError(f"expert_parallel = True, but {architecture.name} has no experts")


def _dtype(asked: str | None, architecture: Architecture) -> str:
    """Activations' dtype. "auto" is the checkpoint's, but bfloat16 for a float32 one (vLLM ``_resolve_auto_dtype``)."""
    names = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32", "fp32": "float32"}
    half_refused = architecture.name in vllm_defaults.NO_FLOAT16
    if asked in (None, "auto"):
        own = architecture.dtype
        return "bfloat16" if own == "float32" or (own == "float16" and half_refused) else own
    name = names.get(str(asked), str(asked))
    if name not in ("bfloat16", "float16", "float32"):
        raise InputError(f"dtype = {asked!r}, expected auto, bfloat16, float16 or float32")
    if name == "float16" and half_refused:
        raise InputError(
            f"dtype = {asked!r}, expected bfloat16 or float32: vLLM refuses float16 for {architecture.name}, as "
            "numerically unstable"
        )
    return name


def _weights(asked: str, architecture: Architecture, dtype: str) -> WeightFormat:
    """The weight format. A name that is the checkpoint's own format takes the checkpoint's coverage and blocks."""
    if asked.lower() == "auto":
        return declared_format(architecture.quantization, dtype)
    named = weight_format(asked)
    if architecture.quantization is not None:
        own = declared_format(architecture.quantization, dtype)
        if own.name == named.name or (named.name == "fp8" and own.name == "fp8-block"):
            return own
    if named.name == "mxfp4" and architecture.is_moe:
        # gpt-oss: only the experts are MXFP4
        return named._replace(roles=("expert",))
    if named.name == "nvfp4" and architecture.is_moe:
        # nvidia/DeepSeek-R1-NVFP4: the 657.65 B quantised weights are every MLP, attention stays 16-bit
        return named._replace(roles=("mlp", "expert", "shared_expert"))
    return named


def _kv(asked: str, architecture: Architecture, dtype: str, weights: WeightFormat, device: Device) -> KvFormat:
    """The KV dtype, and what vLLM refuses about it (``Attention.__init__``, ``CpuPlatform``)."""
    name = declared_kv(architecture.quantization, dtype) if asked.lower() == "auto" else asked
    cache = kv_format(name)
    if cache.mla_only and not architecture.is_mla:
        raise InputError(f"kv = {asked!r}, expected a dtype for {architecture.name}: this one is for MLA only")
    if cache.never_mla and architecture.is_mla:
        raise InputError(f"kv = {asked!r}, expected a dtype that MLA can hold: {architecture.name} keeps a latent")
    if cache.name == "fp8_e5m2" and weights.name.startswith("fp8"):
        raise InputError(f"kv = {asked!r}, expected fp8 or fp8_e4m3: vLLM refuses e5m2 with FP8 checkpoints")
    if device == "cpu":
        _check_cpu_cache(asked, cache, architecture)
    return cache


def _check_cpu_cache(asked: str, cache: KvFormat, architecture: Architecture) -> None:
    """What the CPU backend takes (``CPUAttentionBackend``, ``_get_attn_isa``)."""
    if cache.name not in ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"):
        raise InputError(f"kv = {asked!r}, expected auto, fp8, fp8_e4m3 or fp8_e5m2 on CPU")
    odd = next((a.head_dim for a in architecture.attention_layers if a.head_dim % 32), None)
    if cache.name.startswith("fp8") and odd is not None and odd % 16 == 0 and not architecture.is_mla:
        raise InputError(
            f"kv = {asked!r}, expected auto: an FP8 cache on CPU needs head dims in multiples of 32, not {odd}"
        )


def _context(asked: int | None, architecture: Architecture) -> int:
    """max_model_len: the model's own when none is asked; more than that is refused (``_get_and_verify_max_len``)."""
    if asked is None:
        return architecture.context
    _at_least("max_model_len", asked, 1)
    limit = max(architecture.context, architecture.max_position_embeddings)
    if asked > limit and not architecture.takes_any_length:
        raise InputError(f"max_model_len = {asked}, expected at most the model's {limit}")
    return asked


def _batch(
    seqs_asked: int | None,
    budget_asked: int | None,
    context: int,
    version: Version,
    device: Device,
    gpu: Gpu | None,
    world_size: int,
) -> tuple[int, int]:
    """(max_num_seqs, max_num_batched_tokens): the defaults held against each other and against the context, as
    ``EngineArgs._set_default_max_num_seqs_and_batched_tokens_args`` does; then vLLM's own check."""
    default = vllm_defaults.batch_defaults(version, device, gpu, world_size)
    for key, value in (("max_num_seqs", seqs_asked), ("max_num_batched_tokens", budget_asked)):
        if value is not None:
            _at_least(key, value, 1)
    seqs = seqs_asked if seqs_asked is not None else default.max_num_seqs
    budget = budget_asked if budget_asked is not None else min(seqs * context, default.max_num_batched_tokens)
    if seqs_asked is None:
        seqs = min(seqs, budget)
    if budget < seqs:
        raise InputError(f"max_num_batched_tokens = {budget}, expected at least max_num_seqs ({seqs})")
    return seqs, budget


def _prefix_caching(asked: bool | None, architecture: Architecture) -> bool:
    """On by default, but for attention-free models (``is_prefix_caching_supported``)."""
    return asked if asked is not None else not architecture.is_attention_free


def _state_dtype(asked: str | None, architecture: Architecture, device: Device, dtype: str) -> str:
    """dtype of recurrent states. CPU: float32, which vLLM sets on hosts with AVX-512 BF16 (``CpuPlatform``); else the
    model's own (Qwen3.5, Nemotron-H), else the activations'."""
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    if asked is not None and asked != "auto":
        name = names.get(asked, asked)
        if name not in ("bfloat16", "float16", "float32"):
            raise InputError(f"mamba_ssm_cache_dtype = {asked!r}, expected auto, float32, float16 or bfloat16")
        return name
    if device == "cpu":
        return "float32"
    own = next((state.recurrent_dtype for state in architecture.state_layers if state.recurrent_dtype), None)
    return own or dtype


def _warnings(
    architecture: Architecture, text: str, version: Version, device: Device, state_dtype: str | None
) -> tuple[str, ...]:
    found = []
    mixed = len({type(a.window) for a in architecture.attention_layers}) > 1 or bool(architecture.state_layers)
    if mixed and version < (0, 32, 0):
        found.append(f"the pool rules of models with several kinds of layers are those of vLLM 0.32, not of {text}")
    if version[:2] > (0, 32):
        found.append(f"vLLM {text} is newer than 0.32, whose rules are used")
    if device == "cpu" and architecture.state_layers and state_dtype is None:
        found.append(
            "recurrent states are taken as float32, as vLLM sets on CPUs with AVX-512 BF16; on others pass "
            "--mamba-ssm-cache-dtype bfloat16"
        )
    return tuple(found)


def pipeline_stages(layers: int, pp: int) -> list[int]:
    """Layers of each pipeline stage, in order: equal shares, what remains goes one each to the stages before the last,
    from the back (vLLM 0.32 ``get_pp_indices``)."""
    share, rest = divmod(layers, pp)
    stages = [share] * pp
    for offset in range(2, rest + 2):
        stages[-offset] += 1
    return stages
