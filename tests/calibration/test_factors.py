"""Factors: what they may be, their intervals, where they hold, and that they survive a file."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.errors import InputError
from calibration.factors import FACTORS, Domain, Factor, FactorSet, factors_from_json, prior
from calibration.priors import prior_factors


def some() -> FactorSet:
    return prior_factors(resolve_deployment(find_model("llama-3.1-8b"), gpu=find_gpu("h100-sxm")))


def test_an_interval_is_log_normal_around_the_value() -> None:
    factor = prior("kv_read_factor", 1.5, 0.2, "by hand")
    assert factor.low == pytest.approx(1.5 * 2.718281828 ** (-1.645 * 0.2), rel=1e-3)
    assert factor.low * factor.high == pytest.approx(1.5**2)
    assert (factor.unit, prior("per_sequence", 1e-5, 0.1, "").unit) == ("", "s")
    assert not factor.identified


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "speed"}, "factor 'speed' is unknown"),
        ({"value": -1.0}, "kv_read_factor: value is -1.0"),
        ({"value": float("inf")}, "kv_read_factor: value is inf"),
        ({"prior_value": float("nan")}, "kv_read_factor: prior_value is nan"),
        ({"log_sd": -0.1}, "kv_read_factor: log_sd is -0.1"),
        ({"prior_log_sd": float("nan")}, "kv_read_factor: prior_log_sd is nan"),
    ],
)
def test_a_factor_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    good = {
        "name": "kv_read_factor",
        "value": 1.0,
        "log_sd": 0.1,
        "source": "",
        "prior_value": 1.0,
        "prior_log_sd": 0.1,
    }
    with pytest.raises(InputError, match=message):
        Factor(**{**good, **changes})


def test_a_set_is_complete() -> None:
    factors = some().factors
    with pytest.raises(InputError, match="factors wait_steps are missing"):
        FactorSet({name: factor for name, factor in factors.items() if name != "wait_steps"})


def test_one_factor_is_scaled_and_no_other() -> None:
    before = some()
    after = before.scaled("per_sequence", 2.0)
    assert after.value("per_sequence") == 2 * before.value("per_sequence")
    assert all(after[name] == before[name] for name in FACTORS if name != "per_sequence")
    assert before.with_factors(after["per_sequence"]) == after


def test_what_was_measured_is_the_domain() -> None:
    domain = Domain((1, 64), ((1000, 100), (100, 1000)))
    assert domain.basis(8, 500, 500) == "interpolated"
    assert domain.basis(64, 1000, 100) == "interpolated"
    assert domain.basis(65, 500, 500) == "extrapolated"
    assert domain.basis(8, 2000, 500) == "extrapolated"
    assert domain.basis(8, 500, 2000) == "extrapolated"
    # inside both lengths, but more prompt to each output token than was run
    assert Domain((1, 64), ((1000, 500), (500, 1000))).basis(8, 1000, 400) == "extrapolated"


def test_priors_alone_are_an_extrapolation() -> None:
    assert some().basis(1, 100, 100) == "extrapolated"
    assert replace(some(), domain=Domain((1, 8), ((100, 100),))).basis(4, 100, 100) == "interpolated"


@pytest.mark.parametrize("domain", [None, Domain((1.0, 64.0), ((32.0, 128.0),))])
def test_factors_survive_a_file(domain: Domain | None) -> None:
    before = replace(some(), domain=domain)
    after = factors_from_json(json.loads(json.dumps(before.to_json())))
    assert after.domain == before.domain
    assert after.residual_log_sd == before.residual_log_sd
    assert all(after[name] == before[name] for name in FACTORS)


@pytest.mark.parametrize("broken", ["factors", "residual_log_sd", "domain"])
def test_a_damaged_file_is_refused(broken: str) -> None:
    content = some().to_json()
    del content[broken]
    with pytest.raises(InputError, match=f"cannot be read: KeyError.*{broken}"):
        factors_from_json(content)
    with pytest.raises(InputError, match="cannot be read"):
        factors_from_json({**some().to_json(), broken: "x"})
