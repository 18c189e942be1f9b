"""Mixture-of-experts decoders: Mixtral, Qwen2/3-MoE, gpt-oss, Llama 4, DeepSeek V2/V3 and Kimi K2, GLM-4.5, MiniMax-M2,
Granite-MoE.
"""

from __future__ import annotations

from functools import cache

from calibration.architecture import Attention, Experts, Layer, Weight
from calibration.errors import Unsupported
from calibration.families import parts
from calibration.families.dense import Shape, heads_of, layer_kinds, model_window, outside, repeat, windowed
from calibration.hf_config import HfConfig


def experts_of(config: HfConfig, *keys: str, default: int | None = None, top_k: int | None = None) -> Experts:
    """How many experts, under the names families use, and how many a token takes.

    Raises:
        InputError: more chosen than there are.
    """
    names = keys or ("num_local_experts", "num_experts", "n_routed_experts")
    total = config.integer(config.first(*names), default)
    chosen = config.integer("num_experts_per_tok", top_k)
    if chosen > total:
        raise config.refuse("num_experts_per_tok", chosen, f"at most the number of experts ({total})")
    return Experts(total, chosen)


def mixtral(config: HfConfig, tied: bool) -> Shape:
    """Mixtral: every layer is MoE; a ``sliding_window``, where stated, holds for every layer."""
    hidden = config.integer("hidden_size")
    shape = windowed(heads_of(config, kv_default=8), model_window(config))
    experts = experts_of(config, default=8, top_k=2)
    layer = Layer(
        shape,
        parts.joined(
            parts.attention(hidden, shape),
            parts.routed_experts(hidden, config.integer("intermediate_size"), experts),
            parts.norms(hidden, "input_norm", "post_norm"),
        ),
        experts=experts,
    )
    return repeat(config.integer("num_hidden_layers"), lambda _: layer), outside(config, tied)


def sparse_layers(config: HfConfig) -> list[bool]:
    """Which layers are MoE: each ``decoder_sparse_step``-th, but those of ``mlp_only_layers`` (Qwen)."""
    layers = config.integer("num_hidden_layers")
    step = config.integer("decoder_sparse_step", 1, minimum=0)
    dense = config.items("mlp_only_layers") or []
    return [step > 0 and index not in dense and (index + 1) % step == 0 for index in range(layers)]


def qwen_moe(config: HfConfig, tied: bool, window: int | None, *, version: int) -> Shape:
    """Qwen2-MoE (biases, one shared expert) and Qwen3-MoE (q/k norms, none)."""
    hidden = config.integer("hidden_size")
    shape = windowed(heads_of(config, kv_default=4 if version == 3 else 16), window)
    experts = experts_of(config, "num_experts", "num_local_experts", default=128 if version == 3 else 60)
    bias = config.flag("qkv_bias", True) if version == 2 else config.flag("attention_bias", False)
    width = config.integer("moe_intermediate_size")
    sparse = sparse_layers(config)

    @cache
    def layer(is_sparse: bool) -> Layer:
        heads = parts.attention(
            hidden, shape, qkv_bias=bias, o_bias=bias and version == 3, qk_norm="head" if version == 3 else None
        )
        norms = parts.norms(hidden, "input_norm", "post_norm")
        if not is_sparse:
            return Layer(shape, parts.joined(heads, parts.mlp(hidden, config.integer("intermediate_size")), norms))
        shared = (
            parts.shared_expert(hidden, config.integer("shared_expert_intermediate_size"), gate=True)
            if version == 2
            else ()
        )
        routed = parts.routed_experts(hidden, width, experts)
        return Layer(shape, parts.joined(heads, routed, shared, norms), experts=experts)

    return repeat(len(sparse), lambda i: layer(sparse[i])), outside(config, tied)


def _asked_window(config: HfConfig) -> int | None:
    return model_window(config, 4096) if config.flag("use_sliding_window", False) else None


def qwen2_moe(config: HfConfig, tied: bool) -> Shape:
    """Qwen2-MoE. Its configuration class makes every second layer sliding where no types are stated, and vLLM's layers
    know no window of their own: such a mixture is full attention throughout."""
    types_stated = config.has("layer_types") or config.integer("num_hidden_layers") == 1
    return qwen_moe(config, tied, _asked_window(config) if types_stated else None, version=2)


def qwen3_moe(config: HfConfig, tied: bool) -> Shape:
    return qwen_moe(config, tied, _asked_window(config), version=3)


