"""The flags of a plan, parsed by the real vLLM's own command line: ``vllm serve MODEL`` up to where it would start."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibration.artifacts import Launch, plan_launch, served_model
from calibration.catalog import find_gpu, find_model, read_config_file
from calibration.deployment import Deployment, resolve_deployment

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
MODEL = Path(os.environ.get("VLLM_MODEL", ROOT / ".cache/smollm2")).resolve()
#: no network, no report; the pool is the flag's
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": ""}

#: parses command lines as vllm.entrypoints.cli.main does for `serve`, and configures an engine for one, without starting it
PROGRAM = """
import contextlib, io, json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import cmd_init
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser(description="vLLM CLI")
serve = cmd_init()[0]
serve.subparser_init(parser.add_subparsers(required=False, dest="subparser"))

def parsed(line):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parser.parse_args(line)
            serve.validate(args)
    except SystemExit as ended:
        return {"code": ended.code, "said": said.getvalue()}
    return {"code": 0, "said": said.getvalue(), "fields": vars(args)}

def configured(line):
    args = parser.parse_args(line)
    args.model = args.model_tag
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    cache, scheduler, model = config.cache_config, config.scheduler_config, config.model_config
    return {
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes, "block_size": cache.block_size,
        "enable_prefix_caching": cache.enable_prefix_caching, "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens, "max_model_len": model.max_model_len,
        "dtype": str(model.dtype), "enforce_eager": model.enforce_eager,
    }

def quantised_at_load_as_fp8():
    try:
        Fp8Config(is_checkpoint_fp8_serialized=False)
    except ValueError as refused:
        return str(refused)

