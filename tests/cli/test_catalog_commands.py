"""``models`` and ``gpus``: the catalog, for people and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from console import Cli


def test_models_are_listed_with_kv_bytes_by_dtype(cli: Cli) -> None:
    found = {entry["name"]: entry for entry in json.loads(cli("models", "--json").out)}
    assert found["llama-3.3-70b"]["kv_bytes_per_token"] == {"bf16": 327_680, "fp8": 163_840}
    assert found["deepseek-v3"]["kv_bytes_per_token"] == {"bf16": 70_272, "fp8": 35_136, "fp8_ds_mla": 40_016}
    assert found["mistral-small-24b"]["layers"] == 40
    assert found["gpt-oss-120b"]["layers_by_cache"] == {"full": 18, "sliding": 18}
    assert found["qwen3-next-80b-a3b"]["layers_by_cache"] == {"full": 12, "state": 36}
    assert found["deepseek-v3"]["weights"] == "fp8-block"
    assert found["deepseek-v3"]["checkpoint_bytes"]["fp8"]["bytes"] == 688586727753
    assert all(entry["source"] for entry in found.values())


def test_the_table_of_models_names_them_with_their_bytes(cli: Cli) -> None:
    done = cli("models")
    (line,) = [line for line in done.out.splitlines() if line.startswith("llama-3.3-70b ")]
    assert "327,680" in line
    assert "163,840" in line
    (unsure,) = [line for line in done.out.splitlines() if line.startswith("kimi-k2.5 ")]
    assert "not verified" in unsure


def test_one_model_comes_with_its_sources(cli: Cli) -> None:
    done = cli("models", "Qwen/Qwen3-32B")
    assert "hf_id" in done.out
    assert "aiconfigurator" in done.out or "AIC" in done.out
    assert json.loads(cli("models", "qwen3-32b", "--json").out)["params_total"] == 32762123264


def test_a_config_file_is_described_like_a_model(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "dtype": "bfloat16",
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "vocab_size": 1000,
                "max_position_embeddings": 512,
            }
        )
    )
    assert json.loads(cli("models", str(path), "--json").out)["kv_bytes_per_token"] == {"bf16": 512, "fp8": 256}
    assert "LlamaForCausalLM" in cli("models", str(path)).out


def test_a_wrong_name_gets_what_comes_near(cli: Cli) -> None:
    done = cli("models", "lama-3.1-8b")
    assert done.code == 2
    assert "near it: llama-3.1-8b" in done.one_message()
    assert cli("gpus", "h10").code == 2


def test_gpus_are_listed_with_what_vllm_sees(cli: Cli) -> None:
    found = {entry["name"]: entry for entry in json.loads(cli("gpus", "--json").out)}
    assert len(found) == 23
    assert found["h100-sxm"]["usable_bytes"] == 85029027840
    assert found["l4"]["usable_is_measured"] is False
    table = cli("gpus").out
    (h200,) = [line for line in table.splitlines() if line.startswith("h200-sxm ")]
    assert "139.80" in h200
    assert "4,800" in h200
    (a100,) = [line for line in table.splitlines() if line.startswith("a100-80-pcie ")]
    assert "~" in a100
    assert " - " in a100


def test_one_gpu_comes_with_its_sources(cli: Cli) -> None:
    assert "nvidia-smi" in cli("gpus", "h100").out
    assert json.loads(cli("gpus", "H100-SXM-80GB", "--json").out)["name"] == "h100-sxm"
