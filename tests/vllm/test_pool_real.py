"""The KV pool ``plan`` predicts is the one a real vLLM makes, to the block and the token: every architecture that is
known, two block sizes, two pools, vLLM's defaults, its options, and what it refuses.

vLLM makes each pool in ``pool_oracle.py``, all of them in one process of some minutes. Where this processor decides, the
test asks for what vLLM took: recurrent states are float32 on processors with AVX-512 BF16 and the model's own dtype on
others, and MLA is held to the reference kernel, which processors with AMX replace.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from calibration.errors import InputError
from calibration.families import known_architectures
from harness.cli import plan

#: a number is asked for once: tests/conftest.py would run what fails again, and with it all of vLLM's starts
pytestmark = pytest.mark.vllm
once = pytest.mark.flaky(reruns=0)

HERE = Path(__file__).resolve().parent
PYTHON = Path(os.environ.get("VLLM_PYTHON", HERE.parents[1] / ".venv-vllm/bin/python")).absolute()
CONFIGS: dict[str, dict[str, Any]] = json.loads((HERE.parent / "data/model/pool_configs.json").read_text())
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
#: all starts together; two minutes on a free machine
ORACLE_S = 1800
GIB = 1 << 30

Answer = dict[str, Any]


@dataclass(frozen=True)
class Start:
    """One start: a model and flags that vLLM and ``plan`` share.

    Args:
        space_gib: vLLM's VLLM_CPU_KVCACHE_SPACE, which is ``--kv-cache-memory`` of a plan on CPU.
        changes: keys of the configuration set for this start; None removes one.
    """

    name: str
    model: str
    flags: tuple[str, ...]
    space_gib: str | None = None
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def id(self) -> str:
        return f"{self.model}-{self.name}"

    @property
    def config(self) -> dict[str, Any]:
        config = {**CONFIGS[self.model], **dict(self.changes)}
        return {key: value for key, value in config.items() if value is not None}

    @property
    def case(self) -> dict[str, Any]:
        """What the oracle reads."""
        text = self.config.get("text_config", self.config)
        kernel = ("--attention-backend", "CPU_MLA") if "kv_lora_rank" in text else ()
        return {
            "id": self.id,
            "config": self.config,
            "flags": [*self.flags, *kernel],
            "space_gib": self.space_gib,
        }


def sized(
    *more: str, length: int = 3000, step: int = 256, seqs: int = 8, pool: int | None = 100_000_007
) -> tuple[str, ...]:
    """Flags of a start whose length is no whole number of blocks and exceeds window and step together."""
    flags = ("--max-model-len", str(length), "--max-num-batched-tokens", str(step), "--max-num-seqs", str(seqs))
    return (*flags, *(() if pool is None else ("--kv-cache-memory-bytes", str(pool))), *more)


def defaults(pool: int = 300_000_000) -> tuple[str, ...]:
    return ("--kv-cache-memory-bytes", str(pool))


#: the same layers under the class of a multimodal model, or an older name
ALIASES = {
    *("llama_old_name", "mistral3", "gemma3_multimodal", "llama4_multimodal", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("qwen3_5_multimodal", "qwen3_5_moe_multimodal", "kimi_k25"),
}
#: vLLM 0.32 does not start these on a CPU
NEVER = {"qwen2_sliding_some", "nemotron_h_moe", "bamba"}
WINDOWED = ("mistral_sliding", "gemma2_7_layers", "gemma3_12_layers", "gpt_oss_4_layers", "llama4")
STATEFUL = ("qwen3_next", "granite_hybrid", "falcon_h1", "mamba2", "nemotron_h_dense")


def grid() -> Iterator[Start]:
    """Two block sizes (the default and 32; the reference MLA kernel makes 16 of both) and two pools for each model."""
    for model in CONFIGS:
        if model in NEVER:
            continue
        for block, pool in product(("", "32"), (100_000_007, 256_000_000)):
            asked = ("--block-size", block) if block else ()
            yield Start(f"block {block or 'default'}, {pool} bytes", model, sized(*asked, pool=pool))
            if model in ALIASES:
                break


def options() -> Iterator[Start]:
    llama = "llama_gqa_kv2"
    for gib in ("1", "2"):
        yield Start(f"{gib} GiB", llama, sized(pool=None), space_gib=gib)
    yield Start("1 GiB", "gemma3_12_layers", sized(pool=None), space_gib="1")
    for model in (llama, *WINDOWED, *STATEFUL, "deepseek_v3"):
        yield Start("defaults", model, defaults())
    for model in (llama, *STATEFUL):
        yield Start("no prefix caching", model, sized("--no-enable-prefix-caching"))
    for model in (llama, *WINDOWED):
        yield Start("no hybrid manager", model, sized("--disable-hybrid-kv-cache-manager"))
    for model, dtype in product(("qwen3_next", "granite_hybrid", "falcon_h1"), ("float32", "bfloat16")):
        yield Start(f"states {dtype}", model, sized("--mamba-ssm-cache-dtype", dtype))
    for model, block in product(("gpt_oss_4_layers", "granite_hybrid"), ("16", "256")):
        yield Start(f"block {block}", model, sized("--block-size", block))
    for model, dtype in product((llama, "qwen3_next"), ("float32", "float16")):
        yield Start(dtype, model, sized("--dtype", dtype))
    for model in (llama, "gemma3_12_layers", "deepseek_v3"):
        yield Start("fp8 cache", model, sized("--kv-cache-dtype", "fp8"))
        yield Start("800 blocks", model, sized("--num-gpu-blocks-override", "800"))
    for asked in ((), ("--block-size", "32")):
        name = " ".join(("prefix caching", *asked))
        yield Start(name, "mamba2", sized("--enable-prefix-caching", *asked))
    yield Start("long context", "deepseek_v3", sized(length=8192))
    yield Start("as many sequences as tokens", llama, sized(step=999, seqs=999, length=999))
    yield from strays()
    only_states = (("layer_types", ["linear_attention"] * 8),)
    yield Start("without attention", "qwen3_next", sized(), changes=only_states)


def strays() -> Iterator[Start]:
    """Keys that a family does not use, or leaves out."""
    for model in ("mixtral", "phi3", "granite_moe", "granite_moe_shared", "glm4_moe", "minimax_m2", "deepseek_v3"):
        yield Start("window of 300", model, sized(), changes=(("sliding_window", 300),))
    asked = (("sliding_window", 300), ("use_sliding_window", True))
    for model in ("qwen2_moe", "qwen3_moe"):
        yield Start("window of 300", model, sized(), changes=asked)
    text = CONFIGS["qwen3_vl_moe"]["text_config"] | {"sliding_window": 300}
    yield Start("window of 300", "qwen3_vl_moe", sized(), changes=(("text_config", text),))
    mixed = ["full_attention", "sliding_attention"] * (CONFIGS["granite_moe"]["num_hidden_layers"] // 2)
    for model in ("granite_moe", "mixtral"):
        changes = (("sliding_window", 300), ("layer_types", mixed))
        yield Start("window on some layers", model, sized(), changes=changes)
    unlimited = ("qwen2", "qwen3", "phi3", "glm4_moe", "minimax_m2", "deepseek_v3", "nemotron_h_dense")
    for model in (*unlimited, "falcon_h1", "qwen3_next", "mamba2"):
        yield Start(
            "no position limit", model, defaults(pool=1_000_000_000), changes=(("max_position_embeddings", None),)
        )
    yield Start(
        "no limit but the one asked", "mamba2", sized(length=9000), changes=(("max_position_embeddings", None),)
    )
    other = (("max_position_embeddings", None), ("seq_length", 1000))
    yield Start("another limit", "llama_gqa_kv2", defaults(), changes=other)


@dataclass(frozen=True)
class Refused(Start):
    """A start that vLLM refuses, saying ``theirs``; the plan says ``ours`` (patterns)."""

    theirs: str = ""
    ours: str = ""


def refusals() -> Iterator[Refused]:
    llama, gemma = "llama_gqa_kv2", "gemma3_12_layers"
    for model, block in ((llama, "16"), (llama, "48"), (gemma, "48"), ("llama4", "16")):
        reason = f"No common block size for {block}", f"block_size = {block}, expected a multiple of 32 on cpu"
        yield Refused(f"block {block}", model, sized("--block-size", block), None, (), *reason)
    short = "To serve at least one request .* max seq len .3000.", "max_model_len = 3000: one such request takes"
    states = ("--mamba-ssm-cache-dtype", "float32")
    for model, pool in product((llama, "deepseek_v3", "falcon_h1"), (2_000_000, 6_000_000)):
        more = states if model in STATEFUL else ()
        yield Refused(f"{pool} bytes", model, sized(*more, pool=pool), None, (), *short)
    for model in ("mistral_sliding", gemma, "llama4", "qwen3_next"):
        more = states if model in STATEFUL else ()
        yield Refused("2000000 bytes", model, sized(*more, pool=2_000_000), None, (), *short)
    for model in (llama, gemma):
        yield Refused("3 blocks", model, sized("--num-gpu-blocks-override", "3"), None, (), *short)
    for model in ("qwen3_next", "granite_hybrid"):
        reason = "Failed to promote", "hybrid KV cache manager cannot be disabled"
        yield Refused("no hybrid manager", model, sized("--disable-hybrid-kv-cache-manager"), None, (), *reason)
    reason = "invalid literal for int.*'0.5'", "takes whole GiB"
    yield Refused("half a GiB", llama, sized(pool=None), "0.5", (), *reason)
    yield Refused(
        "no GiB", llama, sized(pool=None), "0", (), "No available memory", "expected a whole number of at least"
    )
    reason = "max_num_batched_tokens .4. must be", "max_num_batched_tokens = 4, expected at least"
    yield Refused("fewer tokens than sequences", llama, sized(step=4), None, (), *reason)
    reason = "max_model_len .9000. is greater", "max_model_len = 9000, expected at most the model's 8192"
    yield Refused("longer than the model", llama, sized(length=9000), None, (), *reason)
    for model in ("gemma2_7_layers", gemma):
        reason = "does not support float16", "dtype = .*float16"
        yield Refused("float16", model, sized("--dtype", "float16"), None, (), *reason)
    reason = "Sliding window for some but all layers", "sliding window for some but not all layers"
    yield Refused("any", "qwen2_sliding_some", sized(), None, (), *reason)
    yield Refused("any", "nemotron_h_moe", sized(), None, (), "supported only for CUDA", "served on GPUs only")
    reason = "vLLM has no other way to handle it", "not served by vLLM 0.24.0 and later"
    yield Refused("any", "bamba", sized(), None, (), *reason)


STARTS = [*grid(), *options()]
REFUSALS = [*refusals()]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What vLLM says to every start, asked in one process."""
    folder = tmp_path_factory.mktemp("pools")
    cases, out, log = folder / "cases.json", folder / "out.json", folder / "log"
    cases.write_text(json.dumps([start.case for start in (*STARTS, *REFUSALS)]))
    environment = {**os.environ, **ENVIRONMENT}
    with log.open("wb") as said:
        done = subprocess.run(
            [str(PYTHON), str(HERE / "pool_oracle.py"), str(cases), str(out)],
            stdout=said,
            stderr=said,
            env=environment,
            timeout=ORACLE_S,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    return {answer["id"]: answer for answer in json.loads(out.read_text())}


def planned(start: Start, folder: Path, more: Iterable[str] = ()) -> dict[str, Any]:
    """The document of ``plan --json`` for the flags of a start."""
    config = folder / "config.json"
    config.write_text(json.dumps(start.config))
    space = () if start.space_gib is None else ("--kv-cache-memory", str(int(float(start.space_gib) * GIB)))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        plan.run(["--model", str(config), "--device", "cpu", "--json", *space, *start.flags, *more])
    document: dict[str, Any] = json.loads(out.getvalue())
    return document


def states_of(answer: Answer) -> tuple[str, ...]:
    """The dtype vLLM gave the recurrent states, as an option: it takes another than was asked on some processors."""
    return () if answer["state_dtype"] is None else ("--mamba-ssm-cache-dtype", answer["state_dtype"])


@once
@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.id)
def test_the_pool_is_vllms_to_the_block_and_token(start: Start, answers: dict[str, Answer], tmp_path: Path) -> None:
    answer = answers[start.id]
    if "FP8 KV cache on CPU requires" in answer.get("refusal", ""):
        pytest.skip(answer["refusal"])
    assert "refusal" not in answer, answer["refusal"]
    document = planned(start, tmp_path, states_of(answer))
    cluster, deployment = document["memory"]["cluster"], document["deployment"]
    assert (cluster["num_blocks"], cluster["kv_pool_tokens"], cluster["block_size"]) == (
        answer["num_gpu_blocks"],
        answer["kv_cache_size_tokens"],
        answer["block_size"],
    )
    for key in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching"):
        assert deployment[key] == answer[key], key


@once
@pytest.mark.parametrize("start", REFUSALS, ids=lambda start: start.id)
def test_what_vllm_refuses_is_refused_for_its_reason(
    start: Refused, answers: dict[str, Answer], tmp_path: Path
) -> None:
    theirs = answers[start.id].get("refusal", "it started")
    assert re.search(start.theirs, theirs), theirs
    with pytest.raises(InputError, match=start.ours) as refused:
        planned(start, tmp_path)
    longest = re.search(r"estimated maximum model length is (\d+)", theirs)
    if longest is not None:
        assert f"the longest that fits is {longest[1]}" in refused.value.message


def test_every_known_architecture_is_held_against_vllm() -> None:
    assert sorted({config["architectures"][0] for config in CONFIGS.values()}) == known_architectures()
    ids = [start.id for start in (*STARTS, *REFUSALS)]
    assert len(ids) == len(set(ids))