def qwen3_vl_moe(config: HfConfig, tied: bool) -> Shape:
    """The text model of Qwen3-VL-MoE: its configuration knows no ``use_sliding_window``."""
    return qwen_moe(config, tied, model_window(config), version=3)


def gpt_oss(config: HfConfig, tied: bool) -> Shape:
    """gpt-oss: even layers have a window of 128, odd ones are full (vLLM goes by parity, not by ``layer_types``:
    ``OAIAttention.__init__``); sinks, biases everywhere, biased experts."""
    hidden = config.integer("hidden_size", 2880)
    full = heads_of(config, kv_default=8, head_dim_default=64)
    local = windowed(full, config.optional_integer("sliding_window", 128, minimum=0))
    experts = experts_of(config, "num_local_experts", "num_experts", default=128, top_k=4)
    width = config.integer("intermediate_size", 2880)

    @cache
    def layer(is_local: bool) -> Layer:
        shape = local if is_local else full
        return Layer(
            shape,
            parts.joined(
                parts.attention(hidden, shape, qkv_bias=True, o_bias=True, sinks=True),
                parts.routed_experts(hidden, width, experts, biases=True),
                parts.norms(hidden, "input_norm", "post_norm"),
            ),
            experts=experts,
        )

    return repeat(config.integer("num_hidden_layers", 36), lambda i: layer(i % 2 == 0)), outside(config, tied)


def llama4(config: HfConfig, tied: bool) -> Shape:
    """Llama 4: each fourth layer is full and has no rope, the others attend within a chunk; MoE layers have one shared
    expert as wide as a routed one; dense layers are ``intermediate_size_mlp`` wide."""
    hidden = config.integer("hidden_size", 5120)
    layers = config.integer("num_hidden_layers", 48)
    full = heads_of(config, kv_default=8, head_dim_default=128)
    chunk = config.optional_integer("attention_chunk_size", 8192)
    local = windowed(full, chunk, "chunked")
    width = config.integer("intermediate_size", 8192)
    experts = experts_of(config, "num_local_experts", default=16, top_k=1)
    moe = _llama4_moe_layers(config, layers)
    kinds = _llama4_kinds(config, layers)
    bias = config.flag("attention_bias", False)

    @cache
    def layer(kind: str, is_moe: bool) -> Layer:
        shape = local if kind == "chunked" else full
        norms = parts.norms(hidden, "input_norm", "post_norm")
        heads = parts.attention(hidden, shape, qkv_bias=bias, o_bias=bias)
        if not is_moe:
            return Layer(
                shape, parts.joined(heads, parts.mlp(hidden, config.integer("intermediate_size_mlp", 16384)), norms)
            )
        routed = parts.routed_experts(hidden, width, experts)
        return Layer(shape, parts.joined(heads, routed, parts.shared_expert(hidden, width), norms), experts=experts)

    return repeat(layers, lambda i: layer(kinds[i], i in moe)), outside(config, tied)


def _llama4_moe_layers(config: HfConfig, layers: int) -> frozenset[int]:
    stated = config.items("moe_layers")
    if stated is not None:
        return frozenset(stated)
    step = config.integer("interleave_moe_layer_step", 1)
    return frozenset(range(step - 1, layers, step))


def _llama4_kinds(config: HfConfig, layers: int) -> list[str]:
    """vLLM builds a layer without rope as a full one (``Llama4Attention``: ``nope`` layers)."""
    stated = config.items("no_rope_layers")
    if stated:
        if len(stated) != layers:
            raise config.refuse("no_rope_layers", f"a list of {len(stated)}", f"one entry for each of {layers} layers")
        return ["chunked" if rope else "full" for rope in stated]
    interval = config.integer("no_rope_layer_interval", 4)
    return ["chunked" if (i + 1) % interval else "full" for i in range(layers)]


def deepseek(config: HfConfig, tied: bool) -> Shape:
    """DeepSeek V2/V3/R1 and Kimi K2: MLA; the first ``first_k_dense_replace`` layers are dense, the others MoE with
    shared experts. MTP layers are no part of the text model."""
    if config.has("index_topk"):
        raise Unsupported(
            f"{config.source}: sparse attention with an indexer cache (index_topk) is unknown",
            "DeepSeek V3.2 and later keep a second cache per layer",
        )
    hidden = config.integer("hidden_size")
    rank, rope = config.integer("kv_lora_rank", 512), config.integer("qk_rope_head_dim", 64)
    nope, v = config.integer("qk_nope_head_dim", 128), config.integer("v_head_dim", 128)
    heads = config.integer("num_attention_heads")
    shape = Attention("mla", heads, heads, nope + rope, v, kv_lora_rank=rank, qk_rope_head_dim=rope)
    q_rank = config.optional_integer("q_lora_rank", 1536)
    latent = parts.latent_attention(hidden, heads, q_rank, rank, nope, rope, v)
    return _first_dense(config, tied, shape, latent)


