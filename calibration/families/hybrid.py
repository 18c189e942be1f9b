"""Models that keep a fixed recurrent state in some or all layers: Qwen3-Next, Qwen3.5, Granite-4 hybrid, Bamba,
Falcon-H1, Nemotron-H, Mamba-2.
"""

from __future__ import annotations

from functools import cache

from calibration.architecture import Experts, Layer, State
from calibration.errors import Unsupported
from calibration.families import parts
from calibration.families.dense import Shape, heads_of, layer_kinds, outside, repeat, windowed
from calibration.families.moe import experts_of, sparse_layers
from calibration.hf_config import HfConfig


def qwen3_next(config: HfConfig, tied: bool) -> Shape:
    """Qwen3-Next and Qwen3.5: three gated delta nets, then one gated attention with q/k norms and an output gate; MoE
    with a gated shared expert, or dense where the configuration has no experts.

    The Qwen3.5 configurations name the dtype of the recurrent state (``mamba_ssm_dtype``); Qwen3-Next leaves it to vLLM.
    """
    hidden = config.integer("hidden_size")
    layers = config.integer("num_hidden_layers")
    shape = heads_of(config, kv_default=2, head_dim_default=256)
    k_heads, v_heads = config.integer("linear_num_key_heads", 16), config.integer("linear_num_value_heads", 32)
    k_dim, v_dim = config.integer("linear_key_head_dim", 128), config.integer("linear_value_head_dim", 128)
    kernel = config.integer("linear_conv_kernel_dim", 4)
    channels = 2 * k_heads * k_dim + v_heads * v_dim
    state = State(
        "gated_delta_net", channels, kernel, v_heads, v_dim, k_dim, recurrent_dtype=config.text("mamba_ssm_dtype")
    )
    names = config.items("layer_types", layers)
    interval = config.integer("full_attention_interval", 4)
    kinds = layer_kinds(config, names) if names else ["linear" if (i + 1) % interval else "full" for i in range(layers)]
    has_experts = config.has("num_experts") and config.integer("num_experts", minimum=0) > 0
    sparse = sparse_layers(config) if has_experts else [False] * layers
    experts = experts_of(config, "num_experts", top_k=10) if has_experts else None
    mixer = parts.gated_delta_net(hidden, k_heads, v_heads, k_dim, v_dim, kernel)
    heads = parts.attention(
        hidden, shape, qkv_bias=config.flag("attention_bias", False), qk_norm="head", output_gate=True
    )

    @cache
    def layer(kind: str, is_sparse: bool) -> Layer:
        if is_sparse and experts is not None:
            feed_forward = parts.joined(
                parts.routed_experts(hidden, config.integer("moe_intermediate_size", 512), experts),
                parts.shared_expert(hidden, config.integer("shared_expert_intermediate_size", 512), gate=True),
            )
        else:
            feed_forward = parts.mlp(hidden, config.integer("intermediate_size"))
        linear = kind == "linear"
        return Layer(
            None if linear else shape,
            parts.joined(mixer if linear else heads, feed_forward, parts.norms(hidden, "input_norm", "post_norm")),
            state=state if linear else None,
            experts=experts if is_sparse else None,
        )

    return repeat(layers, lambda i: layer(kinds[i], sparse[i])), outside(config, tied)


def _mamba_head(config: HfConfig, key: str, channels: int, heads: int) -> int:
    """Head dim of a Mamba mixer; "auto" divides the channels."""
    if config.values.get(key) in (None, "auto"):
        if channels % heads:
            raise config.refuse("mamba_n_heads", heads, f"a divisor of {channels} channels")
        return channels // heads
    return config.integer(key)


def _mamba_d_keys(config: HfConfig, channels: int) -> State:
    """The Mamba-2 state under the ``mamba_d_*`` keys (Granite, Bamba, Falcon-H1)."""
    heads = config.integer("mamba_n_heads", 128)
    return State(
        "mamba2",
        channels,
        config.integer("mamba_d_conv", 4),
        heads,
        _mamba_head(config, "mamba_d_head", channels, heads),
        config.integer("mamba_d_state", 256),
        config.integer("mamba_n_groups", 1),
    )


