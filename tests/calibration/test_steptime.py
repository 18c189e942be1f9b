"""The step: its linear form, its physical terms one by one, and that scalar and array agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.errors import InputError
from calibration.steptime import LinearStep, StepTime, prior_step_time


def served(model: str = "llama-3.1-70b", gpu: str = "h100-sxm", **changes: object) -> StepTime:
    asked: dict[str, object] = {"tp": 2, "weights": "fp8", **changes}
    return prior_step_time(resolve_deployment(find_model(model), gpu=find_gpu(gpu), **asked))  # type: ignore[arg-type]


LINEAR = LinearStep(0.01, 5e-5, 2e-8, 3e-5)


def test_a_linear_step_is_its_four_coefficients() -> None:
    assert LINEAR.step_s(0, 0, 0) == 0.01
    assert LINEAR.step_s(10, 1000, 100) == pytest.approx(0.01 + 5e-4 + 2e-5 + 3e-3)


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ((0.0, 0, 0, 0), "base_s is 0.0: expected > 0"),
        ((0.01, -1e-9, 0, 0), "per_sequence_s is -1e-09"),
        ((0.01, 0, float("nan"), 0), "per_kv_token_s is nan"),
    ],
)
def test_a_step_takes_time_and_never_gives_any_back(coefficients: tuple[float, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LinearStep(*coefficients)


@pytest.mark.parametrize(
    "model", [LINEAR, served(), served("gpt-oss-120b", weights="auto")], ids=["linear", "dense", "moe"]
)
def test_an_array_of_steps_is_each_step(model: LinearStep | StepTime) -> None:
    batch, tokens, prompt = np.array([[1.0], [64.0]]), np.array([500.0, 90_000.0]), 100.0
    many = model.step_s_many(batch, tokens, np.asarray(prompt))
    assert many.shape == (2, 2)
    assert many[1, 0] == model.step_s(64.0, 500.0, prompt)
    assert many[0, 1] == model.step_s(1.0, 90_000.0, prompt)


def test_the_terms_add_up_to_the_step() -> None:
    step = served("gpt-oss-120b", weights="auto")
    decode = step.step_overhead_s + step.experts_s(8) + 8 * step.per_sequence_s + step.kv_s(8, 8000)
    assert step.step_s(8, 8000, 0) == pytest.approx(decode)
    mixed = step.mixed_step_overhead_s + step.prompt_chunk_s(500, 0) + step.experts_s(508) - step.experts_s(8)
    assert step.step_s(8, 8000, 500) == pytest.approx(decode + mixed)


def test_a_dense_model_has_no_experts_to_read() -> None:
    assert served().experts_s(100) == 0.0


def test_a_step_alone_reads_the_weights_and_launches_the_layers() -> None:
    step = served()
    read = step.physics.weight_bytes / 3.35e12
    # 80 layers at some 70 microseconds, and 34.8 GB a GPU at 3.35 TB/s
    assert step.step_s(1, 100, 0) == pytest.approx(read + 80 * 70e-6, rel=0.05)


def test_no_cache_is_read_for_nobody() -> None:
    assert served().kv_s(0, 0) == 0.0


@given(batch=st.floats(1, 512), context=st.floats(1, 50_000), prompt=st.floats(0, 8192), more=st.floats(1.01, 3))
def test_more_of_anything_never_takes_less(batch: float, context: float, prompt: float, more: float) -> None:
    step = served("gpt-oss-120b", weights="auto")
    here = step.step_s(batch, batch * context, prompt)
    assert step.step_s(batch * more, batch * context * more, prompt) >= here
    assert step.step_s(batch, batch * context * more, prompt) >= here
    assert step.step_s(batch, batch * context, prompt * more) >= here


def test_a_prompt_with_a_past_costs_its_attention() -> None:
    step = served()
    fresh, continued = step.prompt_chunk_s(1000, 0), step.prompt_chunk_s(1000, 20_000)
    # 4 * 64 heads * 128 * 80 layers operations a pair of tokens, over 2 GPUs at 989 TFLOP/s
    pairs = 1000 * 20_000 * 4 * 64 * 128 * 80 / 2
    assert continued - fresh == pytest.approx(step.attention_factor * pairs / 989.4e12)
