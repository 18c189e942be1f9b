"""What a GPU holds beside weights and KV cache, as a law with its evidence.

vLLM profiles one pass of ``max_num_batched_tokens`` tokens and a sampler call over ``max_num_seqs`` rows, and keeps for
the KV cache what is left of ``gpu_memory_utilization * total`` (0.32 ``gpu_worker.py``, ``determine_available_memory``).
The terms, each of one cause:

* **sampler peak**: 38 bytes for each logit of ``max_num_seqs x vocab``: the 16-bit logits, their fp32 copy, and the
  sort of top-k/top-p (values, 64-bit indices, probabilities). Divided out of five H100 printouts of 0.11
  (llm-d-planner) after the next term, 37.5 to 38.2; the "5.5 GiB, 8 for MoE" of other tools is this product at
  ``max_num_seqs`` = 1,024.
* **hidden states**: two 16-bit tensors of ``max_num_batched_tokens x hidden`` that live through the sampler call. Seen
  as the difference of two runs of one model at 1,024 and 2,048 tokens: 14.3 KB a token for hidden 3,584.
* **forward peak**, where it exceeds the sampler's: the widest intermediate of a layer.
* **rotary table**: ``max_position_embeddings`` rows in 16 bits; 2.5 GiB for a model of ten million positions.
* **runtime**: CUDA context, NCCL and the custom all-reduce: 0.13 GiB on one GPU, 0.55 on each of several (eight
  printouts, llm-d-planner).
* **CUDA graphs**: from 0.21 on the profiler sets an estimate aside: 0.64 and 0.78 GiB were printed for the full set of
  capture sizes, 0.2 to 2 in fourteen public logs.
"""

from __future__ import annotations

from typing import NamedTuple

from calibration import vllm_defaults
from calibration.architecture import Layer
from calibration.deployment import Deployment

GIB = 1 << 30
SAMPLER_BYTES_PER_LOGIT = 38
RUNTIME_ONE_GPU_BYTES = int(0.13 * GIB)
RUNTIME_SEVERAL_GPUS_BYTES = int(0.55 * GIB)
CUDA_GRAPH_BYTES = int(0.7 * GIB)
#: what the law leaves unexplained on eleven servers, and how far the estimate for graphs was seen to range
SPREAD_BYTES = int(0.4 * GIB)
CUDA_GRAPH_RANGE_BYTES = (int(0.2 * GIB), int(2.0 * GIB))


class Overhead(NamedTuple):
    """Bytes on one GPU of a pipeline stage, by cause. The peak is the larger of sampler and forward pass."""

    sampler_bytes: int
    forward_bytes: int
    hidden_bytes: int
    rotary_bytes: int
    runtime_bytes: int
    cuda_graph_bytes: int
    #: what a server showed beyond these terms; None where they stand alone, as a prior
    correction_bytes: int | None = None

    @property
    def activation_bytes(self) -> int:
        """Peak of the profiled pass."""
        return max(self.sampler_bytes, self.forward_bytes) + self.hidden_bytes

    @property
    def total_bytes(self) -> int:
        prior = self.activation_bytes + self.rotary_bytes + self.runtime_bytes + self.cuda_graph_bytes
        return prior + (self.correction_bytes or 0)

    @property
    def low_bytes(self) -> int:
        """The total less its spread; none where a server showed it."""
        if self.correction_bytes is not None:
            return self.total_bytes
        graphs = CUDA_GRAPH_RANGE_BYTES[0] if self.cuda_graph_bytes else 0
        return max(0, self.total_bytes - SPREAD_BYTES - self.cuda_graph_bytes + graphs)

    @property
    def high_bytes(self) -> int:
        if self.correction_bytes is not None:
            return self.total_bytes
        graphs = CUDA_GRAPH_RANGE_BYTES[1] if self.cuda_graph_bytes else 0
        return self.total_bytes + SPREAD_BYTES - self.cuda_graph_bytes + graphs


def overhead_by_stage(deployment: Deployment) -> list[Overhead]:
    """Overhead on one GPU of each pipeline stage, first to last; the sampler runs on the last."""
    return [_overhead(deployment, is_last=stage == deployment.pp - 1) for stage in range(deployment.pp)]


def _overhead(deployment: Deployment, *, is_last: bool) -> Overhead:
    architecture = deployment.architecture
    tokens = deployment.max_num_batched_tokens
    rows = min(deployment.max_num_seqs, tokens)
    several = deployment.tp * deployment.pp * deployment.dp > 1
    graphs = vllm_defaults.estimates_cuda_graphs(deployment.version) and not deployment.enforce_eager
    return Overhead(
        sampler_bytes=SAMPLER_BYTES_PER_LOGIT * rows * architecture.vocab_size if is_last else 0,
        forward_bytes=2 * tokens * max(_intermediate(deployment, layer) for layer in set_of(architecture.layers)),
        hidden_bytes=2 * 2 * tokens * architecture.hidden_size,
        rotary_bytes=deployment.dtype_bytes * architecture.rope_dim * architecture.max_position_embeddings,
        runtime_bytes=RUNTIME_SEVERAL_GPUS_BYTES if several else RUNTIME_ONE_GPU_BYTES,
        cuda_graph_bytes=CUDA_GRAPH_BYTES if graphs else 0,
        correction_bytes=deployment.overhead_correction_bytes,
    )


def set_of(layers: tuple[Layer, ...]) -> list[Layer]:
    """The distinct layers of a model."""
    return list({id(layer): layer for layer in layers}.values())


def _intermediate(deployment: Deployment, layer: Layer) -> int:
    """Elements per token of a layer's widest moment on one rank: what its MLP computes and what it makes of that; for
    experts times those a token visits, plus one hidden vector for each visit."""
    tp = deployment.tp
    widths = [
        w.rows for w in layer.weights if w.role in ("mlp", "shared_expert") and w.name in ("gate_proj", "up_proj")
    ]
    dense = (sum(widths) + max(widths, default=0)) // tp
    if layer.experts is None:
        return dense
    expert = [w.rows for w in layer.weights if w.role == "expert" and w.name in ("gate_proj", "up_proj")]
    visited = (sum(expert) + max(expert, default=0)) // (1 if deployment.expert_parallel else tp)
    return dense + layer.experts.per_token * (visited + deployment.architecture.hidden_size)
