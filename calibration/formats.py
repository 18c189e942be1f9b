"""Number formats of weights and of the KV cache: bytes, aliases, and what a checkpoint declares.

Sizes that were held against real checkpoints: MXFP4 17/32 byte a weight (gpt-oss, exact), FP8 with 128 x 128 blocks
1 + 4/16384 (DeepSeek-V3's scale count, exact), NVFP4 0.5625 (DeepSeek-R1-NVFP4, exact). AWQ/GPTQ with groups of 128 is
arithmetic: 4 bits, a 16-bit scale and a 4-bit zero per group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from calibration.architecture import Role, Weight
from calibration.errors import InputError, Unsupported

#: roles whose matrices a weight format covers; embedding, lm_head, router and vectors stay 16-bit
_LINEAR: tuple[Role, ...] = ("attention", "mixer", "mlp", "expert", "shared_expert")


class WeightFormat(NamedTuple):
    """How a quantised matrix is stored.

    ``bits_per_weight`` is the payload; each block of ``block`` (rows x columns, 0: the whole side) adds
    ``bits_per_block`` of scales and zeros. ``roles`` are those it covers; anything else keeps the 16-bit dtype.
    """

    name: str
    bits_per_weight: int
    block: tuple[int, int] = (0, 0)
    bits_per_block: int = 0
    roles: tuple[Role, ...] = _LINEAR

    @property
    def bytes_per_weight(self) -> float:
        """Payload of a weight, without scales."""
        return self.bits_per_weight / 8

    def covers(self, weight: Weight) -> bool:
        return weight.is_matrix and weight.role in self.roles

    def bytes_of(self, weight: Weight) -> int:
        """Bytes of a covered weight, scales included."""
        rows = -(-weight.rows // (self.block[0] or weight.rows))
        cols = -(-weight.cols // (self.block[1] or weight.cols))
        return (weight.params * self.bits_per_weight + rows * cols * weight.count * self.bits_per_block) // 8


_FORMATS = {
    f.name: f
    for f in (
        WeightFormat("bf16", 16),
        WeightFormat("fp16", 16),
        WeightFormat("fp32", 32),
        WeightFormat("fp8", 8, (1, 0), 32),
        WeightFormat("fp8-block", 8, (128, 128), 32),
        WeightFormat("int8", 8, (1, 0), 32),
        WeightFormat("int4", 4, (1, 128), 20),
        WeightFormat("mxfp4", 4, (1, 32), 8),
        WeightFormat("nvfp4", 4, (1, 16), 8),
    )
}

_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp8_e4m3": "fp8",
    "fp8-tensor": "fp8",
    "fp8_block": "fp8-block",
    "w8a8": "int8",
    "awq": "int4",
    "gptq": "int4",
    "w4a16": "int4",
    "fp4": "nvfp4",
}

#: names accepted for ``--weights``
WEIGHT_FORMATS = ("auto", *_FORMATS)

_DTYPE_FORMAT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def weight_format(name: str) -> WeightFormat:
    """The format of this name or alias.

    Raises:
        InputError: no such format.
    """
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in _FORMATS:
        raise InputError(f"weights = {name!r}, expected one of {', '.join(WEIGHT_FORMATS)}")
    return _FORMATS[key]


def _with_roles(
    fmt: WeightFormat, roles: tuple[Role, ...], group: int | None = None, symmetric: bool = False
) -> WeightFormat:
    """The format with this coverage; INT4 with this group size, and without zeros where it is symmetric."""
    if fmt.name != "int4":
        return WeightFormat(fmt.name, fmt.bits_per_weight, fmt.block, fmt.bits_per_block, roles)
    scale = 16 if symmetric else fmt.bits_per_block
    return WeightFormat(fmt.name, fmt.bits_per_weight, (fmt.block[0], group or fmt.block[1]), scale, roles)


#: parts of module names that tell which role an exclusion list means
_MODULE_ROLE: dict[str, tuple[Role, ...]] = {
    "self_attn": ("attention",),
    "attn": ("attention",),
    "attention": ("attention",),
    "linear_attn": ("mixer",),
    "mamba": ("mixer",),
    "mixer": ("mixer",),
    "shared_expert": ("shared_expert",),
    "shared_experts": ("shared_expert",),
    "experts": ("expert",),
    "mlp": ("mlp",),
}


def _excluded_roles(config: Mapping[str, Any]) -> frozenset[Role]:
    """Roles a checkpoint's exclusion list leaves in 16 bits: patterns that name a module for every layer. A list that
    names single layers or single projections is read as covering the role only when it holds a wildcard."""
    patterns: list[str] = []
    for key in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"):
        value = config.get(key)
        if isinstance(value, list):
            patterns += [str(item) for item in value]
    excluded: set[Role] = set()
    for pattern in patterns:
        last = pattern.replace("re:", "").strip("*.\\$").split(".")[-1].strip("*.\\")
        every_layer = "*" in pattern or not any(part.isdigit() for part in pattern.split("."))
        if every_layer and last in _MODULE_ROLE:
            excluded.update(_MODULE_ROLE[last])
    return frozenset(excluded)


def declared_format(config: Mapping[str, Any] | None, dtype: str) -> WeightFormat:
    """The format a checkpoint declares in its ``quantization_config``; its dtype where it declares none.

    Raises:
        Unsupported: a quantisation method this model does not know, named.
    """
    if config is None:
        return _FORMATS[_DTYPE_FORMAT[dtype]]
    method = str(config.get("quant_method", "")).lower().replace("_", "-")
    name, group, symmetric = _declared_name(config, method)
    base = _FORMATS[name]
    roles: tuple[Role, ...] = ("expert",) if method == "mxfp4" else base.roles
    excluded = _excluded_roles(config)
    return _with_roles(base, tuple(role for role in roles if role not in excluded), group, symmetric)


def _declared_name(config: Mapping[str, Any], method: str) -> tuple[str, int | None, bool]:
    """(format, group size, symmetric) of a quantization_config."""
    if method in ("fp8", "fbgemm-fp8"):
        return ("fp8-block" if config.get("weight_block_size") else "fp8"), None, False
    if method == "mxfp4":
        return "mxfp4", None, False
    if method in ("awq", "gptq", "gptq-marlin", "awq-marlin", "auto-round"):
        bits = config.get("bits", config.get("w_bit", 4))
        return _integer_format(bits, method), _group(config.get("group_size")), False
    if method == "compressed-tensors":
        return _compressed(config)
    if method.startswith("modelopt"):
        inner = config.get("quantization", config)
        algorithm = str(inner.get("quant_algo", config.get("quant_algo", ""))).upper()
        names = {"FP8": "fp8", "FP8_PB_WO": "fp8-block", "NVFP4": "nvfp4", "FP8_PER_CHANNEL_PER_TOKEN": "fp8"}
        if algorithm in names:
            return names[algorithm], None, False
        raise Unsupported(f"quantization_config: quant_algo {algorithm!r} is unknown", f"known: {', '.join(names)}")
    raise Unsupported(
        f"quantization_config: quant_method {method!r} is unknown",
        "known: fp8, mxfp4, awq, gptq, compressed-tensors, modelopt; --weights states the format by hand",
    )


def _group(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _integer_format(bits: object, method: str) -> str:
    if bits == 4:
        return "int4"
    if bits == 8:
        return "int8"
    raise Unsupported(f"quantization_config: {bits!r} bits with {method} are unknown", "known: 4 and 8")


def _compressed(config: Mapping[str, Any]) -> tuple[str, int | None, bool]:
    """compressed-tensors: the weights of the first group decide."""
    groups = config.get("config_groups")
    weights = next((g.get("weights") for g in groups.values() if g.get("weights")), None) if groups else None
    if not isinstance(weights, Mapping):
        raise Unsupported("quantization_config: compressed-tensors without config_groups.*.weights is unknown")
    bits, kind, group = weights.get("num_bits"), weights.get("type"), _group(weights.get("group_size"))
    if kind == "float" and bits == 8:
        return ("fp8-block" if weights.get("strategy") == "block" else "fp8"), None, False
    if kind == "float" and bits == 4:
        return ("nvfp4" if (group or 16) == 16 else "mxfp4"), None, False
    return _integer_format(bits, "compressed-tensors"), group, bool(weights.get("symmetric"))


class KvFormat(NamedTuple):
    """A KV cache dtype. ``bits_per_element`` for plain caches; the packed ones say their bytes per head or token."""

    name: str
    bits_per_element: int
    #: fp32 scales per head and side (the ``*_per_token_head`` formats)
    scale_bytes_per_head: int = 0
    #: bytes of one token and layer where the layout is opaque (``*_ds_mla``)
    bytes_per_mla_token: int | None = None
    #: only for MLA / only for other attention
    mla_only: bool = False
    never_mla: bool = False

    @property
    def bytes_per_element(self) -> float:
        """Bytes of one cached number, without scales."""
        return self.bits_per_element / 8

    def token_bytes(self, kv_heads: int, head_dim: int, v_head_dim: int) -> int:
        """Bytes of one token in one layer: key and value of ``kv_heads`` heads."""
        if self.name == "nvfp4":
            # 4 bits an element and an FP8 scale for 16 of them
            return kv_heads * sum(dim // 2 + dim // 16 for dim in (head_dim, v_head_dim))
        elements = (head_dim + v_head_dim) * self.bits_per_element // 8
        return kv_heads * (elements + 2 * self.scale_bytes_per_head)

    def latent_bytes(self, latent_dim: int) -> int:
        """Bytes of one token in one MLA layer."""
        if self.bytes_per_mla_token is not None:
            return self.bytes_per_mla_token
        return latent_dim * self.bits_per_element // 8


_KV_FORMATS = {
    f.name: f
    for f in (
        KvFormat("bfloat16", 16),
        KvFormat("float16", 16),
        KvFormat("float32", 32),
        KvFormat("fp8_e4m3", 8),
        KvFormat("fp8_e5m2", 8),
        KvFormat("fp8_inc", 8),
        KvFormat("fp8_ds_mla", 8, bytes_per_mla_token=656, mla_only=True),
        KvFormat("nvfp4_ds_mla", 4, bytes_per_mla_token=352, mla_only=True),
        KvFormat("nvfp4", 4, never_mla=True),
        KvFormat("int8_per_token_head", 8, scale_bytes_per_head=4, never_mla=True),
        KvFormat("fp8_per_token_head", 8, scale_bytes_per_head=4, never_mla=True),
        KvFormat("int4_per_token_head", 4, scale_bytes_per_head=4, never_mla=True),
    )
}

_KV_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "fp8_e4m3"}

#: names accepted for ``--kv``
KV_FORMATS = ("auto", "bf16", "fp16", "fp8", *_KV_FORMATS)


def kv_format(name: str) -> KvFormat:
    """The KV dtype of this name or alias ("auto" is resolved before: it depends on the model).

    Raises:
        InputError: no such dtype.
    """
    key = _KV_ALIASES.get(name.lower(), name.lower())
    if key not in _KV_FORMATS:
        raise InputError(f"kv = {name!r}, expected one of {', '.join(KV_FORMATS)}")
    return _KV_FORMATS[key]


def declared_kv(config: Mapping[str, Any] | None, dtype: str) -> str:
    """What "auto" means for this checkpoint: FP8 or NVFP4 where its quantization_config declares a KV scheme (vLLM 0.32
    ``resolve_kv_cache_dtype_string`` for ModelOpt, ``Attention.__init__`` for compressed-tensors), else its dtype."""
    if config is None:
        return dtype
    method = str(config.get("quant_method", "")).lower()
    inner = config.get("quantization", config)
    scheme = inner.get("kv_cache_scheme") or config.get("kv_cache_scheme")
    if method.startswith("modelopt"):
        scheme = scheme or inner.get("kv_cache_quant_algo") or config.get("kv_cache_quant_algo")
        if isinstance(scheme, Mapping):
            bits = scheme.get("num_bits") if scheme.get("type") == "float" else None
            scheme = {8: "fp8", 4: "nvfp4"}.get(bits) if isinstance(bits, int) else None
        return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(scheme).lower(), dtype)
    return "fp8_e4m3" if scheme else dtype
