"""The catalog: every model of the facts, to the parameter and the byte; names, aliases, variants, near matches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from calibration import catalog
from calibration.errors import InputError, Unsupported
from calibration.formats import declared_format, declared_kv, weight_format
from calibration.weights import text_bytes

DATA = Path(__file__).resolve().parents[1] / "data" / "model"
FACTS = json.loads((DATA / "facts.json").read_text())
NAMES = {
    "llama-3.1-8b",
    "llama-3.3-70b",
    "qwen2.5-72b",
    "mistral-small-24b",
    "deepseek-v3",
    "gpt-oss-120b",
}


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["hf_id"])
def test_a_model_has_the_published_parameters_and_kv_bytes(fact: dict[str, Any]) -> None:
    found = catalog.find_model(fact["hf_id"])
    assert found.name == fact["architecture"]
    assert found.params_total == fact["params_total"]
    assert found.params_active == fact["params_active"]
    assert found.params_embedding == fact["embedding"]
    assert found.params_routed_experts == fact["routed_experts"]
    assert found.kv_bytes_per_token() == fact["kv_bytes_per_token_bf16"]
    kinds = (found.count("full") + found.count("mla"), found.count("sliding"), found.count("chunked"))
    assert (*kinds, len(found.state_layers)) == tuple(fact[key] for key in ("full", "sliding", "chunked", "linear"))


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["hf_id"])
def test_a_checkpoint_has_the_bytes_of_its_formula(fact: dict[str, Any]) -> None:
    found = catalog.find_model(fact["hf_id"])
    assert text_bytes(found, weight_format("bf16"), 2) == fact["bytes_bf16"]
    if fact["bytes_native"] is not None:
        native = declared_format(found.quantization, found.dtype)
        # the fp32 bias that balances the router is no weight of a matrix and is not modelled: 93 kB at most
        assert text_bytes(found, native, 2) + 4 * fact["routing_bias"] == fact["bytes_native"]


def test_the_names_of_the_contract_are_there() -> None:
    entries = {entry.name: entry for entry in catalog.model_entries()}
    assert set(entries) >= NAMES
    assert {gpu.name for gpu in catalog.gpu_entries()} >= {
        "h100-sxm",
        "h200-sxm",
        "b200-sxm",
        "a100-80-sxm",
        "l40s",
        "l4",
    }
    assert all(entry.sources for entry in entries.values())
    assert not entries["deepseek-r1-distill-qwen-7b"].verified


def test_cutting_entries_out_of_the_text_gives_what_parsing_the_file_gives() -> None:
    for file in ("models.yaml", "gpus.yaml"):
        whole = yaml.safe_load((Path(catalog.__file__).parent / file).read_text())
        assert list(whole) == list(catalog._entries(file))
        for name, content in whole.items():
            assert catalog._parse(file, name) == content


def test_every_id_alias_and_variant_finds_its_entry() -> None:
    whole = yaml.safe_load((Path(catalog.__file__).parent / "models.yaml").read_text())
    for name, content in whole.items():
        for spelling in (name, content["hf_id"].upper(), *content["aliases"], *content.get("variants", {})):
            assert catalog.model_entry(spelling).name == name


def test_a_typo_gets_what_comes_near() -> None:
    with pytest.raises(InputError, match=r"model = 'lama-3.3-70' is not in the catalog") as refused:
        catalog.find_model("lama-3.3-70")
    assert "llama-3.3-70b" in refused.value.hint
    with pytest.raises(InputError, match="gpu = 'h100sxm' is not in the catalog") as refused:
        catalog.find_gpu("h100sxm")
    assert "h100-sxm" in refused.value.hint
    with pytest.raises(InputError) as refused:
        catalog.find_gpu("?")
    assert "known: a10, a10g, l4" in refused.value.hint


def test_a_variant_is_the_same_shape_in_another_format() -> None:
    plain = catalog.find_model("qwen3-235b-a22b")
    fp8 = catalog.find_model("Qwen/Qwen3-235B-A22B-FP8")
    assert fp8.layers == plain.layers
    assert declared_format(plain.quantization, "bfloat16").name == "bf16"
    assert declared_format(fp8.quantization, "bfloat16").name == "fp8-block"


def test_nvidias_checkpoint_leaves_attention_in_16_bits_and_declares_an_fp8_cache() -> None:
    found = catalog.find_model("nvidia/DeepSeek-R1-NVFP4")
    fmt = declared_format(found.quantization, "bfloat16")
    assert (fmt.name, "attention" in fmt.roles, "expert" in fmt.roles) == ("nvfp4", False, True)
    assert declared_kv(found.quantization, "bfloat16") == "fp8_e4m3"


def test_kimi_k2_5_in_int4_weighs_what_is_published_for_its_kind() -> None:
    found = catalog.find_model("kimi-k2.5")
    assert text_bytes(found, declared_format(found.quantization, "bfloat16"), 2) == pytest.approx(594e9, rel=0.001)


def test_gpus_carry_what_vllm_sees_where_it_was_read_and_say_where_not() -> None:
    h100 = catalog.find_gpu("H100-SXM-80GB")
    assert (h100.name, h100.usable_bytes, h100.usable_is_measured) == ("h100-sxm", 85029027840, True)
    assert h100.flops_per_s["bf16"] == pytest.approx(989.4e12)
    l4 = catalog.find_gpu("l4")
    assert not l4.usable_is_measured
    assert l4.memory_bytes - l4.usable_bytes == int(0.6 * (1 << 30))
    assert "fp8" not in catalog.find_gpu("a100-80-sxm").flops_per_s


def test_a_config_file_or_its_folder_is_read_like_an_entry(tmp_path: Path) -> None:
    content = yaml.safe_load((Path(catalog.__file__).parent / "models.yaml").read_text())["llama-3.1-8b"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    for spelling in (tmp_path, tmp_path / "config.json"):
        found = catalog.find_model(str(spelling))
        assert (found.params_total, found.catalog_name) == (8030261248, None)


def test_a_file_that_does_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No such file or directory, expected a config.json"):
        catalog.find_model(str(tmp_path / "none.json"))
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(InputError, match="is no JSON"):
        catalog.find_model(str(broken))
    broken.write_text('{"architectures": ["Nope"]}')
    with pytest.raises(Unsupported, match="'Nope' is unknown"):
        catalog.find_model(str(broken))
