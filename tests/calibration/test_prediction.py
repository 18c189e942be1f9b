"""Intervals: the delta method against what is known exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.factors import FACTORS, Z90, FactorSet
from calibration.prediction import Estimate, Outcome, propagate
from calibration.priors import prior_factors


def factors(**log_sd: float) -> FactorSet:
    """Priors with these spreads, all others 0, and no scatter."""
    known = prior_factors(resolve_deployment(find_model("llama-3.1-8b"), gpu=find_gpu("h100-sxm")))
    changed = [replace(known[name], log_sd=log_sd.get(name, 0.0)) for name in FACTORS]
    return replace(known.with_factors(*changed), residual_log_sd={})


def product(f: FactorSet) -> Outcome:
    return {"tpot": f.value("step_overhead") * f.value("kv_read_factor") ** 2}


def test_the_spread_of_a_product_is_exact() -> None:
    found = propagate(product, factors(step_overhead=0.1, kv_read_factor=0.05), "interpolated")["tpot"]
    sd = math.hypot(0.1, 2 * 0.05)
    assert found.high / found.value == pytest.approx(math.exp(Z90 * sd))
    assert found.value / found.low == pytest.approx(math.exp(Z90 * sd))
    assert found.basis == "interpolated"


def test_scatter_is_added_to_the_spread() -> None:
    known = replace(factors(step_overhead=0.1), residual_log_sd={"tpot": 0.1})
    found = propagate(product, known, "extrapolated")["tpot"]
    assert found.high / found.value == pytest.approx(math.exp(Z90 * math.hypot(0.1, 0.1)))


def test_what_has_no_spread_is_certain() -> None:
    found = propagate(product, factors(), "measured")["tpot"]
    assert found.low == found.value == found.high


def test_only_named_factors_are_moved() -> None:
    known = factors(step_overhead=0.1, kv_read_factor=0.5)
    found = propagate(product, known, "measured", names=("step_overhead",))["tpot"]
    assert found.high / found.value == pytest.approx(math.exp(Z90 * 0.1))


def test_an_estimate_holds_its_ends_and_says_so() -> None:
    found = Estimate(2.0, 1.0, 4.0, "measured")
    assert found.holds(1.0)
    assert found.holds(4.0)
    assert not found.holds(0.99)
    assert found.to_json() == {"value": 2.0, "low": 1.0, "high": 4.0, "basis": "measured"}
