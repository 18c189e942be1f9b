"""A plan: the load, the streams the pool holds, what a plan warns of."""

from __future__ import annotations

from typing import Any

import pytest

from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.errors import InputError
from calibration.plan import Load, Plan, make_plan, resolve_load


def plan(model: str, gpu: str = "h100-sxm", load: Load | None = None, **changes: Any) -> Plan:
    deployment = resolve_deployment(find_model(model), gpu=find_gpu(gpu), **changes)
    return make_plan(deployment, load or resolve_load(deployment.max_model_len))


def test_a_load_is_prompt_and_output_or_a_context_of_both() -> None:
    assert resolve_load(8192, prompt_tokens=100, output_tokens=50) == Load(100, 50, True)
    assert resolve_load(8192, context=4001) == Load(2001, 2000, True)
    assert resolve_load(8192) == Load(1000, 500, False)
    assert resolve_load(300) == Load(200, 100, False)
    assert resolve_load(2) == Load(1, 1, False)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"context": 10, "prompt_tokens": 5}, "context with prompt_tokens or output_tokens, expected one"),
        ({"prompt_tokens": 5}, "output_tokens = None, expected both"),
        ({"output_tokens": 5}, "prompt_tokens = None, expected both"),
        ({"context": 1}, "output_tokens = 0, expected at least 1"),
        ({"prompt_tokens": 0, "output_tokens": 5}, "prompt_tokens = 0, expected at least 1"),
        ({"context": 9000}, r"context = 9000, expected at most max_model_len \(8192\)"),
    ],
)
def test_a_load_that_cannot_be_is_refused(asked: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_load(8192, **asked)


def test_streams_of_all_replicas_are_counted() -> None:
    one = plan("llama-3.1-8b")
    two = plan("llama-3.1-8b", dp=2)
    # two GPUs hold the buffers of communication as well
    assert two.kv_full == pytest.approx(2 * one.kv_full, rel=0.02)
    assert (one.max_num_seqs, two.max_num_seqs) == (1024, 2048)
    assert one.stream_blocks == -(-1500 // 16)
    assert one.stream_bytes == 94 * 16 * 131072


def test_without_a_pool_there_are_no_streams() -> None:
    found = plan("deepseek-v3", tp=8)
    assert (found.kv_full, found.kv_staggered, found.stream_blocks, found.stream_bytes) == (0.0, 0.0, None, None)
    assert found.warnings[0].startswith("vLLM would not start: the weights alone need")


@pytest.mark.parametrize(
    ("model", "gpu", "changes", "said"),
    [
        ("llama-3.1-8b", "h100-sxm", {}, "no request length was given: 1000 prompt and 500 output tokens are assumed"),
        ("deepseek-v3", "h200-sxm", {"tp": 8}, "every one of the 8 tensor-parallel ranks holds the whole KV cache"),
        ("qwen3-235b-a22b", "h200-sxm", {"tp": 8}, "each token's KV is held 2 times"),
        ("kimi-k2.5", "b200-sxm", {"tp": 8}, "not counted, for its size is not in the configuration: vision tower"),
        ("gemma-3-27b", "h100-sxm", {}, "multimodal: the encoder's own activations are not in the overhead"),
        ("llama-3.1-8b", "l4", {}, "L4: what CUDA reports as total memory was not found"),
        ("llama-3.1-8b", "a100-80-sxm", {"weights": "fp8"}, "has no FP8 units: fp8 weights save memory"),
        ("gpt-oss-20b", "h100-sxm", {}, "has no FP4 units: mxfp4 weights save memory"),
    ],
)
def test_what_a_reader_would_trip_over_is_said(model: str, gpu: str, changes: dict[str, Any], said: str) -> None:
    assert any(said in warning for warning in plan(model, gpu, **changes).warnings)


def test_a_plain_plan_warns_of_nothing() -> None:
    assert plan("llama-3.3-70b", load=Load(100, 100, True), tp=2, weights="fp8").warnings == ()
