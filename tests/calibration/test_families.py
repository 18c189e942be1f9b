"""Reading config.json: parameter counts against transformers, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calibration.errors import InputError, Unsupported
from calibration.families import known_architectures, read_config

DATA = Path(__file__).resolve().parents[1] / "data" / "model"
CASES = json.loads((DATA / "transformers_params.json").read_text())

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def llama(**changes: Any) -> dict[str, Any]:
    return {**LLAMA, **changes}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_parameters_equal_those_of_the_transformers_model(case: dict[str, Any]) -> None:
    assert read_config(case["config"], case["id"]).params_total == case["params"]


def test_the_transformers_cases_cover_most_families() -> None:
    seen = {case["config"]["architectures"][0] for case in CASES}
    # the others share a reader with one of these, under the name of a multimodal or an older class
    assert len(seen) == 25
    assert seen <= set(known_architectures())


def test_an_unknown_architecture_is_refused_by_name_with_what_comes_near() -> None:
    with pytest.raises(Unsupported, match="'Llama5ForCausalLM' is unknown") as refused:
        read_config(llama(architectures=["Llama5ForCausalLM"]), "x.json")
    assert "Llama4ForCausalLM" in refused.value.hint


def test_an_architecture_like_none_is_refused_with_all_that_are_known() -> None:
    with pytest.raises(Unsupported) as refused:
        read_config(llama(architectures=["Zzz"]), "x.json")
    assert "known: BambaForCausalLM, DeepseekV2ForCausalLM" in refused.value.hint


@pytest.mark.parametrize("names", [None, [], [7], "LlamaForCausalLM"])
def test_a_configuration_without_architectures_is_refused(names: object) -> None:
    with pytest.raises(InputError, match=r"architectures = .* expected a list"):
        read_config(llama(architectures=names), "x.json")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_size", None, "hidden_size = None, expected a whole number of at least 1"),
        ("hidden_size", "64", "hidden_size = '64', expected a whole number"),
        ("num_hidden_layers", 0, "num_hidden_layers = 0, expected a whole number of at least 1"),
        ("num_hidden_layers", True, "num_hidden_layers = True, expected a whole number"),
        ("num_key_value_heads", 3, r"num_key_value_heads = 3, expected a divisor of num_attention_heads \(4\)"),
        ("attention_bias", "yes", "attention_bias = 'yes', expected true or false"),
        ("layer_types", ["full_attention"], "layer_types = 'a list of 1', expected one entry for each of 2 layers"),
        ("layer_types", "full_attention", "layer_types = 'full_attention', expected a list"),
        ("torch_dtype", "int8", "torch_dtype = 'int8', expected bfloat16, float16 or float32"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_key_value_and_expectation(key: str, value: object, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        read_config(llama(**{key: value}), "x.json")


def test_an_unknown_layer_type_is_named() -> None:
    with pytest.raises(Unsupported, match="layer type 'retention' is unknown"):
        read_config(llama(layer_types=["full_attention", "retention"]), "x.json")


def test_a_configuration_that_is_no_object_is_refused() -> None:
    with pytest.raises(InputError, match="holds list, expected a JSON object"):
        read_config([], "x.json")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="text_config = 7, expected a JSON object"):
        read_config(llama(text_config=7), "x.json")


def test_the_text_part_of_a_multimodal_configuration_is_read() -> None:
    inner = {key: value for key, value in LLAMA.items() if key not in ("architectures", "torch_dtype")}
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "text_config": inner | {"sliding_window": None},
        "vision_config": {},
        "tie_word_embeddings": True,
    }
    found = read_config(outer, "x.json")
    assert (found.num_layers, found.dtype, found.tie_word_embeddings) == (2, "bfloat16", True)
    assert found.unsized_parts == ("vision tower",)
    assert [w.name for w in found.weights] == ["embed_tokens", "norm"]


def test_heads_and_head_dim_default_as_the_model_class_does() -> None:
    plain = read_config({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, "x").attention_layers[0]
    assert (plain.heads, plain.kv_heads, plain.head_dim) == (4, 4, 16)
    qwen = read_config(llama(architectures=["Qwen3ForCausalLM"]), "x").attention_layers[0]
    assert qwen.head_dim == 128


def test_a_window_without_layer_types_holds_for_every_layer() -> None:
    found = read_config(llama(architectures=["MistralForCausalLM"], sliding_window=512), "x")
    assert [a.window for a in found.attention_layers] == [512, 512]
    assert found.count("sliding") == 2


def test_mistral_has_its_class_default_window_and_null_or_zero_means_none() -> None:
    base = llama(architectures=["MistralForCausalLM"])
    assert read_config(base, "x").attention_layers[0].window == 4096
    assert read_config(base | {"sliding_window": None}, "x").count("full") == 2
    assert read_config(base | {"sliding_window": 0}, "x").count("full") == 2


def test_a_qwen_window_on_some_layers_is_refused_as_vllm_refuses_it() -> None:
    with pytest.raises(Unsupported, match="max_window_layers = 1 is less than num_hidden_layers = 2"):
        read_config(llama(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, max_window_layers=1), "x")


def test_a_qwen_mixture_that_passes_vllms_check_is_built_without_windows() -> None:
    mixed = llama(
        architectures=["Qwen3ForCausalLM"],
        use_sliding_window=True,
        sliding_window=128,
        max_window_layers=2,
        layer_types=["full_attention", "sliding_attention"],
    )
    assert read_config(mixed, "x").count("full") == 2


def test_gpt_oss_goes_by_parity_whatever_layer_types_say() -> None:
    config = llama(
        architectures=["GptOssForCausalLM"],
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention", "full_attention"],
    )
    assert [a.kind for a in read_config(config, "x").attention_layers] == ["sliding", "full"]


def test_more_experts_chosen_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match=r"num_experts_per_tok = 9, expected at most the number of experts \(8\)"):
        read_config(llama(architectures=["MixtralForCausalLM"], num_local_experts=8, num_experts_per_tok=9), "x")


def test_sparse_attention_with_an_indexer_is_refused() -> None:
    config = next(case["config"] for case in CASES if case["id"] == "dsv3_512_64")
    with pytest.raises(Unsupported, match="index_topk"):
        read_config({**config, "index_topk": 2048}, "x")


def test_unlike_attention_types_of_minimax_are_refused() -> None:
    config = next(case["config"] for case in CASES if case["id"] == "minimax")
    with pytest.raises(Unsupported, match=r"attention types \[0, 1\]"):
        read_config({**config, "attn_type_list": [1, 0, 1]}, "x")


def test_nemotron_patterns_are_read_and_unknown_letters_named() -> None:
    config = next(case["config"] for case in CASES if case["id"] == "nemotron_pat")
    found = read_config(config, "x")
    assert (len(found.state_layers), found.count("full"), found.is_moe) == (3, 1, True)
    assert found.has_ungated_experts
    with pytest.raises(Unsupported, match="layer type Q in hybrid_override_pattern"):
        read_config({**config, "hybrid_override_pattern": "MQ"}, "x")
    without = {key: value for key, value in config.items() if key != "hybrid_override_pattern"}
    with pytest.raises(InputError, match="the type of each layer, or hybrid_override_pattern"):
        read_config(without, "x")
    with pytest.raises(Unsupported, match="'sliding' is unknown in Nemotron-H"):
        read_config({**without, "layers_block_type": ["sliding_attention"]}, "x")
    with pytest.raises(Unsupported, match="moe_latent_size"):
        read_config({**config, "moe_latent_size": 64}, "x")


def test_mamba_heads_must_divide_their_channels() -> None:
    config = next(case["config"] for case in CASES if case["id"] == "granite_6_3_64_1_None")
    with pytest.raises(InputError, match="mamba_n_heads = 7, expected a divisor of 512 channels"):
        read_config({**config, "mamba_d_head": "auto", "mamba_n_heads": 7}, "x")


def test_llama4_counts_layers_without_rope_from_the_list_or_the_interval() -> None:
    config = next(case["config"] for case in CASES if case["id"] == "llama4_8_512_4_512")
    assert read_config(config, "x").count("chunked") == 6
    with pytest.raises(InputError, match="no_rope_layers = 'a list of 2', expected one entry for each of 8 layers"):
        read_config({**config, "no_rope_layers": [1, 0]}, "x")


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 16384),
        ({"type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 4096),
        ({"rope_type": "llama3", "factor": 8.0}, 4096),
        ({"rope_type": "linear", "factor": None}, 4096),
        ({"full_attention": {"rope_type": "linear", "factor": 2.0}}, 8192),
        (None, 4096),
    ],
)
def test_the_context_is_scaled_by_rope_types_that_are_not_yet_in_it(rope: Any, context: int) -> None:
    assert read_config(llama(rope_scaling=rope), "x").context == context


def test_longrope_starts_at_its_original_length() -> None:
    rope = {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}
    assert read_config(llama(rope_scaling=rope, original_max_position_embeddings=1024), "x").context == 1024


def test_the_smallest_length_key_or_the_tokenizer_length_decides_the_context() -> None:
    assert read_config(llama(max_seq_len=2048), "x").context == 2048
    assert read_config(llama(model_max_length=9000), "x").context == 9000
    without = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    assert read_config(without, "x").context == 2048
    assert read_config({**without, "architectures": ["MistralForCausalLM"]}, "x").context == 131072


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        *(("Qwen3ForCausalLM", 32768), ("DeepseekV3ForCausalLM", 4096), ("FalconH1ForCausalLM", 8192)),
        *(("Qwen3NextForCausalLM", 32768), ("MiniMaxM2ForCausalLM", 196608), ("GraniteMoeForCausalLM", 2048)),
    ],
)
def test_a_missing_position_limit_is_the_one_of_the_configurations_class(name: str, limit: int) -> None:
    configs = json.loads((DATA / "pool_configs.json").read_text()).values()
    config = next(c for c in configs if c["architectures"] == [name])
    without = {key: value for key, value in config.items() if key != "max_position_embeddings"}
    assert read_config(without, "x").context == limit
    # the class's limit stays one of several
    assert read_config({**without, "seq_length": 1000}, "x").context == 1000
    assert read_config({**without, "seq_length": 10**6}, "x").context == limit


@pytest.mark.parametrize("model", ["mixtral", "granite_moe", "granite_moe_shared", "glm4_moe", "minimax_m2", "phi3"])
def test_a_stated_window_holds_for_every_layer_of_a_model_without_layer_types(model: str) -> None:
    config = json.loads((DATA / "pool_configs.json").read_text())[model] | {"sliding_window": 300}
    assert {a.window for a in read_config(config, "x").attention_layers} == {300}
    layers = config["num_hidden_layers"]
    if model != "phi3":
        mixed = {**config, "layer_types": ["full_attention"] + ["sliding_attention"] * (layers - 1)}
        own = {None, 300} if model.startswith("granite") else {None}
        assert {a.window for a in read_config(mixed, "x").attention_layers} == own
    assert {a.window for a in read_config({**config, "sliding_window": 0}, "x").attention_layers} == {None}


def test_windows_of_qwen_mixtures_are_those_of_their_configuration_classes() -> None:
    configs = json.loads((DATA / "pool_configs.json").read_text())
    asked = {"sliding_window": 300, "use_sliding_window": True}
    found = {model: read_config(configs[model] | asked, "x") for model in ("qwen2_moe", "qwen3_moe")}
    assert {a.window for a in found["qwen2_moe"].attention_layers} == {None}
    assert {a.window for a in found["qwen3_moe"].attention_layers} == {300}
    text = configs["qwen3_vl_moe"]["text_config"] | {"sliding_window": 300, "use_sliding_window": False}
    seen = read_config(configs["qwen3_vl_moe"] | {"text_config": text}, "x")
    assert {a.window for a in seen.attention_layers} == {300}


def test_the_few_keys_of_a_published_gemma_3_are_completed_by_its_class() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16", "text_config": text}
    found = read_config(outer, "gemma-3-4b")
    assert (found.context, found.vocab_size, found.tie_word_embeddings) == (131072, 262208, True)
    assert (found.count("full"), found.count("sliding")) == (5, 29)
    # 3,880,263,168 text parameters: the published 4.3 B less the vision tower
    assert found.params_total == 3_880_263_168


def test_gemma3_keeps_its_context_whatever_its_rope_says() -> None:
    config = next(case["config"] for case in CASES if case["id"] == "gemma3_12_512_6_512_None")
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    assert read_config({**config, "rope_parameters": rope}, "x").context == 8192


def test_the_rotary_table_covers_the_rotated_part_of_a_head() -> None:
    assert read_config(llama(), "x").rope_dim == 16
    assert read_config(llama(partial_rotary_factor=0.5), "x").rope_dim == 8
    assert read_config(llama(position_embedding_type="nope"), "x").rope_dim == 0
    mla = next(case["config"] for case in CASES if case["id"] == "dsv3_512_64")
    assert read_config(mla, "x").rope_dim == 64
    mamba = next(case["config"] for case in CASES if case["id"] == "mamba2_None")
    assert read_config(mamba, "x").rope_dim == 0


def test_a_configuration_without_dtype_is_float32_as_vllm_assumes() -> None:
    assert read_config({k: v for k, v in LLAMA.items() if k != "torch_dtype"}, "x").dtype == "float32"
    assert read_config(llama(torch_dtype="torch.float16"), "x").dtype == "float16"


def test_an_older_checkpoint_declares_its_format_as_compression_config() -> None:
    assert read_config(llama(compression_config={"quant_method": "compressed-tensors"}), "x").quantization == {
        "quant_method": "compressed-tensors"
    }


def test_a_granite_moe_with_windows_keeps_them_by_layer() -> None:
    config = next(case["config"] for case in CASES if case["id"] == "granitemoeshared")
    layers = config["num_hidden_layers"]
    kinds = ["sliding_attention", *["full_attention"] * (layers - 1)]
    found = read_config({**config, "layer_types": kinds, "sliding_window": 64}, "x")
    assert (found.count("sliding"), found.count("full")) == (1, layers - 1)
