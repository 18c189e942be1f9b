"""config.json -> Architecture: finds the family by the architecture's name, reads the parts every model has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from calibration.architecture import Architecture, Attention, Layer, Weight
from calibration.errors import InputError, Unsupported
from calibration.hf_config import (
    HfConfig,
    context_of,
    dtype_of,
    open_config,
    quantization_of,
    rope_dim_of,
    states_positions,
    tied_embeddings,
)

#: configuration and tied embeddings -> layers in order, and the weights outside them
Reader = Callable[[HfConfig, bool], tuple[tuple[Layer, ...], tuple[Weight, ...]]]

#: architecture name -> module and reader of its family; a module is imported when one of its models is read
_FAMILIES: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("dense", "llama"),
    "LLaMAForCausalLM": ("dense", "llama"),
    "MistralForCausalLM": ("dense", "mistral"),
    "Mistral3ForConditionalGeneration": ("dense", "mistral"),
    "Qwen2ForCausalLM": ("dense", "qwen2"),
    "Qwen2_5_VLForConditionalGeneration": ("dense", "qwen2"),
    "Qwen3ForCausalLM": ("dense", "qwen3"),
    "Qwen3VLForConditionalGeneration": ("dense", "qwen3"),
    "Phi3ForCausalLM": ("dense", "phi3"),
    "GraniteForCausalLM": ("dense", "granite"),
    "Gemma2ForCausalLM": ("dense", "gemma2"),
    "Gemma3ForCausalLM": ("dense", "gemma3"),
    "Gemma3ForConditionalGeneration": ("dense", "gemma3"),
    "MixtralForCausalLM": ("moe", "mixtral"),
    "Qwen2MoeForCausalLM": ("moe", "qwen2_moe"),
    "Qwen3MoeForCausalLM": ("moe", "qwen3_moe"),
    "Qwen3VLMoeForConditionalGeneration": ("moe", "qwen3_vl_moe"),
    "GptOssForCausalLM": ("moe", "gpt_oss"),
    "Llama4ForCausalLM": ("moe", "llama4"),
    "Llama4ForConditionalGeneration": ("moe", "llama4"),
    "DeepseekV2ForCausalLM": ("moe", "deepseek"),
    "DeepseekV3ForCausalLM": ("moe", "deepseek"),
    "KimiK25ForConditionalGeneration": ("moe", "deepseek"),
    "Glm4MoeForCausalLM": ("moe", "glm4_moe"),
    "MiniMaxM2ForCausalLM": ("moe", "minimax_m2"),
    "GraniteMoeForCausalLM": ("moe", "granite_moe"),
    "GraniteMoeSharedForCausalLM": ("moe", "granite_moe"),
    "Qwen3NextForCausalLM": ("hybrid", "qwen3_next"),
    "Qwen3_5ForCausalLM": ("hybrid", "qwen3_next"),
    "Qwen3_5ForConditionalGeneration": ("hybrid", "qwen3_next"),
    "Qwen3_5MoeForCausalLM": ("hybrid", "qwen3_next"),
    "Qwen3_5MoeForConditionalGeneration": ("hybrid", "qwen3_next"),
    "GraniteMoeHybridForCausalLM": ("hybrid", "granite_hybrid"),
    "BambaForCausalLM": ("hybrid", "bamba"),
    "FalconH1ForCausalLM": ("hybrid", "falcon_h1"),
    "NemotronHForCausalLM": ("hybrid", "nemotron_h"),
    "Mamba2ForCausalLM": ("hybrid", "mamba2"),
}
#: architectures whose embeddings are tied where the configuration does not say
_TIED = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"})

#: position limits the configuration classes give checkpoints that state none (transformers 5.19); 2,048 for the others
_POSITIONS = {
    "BambaForCausalLM": 262144,
    "DeepseekV3ForCausalLM": 4096,
    "FalconH1ForCausalLM": 8192,
    "Gemma2ForCausalLM": 8192,
    "Gemma3ForCausalLM": 131072,
    "Gemma3ForConditionalGeneration": 131072,
    "Glm4MoeForCausalLM": 131072,
    "GptOssForCausalLM": 131072,
    "KimiK25ForConditionalGeneration": 4096,
    "Llama4ForCausalLM": 131072,
    "Llama4ForConditionalGeneration": 131072,
    "MiniMaxM2ForCausalLM": 196608,
    "Mistral3ForConditionalGeneration": 131072,
    "MistralForCausalLM": 131072,
    "MixtralForCausalLM": 131072,
    "NemotronHForCausalLM": 4096,
    "Phi3ForCausalLM": 4096,
    "Qwen2ForCausalLM": 32768,
    "Qwen2MoeForCausalLM": 32768,
    "Qwen2_5_VLForConditionalGeneration": 32768,
    "Qwen3ForCausalLM": 32768,
    "Qwen3MoeForCausalLM": 32768,
    "Qwen3NextForCausalLM": 32768,
    "Qwen3VLForConditionalGeneration": 128000,
    "Qwen3VLMoeForConditionalGeneration": 128000,
    "Qwen3_5ForCausalLM": 32768,
    "Qwen3_5ForConditionalGeneration": 32768,
    "Qwen3_5MoeForCausalLM": 32768,
    "Qwen3_5MoeForConditionalGeneration": 32768,
}
#: architectures whose configuration class knows no position limit: vLLM takes any length, and 2,048 where none is asked
_NO_LIMIT = frozenset({"Mamba2ForCausalLM"})


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
    module, function = _FAMILIES[name]
    reader: Reader = getattr(import_module(f"calibration.families.{module}"), function)
    tied = tied_embeddings(opened, name in _TIED)
    layers, weights = reader(opened, tied)
    return _assemble(opened, name, tied, layers, weights)


def _assemble(
    config: HfConfig, name: str, tied: bool, layers: tuple[Layer, ...], weights: tuple[Weight, ...]
) -> Architecture:
    embedding = weights[0]
    attention = next((layer.attention for layer in layers if layer.attention is not None), None)
    context = context_of(config, str(config.values.get("model_type", "")), _POSITIONS.get(name, 2048))
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
        takes_any_length=name in _NO_LIMIT and not states_positions(config),
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
