"""Bytes of weights: of the checkpoint, and on each GPU under tensor, pipeline, expert and data parallelism.

What vLLM 0.32 splits and what it copies (layers/linear.py, vocab_parallel_embedding.py, fused_moe/config.py):

* over TP: query, key/value and output projections, MLPs, shared experts, mixers; embedding and lm_head over the
  vocabulary, padded to a multiple of 64;
* over the KV heads: key and value projections, which are copied where ranks outnumber heads;
* routed experts over all ``tp * dp`` ranks: whole experts with expert parallelism, slices of each without it;
* copied on every rank: norms, routers, the down-projections of MLA, biases of row-parallel projections;
* over PP: layers by stage; the embedding lies on the first stage, lm_head and final norm on the last (a tied embedding
  on both).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from calibration.architecture import Architecture, Layer, Weight
from calibration.deployment import Deployment, pipeline_stages
from calibration.formats import WeightFormat

#: vLLM pads the vocabulary to this (VocabParallelEmbedding, DEFAULT_VOCAB_PADDING_SIZE)
_VOCAB_PADDING = 64


class StageWeights(NamedTuple):
    """Bytes of weights on one GPU of a pipeline stage. ``experts_bytes`` are those of routed experts, ``replicated_bytes``
    those that every tensor-parallel rank holds whole."""

    layers: int
    total_bytes: int
    experts_bytes: int
    replicated_bytes: int


def bytes_on_checkpoint(weight: Weight, fmt: WeightFormat, dtype_bytes: int) -> int:
    """Bytes of one weight as stored: in its format where that covers it, else in the model's dtype."""
    return fmt.bytes_of(weight) if fmt.covers(weight) else weight.params * dtype_bytes


def text_bytes(architecture: Architecture, fmt: WeightFormat, dtype_bytes: int) -> int:
    """Bytes of the text model in this format: no vision tower, no MTP layer."""
    layers = sum(bytes_on_checkpoint(w, fmt, dtype_bytes) for layer in architecture.layers for w in layer.weights)
    return layers + sum(bytes_on_checkpoint(w, fmt, dtype_bytes) for w in architecture.weights)


def weights_by_stage(deployment: Deployment) -> list[StageWeights]:
    """Bytes of weights on one GPU of each pipeline stage, first to last."""
    architecture = deployment.architecture
    stages = pipeline_stages(architecture.num_layers, deployment.pp)
    found = []
    start = 0
    for index, count in enumerate(stages):
        layers = architecture.layers[start : start + count]
        outer = _outer_weights(deployment, first=index == 0, last=index == deployment.pp - 1)
        found.append(_stage(deployment, layers, outer))
        start += count
    return found


def _outer_weights(deployment: Deployment, *, first: bool, last: bool) -> list[Weight]:
    """Weights outside the layers that a stage holds. A multimodal model's tower runs on the first stage; MTP layers are
    loaded only for speculative decoding."""
    architecture = deployment.architecture
    kept: list[Weight] = []
    for weight in architecture.weights:
        is_embedding = weight.role == "embedding"
        if (
            (is_embedding and first)
            or (not is_embedding and last)
            or (is_embedding and last and architecture.tie_word_embeddings)
        ):
            kept.append(weight)
    vision = [weight for weight in architecture.extra_weights if weight.role == "vision"]
    return kept + (vision if first else [])


def _stage(deployment: Deployment, layers: Iterable[Layer], outer: Iterable[Weight]) -> StageWeights:
    total = experts = replicated = count = 0
    # equal layers are the same object: each is counted once and multiplied
    distinct: dict[int, tuple[Layer, int]] = {}
    for layer in layers:
        count += 1
        known = distinct.get(id(layer))
        distinct[id(layer)] = (layer, 1 if known is None else known[1] + 1)
    for layer, times in distinct.values():
        for weight in layer.weights:
            size = times * bytes_on_gpu(deployment, weight, layer)
            total += size
            experts += size if weight.role == "expert" else 0
            replicated += size if weight.shard == "replicated" else 0
        total += times * _absorbed_bytes(deployment, layer)
    for weight in outer:
        size = bytes_on_gpu(deployment, weight, None)
        total += size
        replicated += size if weight.shard == "replicated" else 0
    return StageWeights(count, total, experts, replicated)


def bytes_on_gpu(deployment: Deployment, weight: Weight, layer: Layer | None) -> int:
    """Bytes of one weight on one tensor-parallel rank."""
    whole = bytes_on_checkpoint(weight, deployment.weights, deployment.dtype_bytes)
    if weight.shard == "replicated":
        return whole
    if weight.shard == "experts":
        return ceil(whole * _expert_share(deployment, layer) * _expert_padding(deployment))
    if weight.shard == "vocab":
        padded = -(-weight.rows // _VOCAB_PADDING) * _VOCAB_PADDING
        return ceil(whole * padded / weight.rows / deployment.tp)
    if weight.shard == "kv_heads" and layer is not None and layer.attention is not None:
        attention = layer.attention
        return ceil(whole * attention.kv_heads_per_gpu(deployment.tp) / attention.kv_heads)
    return ceil(whole / deployment.tp)


def _expert_share(deployment: Deployment, layer: Layer | None) -> float:
    """Part of the routed experts on one rank: whole experts under expert parallelism, else an equal slice of each over
    all ``tp * dp`` ranks (``FusedMoEParallelConfig.make`` flattens them)."""
    ranks = deployment.tp * deployment.dp
    if not deployment.expert_parallel or layer is None or layer.experts is None:
        return 1 / ranks
    return -(-layer.experts.total // ranks) / layer.experts.total


def _expert_padding(deployment: Deployment) -> float:
    """How much larger experts are once loaded, where a server was seen to pad them (gpt-oss on MXFP4 kernels)."""
    architecture, fmt = deployment.architecture, deployment.weights
    seen = architecture.loaded_bytes.get(fmt.name)
    if seen is None:
        return 1.0
    experts = sum(
        bytes_on_checkpoint(w, fmt, deployment.dtype_bytes)
        for layer in architecture.layers
        for w in layer.weights
        if w.role == "expert"
    )
    return (seen[0] - (text_bytes(architecture, fmt, deployment.dtype_bytes) - experts)) / experts


def _absorbed_bytes(deployment: Deployment, layer: Layer) -> int:
    """MLA keeps a second, 16-bit copy of the up-projection for decoding, where the stored one is quantised (``W_UK_T`` and
    ``W_UV``, mla_attention.py ``process_weights_after_loading``)."""
    if layer.attention is None or layer.attention.kind != "mla":
        return 0
    quantised = [w for w in layer.weights if w.name == "kv_b_proj" and deployment.weights.bits_per_weight < 16]
    return sum(w.params * deployment.dtype_bytes // deployment.tp for w in quantised if deployment.weights.covers(w))