def granite_hybrid(config: HfConfig, tied: bool) -> Shape:
    """Granite-4 hybrid: Mamba-2 or attention, then experts (where there are any) beside an MLP every token uses."""
    hidden = config.integer("hidden_size")
    layers = config.integer("num_hidden_layers")
    shape = heads_of(config)
    state = _mamba_d_keys(config, config.integer("mamba_expand", 2) * hidden)
    mixer = _mixer(config, hidden, state)
    names = config.items(config.first("layer_types", "layers_block_type"), layers)
    kinds = layer_kinds(config, names) if names else ["linear"] * layers
    total = config.integer("num_local_experts", 8, minimum=0)
    experts = Experts(total, config.integer("num_experts_per_tok", 2, minimum=0)) if total else None
    shared = config.integer("shared_intermediate_size", 1024, minimum=0)
    routed = parts.routed_experts(hidden, config.integer("intermediate_size"), experts) if experts else ()
    always = parts.shared_expert(hidden, shared) if experts else parts.mlp(hidden, shared)
    bias = config.flag("attention_bias", False)
    heads = parts.attention(hidden, shape, qkv_bias=bias, o_bias=bias)

    @cache
    def layer(kind: str) -> Layer:
        linear = kind == "linear"
        weights = parts.joined(
            mixer if linear else heads, routed, always if shared else (), parts.norms(hidden, "input_norm", "post_norm")
        )
        return Layer(None if linear else shape, weights, state=state if linear else None, experts=experts)

    return repeat(layers, lambda i: layer(kinds[i])), outside(config, tied)


def _mixer(
    config: HfConfig, hidden: int, state: State, norm: bool = True, out_bias: bool | None = None
) -> parts.Weights:
    return parts.mamba2_mixer(
        hidden,
        state,
        bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
        norm=norm,
        out_bias=out_bias,
    )


def bamba(config: HfConfig, tied: bool) -> Shape:
    """Bamba: Mamba-2 layers with attention at ``attn_layer_indices``, a gated MLP in each."""
    hidden = config.integer("hidden_size")
    layers = config.integer("num_hidden_layers")
    shape = heads_of(config, kv_default=8)
    state = _mamba_d_keys(config, config.integer("mamba_expand", 2) * hidden)
    mixer = _mixer(config, hidden, state)
    full = frozenset(config.items("attn_layer_indices") or [])
    feed_forward = parts.mlp(hidden, config.integer("intermediate_size"), bias=config.flag("mlp_bias", False))
    bias = config.flag("attention_bias", False)
    heads = parts.attention(hidden, shape, qkv_bias=bias, o_bias=bias)

    @cache
    def layer(is_full: bool) -> Layer:
        weights = parts.joined(
            heads if is_full else mixer, feed_forward, parts.norms(hidden, "input_norm", "post_norm")
        )
        return Layer(shape if is_full else None, weights, state=None if is_full else state)

    return repeat(layers, lambda i: layer(i in full)), outside(config, tied)


def falcon_h1(config: HfConfig, tied: bool) -> Shape:
    """Falcon-H1: attention and a Mamba-2 mixer side by side in every layer, then a gated MLP."""
    hidden = config.integer("hidden_size")
    shape = heads_of(config, kv_default=8)
    channels = (
        config.integer("mamba_d_ssm", 1024)
        if "mamba_d_ssm" not in config.values or config.has("mamba_d_ssm")
        else config.integer("mamba_expand", 2) * hidden
    )
    state = _mamba_d_keys(config, channels)
    mixer = _mixer(
        config,
        hidden,
        state,
        norm=config.flag("mamba_rms_norm", False),
        out_bias=config.flag("projectors_bias", False),
    )
    bias = config.flag("attention_bias", False)
    layer = Layer(
        shape,
        parts.joined(
            parts.attention(hidden, shape, qkv_bias=bias, o_bias=bias),
            mixer,
            parts.mlp(hidden, config.integer("intermediate_size"), bias=config.flag("mlp_bias", False)),
            parts.norms(hidden, "input_norm", "pre_feedforward_norm"),
        ),
        state=state,
    )
    return repeat(config.integer("num_hidden_layers"), lambda _: layer), outside(config, tied)


#: Nemotron-H's one-letter layer pattern
_PATTERN = {"M": "linear", "*": "full", "-": "mlp", "E": "moe"}


def _nemotron_kinds(config: HfConfig) -> list[str]:
    pattern = config.text("hybrid_override_pattern")
    if pattern is not None:
        unknown = sorted(set(pattern) - set(_PATTERN))
        if unknown:
            raise Unsupported(
                f"{config.source}: layer type {', '.join(unknown)} in hybrid_override_pattern is unknown",
                f"known: {' '.join(_PATTERN)}",
            )
        return [_PATTERN[letter] for letter in pattern]
    names = config.items(config.first("layers_block_type", "layer_types"))
    if not names:
        raise config.refuse("layers_block_type", names, "the type of each layer, or hybrid_override_pattern")
    return layer_kinds(config, names)


