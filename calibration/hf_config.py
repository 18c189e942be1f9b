"""A Hugging Face ``config.json`` as typed values: each key is asked for by name, with the default its own configuration
class has, and a value that cannot be is refused with key, value and what was expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from calibration.errors import InputError


class HfConfig(NamedTuple):
    """The text part of a configuration.

    Args:
        values: the keys of the text model (``text_config`` where the model is multimodal).
        outer: the keys around it; the same mapping for a text-only model.
        source: where it was read from, for messages.
    """

    values: Mapping[str, Any]
    outer: Mapping[str, Any]
    source: str

    def refuse(self, key: str, value: object, expected: str) -> InputError:
        return InputError(f"{self.source}: {key} = {value!r}, expected {expected}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def first(self, *keys: str) -> str:
        """The first of these keys that has a value, else the first: configurations name the same thing differently."""
        return next((key for key in keys if self.has(key)), keys[0])

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least ``minimum``; absent or null gives the default, which None makes required.

        Raises:
            InputError: absent without default, no whole number, or below the minimum.
        """
        value = self.values.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.refuse(key, value, f"a whole number of at least {minimum}")
        return value

    def optional_integer(self, key: str, default: int | None = None, minimum: int = 1) -> int | None:
        """As :meth:`integer`, but null means None; absent gives the default."""
        if key in self.values and self.values[key] is None:
            return None
        return None if key not in self.values and default is None else self.integer(key, default, minimum)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(key, value, "a string")
        return value

    def items(self, key: str, length: int | None = None) -> list[Any] | None:
        """A list, or None where absent; of this length where one is given."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.refuse(key, value, "a list")
        if length is not None and len(value) != length:
            raise self.refuse(key, f"a list of {len(value)}", f"one entry for each of {length} layers")
        return list(value)


def open_config(config: Mapping[str, Any], source: str) -> HfConfig:
    """The text part of a configuration, where a multimodal one keeps it under ``text_config``.

    Raises:
        InputError: not a mapping, or ``text_config`` is not one.
    """
    if not isinstance(config, Mapping):
        raise InputError(f"{source}: the file holds {type(config).__name__}, expected a JSON object")
    for key in ("text_config", "llm_config", "language_config"):
        inner = config.get(key)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise InputError(f"{source}: {key} = {inner!r}, expected a JSON object")
        return HfConfig(values=inner, outer=config, source=source)
    return HfConfig(values=config, outer=config, source=source)


def tied_embeddings(config: HfConfig, default: bool = False) -> bool:
    """Does the lm_head share the embedding's matrix? A multimodal configuration may say so outside or inside."""
    for values in (config.values, config.outer):
        value = values.get("tie_word_embeddings")
        if isinstance(value, bool):
            return value
    return default


def dtype_of(config: HfConfig) -> str:
    """The checkpoint's dtype under its new (``dtype``) or old (``torch_dtype``) name; float32 where none is stated, as
    vLLM assumes (``ModelArchConfigConvertorBase.get_torch_dtype``)."""
    for values in (config.outer, config.values):
        for key in ("dtype", "torch_dtype"):
            value = values.get(key)
            if isinstance(value, str):
                name = value.removeprefix("torch.")
                if name not in ("bfloat16", "float16", "float32"):
                    raise config.refuse(key, value, "bfloat16, float16 or float32")
                return name
    return "float32"


def quantization_of(config: HfConfig) -> Mapping[str, Any] | None:
    """The weight format the checkpoint declares: ``quantization_config``, or ``compression_config`` of older
    compressed-tensors checkpoints."""
    for values in (config.outer, config.values):
        for key in ("quantization_config", "compression_config"):
            value = values.get(key)
            if isinstance(value, Mapping):
                return value
    return None


#: rope types whose ``factor`` is already contained in max_position_embeddings (vLLM 0.32 config/model.py,
#: ``_get_and_verify_max_len``)
_ROPE_ALREADY_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default")


def _rope_parameters(config: HfConfig) -> list[Mapping[str, Any]]:
    """Every rope description: ``rope_parameters`` (one, or one per layer type) or the older ``rope_scaling``."""
    value = config.values.get("rope_parameters") or config.values.get("rope_scaling")
    if not isinstance(value, Mapping):
        return []
    nested = [inner for inner in value.values() if isinstance(inner, Mapping)]
    return nested or [value]


#: keys under which configurations state how many positions they know (vLLM 0.32 ``derive_max_model_len_and_key``)
_POSITION_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)


def states_positions(config: HfConfig) -> bool:
    """Does the configuration itself state a position limit?"""
    return any(config.has(key) for key in (*_POSITION_KEYS, "model_max_length"))


def context_of(config: HfConfig, model_type: str, default: int = 2048) -> int:
    """vLLM's ``max_model_len`` when none is asked for, tokens: the smallest position limit, times the factor of rope
    types that are not yet in it; LongRoPE starts at its original length (vLLM 0.32 ``_get_and_verify_max_len``).

    ``default`` is what the configuration's class has for ``max_position_embeddings``: one of the limits where the
    configuration does not state that key.
    """
    limits = [config.integer(key) for key in _POSITION_KEYS if config.has(key)]
    if not config.has("max_position_embeddings"):
        limits.append(default)
    context: float = config.integer("model_max_length") if config.has("model_max_length") else min(limits)
    ropes = _rope_parameters(config)
    kinds = [str(r.get("rope_type", r.get("type", "default"))) for r in ropes]
    if "gemma3" not in model_type:
        # where layer types have a rope each, the last factor counts
        factors = [
            rope.get("factor") or 1.0
            for rope, kind in zip(ropes, kinds, strict=True)
            if kind not in _ROPE_ALREADY_SCALED
        ]
        context *= float(factors[-1]) if factors else 1.0
    if "longrope" in kinds or "su" in kinds:
        return config.integer("original_max_position_embeddings", int(context))
    return int(context)


def rope_dim_of(config: HfConfig, head_dim: int) -> int:
    """Elements of a row of the rotary table: the rotated part of a head (``partial_rotary_factor``); 0 where the model
    has no rope."""
    if config.values.get("position_embedding_type") == "nope":
        return 0
    factor = config.values.get("partial_rotary_factor")
    for rope in _rope_parameters(config):
        factor = rope.get("partial_rotary_factor", factor)
    return int(head_dim * float(factor)) if isinstance(factor, int | float) else head_dim
