"""What KV pool vLLM 0.32.0 itself makes of small models, many of them in one process: the oracle of ``plan``.

    python tests/vllm/pool_oracle.py CASES.json OUT.json      (in the vLLM environment; no model file, no server)

Each case is the start of a server without the server: its flags go through vLLM's argument parser and the defaults of
the API server, then vLLM's own engine builds the model with dummy weights, sizes the pool, allocates it and makes the
scheduler. Written per case: what the server would export as ``vllm:cache_config_info``, or vLLM's refusal.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

# before vLLM is imported: the engine runs in this process
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import vllm.v1.engine.core
from vllm import envs
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import MambaSpec

SPACE = "VLLM_CPU_KVCACHE_SPACE"
#: how vLLM says no; anything else is a fault of this script and ends it
REFUSALS = (ValueError, RuntimeError, AssertionError)
#: no tokenizer and no pictures: neither is part of the pool
FLAGS = ("--load-format", "dummy", "--enforce-eager", "--skip-tokenizer-init", "--language-model-only")


def hasten() -> None:
    """Leave out what a start repeats and the pool does not depend on: a start then takes one second, not ten."""
    # each model class is looked at in a process of its own, which imports vLLM again
    registry._run_in_subprocess = lambda look: look()
    # every module is searched for kernels to replace; once will do, none is run
    current_platform.register_triton_kernel_overrides = functools.cache(
        current_platform.register_triton_kernel_overrides
    )
    # collections walk the whole heap, a second each: what is imported stays frozen
    vllm.v1.engine.core.freeze_gc_heap = gc.collect
    gc.unfreeze = lambda: None


def stand_in_for_torchvision() -> None:
    """Qwen's multimodal modules, which hold its text models too, import torchvision; nothing of it is called."""
    if importlib.util.find_spec("torchvision") is None:
        transforms = ModuleType("torchvision.transforms.v2")
        transforms.functional = ModuleType("torchvision.transforms.v2.functional")  # type: ignore[attr-defined]
        sys.modules[transforms.__name__] = transforms


@functools.cache
def parser() -> FlexibleArgumentParser:
    return AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


def started(model: Path, case: dict[str, Any]) -> dict[str, Any]:
    """The pool as the server's labels show it, and the defaults it was made with."""
    os.environ.pop(SPACE, None)
    if case["space_gib"] is not None:
        os.environ[SPACE] = case["space_gib"]
    args = AsyncEngineArgs.from_cli_args(parser().parse_args(["--model", str(model), *FLAGS, *case["flags"]]))
    config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
    engine = vllm.v1.engine.core.EngineCore(config, Executor.get_class(config), log_stats=False)
    try:
        return shown(config) | {"state_dtype": state_dtype(engine)}
    finally:
        engine.shutdown()


def shown(config: Any) -> dict[str, Any]:
    labels = config.cache_config.metrics_info()
    numbers = ("num_gpu_blocks", "kv_cache_size_tokens", "block_size", "kv_cache_memory_bytes")
    return {
        **{name: int(labels[name]) for name in numbers},
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
    }


def state_dtype(engine: Any) -> str | None:
    """dtype of the recurrent states; None where the model keeps none."""
    specs = [group.kv_cache_spec for group in engine.scheduler.kv_cache_config.kv_cache_groups]
    kept = {str(spec.dtypes[-1]).removeprefix("torch.") for spec in specs if isinstance(spec, MambaSpec)}
    assert len(kept) <= 1, kept
    return kept.pop() if kept else None


def forget() -> None:
    """Make room for the next start."""
    destroy_model_parallel()
    destroy_distributed_environment()
    envs.disable_envs_cache()
    gc.collect()
    gc.freeze()


def answer(model: Path, case: dict[str, Any]) -> dict[str, Any]:
    begun = time.perf_counter()
    try:
        said = started(model, case)
    except REFUSALS as error:
        said = {"refusal": f"{type(error).__name__}: {error}"}
    except SystemExit as ended:
        said = {"refusal": f"the argument parser ended with {ended.code}"}
    finally:
        forget()
    return {"id": case["id"], **said, "took_s": round(time.perf_counter() - begun, 2)}


def main(cases: Path, out: Path) -> None:
    hasten()
    stand_in_for_torchvision()
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(json.loads(cases.read_text())):
            model = Path(folder) / str(number)
            model.mkdir()
            (model / "config.json").write_text(json.dumps(case["config"]))
            answers.append(answer(model, case))
            print(json.dumps(answers[-1]), file=sys.stderr, flush=True)
    out.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
