"""A model's shape: its layers in order, what each keeps of the past, and every weight with how it is split over GPUs.

Nothing here knows a file format: :mod:`calibration.families` reads a Hugging Face ``config.json`` into this. Counts are
exact: the parameter totals equal those of the published checkpoints to the parameter (tests/calibration).

    Architecture
    ├── weights          outside the layers: embedding, lm_head (unless tied), final norm
    └── layers           one Layer each, in order; equal layers are the same object
        ├── attention    what it keeps per token (Attention), or None
        ├── state        what it keeps per request (State: Mamba, gated delta net), or None
        ├── experts      (number, chosen per token), or None for a dense layer
        └── weights      its matrices and vectors
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

AttentionKind = Literal["full", "sliding", "chunked", "mla"]
StateKind = Literal["mamba1", "mamba2", "gated_delta_net", "short_conv"]
Role = Literal[
    "embedding", "lm_head", "attention", "mixer", "mlp", "expert", "shared_expert", "router", "norm", "mtp", "vision"
]
#: how tensor parallelism splits a weight: over all ranks, over the kv heads (copied where ranks outnumber them), over
#: the experts' ranks, over the vocabulary, or not at all
Shard = Literal["tp", "kv_heads", "experts", "vocab", "replicated"]


class Experts(NamedTuple):
    """The routed experts of a layer: how many there are and how many a token uses."""

    total: int
    per_token: int


@dataclass(frozen=True, slots=True)
class Weight:
    """``count`` equal matrices of ``rows`` x ``cols`` (output x input features) as the checkpoint stores them; a vector
    has ``cols`` = 1. Fused projections are listed unfused: block scales depend on the matrix's own sides.
    """

    name: str
    rows: int
    cols: int
    role: Role
    shard: Shard = "tp"
    count: int = 1

    @property
    def params(self) -> int:
        return self.rows * self.cols * self.count

    @property
    def is_matrix(self) -> bool:
        return self.cols > 1


class Attention(NamedTuple):
    """What one attention layer keeps of each token.

    ``window`` is the sliding window or the chunk, in tokens. For MLA the cache holds one latent of ``kv_lora_rank`` and
    one rope key of ``qk_rope_head_dim`` per token, whole on every tensor-parallel rank; ``head_dim`` and ``v_head_dim``
    are then those of the computation (query/key and value heads).
    """

    kind: AttentionKind
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None

    @property
    def latent_dim(self) -> int | None:
        """Elements of the latent kept per token (MLA), else None."""
        if self.kv_lora_rank is None or self.qk_rope_head_dim is None:
            return None
        return self.kv_lora_rank + self.qk_rope_head_dim

    def kv_heads_per_gpu(self, tp: int) -> int:
        """KV heads on one rank; at least one: fewer heads than ranks are replicated (vLLM 0.32
        ``ModelConfig.get_num_kv_heads``)."""
        return max(1, self.kv_heads // tp)

    def elements_per_token(self, tp: int = 1) -> int:
        """Cached numbers per token on one rank: keys and values, or the latent."""
        if self.latent_dim is not None:
            return self.latent_dim
        return self.kv_heads_per_gpu(tp) * (self.head_dim + self.v_head_dim)


class State(NamedTuple):
    """What one recurrent layer keeps of a request, however long it is: a convolution tail and a recurrent state.

    ``channels`` run through the convolution (for Mamba-2 without the groups' share, which is ``2 * groups *
    state_size`` and grows where ranks outnumber groups). Shapes: vLLM 0.32 ``MambaStateShapeCalculator``.
    """

    kind: StateKind
    channels: int
    conv_kernel: int
    heads: int = 0
    head_dim: int = 0
    state_size: int = 0
    groups: int = 0
    #: dtype of the recurrent state where the config names it (``mamba_ssm_dtype``), else None: vLLM's default
    recurrent_dtype: str | None = None

    def elements(self, tp: int = 1) -> tuple[int, int]:
        """(convolution, recurrent) numbers of one request and layer on one rank."""
        channels = self.channels
        if self.kind == "mamba2":
            groups = self.groups if self.groups % tp == 0 else tp
            channels += 2 * groups * self.state_size
        conv = channels // tp * (self.conv_kernel - 1)
        return conv, self.heads * self.head_dim * self.state_size // tp


class Layer(NamedTuple):
    """One decoder layer. A layer may keep both attention and state (Falcon-H1), or neither (an MLP-only layer)."""

    attention: Attention | None
    weights: tuple[Weight, ...]
    state: State | None = None
    experts: Experts | None = None

    def params(self, *roles: Role) -> int:
        """Parameters of the layer, of these roles or of all."""
        return sum(w.params for w in self.weights if not roles or w.role in roles)

    @property
    def params_active(self) -> int:
        """Parameters one token's pass multiplies: all but the experts not chosen."""
        routed = self.params("expert")
        if self.experts is None:
            return self.params()
        return self.params() - routed + routed * self.experts.per_token // self.experts.total


