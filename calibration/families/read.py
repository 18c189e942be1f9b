"""config.json -> Architecture: finds the family by the architecture's name, reads the parts every model has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from calibration.architecture import Architecture, Attention, Layer, Weight
from calibration.errors import InputError, Unsupported
from calibration.families import dense, hybrid, moe
from calibration.families.dense import Shape
from calibration.hf_config import (
    HfConfig,
    context_of,
    dtype_of,
    open_config,
    quantization_of,
    rope_dim_of,
    tied_embeddings,
)

Reader = Callable[[HfConfig, bool], Shape]

#: architecture name -> (reader, are embeddings tied where the configuration does not say)
_FAMILIES: dict[str, tuple[Reader, bool]] = {
    "LlamaForCausalLM": (dense.llama, False),
    "LLaMAForCausalLM": (dense.llama, False),
    "MistralForCausalLM": (dense.mistral, False),
    "Mistral3ForConditionalGeneration": (dense.mistral, False),
    "Qwen2ForCausalLM": (dense.qwen2, False),
    "Qwen3ForCausalLM": (dense.qwen3, False),
    "Phi3ForCausalLM": (dense.phi3, False),
    "GraniteForCausalLM": (dense.granite, False),
    "Gemma2ForCausalLM": (dense.gemma2, True),
    "Gemma3ForCausalLM": (dense.gemma3, True),
    "Gemma3ForConditionalGeneration": (dense.gemma3, True),
    "MixtralForCausalLM": (moe.mixtral, False),
    "Qwen2MoeForCausalLM": (moe.qwen2_moe, False),
    "Qwen3MoeForCausalLM": (moe.qwen3_moe, False),
    "GptOssForCausalLM": (moe.gpt_oss, False),
    "Llama4ForCausalLM": (moe.llama4, False),
    "Llama4ForConditionalGeneration": (moe.llama4, False),
    "DeepseekV2ForCausalLM": (moe.deepseek, False),
    "DeepseekV3ForCausalLM": (moe.deepseek, False),
    "KimiK25ForConditionalGeneration": (moe.deepseek, False),
    "Glm4MoeForCausalLM": (moe.glm4_moe, False),
    "MiniMaxM2ForCausalLM": (moe.minimax_m2, False),
    "GraniteMoeForCausalLM": (moe.granite_moe, False),
    "GraniteMoeSharedForCausalLM": (moe.granite_moe, False),
    "Qwen3NextForCausalLM": (hybrid.qwen3_next, False),
    "Qwen3_5ForCausalLM": (hybrid.qwen3_next, False),
    "Qwen3_5ForConditionalGeneration": (hybrid.qwen3_next, False),
    "Qwen3_5MoeForCausalLM": (hybrid.qwen3_next, False),
    "Qwen3_5MoeForConditionalGeneration": (hybrid.qwen3_next, False),
    "GraniteMoeHybridForCausalLM": (hybrid.granite_hybrid, False),
    "BambaForCausalLM": (hybrid.bamba, False),
    "FalconH1ForCausalLM": (hybrid.falcon_h1, False),
    "NemotronHForCausalLM": (hybrid.nemotron_h, False),
    "Mamba2ForCausalLM": (hybrid.mamba2, False),
}


def known_architectures() -> list[str]:
    """Names of the architectures that can be read."""
    return sorted(_FAMILIES)


def _name_of(config: Mapping[str, Any], source: str) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise InputError(
            f"{source}: architectures = {names!r}, expected a list with the model's class, such as ['LlamaForCausalLM']"
        )
    return names[0]


def read_config(config: Mapping[str, Any], source: str) -> Architecture:
    """The architecture a Hugging Face configuration describes.

    Args:
        config: the content of ``config.json``.
        source: where it comes from; stands in messages and in the result.

    Raises:
        Unsupported: an architecture, layer type or attention this model does not know, named.
        InputError: a key that is missing or cannot be, with what was expected.
    """
    opened = open_config(config, source)
    name = _name_of(config, source)
    if name not in _FAMILIES:
        from difflib import get_close_matches

        near = get_close_matches(name, _FAMILIES, n=3)
        raise Unsupported(
            f"{source}: architecture {name!r} is unknown: what it caches and how its weights are split would be a guess",
            f"near it: {', '.join(near)}" if near else f"known: {', '.join(known_architectures())}",
        )
    reader, tied_default = _FAMILIES[name]
    tied = tied_embeddings(opened, tied_default)
    layers, weights = reader(opened, tied)
    return _assemble(opened, name, tied, layers, weights)


def _assemble(
    config: HfConfig, name: str, tied: bool, layers: tuple[Layer, ...], weights: tuple[Weight, ...]
) -> Architecture:
    embedding = weights[0]
    attention = next((layer.attention for layer in layers if layer.attention is not None), None)
    context = context_of(config, str(config.values.get("model_type", "")))
    return Architecture(
        name=name,
        source=config.source,
        layers=layers,
        weights=weights,
        hidden_size=embedding.cols,
        vocab_size=embedding.rows,
        heads=0 if attention is None else attention.heads,
        max_position_embeddings=config.integer("max_position_embeddings", context),
        tie_word_embeddings=tied,
        dtype=dtype_of(config),
        context=context,
        rope_dim=_rope_dim(config, attention),
        quantization=quantization_of(config),
        unsized_parts=("vision tower",) if "vision_config" in config.outer else (),
    )


def _rope_dim(config: HfConfig, attention: Attention | None) -> int:
    if attention is None:
        return 0
    if attention.qk_rope_head_dim is not None:
        return attention.qk_rope_head_dim
    return rope_dim_of(config, attention.head_dim)
