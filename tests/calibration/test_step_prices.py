"""Priors that have not seen what they predict."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from calibration.accuracy import Report
from calibration.measurements import Measurement, read_measurements
from calibration.priors import generation
from calibration.step_prices import first_tokens, fit, prices_of, score_left_out, table, tpot_s, usable

HEADER = "source,gpu,num_gpus,tp,model,weight_dtype,isl,osl,concurrency,ttft_ms_mean,tpot_ms_mean,vllm_version,notes"
#: a few levels of published servers (aiconfigurator's gap analysis and InferenceX rows): the same model twice, two others
ROWS = [
    "a,H100-SXM-80GB,2,2,Qwen/Qwen3-32B,bf16,1024,512,{n},{t},{p},0.12.0,",
    "a,H100-SXM-80GB,4,4,Qwen/Qwen3-32B,bf16,1024,512,{n},{t},{p},0.12.0,",
    "a,H200-SXM,2,2,meta-llama/Llama-3.1-70B,fp8,1024,1024,{n},{t},{p},0.12.0,",
    "a,B200-SXM,2,2,meta-llama/Llama-3.1-70B,fp8,1024,1024,{n},{t},{p},0.12.0,",
]
LEVELS = [
    [(1, 90, 13.9), (8, 160, 15.6), (32, 330, 20.4)],
    [(1, 70, 9.4), (8, 120, 10.8), (32, 240, 14.9)],
    [(4, 120, 14.2), (16, 190, 17.1), (64, 420, 27.0)],
    [(4, 90, 11.0), (16, 140, 13.0), (64, 300, 19.5)],
]


def measurements() -> list[Measurement]:
    lines = [row.format(n=n, t=t, p=p) for row, levels in zip(ROWS, LEVELS, strict=True) for n, t, p in levels]
    found, skipped = read_measurements(csv.DictReader(io.StringIO("\n".join([HEADER, *lines]))))
    assert not skipped
    return found


def tpots(report: Report) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([row.scores["tpot"].estimate.value for row in report.rows])


def slowed(rows: Sequence[Measurement], first: int, last: int) -> list[Measurement]:
    return [
        replace(row, tpot_s=(row.tpot_s or 0.0) * 1.5, ttft_s=(row.ttft_s or 0.0) * 1.5) if first <= i < last else row
        for i, row in enumerate(rows)
    ]


def test_what_is_left_out_is_not_seen_and_everything_else_is() -> None:
    rows = measurements()
    before = tpots(score_left_out(rows))
    changed = tpots(score_left_out(slowed(rows, 0, 3)))
    assert changed[:3] == pytest.approx(before[:3], rel=1e-3)
    assert (changed[3:9] > 1.02 * before[3:9]).all()


def test_a_model_is_left_out_with_all_its_deployments() -> None:
    rows = measurements()
    before = tpots(score_left_out(rows, unit="model"))
    changed = tpots(score_left_out(slowed(rows, 0, 6), unit="model"))
    assert changed[:6] == pytest.approx(before[:6], rel=1e-3)
    assert (changed[6:9] > 1.02 * before[6:9]).all()


def test_every_group_is_told_of() -> None:
    told: list[tuple[int, int]] = []
    score_left_out(measurements(), progress=lambda done, of: told.append((done, of)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_prices_come_back_from_times_that_they_make() -> None:
    """Where only they differ from their priors, prices move the whole way times can tell."""
    t = table([row for row in measurements() if usable(row)])
    true = fit(t)
    true["layer_overhead_s@hopper"] *= 1.3
    made = t.__class__(t.columns, tpot_s(true, t), t.deployment, t.generation)
    again = tpot_s(fit(made), made)
    assert again == pytest.approx(made.tpot_s, rel=0.05)


def test_a_generation_that_the_table_says_nothing_of_keeps_the_catalogs_prices() -> None:
    rows = measurements()
    found, firsts = fit(table(rows)), first_tokens(rows)
    for kind in ("ada", "generic", "cpu"):
        assert prices_of(kind, generation(kind).prices, found, firsts) == generation(kind).prices
    ampere = prices_of("ampere", generation("ampere").prices, found, firsts)
    assert ampere.layer_overhead_s == pytest.approx(found["layer_overhead_s@hopper"] * found["layer@ampere"])
    assert prices_of("blackwell", generation("blackwell").prices, found, firsts).gemm == found["gemm@blackwell"]
