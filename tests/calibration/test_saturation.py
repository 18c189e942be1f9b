"""Limits and knees of sweeps whose answer is known: by hand, by formula, and of a real server."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from calibration.knee import KNEE_SLOPE
from calibration.saturation import Level, Onset, Sign, knee, onset, sign_of

POWERS = [1, 2, 4, 8, 16, 32, 64, 128]


def test_preemptions_show_the_wall() -> None:
    assert sign_of(Level(users=8, preemptions=4, waiting=0.0)) == Sign("wall", "4 preemptions")


def test_streams_that_wait_for_a_full_pool_show_the_wall() -> None:
    level = Level(users=12, preemptions=0, waiting=2.1, kv_usage=0.9, running=9)
    assert sign_of(level, request_share=0.15) == Sign("wall", "2.1 streams waiting with the pool 90% full")


def test_streams_that_wait_while_the_pool_has_room_wait_for_something_else() -> None:
    assert sign_of(Level(users=64, preemptions=0, waiting=20, kv_usage=0.5), request_share=0.01) is None
    # one request takes half of a small pool: 0.5 full is full
    assert sign_of(Level(users=64, preemptions=0, waiting=20, kv_usage=0.5), request_share=0.5) is not None


def test_where_the_share_of_a_request_is_unknown_85_percent_is_full() -> None:
    assert sign_of(Level(users=9, waiting=3, kv_usage=0.85)) is not None
    assert sign_of(Level(users=9, waiting=3, kv_usage=0.84)) is None


def test_streams_that_wait_behind_max_num_seqs_show_that_limit() -> None:
    level = Level(users=96, preemptions=0, waiting=32, kv_usage=0.97, running=64)
    assert sign_of(level, 0.01, 64) == Sign("max_num_seqs", "32.0 streams waiting with 64 running")


def test_a_wait_for_the_running_step_is_no_limit() -> None:
    assert sign_of(Level(users=4, preemptions=0, waiting=0.5, kv_usage=1.0)) is None
    assert sign_of(Level(users=1000, preemptions=0, waiting=20, kv_usage=1.0)) is None
    assert sign_of(Level(users=1000, preemptions=0, waiting=21, kv_usage=1.0)) is not None


def test_without_usage_waiting_alone_counts_and_without_readings_nothing_does() -> None:
    assert sign_of(Level(users=9, waiting=3)) == Sign("wall", "3.0 streams waiting")
    assert sign_of(Level(users=9)) is None


WALL = Sign("wall", "4 preemptions")


def levels(*users: int) -> list[Level]:
    return [Level(users=n, preemptions=0) for n in users]


def test_the_onset_is_between_the_last_level_without_and_the_first_with_a_sign() -> None:
    assert onset(levels(2, 4, 8, 12), [None, None, WALL, WALL]) == Onset(4, 8, WALL)


def test_a_sweep_without_signs_has_its_top_as_last_good_level() -> None:
    assert onset(levels(2, 4), [None, None]) == Onset(4)


def test_a_sweep_that_begins_beyond_the_limit_has_no_good_level() -> None:
    assert onset(levels(16, 32), [WALL, WALL]) == Onset(None, 16, WALL)


def test_of_repeated_levels_the_worst_counts_and_order_does_not_matter() -> None:
    assert onset(levels(8, 4, 8, 2), [None, None, WALL, None]) == Onset(4, 8, WALL)


def test_levels_the_server_said_nothing_of_tell_nothing() -> None:
    assert onset([Level(users=2), Level(users=4)], [None, None]) is None
    assert onset([Level(users=2, preemptions=0), Level(users=4)], [None, None]) == Onset(2)


@pytest.mark.parametrize("knee_at", [10, 20, 40])
def test_a_hyperbola_bends_where_its_slope_says(knee_at: int) -> None:
    """X = a N / (1 + b N): the slope falls to ``KNEE_SLOPE`` of the first user's at (1 + b N)**2 = (1 + b) / KNEE_SLOPE."""
    b = brentq(lambda b: (1 + b * knee_at) ** 2 - (1 + b) / KNEE_SLOPE, 1e-6, 10.0)
    found = knee(POWERS, [40 * n / (1 + b * n) for n in POWERS])
    assert found.users == pytest.approx(knee_at, rel=0.1)


@given(st.floats(min_value=2, max_value=30), st.floats(min_value=0.1, max_value=1000))
def test_the_bend_of_two_straight_lines_lies_between_low_and_high(bend: float, slope: float) -> None:
    found = knee(POWERS, [slope * min(n, bend) for n in POWERS])
    assert found.users is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low <= bend <= found.high
    assert found.low <= found.users <= found.high


def test_a_straight_line_has_no_knee() -> None:
    found = knee(POWERS, [10.0 * n for n in POWERS])
    assert (found.users, found.low, found.high) == (None, None, None)
    assert found.reason == "not reached: throughput still grows at 128 users"


