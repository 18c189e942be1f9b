"""``plan --write DIR``: both files or neither, nothing overwritten unasked, and what the plan says is what they hold."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from console import Cli

NAMES = {"run_vllm_cluster.sh", "docker-compose.yml"}
PLAN = ("plan", "--preset", "llama-70b-2xh100", "--max-model-len", "8192")


def test_both_files_are_written_and_the_script_may_be_run(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "launch"
    done = cli(*PLAN, "--write", folder)
    assert done.code == 0
    assert {path.name for path in folder.iterdir()} == NAMES
    assert "Memory of one GPU" in done.out
    assert f"wrote {folder / 'run_vllm_cluster.sh'}\n" in done.err
    script = folder / "run_vllm_cluster.sh"
    assert os.access(script, os.X_OK)
    assert not os.access(folder / "docker-compose.yml", os.X_OK)
    assert "\nMODEL=meta-llama/Llama-3.3-70B-Instruct\n" in script.read_text()
    refused = subprocess.run([script, "nonsense"], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr) == (2, "run_vllm_cluster: nonsense: expected serve or check\n")
    command = yaml.safe_load((folder / "docker-compose.yml").read_text())["services"]["vllm"]["command"]
    flags = ["--tensor-parallel-size", "2", "--quantization", "fp8_per_tensor", "--max-model-len", "8192"]
    assert command[:7] == ["meta-llama/Llama-3.3-70B-Instruct", *flags]


def test_one_document_is_all_that_stands_on_stdout(cli: Cli, tmp_path: Path) -> None:
    done = cli(*PLAN, "--write", tmp_path, "--json")
    assert done.code == 0
    assert json.loads(done.out)["fits"] is True
    assert {path.name for path in tmp_path.iterdir()} == NAMES


@pytest.mark.parametrize("there", sorted(NAMES))
def test_a_file_that_is_there_is_kept_unless_forced(there: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / there).write_text("mine")
    refused = cli(*PLAN, "--write", tmp_path)
    assert refused.code == 2
    assert refused.one_message().startswith(f"vllm-harness: nothing written: {tmp_path} holds {there} already")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {there: "mine"}
    assert cli(*PLAN, "--write", tmp_path, "--force").code == 0
    assert {path.name for path in tmp_path.iterdir()} == NAMES
    assert (tmp_path / there).read_text() != "mine"
    assert os.access(tmp_path / "run_vllm_cluster.sh", os.X_OK)


def test_a_plan_that_does_not_fit_is_not_launched(cli: Cli, tmp_path: Path) -> None:
    plan = ("plan", "--model", "llama-3.3-70b", "--gpu", "l4", "--write", tmp_path)
    refused = cli(*plan)
    assert refused.code == 2
    assert "nothing written: the plan does not fit" in refused.one_message()
    assert [*tmp_path.iterdir()] == []
    assert cli(*plan, "--force").code == 0


def test_a_flag_the_release_does_not_know_leaves_nothing_behind(cli: Cli, tmp_path: Path) -> None:
    plan = ("plan", "--model", "llama-3.1-8b", "--gpu", "b200-sxm", "--kv", "nvfp4", "--vllm-version", "0.15.0")
    refused = cli(*plan, "--write", tmp_path / "launch")
    assert refused.code == 2
    assert "kv = 'nvfp4' with vLLM 0.15.0, expected vLLM 0.20.0 or later" in refused.one_message()
    assert not (tmp_path / "launch").exists()


def test_a_file_is_no_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = cli(*PLAN, "--write", tmp_path / "file")
    assert (refused.code, refused.one_message()) == (
        2,
        f"vllm-harness: --write {tmp_path / 'file'}, expected a folder: it is a file",
    )


def test_a_disk_that_refuses_is_said(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = cli(*PLAN, "--write", tmp_path / "file" / "below")
    assert refused.code == 1
    assert "Not a directory" in refused.one_message()


def test_a_folder_of_the_operators_own_is_the_model(cli: Cli, tmp_path: Path) -> None:
    model = tmp_path / "my $model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "dtype": "bfloat16",
                "num_hidden_layers": 4,
                "hidden_size": 256,
                "intermediate_size": 512,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "vocab_size": 1000,
                "max_position_embeddings": 2048,
            }
        )
    )
    for asked in (model, model / "config.json"):
        assert cli("plan", "--model", asked, "--gpu", "l4", "--write", tmp_path / "out", "--force").code == 0
        script = (tmp_path / "out" / "run_vllm_cluster.sh").read_text()
        assert f"\nMODEL='{model}'\n" in script
        service = yaml.safe_load((tmp_path / "out" / "docker-compose.yml").read_text())["services"]["vllm"]
        assert service["command"][0] == str(model).replace("$", "$$")
        assert service["volumes"][1]["source"] == service["command"][0]


def test_more_gpus_than_a_node_has_are_joined_by_ray(cli: Cli, tmp_path: Path) -> None:
    plan = ("plan", "--model", "deepseek-v3", "--gpu", "h200-sxm", "--tp", "8", "--write", tmp_path)
    assert "ray[cgraph]" in cli(*plan, "--gpus-per-node", "4").err
    assert "--distributed-executor-backend ray\n" in (tmp_path / "run_vllm_cluster.sh").read_text()
    assert set(yaml.safe_load((tmp_path / "docker-compose.yml").read_text())["services"]) == {"head", "worker"}
    assert cli(*plan, "--gpus-per-node", "0", "--force").code == 2


def test_a_comparison_has_no_launch_files(cli: Cli, tmp_path: Path) -> None:
    refused = cli("plan", "--model", "llama-3.1-8b", "--gpu", "h100-sxm,l40s", "--write", tmp_path)
    assert (refused.code, refused.out) == (2, "")
    assert "--write with several deployments, expected one" in refused.one_message()
    assert [*tmp_path.iterdir()] == []


def test_the_smallest_that_fits_is_what_is_written(cli: Cli, tmp_path: Path) -> None:
    assert cli("plan", "--model", "llama-3.3-70b", "--gpu", "h100-sxm", "--fit", "--write", tmp_path).code == 0
    assert "\n  --tensor-parallel-size " in (tmp_path / "run_vllm_cluster.sh").read_text()
