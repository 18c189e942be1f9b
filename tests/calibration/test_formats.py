"""Number formats: bytes of a matrix, what checkpoints declare, aliases."""

from __future__ import annotations

from typing import Any

import pytest

from calibration.architecture import Weight
from calibration.errors import InputError, Unsupported
from calibration.formats import declared_format, declared_kv, kv_format, weight_format

MATRIX = Weight("up", 1000, 512, "mlp", count=2)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("bf16", 2 * 1000 * 512 * 2),
        ("fp32", 2 * 1000 * 512 * 4),
        ("fp8", 2 * (1000 * 512 + 1000 * 4)),
        ("fp8-block", 2 * (1000 * 512 + 8 * 4 * 4)),
        ("int8", 2 * (1000 * 512 + 1000 * 4)),
        ("int4", 2 * (1000 * 256 + 1000 * 4 * 5 // 2)),
        ("mxfp4", 2 * 1000 * 512 * 17 // 32),
        ("nvfp4", 2 * 1000 * 512 * 9 // 16),
    ],
)
def test_a_matrix_takes_its_payload_and_its_scales(name: str, size: int) -> None:
    assert weight_format(name).bytes_of(MATRIX) == size


def test_embeddings_routers_and_vectors_are_not_covered() -> None:
    fp8 = weight_format("fp8")
    assert fp8.covers(MATRIX)
    assert not fp8.covers(Weight("embed", 10, 10, "embedding"))
    assert not fp8.covers(Weight("router", 10, 10, "router"))
    assert not fp8.covers(Weight("bias", 10, 1, "mlp"))


@pytest.mark.parametrize(
    ("alias", "name"), [("bfloat16", "bf16"), ("AWQ", "int4"), ("gptq", "int4"), ("half", "fp16"), ("fp4", "nvfp4")]
)
def test_aliases(alias: str, name: str) -> None:
    assert weight_format(alias).name == name
    assert weight_format(name).bytes_per_weight == weight_format(alias).bits_per_weight / 8


COMPRESSED = {"quant_method": "compressed-tensors"}


def groups(**weights: Any) -> dict[str, Any]:
    return {**COMPRESSED, "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (None, "bf16"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "awq", "w_bit": 4, "group_size": 64}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        (groups(num_bits=8, type="float", strategy="channel"), "fp8"),
        (groups(num_bits=8, type="float", strategy="block"), "fp8-block"),
        (groups(num_bits=4, type="float", group_size=16), "nvfp4"),
        (groups(num_bits=4, type="float", group_size=32), "mxfp4"),
        (groups(num_bits=4, type="int", group_size=32, symmetric=True), "int4"),
        (groups(num_bits=8, type="int"), "int8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "NVFP4"}}, "nvfp4"),
    ],
)
def test_what_a_checkpoint_declares(config: dict[str, Any] | None, name: str) -> None:
    assert declared_format(config, "bfloat16").name == name


def test_group_sizes_and_missing_zeros_change_the_bytes() -> None:
    plain = declared_format({"quant_method": "awq", "bits": 4, "group_size": 64}, "bfloat16")
    assert plain.bytes_of(MATRIX) == 2 * (1000 * 256 + 1000 * 8 * 5 // 2)
    symmetric = declared_format(groups(num_bits=4, type="int", group_size=32, symmetric=True), "bfloat16")
    assert symmetric.bytes_of(MATRIX) == 2 * (1000 * 256 + 1000 * 16 * 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is unknown"),
        ({"quant_method": "awq", "bits": 3}, "3 bits with awq are unknown"),
        (COMPRESSED, "without config_groups"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo 'W4A8' is unknown"),
    ],
)
def test_an_unknown_quantisation_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        declared_format(config, "bfloat16")


@pytest.mark.parametrize(
    ("patterns", "excluded"),
    [
        (["re:.*self_attn", "lm_head"], {"attention"}),
        (["*self_attn*"], {"attention"}),
        (["model.layers.0.self_attn"], set()),
        (["re:.*shared_experts.*", "re:.*mlp.*"], {"shared_expert", "mlp"}),
        (["model.layers.3.mlp.gate"], set()),
    ],
)
def test_an_exclusion_list_leaves_a_role_in_16_bits_where_it_holds_for_every_layer(
    patterns: list[str], excluded: set[str]
) -> None:
    everything = set(weight_format("fp8").roles)
    assert everything - set(declared_format({"quant_method": "fp8", "ignore": patterns}, "bfloat16").roles) == excluded


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (None, "bfloat16"),
        ({"quant_method": "fp8"}, "bfloat16"),
        ({**COMPRESSED, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "bfloat16"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT3"}, "bfloat16"),
    ],
)
def test_what_auto_means_for_the_cache(config: dict[str, Any] | None, name: str) -> None:
    assert declared_kv(config, "bfloat16") == name


def test_cache_dtypes_have_their_bytes() -> None:
    assert kv_format("fp8").token_bytes(8, 128, 128) == 2048
    assert kv_format("bf16").latent_bytes(576) == 1152
    assert kv_format("fp8_ds_mla").latent_bytes(576) == 656
    assert kv_format("nvfp4_ds_mla").latent_bytes(576) == 352
    assert kv_format("int4_per_token_head").token_bytes(1, 128, 128) == 128 + 8
    assert kv_format("fp8").bytes_per_element == 1.0
    with pytest.raises(InputError, match="kv = 'x', expected one of auto"):
        kv_format("x")