def test_throughput_that_never_grows_bends_at_its_lowest_level() -> None:
    found = knee([8, 16, 32], [100.0, 104.0, 101.0])
    assert (found.users, found.low, found.high) == (8, 8, 16)
    assert found.reason == "already at the lowest level, 8 users"


def test_a_dip_before_a_rise_is_no_knee() -> None:
    found = knee([1, 2, 4, 8, 16, 32], [40, 42, 150, 290, 310, 315])
    assert found.low == 4
    assert found.high == 16


def test_a_pause_of_the_curve_is_no_knee() -> None:
    # 2 -> 4 brings nothing, 4 -> 8 brings much: the knee is not before 8
    found = knee([2, 4, 8, 16], [80, 80, 240, 250])
    assert (found.low, found.high) == (4, 16)


def test_two_levels_are_too_few() -> None:
    assert knee([1, 2], [10, 20]).reason == "2 levels with a throughput, at least 3 are needed"
    assert knee([1, 2, 4], [0, 0, 0]).reason == "no throughput at any level"


@given(st.lists(st.floats(min_value=0, max_value=1000), min_size=8, max_size=8))
def test_whatever_the_curve_the_knee_lies_between_low_and_high(tokens: list[float]) -> None:
    found = knee(POWERS, tokens)
    if found.users is not None:
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.users <= found.high


@given(st.floats(min_value=0.01, max_value=1e6))
def test_the_unit_of_throughput_does_not_matter(scale: float) -> None:
    tokens = [38.7, 67.4, 148, 206, 263, 300, 316]
    found, scaled = knee(POWERS[:7], tokens), knee(POWERS[:7], [scale * t for t in tokens])
    assert scaled.users == pytest.approx(found.users)
    assert (scaled.low, scaled.high) == (found.low, found.high)


def test_real_sweeps_of_a_small_model_on_two_cores_bend_about_sixteen_users() -> None:
    """SmolLM2-135M on vLLM 0.32.0, CPU, 64 in / 64 out: 206 tok/s at 8 users, 263 at 16, 316 at 64."""
    found = knee([1, 2, 4, 8, 16, 32, 64, 96], [38.7, 67.4, 148, 206, 263, 300, 316, 304])
    assert (found.low, found.high) == (8, 32)
    assert found.users == pytest.approx(18.1, abs=0.1)
    # an added user between 8 and 16 brings 7.1 of the first one's 38.7 tok/s, between 16 and 32 only 2.3
    assert 7.1 > KNEE_SLOPE * 38.7 > 2.3


def test_a_real_sweep_into_a_small_pool_bends_at_its_wall() -> None:
    """The same with 40 usable blocks of 32 tokens and 64 in / 100 out, where 6.7 whole requests fit."""
    found = knee([4, 8, 12, 24], [119, 173, 157, 165])
    assert (found.low, found.high) == (4, 12)
    assert found.users is not None
    assert not math.isnan(found.users)


SHARED = Path(os.environ.get("VLLM_HARNESS_SHARED", Path(__file__).parents[2].parent / "shared"))


@pytest.mark.skipif(not (SHARED / "oracle").is_dir(), reason="needs the oracle of a real vLLM")
@pytest.mark.parametrize(("mode", "last_good", "first_bad"), [("lock", 6, 7), ("stagger", 9, 10)])
def test_the_wall_of_a_real_server_is_where_it_was_seen(mode: str, last_good: int, first_bad: int) -> None:
    rows = json.loads((SHARED / "oracle" / "preemption.json").read_text())["levels"]
    found = [
        Level(
            users=row["N"],
            preemptions=row["full"]["preemptions"],
            waiting=row["window"]["wait_mean"],
            kv_usage=row["full"]["kv_max"],
            running=row["full"]["run_max"],
        )
        for row in rows
        if row["mode"] == mode
    ]
    signs = [sign_of(level, request_share=6 / 40, max_num_seqs=64) for level in found]
    seen = onset(found, signs)
    assert seen is not None
    assert (seen.last_good, seen.first_bad) == (last_good, first_bad)
    assert seen.sign is not None
    assert seen.sign.limit == "wall"
    # with the preemption counter unread, waiting shows the same wall within two users
    blind = [Level(users=level.users, waiting=level.waiting, kv_usage=level.kv_usage) for level in found]
    seen = onset(blind, [sign_of(level, request_share=6 / 40) for level in blind])
    assert seen is not None
    assert seen.first_bad is not None
    assert first_bad <= seen.first_bad <= first_bad + 3


@pytest.mark.skipif(not (SHARED / "oracle").is_dir(), reason="needs the oracle of a real vLLM")
def test_a_real_server_with_room_shows_no_wall() -> None:
    rows = json.loads((SHARED / "oracle" / "steptime.json").read_text())["levels"]
    for row in rows:
        window = row["window"]
        level = Level(
            users=row["N"],
            preemptions=window["preemptions"],
            waiting=window["wait_mean"],
            kv_usage=window["kv_max"],
            running=window["run_max"],
        )
        assert sign_of(level, request_share=0.01, max_num_seqs=64) is None
