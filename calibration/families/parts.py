"""The parts layers are made of, each as its list of weights. Sizes are those of the checkpoints: every part is held
against published parameter totals (tests/calibration/test_catalog.py) and against the transformers models.

Symbols: h hidden, q heads, kv heads, d head dim, f FFN width, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable

from calibration.architecture import Attention, Experts, Role, Shard, State, Weight

Weights = tuple[Weight, ...]


def vector(name: str, size: int, role: Role = "norm", shard: Shard = "replicated", count: int = 1) -> Weight:
    return Weight(name, size, 1, role, shard, count)


def norms(hidden: int, *names: str) -> Weights:
    """RMS norms over the hidden size: one vector each, whole on every rank."""
    return tuple(vector(name, hidden) for name in names)


def embedding(vocab: int, hidden: int, tied: bool) -> Weights:
    """Input embedding and lm_head (none where tied), both split over the vocabulary, and the final norm."""
    head = () if tied else (Weight("lm_head", vocab, hidden, "lm_head", "vocab"),)
    return (Weight("embed_tokens", vocab, hidden, "embedding", "vocab"), *head, vector("norm", hidden))


def attention(
    hidden: int,
    shape: Attention,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: str | None = None,
    sinks: bool = False,
    output_gate: bool = False,
) -> Weights:
    """Multi-head, grouped or multi-query attention.

    ``h*q*d (twice with an output gate) + 2*h*kv*d + q*d*h``, biases, and q/k norms per head (``2d``) or over the whole
    projection (``(q+kv)*d``, MiniMax). Query and output are split over ranks, key and value over kv heads.
    """
    q, kv, d = shape.heads, shape.kv_heads, shape.head_dim
    weights = [
        Weight("q_proj", q * d * (2 if output_gate else 1), hidden, "attention", "tp"),
        Weight("k_proj", kv * d, hidden, "attention", "kv_heads"),
        Weight("v_proj", kv * shape.v_head_dim, hidden, "attention", "kv_heads"),
        Weight("o_proj", hidden, q * shape.v_head_dim, "attention", "tp"),
    ]
    if qkv_bias:
        weights += [vector("q_bias", q * d, "attention", "tp"), vector("kv_bias", 2 * kv * d, "attention", "kv_heads")]
    if o_bias:
        weights.append(vector("o_bias", hidden, "attention"))
    if sinks:
        weights.append(vector("sinks", q, "attention", "tp"))
    if qk_norm == "head":
        weights.append(vector("qk_norm", 2 * d, "attention"))
    elif qk_norm == "full":
        weights += [vector("q_norm", q * d, "attention", "tp"), vector("k_norm", kv * d, "attention", "kv_heads")]
    return tuple(weights)


def latent_attention(
    hidden: int, heads: int, q_rank: int | None, kv_rank: int, nope: int, rope: int, v: int
) -> Weights:
    """Multi-head latent attention (DeepSeek). The down-projections to the latents are whole on every rank."""
    if q_rank is None:
        query: Weights = (Weight("q_proj", heads * (nope + rope), hidden, "attention", "tp"),)
    else:
        query = (
            Weight("q_a_proj", q_rank, hidden, "attention", "replicated"),
            vector("q_a_norm", q_rank, "attention"),
            Weight("q_b_proj", heads * (nope + rope), q_rank, "attention", "tp"),
        )
    return (
        *query,
        Weight("kv_a_proj", kv_rank + rope, hidden, "attention", "replicated"),
        vector("kv_a_norm", kv_rank, "attention"),
        Weight("kv_b_proj", heads * (nope + v), kv_rank, "attention", "tp"),
        Weight("o_proj", hidden, heads * v, "attention", "tp"),
    )


def mlp(hidden: int, width: int, *, gated: bool = True, bias: bool = False, role: Role = "mlp") -> Weights:
    """A dense MLP: gate and up (or up alone) and down; 3*h*f, or 2*h*f where it has no gate."""
    ups = ("gate_proj", "up_proj") if gated else ("up_proj",)
    weights = [Weight(name, width, hidden, role, "tp") for name in ups]
    weights.append(Weight("down_proj", hidden, width, role, "tp"))
    if bias:
        weights += [vector("up_bias", width * len(ups), role, "tp"), vector("down_bias", hidden, role)]
    return tuple(weights)


def routed_experts(hidden: int, width: int, experts: Experts, *, gated: bool = True, biases: bool = False) -> Weights:
    """The router (whole on every rank) and E gated experts; gpt-oss adds biases to the router and to each expert."""
    ups = ("gate_proj", "up_proj") if gated else ("up_proj",)
    weights = [Weight("router", experts.total, hidden, "router", "replicated")]
    weights += [Weight(name, width, hidden, "expert", "experts", experts.total) for name in ups]
    weights.append(Weight("down_proj", hidden, width, "expert", "experts", experts.total))
    if biases:
        weights += [
            vector("router_bias", experts.total, "router"),
            vector("up_bias", len(ups) * width, "expert", "experts", experts.total),
            vector("down_bias", hidden, "expert", "experts", experts.total),
        ]
    return tuple(weights)


def shared_expert(hidden: int, width: int, *, gated: bool = True, gate: bool = False) -> Weights:
    """An expert every token uses; ``gate``: its own scalar gate (Qwen)."""
    gates = (Weight("shared_expert_gate", 1, hidden, "router", "replicated"),) if gate else ()
    return (*mlp(hidden, width, gated=gated, role="shared_expert"), *gates)


def mamba2_mixer(
    hidden: int, state: State, *, bias: bool, conv_bias: bool, norm: bool, out_bias: bool | None = None
) -> Weights:
    """A Mamba-2 mixer: one projection to gate, x, B, C and dt, a convolution over x, B and C, per-head A, D and dt
    bias, a gated norm, and the projection back (whose bias is the first one's, unless told)."""
    groups = 2 * state.groups * state.state_size
    conv = state.channels + groups
    projected = state.channels + conv + state.heads
    return (
        Weight("in_proj", projected, hidden, "mixer", "tp"),
        *((vector("in_proj_bias", projected, "mixer", "tp"),) if bias else ()),
        vector("conv1d", conv * state.conv_kernel, "mixer", "tp"),
        *((vector("conv1d_bias", conv, "mixer", "tp"),) if conv_bias else ()),
        vector("a_d_dt_bias", 3 * state.heads, "mixer", "tp"),
        *((vector("mixer_norm", state.channels, "mixer", "tp"),) if norm else ()),
        Weight("out_proj", hidden, state.channels, "mixer", "tp"),
        *((vector("out_proj_bias", hidden, "mixer"),) if (bias if out_bias is None else out_bias) else ()),
    )


def gated_delta_net(hidden: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int, conv_kernel: int) -> Weights:
    """A gated delta net (Qwen3-Next, Qwen3.5): ``h*(2K+2V) + 2*h*Hv`` in, convolution over q, k, v, ``2*Hv`` for decay
    and dt bias, a per-head norm, ``V*h`` out; K = Hk*dk, V = Hv*dv."""
    key, value = k_heads * k_dim, v_heads * v_dim
    return (
        Weight("in_proj_qkvz", 2 * key + 2 * value, hidden, "mixer", "tp"),
        Weight("in_proj_ba", 2 * v_heads, hidden, "mixer", "tp"),
        vector("conv1d", (2 * key + value) * conv_kernel, "mixer", "tp"),
        vector("a_log_dt_bias", 2 * v_heads, "mixer", "tp"),
        vector("mixer_norm", v_dim, "mixer"),
        Weight("out_proj", hidden, value, "mixer", "tp"),
    )


def joined(*parts: Iterable[Weight]) -> Weights:
    """All weights of several parts, in order."""
    return tuple(weight for part in parts for weight in part)
