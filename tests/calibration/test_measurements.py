"""A table of measurements read: names, loads, flags, and every reason to leave a row out."""

from __future__ import annotations

import pytest

from calibration.errors import InputError
from calibration.measurements import Measurement, Unusable, numbers, read_measurements

INFERENCEX = "aiconfigurator-silicon/db-dump(InferenceX-style)"
ROW = {
    "source": "somebody",
    "url_or_path": "",
    "gpu": "H100-SXM-80GB",
    "num_gpus": "2",
    "tp": "2",
    "model": "meta-llama/Llama-3.1-70B",
    "weight_dtype": "fp8",
    "kv_dtype": "",
    "isl": "1000",
    "osl": "500",
    "concurrency": "8",
    "request_rate": "",
    "ttft_ms_mean": "150",
    "ttft_ms_p50": "",
    "ttft_ms_p99": "",
    "tpot_ms_mean": "20",
    "output_tok_s": "",
    "total_tok_s": "",
    "req_s": "",
    "vllm_version": "0.19.0",
    "notes": "",
}


def read(*changes: dict[str, str]) -> tuple[list[Measurement], list[Unusable]]:
    return read_measurements([{**ROW, **change} for change in changes])


def one(**changes: str) -> Measurement:
    (found,), left = read(changes)
    assert left == []
    return found


def reason(**changes: str) -> str:
    found, (left,) = read(changes)
    assert found == []
    return left.reason


def test_a_row_is_a_deployment_a_load_and_what_was_measured() -> None:
    found = one()
    assert (found.row, found.gpu, found.model, found.family, found.tp) == (1, "h100-sxm", "llama-3.1-70b", "dense", 2)
    assert (found.users, found.requests_per_s) == (8.0, None)
    assert (found.tpot_s, found.ttft_s, found.output_tokens_per_s) == (0.02, 0.15, None)
    assert (found.shape.prompt_tokens, found.shape.output_tokens) == (1000, 500)
    assert found.deployment.weights.name == "fp8"
    assert found.deployment.vllm_version == "0.19.0"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", "llama-4-scout"),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("somebody/Qwen3-32B-AWQ", "qwen3-32b"),
    ],
)
def test_a_model_is_found_under_any_vendor_and_format(text: str, name: str) -> None:
    assert one(model=text, tp="4", num_gpus="4").model == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("H100-SXM", "h100-sxm"),
        ("H100-SXM-80GB", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H200-SXM", "h200-sxm"),
        ("B200-SXM", "b200-sxm"),
        ("GB200", "gb200"),
        ("MI300X", "mi300x"),
        ("AMD MI300X", "mi300x"),
        ("A100-SXM-80GB", "a100-80-sxm"),
        ("A100-80GB", "a100-80-sxm"),
        ("A100-SXM", "a100-80-sxm"),
        ("L4 24GB", "l4"),
        ("RTX A6000 48GB", "rtx-a6000"),
    ],
)
def test_a_gpu_is_found_however_it_is_spelt(text: str, name: str) -> None:
    assert one(gpu=text, model="llama-3.2-1b", weight_dtype="bf16").gpu == name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"isl": ""}, "isl is not stated"),
        ({"osl": "0"}, "osl is not stated"),
        ({"isl": "long"}, "isl = 'long', expected a number"),
        ({"concurrency": ""}, "neither concurrency nor a finite request rate is stated"),
        ({"concurrency": "", "request_rate": "inf"}, "neither concurrency nor a finite request rate is stated"),
        ({"model": "nobody/nothing-7b"}, "model = 'nobody/nothing-7b' is not in the catalog"),
        ({"gpu": "DGX Spark GB10"}, "gpu = 'DGX Spark GB10' is not in the catalog"),
        ({"ttft_ms_mean": "", "tpot_ms_mean": ""}, "nothing was measured"),
        ({"notes": "as published; do not use for validation"}, "its notes say not to use it"),
        ({"notes": "4 nodes TP over network"}, "tensor parallelism over a network"),
        ({"tp": "3", "num_gpus": "3"}, "tp = 3, expected a divisor of the 64 attention heads"),
        ({"weight_dtype": "fp9"}, "weights = 'fp9', expected one of"),
        ({"vllm_version": "0.3.0"}, "vllm_version = '0.3.0', expected 0.8.0 or later"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(changes: dict[str, str], said: str) -> None:
    assert reason(**changes).startswith(said)


def test_labels_that_disagree_are_refused_on_mixtures_only() -> None:
    notes = "moe_tp=4 moe_ep=1"
    assert "experts over 4 ranks, but tp = 2 and 2 GPUs" in reason(model="openai/gpt-oss-120b", notes=notes)
    assert one(notes=notes).model == "llama-3.1-70b"


def test_a_row_that_contradicts_itself_is_refused() -> None:
    said = reason(tpot_ms_mean="3")
    assert "8 sequences ran" in said or "7 sequences ran" in said
    assert "at the memory's peak, more than its TPOT of 3.0 ms" in said


def test_a_run_that_stands_twice_is_used_once() -> None:
    found, left = read({}, {"source": "somebody else", "tpot_ms_mean": "20.004"}, {"tpot_ms_mean": "21"})
    assert [m.row for m in found] == [1, 3]
    assert left == [Unusable(2, "somebody else", "llama-3.1-70b", "h100-sxm", "the same run as row 1")]


def test_equal_throughput_alone_makes_no_run_the_same() -> None:
    only = {"ttft_ms_mean": "", "tpot_ms_mean": "", "output_tok_s": "300"}
    assert len(read(only, only)[0]) == 2


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ({"output_tok_s": "400"}, 400.0),
        ({"req_s": "2"}, 1000.0),
        ({"total_tok_s": "1200"}, 400.0),
        ({"output_tok_s": "400", "req_s": "2"}, 400.0),
    ],
)
def test_throughput_is_output_tokens_a_second(changes: dict[str, str], rate: float) -> None:
    assert one(**changes).output_tokens_per_s == pytest.approx(rate)


