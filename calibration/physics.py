"""What one engine step moves and computes on one GPU: bytes, operations, layers. Amounts, not times.

Everything is per rank of one replica; a pipeline's stages follow one another, so a token meets all layers and all their
weights whatever ``pp`` is. Prices (seconds a byte, seconds a layer) are the business of :mod:`calibration.priors`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from calibration.architecture import Attention, Experts, Layer, Weight
from calibration.deployment import Deployment
from calibration.errors import Unsupported
from calibration.gpu import Gpu
from calibration.kv_cache import state_bytes, token_bytes
from calibration.weights import bytes_on_gpu

#: dense rate that a weight format computes in, best first; the first one the device has is taken. Weight-only formats
#: (INT4) are unpacked to 16 bit; gpt-oss runs its MXFP4 experts with MXFP8 activations where there are units for it.
_COMPUTE: dict[str, tuple[str, ...]] = {
    "fp8": ("fp8", "bf16", "fp16"),
    "fp8-block": ("fp8", "bf16", "fp16"),
    "int8": ("int8", "bf16", "fp16"),
    "nvfp4": ("fp4", "bf16", "fp16"),
    "mxfp4": ("fp4", "bf16", "fp16"),
}
_SIXTEEN_BIT = ("bf16", "fp16")


class ExpertLayers(NamedTuple):
    """Layers with the same routed experts: bytes on one rank of all experts of all these layers."""

    layers: int
    total: int
    per_token: int
    bytes: float


class AttentionLayers(NamedTuple):
    """Layers with the same attention on one rank: cache bytes a token and operations a pair of tokens, summed."""

    layers: int
    window: int | None
    kv_bytes_per_token: float
    flops_per_token_pair: float

    def seen(self, context: float) -> float:
        """Tokens a query at this context looks at."""
        return context if self.window is None else min(context, float(self.window))


class Physics(NamedTuple):
    """Amounts of one step on one rank. Data-parallel replicas share the experts, and so the tokens that choose them:
    ``expert_replicas`` of them. ``unpacks_experts``: the device has no units for their format, they are unpacked to 16 bit.

    ``weight_bytes`` is read in every step: all but the routed experts and the input embedding, which is a look-up.
    ``compute_s_per_token`` and ``expert_compute_s_per_token`` are at the device's dense peak for the format, without
    the lm_head: a prompt needs the logits of its last token only. ``activation_bytes_per_token`` is one pass over the
    residual stream of every layer, held whole on every rank; ``reduced_bytes_per_token`` what two ring all-reduces a
    layer send from one rank.
    """

    layers: int
    moe_layers: int
    mla_layers: int
    fp8_expert_layers: int
    weight_bytes: float
    experts: tuple[ExpertLayers, ...]
    expert_replicas: int
    unpacks_experts: bool
    attention: tuple[AttentionLayers, ...]
    state_bytes_per_sequence: float
    compute_s_per_token: float
    expert_compute_s_per_token: float
    activation_bytes_per_token: float
    reduced_bytes_per_token: float
    bandwidth_bytes_per_s: float
    attention_flops_per_s: float
    link_bytes_per_s: float

    @property
    def expert_bytes(self) -> float:
        """Bytes of all routed experts on one rank."""
        return sum(group.bytes for group in self.experts)

    def expert_bytes_hit(self, tokens: float) -> float:
        """Expected bytes of the experts that ``tokens`` tokens of one replica's step choose."""
        together = tokens * self.expert_replicas
        hit = 0.0
        for group in self.experts:
            hit += group.bytes * expected_share(group.total, group.per_token, together)
        return hit

    def kv_bytes(self, sequences: float, kv_tokens: float) -> float:
        """Cache bytes a decode step reads for ``sequences`` running sequences that hold ``kv_tokens`` together; a
        window reads no further back than it is long."""
        if sequences <= 0:
            return 0.0
        context = kv_tokens / sequences
        read = 0.0
        for group in self.attention:
            read += group.kv_bytes_per_token * group.seen(context)
        return sequences * (read + 2 * self.state_bytes_per_sequence)

    def attention_flops(self, tokens: float, context: float) -> float:
        """Operations of a prompt's attention to itself: ``tokens`` queries, each over the mean ``context`` before it."""
        operations = 0.0
        for group in self.attention:
            operations += group.flops_per_token_pair * group.seen(context)
        return tokens * operations


def expected_share(total: int, per_token: int, tokens: float) -> float:
    """Expected share of ``total`` experts that at least one of ``tokens`` tokens chooses, each taking ``per_token`` at
    random: 1 - (1 - k/E)^tokens. Real routing is uneven, so a little less; the expert factor holds the difference."""
    return 1.0 - (1.0 - per_token / total) ** tokens if tokens > 0 else 0.0


