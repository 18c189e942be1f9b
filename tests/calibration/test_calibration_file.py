"""The content of a calibration file: it survives the way there and back, and nothing else is taken for one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from calibration.calibration_file import (
    Calibration,
    FactorFinding,
    FitRecord,
    HeldOut,
    LeftOut,
    RunRecord,
    UsedStage,
    calibration_from_json,
    calibration_to_json,
    differences,
    mismatches,
    record_deployment,
)
from calibration.catalog import find_gpu, find_model, model_entries
from calibration.deployment import Deployment, resolve_deployment
from calibration.errors import InputError, Unsupported
from calibration.factors import Covariance, Domain
from calibration.observation import Observation
from calibration.priors import prior_factors
from calibration.queueing import Shape

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def on_cpu(**changes: Any) -> Deployment:
    from calibration.families import read_config

    asked = {"device": "cpu", "num_gpu_blocks_override": 364, "block_size": 128, "max_model_len": 512, **changes}
    return resolve_deployment(read_config(SMOLLM2, "config.json"), **asked)


def calibration_of(deployment: Deployment, model: Any) -> Calibration:
    factors = prior_factors(deployment)
    observation = Observation(
        label="stage 1",
        shape=Shape(prompt_tokens=64, output_tokens=100, requests_per_user=5.0, start_gap_s=0.002),
        users=4,
        tpot_s=0.19,
        ttft_s=1.1,
        tpot_log_sd=0.01,
        step_s=0.2,
        step_running=3.9,
    )
    matrix = ((0.01, 0.0), (0.0, 0.04))
    return Calibration(
        deployment=record_deployment(deployment, model, "smollm2"),
        factors=type(factors)(
            factors.factors,
            {"tpot": 0.02},
            Domain((1.0, 16.0), ((64.0, 100.0),)),
            (Covariance(("step_overhead", "per_sequence"), matrix),),
        ),
        used=(UsedStage(run=0, observation=observation, output_tokens_per_s=19.8, tpot_error=0.01, little_error=0.02),),
        left_out=(LeftOut(0, "stage 2", 99.0, 64.0, 100.0, "beyond the wall"),),
        held_out=(HeldOut("stage 1", "tpot", 0.19, 0.18, 0.17, 0.2),),
        fit=FitRecord(
            condition=4.5,
            scatter={"tpot": 0.02},
            findings={
                "step_overhead": FactorFinding(True, 0.1, 2.0, ""),
                "wait_steps": FactorFinding(False, 1, None, "x"),
            },
        ),
        runs=(RunRecord("results/a", "2026-11-30T16:23:14+00:00", "http://127.0.0.1:8300"),),
        notes=("one shape only",),
        harness_version="0.1.0",
        created="2026-11-30T18:00:00+00:00",
    )


def through_text(calibration: Calibration) -> Any:
    return json.loads(json.dumps(calibration_to_json(calibration), allow_nan=False))


def test_it_survives_the_way_there_and_back() -> None:
    here = calibration_of(on_cpu(), SMOLLM2)
    there = calibration_from_json(through_text(here))
    assert there == here
    assert there.rebuild_deployment() == on_cpu()
    assert there.single_shape


@pytest.mark.parametrize("entry", list(model_entries()), ids=lambda entry: entry.name)
def test_every_model_of_the_catalog_is_rebuilt(entry: Any) -> None:
    for name in (entry.name, entry.hf_id):
        model = find_model(name)
        heads = [a.heads for a in model.attention_layers] + [s.heads for s in model.state_layers]
        try:
            deployment = resolve_deployment(
                model, gpu=find_gpu("h200-sxm"), tp=2 if all(h % 2 == 0 for h in heads) else 1
            )
        except Unsupported:
            # dropped by this vLLM: there is no such deployment to keep
            continue
        record = record_deployment(deployment, name)
        assert record.rebuild() == deployment
        assert record.rebuild().warnings == deployment.warnings


@pytest.mark.parametrize("weights", ["auto", "bf16", "fp8", "int4", "nvfp4"])
def test_every_weight_format_is_rebuilt(weights: str) -> None:
    asked = resolve_deployment(find_model("llama-3.1-8b"), gpu=find_gpu("b200-sxm"), weights=weights, kv="fp8")
    assert record_deployment(asked, "llama-3.1-8b").rebuild() == asked


def test_another_model_than_the_deployments_is_refused() -> None:
    asked = resolve_deployment(find_model("llama-3.1-8b"), gpu=find_gpu("h100-sxm"))
    with pytest.raises(InputError, match="its record would rebuild another one"):
        record_deployment(asked, "qwen3-8b")


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in a document."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield (*path, key)
            yield from places(value, (*path, key))
    elif isinstance(content, list):
        for index, value in enumerate(content):
            yield (*path, index)
            yield from places(value, (*path, index))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with one place replaced, or removed for ``...``."""
    whole = copy.deepcopy(content)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return whole