@dataclass(frozen=True)
class Architecture:
    """A text model's shape. ``source`` says where the numbers come from (a path, a catalog entry's sources)."""

    name: str
    source: str
    layers: tuple[Layer, ...]
    weights: tuple[Weight, ...]
    hidden_size: int
    vocab_size: int
    heads: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    #: the checkpoint's 16/32-bit dtype: bfloat16, float16 or float32
    dtype: str
    #: vLLM's max_model_len when none is asked: position limit, rope scaling, LongRoPE's original length
    context: int = 0
    #: neither the configuration nor its class knows a position limit: vLLM takes any max_model_len
    takes_any_length: bool = False
    #: elements of one row of the rotary embedding's table (cosines and sines); 0 without rope
    rope_dim: int = 0
    #: weight format the checkpoint itself declares (``quantization_config``), as the config states it; None: 16-bit
    quantization: Mapping[str, Any] | None = None
    #: weights in the checkpoint outside the text model (vision tower, MTP), where their size is known
    extra_weights: tuple[Weight, ...] = ()
    #: parts the checkpoint has whose size the config does not tell
    unsized_parts: tuple[str, ...] = ()
    #: published sizes of the checkpoint by weight format, bytes, each with its source
    checkpoint_bytes: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    #: bytes a server loaded on one GPU where its kernels pad, by weight format, each with its source
    loaded_bytes: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    #: key of the catalog entry, None for a config file
    catalog_name: str | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def attention_layers(self) -> tuple[Attention, ...]:
        """The attention of every layer that has one, in order."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @cached_property
    def state_layers(self) -> tuple[State, ...]:
        """The recurrent state of every layer that has one, in order."""
        return tuple(layer.state for layer in self.layers if layer.state is not None)

    @property
    def is_moe(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)

    @property
    def has_ungated_experts(self) -> bool:
        """Experts of an up and a down projection alone (Nemotron-H)."""
        return any(
            layer.experts is not None and not any(w.name == "gate_proj" and w.role == "expert" for w in layer.weights)
            for layer in self.layers
        )

    @property
    def is_attention_free(self) -> bool:
        """A class that has no attention by design; a hybrid with recurrent layers only is none (vLLM's
        ``IsAttentionFree``)."""
        return self.name == "Mamba2ForCausalLM"

    @property
    def is_mla(self) -> bool:
        return any(a.kind == "mla" for a in self.attention_layers)

    def count(self, kind: AttentionKind) -> int:
        """Layers with this kind of attention."""
        return sum(a.kind == kind for a in self.attention_layers)

    def params(self, *roles: Role) -> int:
        """Parameters of the text model, of these roles or of all."""
        return self._sum(lambda layer: layer.params(*roles)) + sum(
            w.params for w in self.weights if not roles or w.role in roles
        )

    def _sum(self, of: Callable[[Layer], int]) -> int:
        """A sum over layers that evaluates equal layers once: they are the same object."""
        distinct = {id(layer): layer for layer in self.layers}
        values = {key: of(layer) for key, layer in distinct.items()}
        return sum(values[id(layer)] for layer in self.layers)

    @cached_property
    def params_total(self) -> int:
        """Embedding, layers, final norm and lm_head (a tied one counts once); no vision tower, no MTP."""
        return self.params()

    @cached_property
    def params_embedding(self) -> int:
        return self.params("embedding")

    @cached_property
    def params_lm_head(self) -> int:
        """Parameters that compute the logits: the tied embedding where there is no matrix of its own."""
        return self.params("lm_head") or self.params_embedding

    @cached_property
    def params_routed_experts(self) -> int:
        return self.params("expert")

    @cached_property
    def params_active(self) -> int:
        """Parameters one token's forward pass multiplies: all but the experts not chosen and the input embedding, which
        is a look-up; the lm_head counts, a tied embedding counts once (for the logits)."""
        outside = sum(w.params for w in self.weights)
        untied = 0 if self.tie_word_embeddings else self.params_embedding
        return self._sum(lambda layer: layer.params_active) + outside - untied

    def kv_bytes_per_token(self, bytes_per_element: float = 2.0, tp: int = 1) -> float:
        """Nominal KV bytes of one token on one tensor-parallel rank: every attention layer holds every token."""
        return sum(a.elements_per_token(tp) for a in self.attention_layers) * bytes_per_element