def test_a_median_stands_in_for_a_mean_ttft() -> None:
    assert one(ttft_ms_mean="", ttft_ms_p50="90").ttft_s == pytest.approx(0.09)
    assert one(ttft_ms_mean="100", ttft_ms_p50="90").ttft_s == pytest.approx(0.1)


def test_an_open_loop_has_a_rate_and_no_users() -> None:
    found = one(concurrency="", request_rate="2.5")
    assert (found.users, found.requests_per_s, found.shape.requests_per_user) == (None, 2.5, None)


def test_flags_in_the_notes_are_the_deployments() -> None:
    found = one(notes="mbt=2048 gpu_mem_util=0.95 max_num_seqs=128").deployment
    assert (found.max_num_batched_tokens, found.gpu_memory_utilization, found.max_num_seqs) == (2048, 0.95, 128)
    found = one(notes="gpu-memory-utilization 0.6 max-model-len 8192").deployment
    assert (found.gpu_memory_utilization, found.max_model_len) == (0.6, 8192)


def test_a_stated_cache_dtype_is_taken() -> None:
    assert one(kv_dtype="fp8").deployment.kv.name == "fp8_e4m3"
    assert one().deployment.kv.name == "bfloat16"


@pytest.mark.parametrize(
    ("model", "stated", "name"),
    [
        ("openai/gpt-oss-120b", "fp4", "mxfp4"),
        ("openai/gpt-oss-120b", "mxfp4", "mxfp4"),
        ("moonshotai/Kimi-K2.5", "fp4", "nvfp4"),
        ("moonshotai/Kimi-K2.5", "int4", "int4"),
        ("MiniMaxAI/MiniMax-M2.5", "fp8", "fp8-block"),
        ("meta-llama/Llama-3.1-70B", "", "bf16"),
    ],
)
def test_a_format_is_the_checkpoints_own(model: str, stated: str, name: str) -> None:
    found = one(gpu="B300-SXM", tp="8", num_gpus="8", model=model, weight_dtype=stated, notes="moe_tp=8 moe_ep=1")
    assert found.deployment.weights.name == name