def glm4_moe(config: HfConfig, tied: bool) -> Shape:
    """GLM-4.5: grouped attention with biases (and q/k norms in the large one), MoE as DeepSeek's."""
    hidden = config.integer("hidden_size")
    shape = windowed(heads_of(config, kv_default=8, head_dim_default=128), model_window(config))
    heads = parts.attention(
        hidden,
        shape,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm="head" if config.flag("use_qk_norm", False) else None,
    )
    return _first_dense(config, tied, shape, heads)


def _first_dense(config: HfConfig, tied: bool, shape: Attention, heads: tuple[Weight, ...]) -> Shape:
    hidden = config.integer("hidden_size")
    width = config.integer("moe_intermediate_size")
    shared = config.integer("n_shared_experts", 0, minimum=0)
    experts = experts_of(config, "n_routed_experts", "num_local_experts", "num_experts")
    dense = config.integer("first_k_dense_replace", 0, minimum=0)
    frequency = config.integer("moe_layer_freq", 1)
    norms = parts.norms(hidden, "input_norm", "post_norm")

    @cache
    def layer(is_moe: bool) -> Layer:
        if not is_moe:
            return Layer(shape, parts.joined(heads, parts.mlp(hidden, config.integer("intermediate_size")), norms))
        routed = parts.routed_experts(hidden, width, experts)
        always = parts.shared_expert(hidden, width * shared) if shared else ()
        return Layer(shape, parts.joined(heads, routed, always, norms), experts=experts)

    layers = config.integer("num_hidden_layers")
    return repeat(layers, lambda i: layer(i >= dense and i % frequency == 0)), outside(config, tied)


def minimax_m2(config: HfConfig, tied: bool) -> Shape:
    """MiniMax-M2: full attention with q/k norms over the whole projection; every layer is MoE."""
    hidden = config.integer("hidden_size", 3072)
    shape = windowed(heads_of(config, kv_default=8, head_dim_default=128), model_window(config))
    if config.has("attn_type_list") and any(kind != 1 for kind in config.items("attn_type_list") or []):
        kinds = sorted(set(config.items("attn_type_list") or []))
        raise Unsupported(f"{config.source}: attention types {kinds} in attn_type_list are unknown", "known: 1 (full)")
    experts = experts_of(config, "num_local_experts", "num_experts", default=256, top_k=8)
    layer = Layer(
        shape,
        parts.joined(
            parts.attention(hidden, shape, qk_norm="full"),
            parts.routed_experts(hidden, config.integer("intermediate_size", 1536), experts),
            parts.norms(hidden, "input_norm", "post_norm"),
        ),
        experts=experts,
    )
    return repeat(config.integer("num_hidden_layers", 62), lambda _: layer), outside(config, tied)


def granite_moe(config: HfConfig, tied: bool) -> Shape:
    """Granite-MoE, with an MLP every token uses where ``shared_intermediate_size`` is set."""
    hidden = config.integer("hidden_size")
    shape = heads_of(config)
    experts = experts_of(config, "num_local_experts", default=8, top_k=2)
    shared = config.integer("shared_intermediate_size", 0, minimum=0)
    bias = config.flag("attention_bias", False)
    names = config.items("layer_types", config.integer("num_hidden_layers"))
    window = config.optional_integer("sliding_window", minimum=0)
    # without types a stated window holds for all (CacheConfig.sliding_window)
    kinds = layer_kinds(config, names) if names else ["sliding"] * config.integer("num_hidden_layers")

    @cache
    def layer(kind: str) -> Layer:
        own = windowed(shape, window) if kind == "sliding" else shape
        always = parts.shared_expert(hidden, shared) if shared else ()
        return Layer(
            own,
            parts.joined(
                parts.attention(hidden, own, qkv_bias=bias, o_bias=bias),
                parts.routed_experts(hidden, config.integer("intermediate_size"), experts),
                always,
                parts.norms(hidden, "input_norm", "post_norm"),
            ),
            experts=experts,
        )

    return repeat(len(kinds), lambda i: layer(kinds[i])), outside(config, tied)