def nemotron_h(config: HfConfig, tied: bool) -> Shape:
    """Nemotron-H: each layer is one thing only: a Mamba-2 mixer, an attention, an MLP or experts without gate (relu²);
    one norm a layer. vLLM keeps the recurrent state in fp32 unless the configuration says otherwise."""
    hidden = config.integer("hidden_size")
    shape = windowed(
        heads_of(config, kv_default=8, head_dim_default=128), config.optional_integer("sliding_window", minimum=0)
    )
    heads, dim = config.integer("mamba_num_heads", 128), config.integer("mamba_head_dim", 64)
    state = State(
        "mamba2",
        heads * dim,
        config.integer(config.first("conv_kernel", "mamba_d_conv"), 4),
        heads,
        dim,
        config.integer("ssm_state_size", 128),
        config.integer(config.first("n_groups", "mamba_n_groups"), 8),
        recurrent_dtype=config.text("mamba_ssm_cache_dtype", "float32"),
    )
    mlp_bias = config.flag("mlp_bias", False)
    bias = config.flag("attention_bias", False)
    mixer = _nemotron_mixer(config, hidden, state)
    attention = parts.attention(hidden, shape, qkv_bias=bias, o_bias=bias)
    norm = parts.norms(hidden, "norm")

    @cache
    def layer(kind: str) -> Layer:
        if kind == "linear":
            return Layer(None, parts.joined(mixer, norm), state=state)
        if kind == "full":
            return Layer(shape, parts.joined(attention, norm))
        if kind == "mlp":
            width = config.integer("intermediate_size", 21504)
            return Layer(None, parts.joined(parts.mlp(hidden, width, gated=False, bias=mlp_bias), norm))
        if kind == "moe":
            weights, experts = _nemotron_moe(config, hidden)
            return Layer(None, parts.joined(weights, norm), experts=experts)
        raise Unsupported(
            f"{config.source}: layer type {kind!r} is unknown in Nemotron-H", "known: linear, full, mlp, moe"
        )

    kinds = _nemotron_kinds(config)
    return repeat(len(kinds), lambda i: layer(kinds[i])), outside(config, tied)


def _nemotron_mixer(config: HfConfig, hidden: int, state: State) -> parts.Weights:
    bias = config.flag("use_bias", False)
    return parts.mamba2_mixer(hidden, state, bias=bias, conv_bias=config.flag("use_conv_bias", True), norm=True)


def _nemotron_moe(config: HfConfig, hidden: int) -> tuple[parts.Weights, Experts]:
    if config.has("moe_latent_size"):
        raise Unsupported(f"{config.source}: experts in a latent space (moe_latent_size) are unknown")
    experts = experts_of(config, "n_routed_experts", "num_local_experts", default=8, top_k=2)
    shared = config.integer("n_shared_experts", 1, minimum=0)
    width = config.integer("moe_shared_expert_intermediate_size", 7688) * shared
    always = parts.shared_expert(hidden, width, gated=False) if shared else ()
    routed = parts.routed_experts(hidden, config.integer("moe_intermediate_size", 7688), experts, gated=False)
    return parts.joined(routed, always), experts


def mamba2(config: HfConfig, tied: bool) -> Shape:
    """Mamba-2 alone: one mixer and one norm a layer, no attention. The convolution runs over ``intermediate_size`` where
    the configuration has one, as vLLM's ``Mamba2DecoderLayer`` builds it."""
    hidden = config.integer("hidden_size")
    channels = config.integer("intermediate_size", config.integer("expand", 2) * hidden)
    heads = config.integer("num_heads", 128)
    state = State(
        "mamba2",
        channels,
        config.integer("conv_kernel", 4),
        heads,
        config.integer("head_dim", 64),
        config.integer("state_size", 128),
        config.integer("n_groups", 8),
    )
    mixer = parts.mamba2_mixer(
        hidden, state, bias=config.flag("use_bias", False), conv_bias=config.flag("use_conv_bias", True), norm=True
    )
    layer = Layer(None, parts.joined(mixer, parts.norms(hidden, "norm")), state=state)
    return repeat(config.integer("num_hidden_layers"), lambda _: layer), outside(config, tied)
