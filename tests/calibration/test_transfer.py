"""Factors carried to another deployment: refused, kept or widened, never taken for its own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from calibration.calibration_file import Calibration, FitRecord, RunRecord, record_deployment
from calibration.catalog import find_gpu, find_model
from calibration.deployment import Deployment, resolve_deployment
from calibration.errors import InputError
from calibration.factors import Covariance, Domain
from calibration.priors import prior_factors
from calibration.transfer import KEPT, MOVED, factors_for


def deployment(model: str = "llama-3.1-8b", gpu: str = "h100-sxm", tp: int = 1, **flags: int) -> Deployment:
    return resolve_deployment(find_model(model), gpu=find_gpu(gpu), tp=tp, max_model_len=4096, **flags)


def calibration() -> Calibration:
    """Every step 1.3 times its prior, told to 2 %."""
    prior = prior_factors(deployment())
    fitted = replace(prior["step_overhead"], value=prior.value("step_overhead") * 1.3, log_sd=0.02, identified=True)
    other = replace(prior["per_sequence"], log_sd=0.1)
    return Calibration(
        deployment=record_deployment(deployment(), "llama-3.1-8b"),
        factors=replace(
            prior.with_factors(fitted, other),
            domain=Domain((1.0, 16.0), ((256.0, 128.0),)),
            covariances=(Covariance(("step_overhead", "per_sequence"), ((0.0004, -0.001), (-0.001, 0.01))),),
        ),
        used=(),
        left_out=(),
        held_out=(),
        fit=FitRecord(condition=1.0, scatter={}, findings={}),
        runs=(RunRecord("a", "now", "here"),),
        notes=(),
        harness_version="0",
        created="2026-11-30",
    )


def test_the_calibrated_deployment_has_its_factors_as_they_are() -> None:
    known = calibration()
    assert factors_for(known, deployment(), transfer=False) is known.factors


def test_another_deployment_is_refused_and_the_way_out_is_named() -> None:
    with pytest.raises(InputError, match="tp: 1 when calibrated, 2 now") as refused:
        factors_for(calibration(), deployment(tp=2), transfer=False)
    assert "--transfer" in refused.value.hint


@pytest.mark.parametrize("other", [deployment(tp=2), deployment("qwen2.5-7b")])
def test_factors_carried_over_move_the_other_prior_and_stay_wide(other: Deployment) -> None:
    known = calibration()
    found, own = factors_for(known, other, transfer=True), prior_factors(other)
    factor = found["step_overhead"]
    assert factor.value == pytest.approx(1.3**MOVED * own.value("step_overhead"))
    assert factor.log_sd == pytest.approx(math.hypot(0.02, KEPT * own["step_overhead"].log_sd))
    assert factor.log_sd < own["step_overhead"].log_sd
    assert factor.source.startswith("transferred from another deployment (")
    assert not factor.identified
    assert found.domain is None
    assert found.basis(4, 256, 128) == "extrapolated"


def test_what_was_fitted_together_stays_correlated_and_its_matrix_fits_its_spreads() -> None:
    found = factors_for(calibration(), deployment(tp=2), transfer=True)
    (together,) = found.covariances
    assert together.matrix[0][1] == -0.001
    for row, name in enumerate(together.names):
        assert together.matrix[row][row] == pytest.approx(found[name].log_sd ** 2)


def test_bounds_of_the_scheduler_price_no_step() -> None:
    known = calibration()
    assert factors_for(known, deployment(max_num_seqs=32), transfer=True) is known.factors


def test_another_device_is_refused_even_so() -> None:
    with pytest.raises(InputError, match="factors of one device say nothing of another"):
        factors_for(calibration(), deployment(gpu="l4"), transfer=True)