asked = json.load(sys.stdin)
answer = {
    "fp8": quantised_at_load_as_fp8(),
    "methods": QUANTIZATION_METHODS,
    "parsed": {name: parsed(line) for name, line in asked["parse"].items()},
    "configured": configured(asked["configure"]),
}
print("ANSWER" + json.dumps(answer, default=str))
"""


def launch(name: str, model: str, gpu: str | None = "h100-sxm", **asked: Any) -> Launch:
    found = None if gpu is None else find_gpu(gpu)
    return plan_launch(resolve_deployment(find_model(model), gpu=found, **asked), name)


def catalogued(model: str, gpu: str = "h100-sxm", **asked: Any) -> Launch:
    name = served_model(model)
    assert name is not None
    return launch(name, model, gpu, **asked)


#: deployment -> (its launch, fields of vLLM's engine arguments that must come of it)
DEPLOYMENTS: dict[str, tuple[Callable[[], Launch], dict[str, Any]]] = {
    "defaults": (lambda: catalogued("llama-3.1-8b"), {"tensor_parallel_size": 1, "quantization": None}),
    "tensor parallel, sized": (
        lambda: catalogued("llama-3.3-70b", tp=4, max_model_len=8192, max_num_seqs=256, gpu_memory_utilization=0.95),
        {"tensor_parallel_size": 4, "max_model_len": 8192, "max_num_seqs": 256, "gpu_memory_utilization": 0.95},
    ),
    "made FP8 at load": (
        lambda: catalogued("llama-3.3-70b", tp=2, weights="fp8", kv="fp8"),
        {"quantization": "fp8_per_tensor", "kv_cache_dtype": "fp8"},
    ),
    "made FP8 in blocks": (lambda: catalogued("qwen3-8b", weights="fp8-block"), {"quantization": "fp8_per_block"}),
    "float16 and e5m2": (
        lambda: catalogued("qwen2.5-72b", "a100-80-sxm", tp=4, weights="fp16", kv="fp8_e5m2"),
        {"dtype": "float16", "kv_cache_dtype": "fp8_e5m2"},
    ),
    "MLA, expert parallel": (
        lambda: catalogued("deepseek-v3", "h200-sxm", tp=8, expert_parallel=True, kv="fp8_ds_mla"),
        {"enable_expert_parallel": True, "kv_cache_dtype": "fp8_ds_mla", "tensor_parallel_size": 8},
    ),
    "stages over nodes": (
        lambda: catalogued("deepseek-v3", tp=8, pp=2),
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
    ),
    "replicas on a node": (
        lambda: catalogued(
            "qwen3-235b-a22b", "b200-sxm", tp=2, dp=4, expert_parallel=True, max_num_batched_tokens=4096
        ),
        {"data_parallel_size": 4, "data_parallel_backend": "mp", "max_num_batched_tokens": 4096},
    ),
    "replicas over nodes": (
        lambda: catalogued("qwen3-30b-a3b", tp=2, dp=8),
        {"data_parallel_size": 8, "data_parallel_size_local": 4, "data_parallel_backend": "ray"},
    ),
    "hybrid": (
        lambda: catalogued("qwen3-next-80b-a3b", tp=2, mamba_ssm_cache_dtype="float32", enable_prefix_caching=False),
        {"mamba_ssm_cache_dtype": "float32", "enable_prefix_caching": False},
    ),
    "windows as full attention": (
        lambda: catalogued("gpt-oss-120b", hybrid_kv_cache_manager=False, enforce_eager=True),
        {"disable_hybrid_kv_cache_manager": True, "enforce_eager": True},
    ),
    "pool given in blocks": (
        lambda: catalogued(
            "mistral-small-24b", num_gpu_blocks_override=4096, block_size=32, enable_prefix_caching=True
        ),
        {"num_gpu_blocks_override": 4096, "block_size": 32, "enable_prefix_caching": True},
    ),
    "pool given in bytes": (
        lambda: catalogued("gemma-3-27b", kv_cache_memory_bytes=12_345_678_901),
        {"kv_cache_memory_bytes": 12_345_678_901},
    ),
    "NVFP4 cache": (lambda: catalogued("llama-3.1-8b", "b200-sxm", kv="nvfp4"), {"kv_cache_dtype": "nvfp4"}),
    "16-bit cache of an FP8 checkpoint": (
        lambda: catalogued("minimax-m2", "h200-sxm", tp=4, kv="fp16", dtype="bf16"),
        {"kv_cache_dtype": "float16", "dtype": "bfloat16"},
    ),
    "CPU": (
        lambda: launch(
            str(MODEL), "smollm2-135m", None, device="cpu", kv_cache_memory_bytes=(1 << 30) + 4096, dtype="fp32"
        ),
        {"kv_cache_memory_bytes": (1 << 30) + 4096, "dtype": "float32"},
    ),
    "a name with everything in it": (lambda: launch("/m/a b/$(x)='\"--", "llama-3.1-8b"), {}),
}

#: the informal launch line of old pages, beside the model
OLD_LINE = (
    *(
        "--tensor-parallel-size",
        "2",
        "--gpu-memory-utilization",
        "0.95",
        "--max-model-len",
        "8192",
        "--max-num-seqs",
        "256",
    ),
    *("--dtype", "float16", "--block-size", "16", "--enable-chunked-prefill"),
)
GONE = {
    "--disable-log-requests": (),
    "--swap-space": ("4",),
    "--num-scheduler-steps": ("8",),
    "--use-v2-block-manager": (),
}


Answer = dict[str, Any]


def run_vllm(*args: str, question: object = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PYTHON), *args],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **ENVIRONMENT},
        check=False,
    )


def small_deployment() -> Deployment:
    return resolve_deployment(
        read_config_file(MODEL / "config.json"),
        device="cpu",
        kv_cache_memory_bytes=300_000_000,
        max_model_len=1024,
        max_num_seqs=24,
        block_size=64,
        enable_prefix_caching=False,
        enforce_eager=True,
        dtype="float32",
    )


@pytest.fixture(scope="module")
def answer() -> Answer:
    """Every command line through the one parser, which takes long to import."""
    lines = {}
    for name, (make, _) in DEPLOYMENTS.items():
        made = make()
        lines[name] = ["serve", str(made.checkpoint.model), *made.flags, "--host", "0.0.0.0", "--port", "8000"]
    lines["old line"] = ["serve", "org/model", *OLD_LINE]
    lines |= {flag: ["serve", "org/model", *OLD_LINE, flag, *values] for flag, values in GONE.items()}
    engine = ["serve", str(MODEL), *plan_launch(small_deployment(), str(MODEL)).flags]
    done = run_vllm("-c", PROGRAM, question={"parse": lines, "configure": engine})
    assert done.returncode == 0, done.stderr[-3000:]
    found: Answer = json.loads(done.stdout.rpartition("ANSWER")[2])
    return found


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_vllms_own_parser_takes_the_flags_of_a_plan(name: str, answer: Answer) -> None:
    make, expected = DEPLOYMENTS[name]
    came = answer["parsed"][name]
    assert came["code"] == 0, came["said"]
    assert came["said"] == ""
    assert came["fields"]["model_tag"] == make().checkpoint.model
    assert {key: came["fields"][key] for key in expected} == expected
    assert came["fields"]["quantization"] in (None, *answer["methods"])


def test_the_old_name_of_fp8_made_at_load_is_refused_by_the_engine(answer: Answer) -> None:
    """The parser takes it, the engine does not: why a plan says fp8_per_tensor."""
    assert "Please use `--quantization fp8_per_tensor`" in answer["fp8"]


def test_what_a_plan_leaves_out_keeps_vllms_default(answer: Answer) -> None:
    """A flag changes its own field and no other: against the line without flags."""
    plain = answer["parsed"]["defaults"]["fields"]
    changed = answer["parsed"]["tensor parallel, sized"]["fields"]
    different = {key for key, value in changed.items() if value != plain[key]}
    assert different == {"model_tag", "tensor_parallel_size", "max_model_len", "max_num_seqs", "gpu_memory_utilization"}


@pytest.mark.parametrize("flag", GONE)
def test_the_flags_of_old_pages_are_refused_with_a_usage_error(flag: str, answer: Answer) -> None:
    assert answer["parsed"]["old line"]["code"] == 0
    assert answer["parsed"][flag]["code"] == 2
    assert f"unrecognized arguments: {' '.join((flag, *GONE[flag]))}" in answer["parsed"][flag]["said"]


def test_the_informal_launch_line_ends_with_exit_code_2() -> None:
    module = ("-m", "vllm.entrypoints.openai.api_server", "--model", "org/model")
    done = run_vllm(*module, *OLD_LINE, "--kv-cache-dtype", "fp8_e5m2", "--disable-log-requests")
    assert done.returncode == 2
    assert "unrecognized arguments: --disable-log-requests" in done.stderr


def test_the_engine_is_configured_as_planned(answer: Answer) -> None:
    deployment = small_deployment()
    assert answer["configured"] == {
        "kv_cache_memory_bytes": deployment.kv_cache_memory_bytes,
        "block_size": deployment.block_size,
        "enable_prefix_caching": deployment.enable_prefix_caching,
        "max_num_seqs": deployment.max_num_seqs,
        "max_num_batched_tokens": deployment.max_num_batched_tokens,
        "max_model_len": deployment.max_model_len,
        "dtype": f"torch.{deployment.dtype}",
        "enforce_eager": True,
    }