def measure(deployment: Deployment, gpu: Gpu | None = None) -> Physics:
    """The amounts of this deployment.

    Args:
        gpu: the device, where the deployment names none (CPU).

    Raises:
        Unsupported: neither names a device.
    """
    device = deployment.gpu or gpu
    if device is None:
        raise Unsupported("no step time without a device: its bandwidth and rates are not known", "name one with --gpu")
    architecture, tp = deployment.architecture, deployment.tp
    peak = _rate(device, _SIXTEEN_BIT)
    kinds = Counter(layer.experts for layer in architecture.layers if layer.experts is not None)
    experts = tuple(_experts(deployment, kind, kinds[kind]) for kind in kinds)
    fp8 = deployment.weights.name.startswith("fp8") and "expert" in deployment.weights.roles
    dense, routed = _compute_s_per_token(deployment, device)
    residual = architecture.num_layers * architecture.hidden_size * deployment.dtype_bytes
    return Physics(
        layers=architecture.num_layers,
        moe_layers=sum(kinds.values()),
        mla_layers=architecture.count("mla"),
        fp8_expert_layers=sum(kinds.values()) if fp8 else 0,
        weight_bytes=float(_bytes_read_each_step(deployment)),
        experts=experts,
        expert_replicas=deployment.dp,
        unpacks_experts=_is_unpacked(deployment, device),
        attention=tuple(_attention(deployment, kind, n) for kind, n in Counter(architecture.attention_layers).items()),
        state_bytes_per_sequence=float(sum(state_bytes(deployment, state) for state in architecture.state_layers)),
        compute_s_per_token=dense,
        expert_compute_s_per_token=routed,
        activation_bytes_per_token=float(residual),
        reduced_bytes_per_token=2 * 2 * (tp - 1) / tp * residual,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        attention_flops_per_s=peak,
        link_bytes_per_s=device.link_bytes_per_s,
    )


def _rate(device: Gpu, formats: tuple[str, ...]) -> float:
    """The first of these dense rates that the device has, operations per second."""
    for name in formats:
        if name in device.flops_per_s:
            return device.flops_per_s[name]
    raise Unsupported(f"gpu = {device.name!r} has none of the rates {', '.join(formats)}")


def _is_unpacked(deployment: Deployment, device: Gpu) -> bool:
    """Are the experts stored in fewer bits than the device computes them in?"""
    fmt = deployment.weights
    native = any(name in device.flops_per_s for name in _COMPUTE.get(fmt.name, ()) if name not in _SIXTEEN_BIT)
    return "expert" in fmt.roles and fmt.bits_per_weight < 16 and not native


def _layer_weights(deployment: Deployment) -> Iterator[tuple[Weight, int, Layer]]:
    """Every weight inside the layers, once for equal layers, with the number of such layers and the layer."""
    layers: Counter[int] = Counter(id(layer) for layer in deployment.architecture.layers)
    distinct: dict[int, Layer] = {id(layer): layer for layer in deployment.architecture.layers}
    for key, layer in distinct.items():
        for weight in layer.weights:
            yield weight, layers[key], layer


def _bytes_read_each_step(deployment: Deployment) -> int:
    """Bytes on one rank of the weights of one pass, but for the routed experts; a tied embedding is read for the logits."""
    inside = sum(
        layers * bytes_on_gpu(deployment, weight, layer)
        for weight, layers, layer in _layer_weights(deployment)
        if weight.role != "expert"
    )
    tied = deployment.architecture.tie_word_embeddings
    outside = (w for w in deployment.architecture.weights if tied or w.role != "embedding")
    return inside + sum(bytes_on_gpu(deployment, weight, None) for weight in outside)


def _experts(deployment: Deployment, kind: Experts, layers: int) -> ExpertLayers:
    total = sum(
        count * bytes_on_gpu(deployment, weight, layer)
        for weight, count, layer in _layer_weights(deployment)
        if weight.role == "expert" and layer.experts == kind
    )
    return ExpertLayers(layers, kind.total, kind.per_token, float(total))


def _attention(deployment: Deployment, attention: Attention, layers: int) -> AttentionLayers:
    flops = 2.0 * attention.heads * (attention.head_dim + attention.v_head_dim) / deployment.tp
    window = attention.window if attention.kind in ("sliding", "chunked") else None
    return AttentionLayers(layers, window, layers * float(token_bytes(deployment, attention)), layers * flops)


def _compute_s_per_token(deployment: Deployment, device: Gpu) -> tuple[float, float]:
    """(dense, routed) seconds of one token's matrix products at peak, on one of ``tp`` ranks, without the lm_head."""
    covered = _rate(device, _COMPUTE.get(deployment.weights.name, _SIXTEEN_BIT))
    plain = _rate(device, _SIXTEEN_BIT)
    dense = routed = 0.0
    for weight, layers, layer in _layer_weights(deployment):
        if not weight.is_matrix:
            continue
        rate = covered if deployment.weights.covers(weight) else plain
        seconds = 2.0 * weight.params * layers / rate / deployment.tp
        if weight.role == "expert" and layer.experts is not None:
            routed += seconds * layer.experts.per_token / layer.experts.total
        else:
            dense += seconds
    return dense, routed
