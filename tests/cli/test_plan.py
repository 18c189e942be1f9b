"""``plan``: the contract's document, the oracle through the command line, refusals, what people see, and how long it takes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from console import Cli

DATA = Path(__file__).resolve().parents[1] / "data" / "model"
STARTS = json.loads((DATA / "kv_starts.json").read_text())
MEMORY_KEYS = {
    "total_bytes",
    "weights_bytes",
    "overhead_bytes",
    "kv_pool_bytes",
    "kv_bytes_per_token",
    "kv_pool_tokens",
    "num_blocks",
    "block_size",
}


def planned(cli: Cli, *args: str) -> dict[str, Any]:
    done = cli("plan", *args, "--json")
    assert done.code == 0, done.err
    content: dict[str, Any] = json.loads(done.out)
    return content


def options_of(start: dict[str, Any], folder: Path) -> list[str]:
    path = folder / "config.json"
    path.write_text(json.dumps(start["config"]))
    memory = str(int(float(start["kv_cache_gib"]) * (1 << 30)))
    options = ["--model", str(path), "--kv-cache-memory", memory, "--device", "cpu"]
    for key, value in start["options"].items():
        options += [key] if value is None else [key, value]
    return options


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start["tag"])
def test_a_real_servers_pool_comes_out_of_the_command_line(start: dict[str, Any], cli: Cli, tmp_path: Path) -> None:
    options = options_of(start, tmp_path)
    if not start["started"]:
        refused = cli("plan", *options, "--json")
        assert (refused.code, refused.out) == (2, "")
        assert (
            "expected" in refused.one_message() or "refuses to start" in refused.one_message() or "fits" in refused.err
        )
        return
    cluster = planned(cli, *options)["memory"]["cluster"]
    assert cluster["num_blocks"] == start["num_blocks"]
    assert cluster["kv_pool_tokens"] == start["size_tokens"]
    assert cluster["block_size"] == start["block_size"]


def test_the_document_has_the_keys_of_the_contract(cli: Cli) -> None:
    found = planned(cli, "--model", "llama-3.3-70b", "--gpu", "h100-sxm", "--tp", "2", "--weights", "fp8")
    assert set(found) >= {
        "deployment",
        "memory",
        "fits",
        "users",
        "throughput_tokens_per_s",
        "tpot_ms",
        "ttft_ms",
        "warnings",
    }
    assert set(found["memory"]) == {"per_gpu", "cluster"}
    for part in found["memory"].values():
        assert set(part) == MEMORY_KEYS
    assert set(found["users"]) == {
        "kv_full",
        "kv_staggered",
        "max_num_seqs",
        "tpot",
        "ttft",
        "knee",
        "binding",
        "next",
    }
    assert found["fits"] is True


@pytest.mark.parametrize(("kv", "size"), [("auto", 327_680), ("bf16", 327_680), ("fp8", 163_840)])
@pytest.mark.parametrize("tp", ["2", "4", "8"])
def test_llama_70b_takes_320_kib_a_token_and_half_of_it_in_fp8(cli: Cli, kv: str, size: int, tp: str) -> None:
    found = planned(cli, "--model", "llama-3.3-70b", "--gpu", "h200-sxm", "--tp", tp, "--kv", kv)
    assert found["memory"]["cluster"]["kv_bytes_per_token"] == size
    assert found["memory"]["per_gpu"]["kv_bytes_per_token"] == size // int(tp)


def test_per_gpu_and_cluster_add_up(cli: Cli) -> None:
    found = planned(cli, "--model", "llama-3.3-70b", "--gpu", "h200-sxm", "--tp", "2", "--dp", "2", "--weights", "fp8")
    one, all_of_them = found["memory"]["per_gpu"], found["memory"]["cluster"]
    for key in ("total_bytes", "weights_bytes", "overhead_bytes", "kv_pool_bytes"):
        assert all_of_them[key] == 4 * one[key]
    # what vLLM prints is one engine's; here are two
    assert all_of_them["kv_pool_tokens"] == 2 * one["kv_pool_tokens"]
    assert all_of_them["num_blocks"] == 2 * one["num_blocks"]
    assert found["users"]["max_num_seqs"] == 2 * 1024


def test_82_gb_of_pool_hold_125_streams_of_4000_tokens(cli: Cli) -> None:
    asked = ("--model", "llama-3.3-70b", "--kv", "fp8", "--kv-cache-memory", "82GB", "--context", "4000")
    assert int(planned(cli, *asked, "--max-model-len", "8192")["users"]["kv_full"]) == 125


def test_the_first_preemptions_of_a_small_pool_lie_between_full_and_staggered(cli: Cli) -> None:
    asked = ("--model", "smollm2-135m", "--device", "cpu", "--num-gpu-blocks-override", "41", "--block-size", "32")
    users = planned(cli, *asked, "--max-model-len", "1024", "--prompt-tokens", "64", "--output-tokens", "100")["users"]
    assert users["kv_full"] == pytest.approx(6.667, abs=0.001)
    assert users["kv_staggered"] == pytest.approx(9.804, abs=0.001)
    assert users["binding"] == "kv_staggered"
    assert users["kv_staggered"] < users["knee"] < users["max_num_seqs"]
    assert users["next"] == "knee"


@pytest.mark.parametrize(("gpu", "tp"), [("h100-sxm", "8"), ("h200-sxm", "4")])
def test_what_does_not_fit_is_a_result_and_no_error(cli: Cli, gpu: str, tp: str) -> None:
    found = planned(cli, "--model", "deepseek-v3", "--gpu", gpu, "--tp", tp)
    assert found["fits"] is False
    assert found["memory"]["cluster"]["num_blocks"] == found["memory"]["cluster"]["kv_pool_tokens"] == 0
    assert found["memory"]["per_gpu"]["block_size"] is None
    assert found["users"]["kv_full"] == 0.0
    assert "the weights alone need" in found["warnings"][0]


def test_a_given_pool_needs_no_gpu_and_what_is_not_known_is_null(cli: Cli) -> None:
    found = planned(cli, "--model", "llama-3.1-8b", "--kv-cache-memory", "32GiB", "--max-model-len", "8192")
    assert found["memory"]["per_gpu"]["total_bytes"] is None
    assert found["memory"]["per_gpu"]["overhead_bytes"] is None
    assert found["memory"]["cluster"]["overhead_bytes"] is None
    assert found["memory"]["cluster"]["kv_pool_bytes"] == 32 << 30
    assert found["deployment"]["gpu"] is None


def test_a_pool_given_in_blocks_has_their_bytes(cli: Cli) -> None:
    asked = ("--model", "llama-3.1-8b", "--num-gpu-blocks-override", "1000", "--max-model-len", "8192")
    assert planned(cli, *asked)["memory"]["per_gpu"]["kv_pool_bytes"] == 1000 * 16 * 131072


def test_the_pool_of_a_cpu_is_whole_gib_but_under_vllms_own_name_any_size(cli: Cli) -> None:
    asked = ("--model", "smollm2-135m", "--device", "cpu", "--max-model-len", "512")
    refused = cli("plan", *asked, "--kv-cache-memory", "512MiB")
    assert refused.code == 2
    assert "takes whole GiB" in refused.one_message()
    found = planned(cli, *asked, "--kv-cache-memory-bytes", "512MiB")
    assert found["memory"]["cluster"]["num_blocks"] == (512 << 20) // (128 * 23040)


@pytest.mark.parametrize(
    ("text", "size"), [("4000000000", 4_000_000_000), ("4GB", 4_000_000_000), ("1.5GiB", 3 << 29), ("4 gib", 4 << 30)]
)
def test_sizes_are_read(cli: Cli, text: str, size: int) -> None:
    asked = ("--model", "llama-3.2-1b", "--max-model-len", "4096", "--kv-cache-memory", text)
    assert planned(cli, *asked)["deployment"]["kv_cache_memory_bytes"] == size


def test_vllms_own_option_names_are_understood(cli: Cli) -> None:
    ours = planned(cli, "--model", "llama-3.3-70b", "--gpu", "h200-sxm", "--tp", "2", "--kv", "fp8")
    theirs = planned(
        cli, "--model", "llama-3.3-70b", "--gpu", "h200", "--tensor-parallel-size", "2", "--kv-cache-dtype", "fp8"
    )
    assert ours == theirs


def test_presets_are_plans_and_an_option_goes_before_them(cli: Cli) -> None:
    from harness.cli.plan import PRESETS

    assert len(PRESETS) >= 6
    for name in PRESETS:
        assert planned(cli, "--preset", name, "--max-model-len", "16384")["fits"] is True, name
    changed = planned(cli, "--preset", "llama-70b-2xh100", "--gpu", "h200-sxm", "--tp", "4")["deployment"]
    assert (changed["model"], changed["gpu"], changed["tp"], changed["weights"]) == (
        "llama-3.3-70b",
        "h200-sxm",
        4,
        "fp8",
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "model = None, expected --model NAME or CONFIG.json, or --preset"),
        (("--model", "lama-3-8b", "--gpu", "l4"), "near it: llama"),
        (("--model", "llama-3.1-8b", "--gpu", "h1000"), "gpu = 'h1000' is not in the catalog"),
        (("--model", "none.json", "--gpu", "l4"), "No such file or directory"),
        (("--preset", "x"), "preset = 'x', expected one of llama-8b-1xl40s"),
        (("--model", "llama-3.1-8b"), "gpu = None, expected a GPU, or the pool itself"),
        (("--model", "llama-3.1-8b", "--kv-cache-memory", "much"), "kv_cache_memory = 'much', expected bytes"),
        (("--model", "llama-3.1-8b", "--kv-cache-memory", "1", "--kv-cache-memory-bytes", "1"), "expected one of them"),
        (
            ("--model", "llama-3.1-8b", "--gpu", "l4", "--tp", "3"),
            "tp = 3, expected a divisor of the 32 attention heads",
        ),
        (("--model", "llama-3.1-8b", "--gpu", "l4", "--context", "4", "--prompt-tokens", "2"), "one of the two ways"),
    ],
)
def test_what_cannot_be_is_one_message_and_exit_2(cli: Cli, args: tuple[str, ...], said: str) -> None:
    done = cli("plan", *args)
    assert done.code == 2
    assert said in done.one_message()
    assert done.out == ""


def test_an_unknown_architecture_is_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["LlamaForCausalLLM"]}))
    done = cli("plan", "--model", str(path), "--gpu", "l4")
    assert done.code == 2
    assert "architecture 'LlamaForCausalLLM' is unknown" in done.one_message()


def test_an_unknown_option_is_usage(cli: Cli) -> None:
    done = cli("plan", "--modle", "llama-3.1-8b")
    assert done.code == 2
    assert "unrecognized arguments: --modle" in done.err


def test_help_names_every_option_of_the_contract(cli: Cli) -> None:
    done = cli("plan", "--help")
    assert done.code == 0
    for option in (
        *("--model", "--gpu", "--tp", "--pp", "--dp", "--weights", "--kv", "--max-model-len", "--context"),
        *("--prompt-tokens", "--output-tokens", "--gpu-memory-utilization", "--max-num-seqs"),
        *("--max-num-batched-tokens", "--block-size", "--num-gpu-blocks-override", "--kv-cache-memory"),
        *("--device", "--vllm-version", "--json", "--explain"),
    ):
        assert option in done.out


def test_people_see_the_memory_the_limits_and_why(cli: Cli) -> None:
    asked = ("--model", "qwen3-32b", "--gpu", "h100-sxm", "--max-model-len", "8192")
    done = cli("plan", *asked, "--prompt-tokens", "2000", "--output-tokens", "1000")
    assert done.code == 0
    assert "qwen3-32b on 1 x H100 SXM5 80GB: bf16 weights, bfloat16 KV, vLLM 0.32.0" in done.out
    for name in ("total", "usable", "weights", "runtime and activation buffer", "KV pool", "KV per stream"):
        assert name in done.out
    assert "[WWWWWWWWW" in done.out
    assert "max_num_seqs" in done.out
    assert "pool, staggered <-" in done.out
    said = " ".join(done.out.split())
    assert (
        "The KV pool binds at 8 users: 21,808 tokens; the pool holds 7.2 streams of 2,000 + 1,000 tokens at their end"
        in said
    )
    assert "With 8 users, at pool, staggered" in said
    assert "time per output token, ms" in said


def test_people_see_that_a_limit_of_sequences_binds(cli: Cli) -> None:
    done = cli("plan", "--preset", "llama-8b-1xh100", "--max-num-seqs", "8", "--max-model-len", "8192")
    assert "max_num_seqs (8) binds" in done.out
    assert "asked for" in done.out


def test_people_see_that_it_does_not_fit(cli: Cli) -> None:
    done = cli("plan", "--model", "deepseek-v3", "--gpu", "h100-sxm", "--tp", "8")
    assert done.code == 0
    assert "It does not fit: the weights alone need 85.4 GB on each GPU" in done.out
    assert "no pool, no stream" in done.out
    assert done.out.count("the weights alone need") == 2


def test_an_explanation_names_the_physics(cli: Cli) -> None:
    done = cli("plan", "--model", "gemma-3-27b", "--gpu", "h100-sxm", "--max-model-len", "32768", "--explain")
    for words in (
        "Weights. 27,009,346,304 parameters",
        "The sampler's sort over 262,208 logits",
        "share one pool in 7 groups",
        "10 layers hold every token",
        "bound by memory bandwidth",
        "bound by compute",
        "When the pool is full.",
    ):
        assert words in done.out.replace("\n", " ")


def test_a_plan_without_a_pool_is_explained_too(cli: Cli) -> None:
    done = cli("plan", "--model", "deepseek-v3", "--gpu", "h100-sxm", "--tp", "8", "--explain")
    assert "KV pool. None: the weights alone need" in done.out
    given_pool = cli(
        "plan", "--model", "llama-3.1-8b", "--kv-cache-memory", "32GiB", "--max-model-len", "8192", "--explain"
    )
    assert "The pool was given." in given_pool.out
    assert "one block table" in given_pool.out
    assert "a given pool (cuda)" in given_pool.out


def test_replicas_pipelines_and_experts_are_in_the_headline(cli: Cli) -> None:
    asked = ("--model", "qwen3-235b-a22b", "--gpu", "h200-sxm", "--tp", "4", "--pp", "2", "--dp", "2")
    done = cli("plan", *asked, "--enable-expert-parallel", "--context", "40000")
    assert "on 16 x H200 SXM 141GB (TP 4, PP 2, DP 2, EP)" in done.out
    assert done.out.count("With ") == 2


def test_the_console_script_answers_like_the_command_tree(cli: Cli) -> None:
    asked = ["plan", "--preset", "llama-8b-1xl40s", "--json"]
    script = subprocess.run(
        [sys.executable, "-m", "harness.cli", *asked], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(script.stdout) == planned(cli, *asked[1:-1])
    refused = subprocess.run(
        [sys.executable, "-m", "harness.cli", "plan", "--preset", "x"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith("vllm-harness: preset = 'x'")


def test_a_plan_loads_neither_the_command_tree_nor_numpy() -> None:
    code = (
        "import sys; sys.argv = ['vllm-harness', 'plan', '--preset', 'llama-8b-1xl40s', '--json']\n"
        "from harness.cli import main; main()\n"
        "heavy = {'typer', 'pydantic', 'numpy', 'rich', 'pandas', 'aiohttp', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.bench
def test_a_plan_answers_in_300_ms_with_its_start_up() -> None:
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "harness.cli", "plan", "--preset", "llama-70b-2xh100", "--json"],
            capture_output=True,
            check=True,
            timeout=60,
        )
        taken.append(time.perf_counter() - begun)
    assert min(taken) < 0.3