GOOD = through_text(calibration_of(on_cpu(), SMOLLM2))
#: places inside the model's own config.json, whose keys are the business of its reader
OWN = [path for path in places(GOOD) if path[:3] != ("deployment", "model", "config")]
#: what the reader of factors computes anew
DERIVED = ("low", "high", "unit")


def is_refused(content: Any) -> bool:
    try:
        calibration_from_json(content)
    except InputError:
        return True
    return False


def test_any_missing_key_is_refused() -> None:
    tables = (("factors", "residual_log_sd"), ("fit", "scatter"), ("fit", "findings"))
    derived = [path for path in OWN if path[0] == "factors" and path[-1] in DERIVED]
    any_length = [path for path in OWN if isinstance(path[-1], int) or path[:-1] in tables]
    # a file from before it was known says nothing of it
    optional = [path for path in OWN if path[-1] == "start_gap_s"]
    assert optional
    assert not any(is_refused(changed(GOOD, path, ...)) for path in optional)
    needed = [path for path in OWN if path not in derived and path not in any_length and path not in optional]
    assert len(needed) > 100
    assert [path for path in needed if not is_refused(changed(GOOD, path, ...))] == []


def test_any_wrong_value_is_refused() -> None:
    as_text = (*DERIVED, "source", "identified")
    read = [p for p in OWN if not (p[0] == "factors" and (p[-1] in as_text or p[-2:-1] == ("names",)))]
    for value in (object(), {"x": 1}, float("nan"), [[]]):
        assert [path for path in read if not is_refused(changed(GOOD, path, value))] == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("schema_version",), 2, "schema_version = 2, this version reads 1"),
        (("surprise",), 1, "surprise is not known here"),
        (("deployment", "tp"), True, "deployment.tp = True, expected int"),
        (("deployment", "tp"), 7, "deployment: tp = 7, expected a divisor"),
        (("deployment", "gpu"), "h100", "deployment: "),
        (("deployment", "model", "catalog"), "llama-3.1-8b", "deployment.model: expected either catalog or config"),
        (("used", 0, "run"), 3, "used.0.run = 3, expected the number of one of the 1 runs"),
        (("used", 0, "tpot_s"), -1.0, "stage 1: tpot_s = -1.0, expected more than 0"),
        (("factors", "covariances", 0, "matrix"), [[1.0]], "factors.covariances.0.matrix: expected 2 rows"),
        (("factors", "covariances", 0, "names"), ["a", "b"], "factors.covariances.0.names has 'a'"),
        (("fit", "findings", "odd"), {}, "fit.findings.odd is no factor"),
    ],
)
def test_a_damaged_file_is_refused_by_key(path: tuple[Any, ...], value: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        calibration_from_json(changed(GOOD, path, value))
    assert said in caught.value.message


@pytest.mark.parametrize("content", [None, [], "x", 3, {}])
def test_no_calibration_is_refused(content: object) -> None:
    with pytest.raises(InputError):
        calibration_from_json(content)


def test_the_same_server_has_no_differences() -> None:
    assert differences(calibration_of(on_cpu(), SMOLLM2), on_cpu()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vllm_version": "0.31.0"}, "vllm_version: 0.32.0 when calibrated, 0.31.0 now"),
        ({"max_num_batched_tokens": 512}, "max_num_batched_tokens: 2048 when calibrated, 512 now"),
        ({"enable_prefix_caching": False}, "enable_prefix_caching: True when calibrated, False now"),
        (
            {"num_gpu_blocks_override": 41},
            "pool: 364 blocks of 128 tokens when calibrated, 41 blocks of 128 tokens now",
        ),
        ({"enforce_eager": True}, "enforce_eager: False when calibrated, True now"),
    ],
)
def test_another_server_is_told_apart_in_words(changes: dict[str, Any], said: str) -> None:
    assert said in mismatches(calibration_of(on_cpu(), SMOLLM2), on_cpu(**changes))


def test_another_model_is_told_apart() -> None:
    other = resolve_deployment(
        find_model("llama-3.1-8b"), device="cpu", num_gpu_blocks_override=364, block_size=128, max_model_len=512
    )
    keys = [difference.key for difference in differences(calibration_of(on_cpu(), SMOLLM2), other)]
    assert keys == ["model"]
