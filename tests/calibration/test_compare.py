"""Predicted beside measured saturation: the interval of the pool, the distance between intervals, the verdict, the gate."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.compare import KvPool, Prediction, compare, levels_of, mean_lengths, predict_wall
from calibration.errors import InputError
from calibration.saturation import Level

#: SmolLM2 on vLLM 0.32.0 with --num-gpu-blocks-override 41 --block-size 32
SMALL = KvPool(usable_blocks=40, block_size=32, usable_tokens=1280)


def sweep(bad_from: int, *users: int) -> list[Level]:
    """Levels that preempt from ``bad_from`` users on; throughput grows without a bend."""
    return [Level(users=n, output_tokens_per_s=30.0 * n, preemptions=float(n >= bad_from)) for n in users]


def test_the_small_pool_holds_six_whole_requests_and_nine_on_average() -> None:
    found = predict_wall(SMALL, 64, 100)
    # 164 tokens are 6 blocks; over its life a request holds 3, 4, 5 (32 tokens each) and 6 blocks (4 tokens)
    assert found.kv_full == pytest.approx(40 / 6)
    assert found.kv_staggered == pytest.approx(40 * 100 / (32 * 3 + 32 * 4 + 32 * 5 + 4 * 6))
    assert found.interval == (found.kv_full, found.kv_staggered)
    assert (found.binding, found.source) == ("wall", "probed")


def test_a_big_pool_comes_near_the_formula_without_blocks() -> None:
    pool = KvPool(usable_blocks=100_000, block_size=16, usable_tokens=1_600_000)
    found = predict_wall(pool, 1000, 500)
    assert found.kv_full == pytest.approx(1_600_000 / 1500, rel=0.01)
    assert found.kv_staggered == pytest.approx(1_600_000 / (1000 + 250 + 8), rel=0.01)


def test_mixed_layers_are_reckoned_in_tokens() -> None:
    found = predict_wall(KvPool(usable_blocks=100, block_size=16, usable_tokens=3000), 100, 100)
    assert (found.kv_full, found.kv_staggered) == (15, 20)


def test_engines_share_the_users() -> None:
    two = KvPool(usable_blocks=40, block_size=32, usable_tokens=1280, engines=2)
    found = predict_wall(two, 64, 100, max_num_seqs=5)
    assert found.kv_full == pytest.approx(2 * 40 / 6)
    assert found.max_num_seqs == 10
    assert found.interval == (10, 10)
    assert found.binding == "max_num_seqs"


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 512), st.integers(1, 100_000))
def test_staggered_users_are_never_fewer_than_lock_step_ones(prompt: int, output: int, block: int, blocks: int) -> None:
    pool = KvPool(usable_blocks=blocks, block_size=block, usable_tokens=blocks * block)
    found = predict_wall(pool, prompt, output)
    assert 0 < found.kv_full <= found.kv_staggered * (1 + 1e-12)
    assert found.kv_full <= pool.usable_tokens / (prompt + output)


def prediction(full: float, staggered: float, max_num_seqs: int | None = None) -> Prediction:
    return Prediction(kv_full=full, kv_staggered=staggered, max_num_seqs=max_num_seqs)


@pytest.mark.parametrize(
    ("full", "staggered", "verdict", "error"),
    [
        (6.7, 9.8, "inside", 0.0),
        (8.0, 9.8, "inside", 0.0),
        # the first level to show it is 8: the next one above 7, so the wall at 7 is not contradicted
        (5.0, 7.0, "beside", 0.0),
        # 8 is the next level below 9, but 9 were said to run freely in lock step
        (9.0, 11.0, "beside", 9 / 8 - 1),
        # 6 ran freely, but 4 were said to collide even when staggered
        (3.0, 4.0, "outside", 4 / 6 - 1),
        (16.0, 20.0, "outside", 1.0),
    ],
)
def test_the_verdict_on_a_wall_that_shows_at_eight(full: float, staggered: float, verdict: str, error: float) -> None:
    found = compare(sweep(8, 2, 4, 6, 8, 12), prediction(full, staggered)).limit
    assert found.verdict == verdict
    assert found.relative_error == pytest.approx(error)
    assert found.full_error == pytest.approx(full / 8 - 1)
    assert found.staggered_error == pytest.approx(staggered / 8 - 1)


def test_a_sweep_that_stays_below_the_predicted_wall_says_not_reached() -> None:
    found = compare(sweep(99, 2, 4, 8), prediction(20, 30))
    assert (found.limit.verdict, found.limit.relative_error) == ("not_reached", 0)
    assert (found.limit.full_error, found.binding, found.users) == (None, None, None)
    assert found.missed(0.1) is None


def test_a_sweep_that_runs_freely_beyond_the_predicted_wall_contradicts_it() -> None:
    found = compare(sweep(99, 10, 20, 40), prediction(20, 30))
    assert (found.limit.verdict, found.limit.relative_error) == ("outside", pytest.approx(-0.25))
    assert found.missed(0.2) == "predicted and measured saturation differ by -25%, tolerance 20%"


def test_a_sweep_that_begins_beyond_the_limit_still_bounds_it() -> None:
    found = compare(sweep(1, 16, 32), prediction(20, 30))
    assert found.limit.relative_error == pytest.approx(0.25)
    assert compare(sweep(1, 16, 32), prediction(4, 5)).limit.relative_error == 0
    assert (found.binding, found.users) == ("wall", None)


def test_max_num_seqs_caps_the_prediction_and_is_named() -> None:
    levels = [
        Level(users=n, preemptions=0.0, waiting=max(0, n - 64), kv_usage=0.3, running=min(n, 64)) for n in (32, 64, 96)
    ]
    found = compare(levels, prediction(200, 300, max_num_seqs=64))
    assert found.prediction is not None
    assert found.prediction.binding == found.binding == "max_num_seqs"
    assert (found.limit.verdict, found.limit.relative_error) == ("beside", 0)
    assert found.users == 64


def test_a_tolerance_is_met_or_missed_by_the_distance() -> None:
    found = compare(sweep(8, 4, 6, 8), prediction(10, 14))
    assert found.limit.relative_error == pytest.approx(0.25)
    assert found.missed(0.25) is None
    assert found.missed(0.24) == "predicted and measured saturation differ by +25%, tolerance 24%"


def test_nothing_measured_or_nothing_predicted_meets_no_tolerance() -> None:
    blind = compare([Level(users=2, output_tokens_per_s=60), Level(users=4)], prediction(3, 4))
    assert blind.limit.verdict == "not_measured"
    assert blind.missed(9.9) == (
        "nothing to compare: no level of the run says whether requests waited or were preempted (was /metrics read?)"
    )
    unpredicted = compare(sweep(8, 4, 8), None)
    assert unpredicted.limit.verdict == "not_predicted"
    assert "no plan was given" in (unpredicted.missed(9.9) or "")
    assert unpredicted.binding == "wall"


def test_a_knee_below_the_wall_binds_and_one_at_the_wall_does_not() -> None:
    tokens = dict(zip([1, 2, 4, 8, 16, 32, 64], [40, 80, 160, 165, 166, 167, 167], strict=True))
    early = [Level(users=n, output_tokens_per_s=t, preemptions=float(n >= 64)) for n, t in tokens.items()]
    found = compare(early, prediction(50, 60))
    assert found.binding == "knee"
    assert found.users == found.knee.users
    at_wall = [Level(users=n, output_tokens_per_s=t, preemptions=float(n >= 8)) for n, t in tokens.items()]
    found = compare(at_wall, prediction(5, 7))
    assert (found.binding, found.users) == ("wall", 4)
    unlimited = [Level(users=n, output_tokens_per_s=t, preemptions=0.0) for n, t in tokens.items()]
    assert compare(unlimited, prediction(500, 700)).binding == "knee"


def test_of_repeated_levels_the_best_throughput_and_the_worst_sign_count() -> None:
    levels = [*sweep(99, 1, 2, 4), Level(users=4, output_tokens_per_s=10.0, preemptions=3.0)]
    found = compare(levels, prediction(3, 5))
    assert found.onset is not None
    assert found.onset.first_bad == 4
    assert found.knee.reason == "not reached: throughput still grows at 4 users"


@given(st.permutations([2, 4, 6, 8, 12]), st.floats(1, 50), st.floats(1, 2))
def test_the_order_of_stages_does_not_matter(order: list[int], full: float, ratio: float) -> None:
    expected = prediction(full, full * ratio)
    assert compare(sweep(8, *order), expected) == compare(sweep(8, 2, 4, 6, 8, 12), expected)


@given(st.integers(2, 100), st.floats(1, 100), st.floats(1, 2), st.integers(3, 40))
def test_overlapping_intervals_have_no_error_and_distant_ones_have_its_sign(
    bad_from: int, full: float, ratio: float, top: int
) -> None:
    levels = list(range(1, top + 1))
    found = compare(sweep(bad_from, *levels), prediction(full, full * ratio))
    error = found.limit.relative_error
    assert error is not None
    assert found.onset is not None
    first_bad = found.onset.first_bad or math.inf
    last_good = found.onset.last_good or 0
    assert (error > 0) == (full > first_bad)
    assert (error < 0) == (full * ratio < last_good)


def stage(**values: Any) -> dict[str, Any]:
    fixed: dict[str, Any] = {
        "index": 0,
        "users": 8,
        "request_rate": None,
        "valid": True,
        "reasons": [],
        "requests": {"ok": 10},
        "output_tokens_per_s": 200.0,
        "server": {
            "preemptions": 0.0,
            "waiting_mean": 3.0,
            "waiting_capacity_mean": 2.0,
            "kv_cache_usage_max": 0.9,
            "running_max": 8.0,
        },
        "totals": {"prompt_tokens_mean": 64.0, "output_tokens_mean": 100.0},
    }
    return fixed | values


def test_a_stage_becomes_a_level() -> None:
    levels, left_out = levels_of([stage()])
    assert levels == [
        Level(users=8, output_tokens_per_s=200.0, preemptions=0.0, waiting=2.0, kv_usage=0.9, running=8.0)
    ]
    assert left_out == []


def test_without_a_reason_all_waiting_counts_and_without_a_server_nothing_is_known() -> None:
    before_032 = stage(server={"preemptions": 0.0, "waiting_mean": 3.0, "waiting_capacity_mean": None})
    assert levels_of([before_032])[0][0].waiting == 3.0
    assert levels_of([stage(server=None)])[0] == [Level(users=8, output_tokens_per_s=200.0)]


def test_rates_and_invalid_stages_are_left_out_by_name() -> None:
    levels, left_out = levels_of(
        [
            stage(users=None, request_rate=2.0),
            stage(index=1, valid=False, reasons=["client: CPU of the busiest process is 0.97 of a core"]),
        ]
    )
    assert levels == []
    assert left_out == [
        "stage 0: a rate, not users",
        "stage 1: 8 users: invalid: client: CPU of the busiest process is 0.97 of a core",
    ]


def test_mean_lengths_weigh_stages_by_their_good_requests() -> None:
    long = stage(requests={"ok": 30}, totals={"prompt_tokens_mean": 128.0, "output_tokens_mean": 200.0})
    empty = stage(requests={"ok": 0}, totals={"prompt_tokens_mean": None, "output_tokens_mean": None})
    assert mean_lengths([stage(), long, empty]) == (112.0, 175.0)
    with pytest.raises(InputError, match="no good request of the run has token counts"):
        mean_lengths([empty])


def test_the_document_is_json_without_nan_and_says_both_sides() -> None:
    document = compare(sweep(8, 2, 4, 6, 8, 12), predict_wall(SMALL, 64, 100)).to_dict()
    again = json.loads(json.dumps(document, allow_nan=False))
    assert again["predicted"]["kv_full"] == pytest.approx(6.67, abs=0.01)
    assert again["predicted"]["binding"] == "wall"
    assert again["measured"]["last_good"] == 6
    assert again["measured"]["first_bad"] == 8
    assert again["measured"]["sign"] == {"limit": "wall", "evidence": "1 preemptions"}
    assert again["verdict"] == "inside"
    assert [level["sign"] is not None for level in again["levels"]] == [False, False, False, True, True]


def test_a_document_of_nothing_is_null() -> None:
    document = compare([], None).to_dict()
    assert document["predicted"] is None
    assert document["measured"]["last_good"] is None
    assert document["verdict"] == "not_measured"
    assert document["levels"] == []
