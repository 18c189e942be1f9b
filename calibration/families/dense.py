"""Dense decoders: Llama and its kin, Qwen2/3, Phi-3, Granite, Gemma 2 and 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from calibration.architecture import Attention, Layer, Weight
from calibration.errors import Unsupported
from calibration.families import parts
from calibration.hf_config import HfConfig

#: what a family's reader returns: its layers in order, and the weights outside them
Shape = tuple[tuple[Layer, ...], tuple[Weight, ...]]


def heads_of(config: HfConfig, *, kv_default: int | None = None, head_dim_default: int | None = None) -> Attention:
    """The attention shape the common keys describe: kv heads default to all heads (or the family's own number), the
    head dim to hidden / heads (or the family's own)."""
    heads = config.integer("num_attention_heads")
    kv = config.integer("num_key_value_heads", kv_default if kv_default is not None else heads)
    fallback = head_dim_default if head_dim_default is not None else config.integer("hidden_size") // heads
    if heads % kv != 0:
        raise config.refuse("num_key_value_heads", kv, f"a divisor of num_attention_heads ({heads})")
    dim = config.integer("head_dim", fallback)
    return Attention("full", heads, kv, dim, dim)


def windowed(shape: Attention, window: int | None, kind: str = "sliding") -> Attention:
    """The same heads with a window; none, or a window of 0, means full attention (vLLM reads 0 as "off")."""
    if not window:
        return shape
    if kind == "chunked":
        return Attention("chunked", shape.heads, shape.kv_heads, shape.head_dim, shape.v_head_dim, window)
    return Attention("sliding", shape.heads, shape.kv_heads, shape.head_dim, shape.v_head_dim, window)


def model_window(config: HfConfig, default: int | None = None) -> int | None:
    """The window of every layer that names none itself, vLLM's ``CacheConfig.sliding_window``: the one the configuration
    states, if it has no layer types or only sliding ones (0.32 ``EngineArgs.create_engine_config``). It counts for models
    whose own code knows no window, too."""
    names = config.items("layer_types")
    if names is not None and any(name != "sliding_attention" for name in names):
        return None
    return config.optional_integer("sliding_window", default, minimum=0)


#: names of layer types in ``layer_types`` and its predecessors
_LAYER_TYPES = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "mamba": "linear",
    "mamba2": "linear",
    "moe": "moe",
    "mlp": "mlp",
}


def layer_kinds(config: HfConfig, names: Sequence[str]) -> list[str]:
    """Layer type names of the configuration as ours.

    Raises:
        Unsupported: a type this model does not know, named.
    """
    unknown = sorted({name for name in names if name not in _LAYER_TYPES})
    if unknown:
        raise Unsupported(
            f"{config.source}: layer type {', '.join(map(repr, unknown))} is unknown",
            f"known: {', '.join(sorted(_LAYER_TYPES))}",
        )
    return [_LAYER_TYPES[name] for name in names]


def stated_kinds(config: HfConfig, key: str = "layer_types") -> list[str] | None:
    """``layer_types`` as our kinds, None where the configuration has none."""
    names = config.items(key, config.integer("num_hidden_layers"))
    return None if names is None else layer_kinds(config, [str(name) for name in names])


def repeat(count: int, make: Callable[[int], Layer]) -> tuple[Layer, ...]:
    """Layers 0 .. count - 1."""
    return tuple(make(index) for index in range(count))


def outside(config: HfConfig, tied: bool) -> tuple[Weight, ...]:
    return parts.embedding(config.integer("vocab_size"), config.integer("hidden_size"), tied)


def llama(config: HfConfig, tied: bool) -> Shape:
    """Llama, and what vLLM serves with the same layer (``llama.py``): ``layer_types`` may put a window on some layers."""
    shape = heads_of(config)
    kinds = stated_kinds(config)
    window = config.optional_integer("sliding_window", minimum=0)
    return _plain(config, tied, shape, kinds, window, bias=config.flag("attention_bias", False), o_bias=True)


def mistral(config: HfConfig, tied: bool) -> Shape:
    """Mistral: 8 kv heads and a window of 4,096 where the configuration does not say otherwise."""
    window = config.optional_integer("sliding_window", 4096, minimum=0)
    return _plain(config, tied, heads_of(config, kv_default=8), stated_kinds(config), window)


def granite(config: HfConfig, tied: bool) -> Shape:
    return llama(config, tied)


def phi3(config: HfConfig, tied: bool) -> Shape:
    return _plain(config, tied, heads_of(config), None, model_window(config))


def qwen2(config: HfConfig, tied: bool) -> Shape:
    """Qwen2 and 2.5: biases on q, k and v. A window is used only with ``use_sliding_window``, and vLLM takes it for all
    layers or none (``Qwen2Model.__init__``)."""
    window, kinds = qwen_window(config)
    return _plain(config, tied, heads_of(config, kv_default=32), kinds, window, bias=True)


def qwen3(config: HfConfig, tied: bool) -> Shape:
    window, kinds = qwen_window(config)
    return _plain(
        config,
        tied,
        heads_of(config, kv_default=32, head_dim_default=128),
        kinds,
        window,
        bias=config.flag("attention_bias", False),
        o_bias=True,
        qk_norm="head",
    )


def qwen_window(config: HfConfig) -> tuple[int | None, list[str] | None]:
    """(window, kinds) of a Qwen2/3 model.

    Raises:
        Unsupported: a window on some layers only, which vLLM 0.32 refuses at start.
    """
    layers = config.integer("num_hidden_layers")
    window = (
        config.optional_integer("sliding_window", 4096, minimum=0) if config.flag("use_sliding_window", False) else None
    )
    first = config.integer("max_window_layers", 28, minimum=0)
    kinds = stated_kinds(config)
    if kinds is None:
        kinds = ["sliding" if window is not None and index >= first else "full" for index in range(layers)]
    if len(set(kinds)) > 1 and first != layers:
        raise Unsupported(
            f"{config.source}: sliding window for some but not all layers: max_window_layers = {first} is less than "
            f"num_hidden_layers = {layers}; vLLM 0.32 refuses to start such a Qwen model",
            "set use_sliding_window to false, or max_window_layers to the number of layers",
        )
    # a mixture that passes that check is not applied either: the layers are built without a window of their own
    return window, kinds if len(set(kinds)) == 1 else ["full"] * layers


def _plain(
    config: HfConfig,
    tied: bool,
    shape: Attention,
    kinds: list[str] | None,
    window: int | None,
    *,
    bias: bool = False,
    o_bias: bool = False,
    qk_norm: str | None = None,
) -> Shape:
    """A stack of pre-norm layers with a gated MLP. Without layer types a window holds for every layer, as vLLM's
    ``CacheConfig.sliding_window`` does."""
    hidden = config.integer("hidden_size")
    feed_forward = parts.mlp(hidden, config.integer("intermediate_size"), bias=config.flag("mlp_bias", False))

    @cache
    def layer(kind: str) -> Layer:
        own = windowed(shape, window, kind) if kind in ("sliding", "chunked") else shape
        weights = parts.attention(hidden, own, qkv_bias=bias, o_bias=bias and o_bias, qk_norm=qk_norm)
        return Layer(own, parts.joined(weights, feed_forward, parts.norms(hidden, "input_norm", "post_norm")))

    layers = config.integer("num_hidden_layers")
    each = kinds if kinds is not None else ["sliding" if window else "full"] * layers
    return repeat(layers, lambda index: layer(each[index])), outside(config, tied)


def gemma2(config: HfConfig, tied: bool) -> Shape:
    return _gemma(config, tied, pattern=2, qk_norm=None)


def gemma3(config: HfConfig, tied: bool) -> Shape:
    return _gemma(config, tied, pattern=_gemma3_pattern(config), qk_norm="head")


def _gemma3_pattern(config: HfConfig) -> int:
    return config.integer(config.first("sliding_window_pattern", "_sliding_window_pattern"), 6)


def _gemma(config: HfConfig, tied: bool, pattern: int, qk_norm: str | None) -> Shape:
    """Gemma 2 and 3: each pattern-th layer is full, the others have a window; four norms a layer."""
    hidden = config.integer("hidden_size", 2304)
    layers = config.integer("num_hidden_layers", 26)
    kv = config.integer("num_key_value_heads", 4)
    dim = config.integer("head_dim", 256)
    shape = Attention("full", config.integer("num_attention_heads", 8), kv, dim, dim)
    window = config.optional_integer("sliding_window", 4096, minimum=0)
    names = config.items("layer_types", layers)
    kinds = layer_kinds(config, names) if names else ["sliding" if (i + 1) % pattern else "full" for i in range(layers)]
    feed_forward = parts.mlp(hidden, config.integer("intermediate_size", 9216))
    bias = config.flag("attention_bias", False)
    norms = parts.norms(hidden, "input_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm")

    @cache
    def layer(kind: str) -> Layer:
        own = windowed(shape, window) if kind == "sliding" else shape
        weights = parts.attention(hidden, own, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)
        return Layer(own, parts.joined(weights, feed_forward, norms))

    vocab = config.integer("vocab_size", 262208 if qk_norm else 256000)
    return repeat(layers, lambda i: layer(kinds[i])), parts.embedding(vocab, hidden, tied)
