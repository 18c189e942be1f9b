"""A run's folder and a calibration, as tests of the export use them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from calibration.calibration_file import Calibration, FitRecord, RunRecord, record_deployment
from calibration.catalog import find_gpu, find_model
from calibration.deployment import Deployment, resolve_deployment
from calibration.factors import Domain
from calibration.priors import prior_factors
from harness.calibration_file import NAME, write_calibration

ROOT = Path(__file__).parents[2]
#: a real vLLM 0.32.0 with a small pool: predicted 6.7 to 9.8 users, 6 ran freely, 8 did not
REFERENCE = ROOT / "results" / "reference" / "vllm-0.32.0-cpu-small-pool"
MODEL = "llama-3.1-8b"


def deployed() -> Deployment:
    return resolve_deployment(find_model(MODEL), gpu=find_gpu("h100-sxm"))


def calibrated(created: str = "2026-11-30T18:00:00+00:00") -> Calibration:
    """The priors of a deployment, two of them as a fit found them."""
    priors = prior_factors(deployed())
    found = priors.with_factors(
        replace(priors["step_overhead"], value=0.005, log_sd=0.1, identified=True),
        replace(priors["kv_read_factor"], value=1.25, log_sd=0.2, identified=True),
    )
    return Calibration(
        deployment=record_deployment(deployed(), MODEL),
        factors=replace(found, domain=Domain((1.0, 64.0), ((256.0, 128.0), (2048.0, 256.0)))),
        used=(),
        left_out=(),
        held_out=(),
        fit=FitRecord(condition=4.5, scatter={}, findings={}),
        runs=(RunRecord("results/a", "2026-11-30T16:23:14+00:00", "http://127.0.0.1:8000"),),
        notes=(),
        harness_version="0.1.0",
        created=created,
    )


def calibrated_run(folder: Path, created: str = "2026-11-30T18:00:00+00:00") -> Path:
    """The reference run with a calibration beside it."""
    folder.mkdir()
    for path in REFERENCE.iterdir():
        shutil.copy(path, folder)
    write_calibration(folder / NAME, calibrated(created))
    return folder
