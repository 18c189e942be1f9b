"""Scores: what is scored and what is not, the wall, the sums, against predictions made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from calibration.accuracy import (
    Report,
    RowScore,
    Score,
    WallScore,
    percentile,
    predict_point,
    prior_of,
    report_json,
    score,
    summary,
    walls,
)
from calibration.measurements import Measurement, read_measurements
from calibration.prediction import Estimate
from calibration.serving import serving

BASE = {
    "source": "somebody",
    "gpu": "H100-SXM-80GB",
    "num_gpus": "2",
    "tp": "2",
    "model": "Qwen/Qwen3-32B",
    "weight_dtype": "bf16",
    "isl": "4096",
    "osl": "1024",
    "vllm_version": "0.12.0",
    "notes": "gpu_mem_util=0.9",
}
#: users -> (TTFT, TPOT) in ms, as published for this server (aiconfigurator gap analysis): the wall is at some 60 users
SWEEP = {8: (749, 17.87), 16: (840, 21.88), 32: (979, 29.33), 64: (4376, 52.57), 128: (58753, 55.2)}


def measured(**changes: str) -> Measurement:
    (found,), left = read_measurements([{**BASE, "concurrency": "8", "tpot_ms_mean": "17.87", **changes}])
    assert left == []
    return found


def sweep(levels: Mapping[int, tuple[float, float]] = SWEEP) -> list[Measurement]:
    rows = [
        {**BASE, "concurrency": str(users), "ttft_ms_mean": str(ttft), "tpot_ms_mean": str(tpot)}
        for users, (ttft, tpot) in levels.items()
    ]
    found, left = read_measurements(rows)
    assert left == []
    return found


def test_a_row_is_scored_on_what_it_measured() -> None:
    m = measured(ttft_ms_mean="749", output_tok_s="430")
    (row,) = score([m]).rows
    served = serving(m.deployment)
    point = predict_point(m, served, prior_of(m, served))
    assert set(row.scores) == {"tpot", "ttft", "throughput"}
    assert row.scores["tpot"].estimate.value == point.tpot_s
    assert row.scores["tpot"].error == pytest.approx(point.tpot_s / 0.01787 - 1)
    assert row.scores["throughput"].measured == 430
    assert row.scores["throughput"].estimate.value == point.output_tokens_per_s
    assert row.regime == "below_limits"


def test_nothing_is_scored_that_was_not_measured() -> None:
    assert set(score([measured()]).rows[0].scores) == {"tpot"}


def test_the_priors_are_near_a_published_sweep() -> None:
    report = score(sweep())
    assert [abs(row.scores["tpot"].error) < 0.2 for row in report.rows] == [True] * 5
    assert all(row.scores["tpot"].covered for row in report.rows[:3])


def test_ttft_beyond_the_wall_is_not_scored() -> None:
    report = score(sweep())
    assert [row.beyond_wall for row in report.rows] == [False, False, False, True, True]
    assert ["ttft" in row.scores for row in report.rows] == [True, True, True, False, False]


def test_the_wall_is_bracketed_between_measured_levels() -> None:
    (wall,) = score(sweep()).walls
    assert (wall.last_below, wall.first_beyond) == (32, 64)
    assert 50 < wall.full < wall.staggered < 64
    assert wall.bracketed


@pytest.mark.parametrize(
    ("full", "staggered", "met"), [(20, 40, True), (33, 60, True), (64, 70, True), (65, 70, False), (20, 31, False)]
)
def test_a_wall_is_met_where_the_intervals_meet(full: float, staggered: float, met: bool) -> None:
    assert WallScore(measured(), 32, 64, full, staggered).bracketed is met


def test_no_wall_is_seen_where_ttft_grows_with_the_users() -> None:
    beyond, crossings = walls(sweep({users: (100.0 * users, 20.0) for users in (4, 8, 16, 32)}))
    assert beyond == set()
    assert crossings == []


def test_a_single_slow_level_is_no_wall() -> None:
    levels = {8: (300.0, 20.0), 16: (5000.0, 21.0), 32: (900.0, 25.0)}
    assert walls(sweep(levels)) == (set(), [])


def test_a_lone_row_that_waits_longer_than_it_decodes_is_beyond_the_wall() -> None:
    m = measured(ttft_ms_mean="20000")
    assert walls([m]) == ({1}, [])
    assert "ttft" not in score([m]).rows[0].scores


def test_sweeps_are_told_apart_and_equal_levels_count_once() -> None:
    twice = [*sweep(), *(replace(m, row=m.row + 10, ttft_s=0.1) for m in sweep())]
    assert len(walls(twice)[1]) == 1
    other = [replace(m, row=m.row + 10, stated_version="nightly") for m in sweep()]
    assert len(walls([*sweep(), *other])[1]) == 2


def test_a_client_at_its_connection_limit_is_left_out() -> None:
    row = {
        **BASE,
        "model": "openai/gpt-oss-120b",
        "weight_dtype": "fp4",
        "isl": "1024",
        "osl": "1024",
        "concurrency": "512",
        "ttft_ms_mean": "33000",
        "tpot_ms_mean": "7.5",
    }
    found, _ = read_measurements([row])
    report = score(found)
    assert report.rows == []
    assert report.skipped[0].reason.startswith("its client kept to 100 connections: of 512 users 9")


def test_an_open_loop_row_is_scored_at_its_rate() -> None:
    m = measured(concurrency="", request_rate="0.5", isl="500", osl="250")
    (row,) = score([m]).rows
    assert row.scores["tpot"].estimate.value == pytest.approx(0.0149, rel=0.05)


def test_an_open_loop_beyond_what_can_be_served_is_full() -> None:
    m = measured(concurrency="", request_rate="50")
    (row,) = score([m]).rows
    assert row.regime == "kv_full"


def test_a_row_that_cannot_be_predicted_is_skipped_with_the_reason() -> None:
    m = measured()
    broken = replace(m, deployment=replace(m.deployment, device="cuda", gpu=None, kv_cache_memory_bytes=1 << 34))
    report = score([broken])
    assert report.rows == []
    assert "no step time without a device" in report.skipped[0].reason


def test_a_sweep_without_a_pool_has_no_wall() -> None:
    models = [replace(m, deployment=replace(m.deployment, tp=1, gpu_memory_utilization=0.5)) for m in sweep()]
    assert score(models).walls == []


def scored(error: float, covered: bool) -> RowScore:
    spread = 10.0 if covered else 1.0
    estimate = Estimate(1 + error, (1 + error) / spread, (1 + error) * spread, "extrapolated")
    return RowScore(measured(), {"tpot": Score(1.0, estimate)}, "below_limits", False)


def test_errors_are_summed_up_in_percent() -> None:
    found = summary([scored(0.1, True), scored(-0.2, True), scored(0.3, False), scored(0.0, True)], [])
    assert found["tpot"]["n"] == 4
    assert found["tpot"]["mape_mean"] == pytest.approx(15)
    assert found["tpot"]["mape_median"] == pytest.approx(15)
    assert found["tpot"]["mape_p90"] == pytest.approx(27)
    assert found["tpot"]["coverage_90"] == 0.75
    nothing = {"n": 0, "mape_mean": None, "mape_median": None, "mape_p90": None, "coverage_90": None}
    assert found["ttft"] == found["throughput"] == nothing
    assert found["wall"] == {"n": 0, "bracketed": 0}


def test_percentiles_interpolate_between_ordered_values() -> None:
    assert percentile([1.0, 2.0, 4.0], 50) == 2.0
    assert percentile([1.0, 2.0, 4.0], 75) == 3.0
    assert percentile([5.0], 90) == 5.0
    assert percentile([], 50) is None


def test_the_report_has_the_keys_of_the_contract_and_no_nan() -> None:
    content = report_json(score(sweep()))
    assert {"overall", "by", "skipped", "rows"} <= set(content)
    assert set(content["by"]) == {"family", "gpu", "model", "tp", "source"}
    assert set(content["by"]["family"]) == {"dense"}
    for entry in (content["overall"], content["by"]["gpu"]["h100-sxm"]):
        assert set(entry) == {"tpot", "ttft", "throughput", "wall"}
        assert set(entry["tpot"]) == {"n", "mape_mean", "mape_median", "mape_p90", "coverage_90"}
    assert content["overall"]["wall"] == {"n": 1, "bracketed": 1}
    assert content["rows"][0]["tpot"]["measured"] == pytest.approx(17.87)
    assert content["rows"][0]["throughput"] is None
    assert content["rows"][4]["ttft"] is None
    json.dumps(content, allow_nan=False)


def test_an_empty_report_is_empty() -> None:
    assert report_json(Report([], [], []))["overall"]["tpot"]["n"] == 0