def test_what_the_sources_scripts_say_fills_the_blanks() -> None:
    found = one(source=INFERENCEX, vllm_version="")
    assert (found.shape.prompt_tokens, found.shape.output_tokens) == (900, 450)
    assert list(found.nominal_shape) == [1000, 500]
    assert found.shape.requests_per_user == 10
    d = found.deployment
    assert (d.max_num_batched_tokens, d.gpu_memory_utilization, d.max_num_seqs) == (8192, 0.9, 8)
    assert d.concurrent_batches == 2


def test_the_cache_dtype_of_a_script_is_the_gpus() -> None:
    caches = [one(source=INFERENCEX, gpu=gpu).deployment.kv.name for gpu in ("H100-SXM", "H200-SXM", "B200-SXM")]
    assert caches == ["bfloat16", "fp8_e4m3", "fp8_e4m3"]


def test_later_scripts_set_other_flags() -> None:
    row = {"source": INFERENCEX, "gpu": "B200-SXM", "model": "MiniMaxAI/MiniMax-M2.5", "isl": "8192", "osl": "1024"}
    old, new = (one(**row, vllm_version=version).deployment for version in ("0.17.0", "0.19.0"))
    assert (old.kv.name, old.gpu_memory_utilization, old.max_num_batched_tokens) == ("bfloat16", 0.95, 8192)
    assert (new.kv.name, new.gpu_memory_utilization, new.max_num_batched_tokens) == ("fp8_e4m3", 0.9, 16384)


def test_expert_parallel_ranks_counted_twice_are_users() -> None:
    row = {"source": INFERENCEX, "model": "MiniMaxAI/MiniMax-M2.5", "tp": "4", "num_gpus": "16"}
    found = one(**row, notes="moe_tp=1 moe_ep=16")
    assert found.users == 32
    assert found.deployment.expert_parallel
    assert found.deployment.gpus == 4


@pytest.mark.parametrize(
    ("stated", "notes", "version"),
    [
        ("0.15.1", "", "0.15.1"),
        ("v0.15.1", "", "v0.15.1"),
        ("", "measured=2025-10-29T00:00:00.000Z", "0.11.0"),
        ("nightly-5b8c30d62b754b57", "measured=2026-04-03T00:00:00.000Z", "0.19.0"),
        ("", "measured=2024-01-01", "0.11.0"),
        ("", "", "0.19.0"),
    ],
)
def test_a_version_is_stated_or_that_of_the_day(stated: str, notes: str, version: str) -> None:
    found = one(vllm_version=stated, notes=notes)
    assert found.deployment.vllm_version == version
    assert found.stated_version == stated


def test_prompts_of_a_shared_prefix_are_mostly_cached() -> None:
    found = one(source="BLIS sim-to-real ground truth", concurrency="", request_rate="5")
    assert found.shape.cached_prompt_share == 0.8


def test_rows_of_one_server_and_shape_are_a_sweep() -> None:
    first, second, other = read({}, {"concurrency": "16", "tpot_ms_mean": "25"}, {"isl": "2000"})[0]
    assert first.sweep_key == second.sweep_key != other.sweep_key
    assert first.server_key == other.server_key
    assert first.deployment_key == ("h100-sxm", "llama-3.1-70b", "fp8", 2)


def test_a_condition_on_versions_needs_numbers() -> None:
    with pytest.raises(InputError, match="version = 'newest', expected numbers"):
        numbers("newest")


def test_short_rows_are_read_as_blank() -> None:
    found, left = read_measurements([{"source": "x", "gpu": "H100"}])
    assert found == []
    assert left[0].reason == "model = '' is not in the catalog"
