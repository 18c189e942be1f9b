"""Loads on the virtual clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from calibration.steptime import LinearStep
from calibration.twin.config import EngineConfig
from calibration.twin.engine import Engine
from calibration.twin.sequence import Sequence
from calibration.twin.simulate import Run, Watch, closed_loop, open_loop

#: 10 ms a step, whatever is in it
STEP = LinearStep(0.01, 0.0, 0.0, 0.0)
CONFIG = EngineConfig(num_gpu_blocks=513, max_num_seqs=64)


def closed(users: int, duration_s: float, **options: Any) -> Run:
    return closed_loop([Engine(CONFIG, STEP)], lambda user, nth: Sequence(16, 10), [0.0] * users, duration_s, **options)


def test_a_user_sends_again_when_it_has_read_and_thought() -> None:
    trace = closed(1, 1.0, think_s=0.1).trace
    # 10 tokens are 10 steps
    np.testing.assert_allclose(trace.sent_s, np.arange(len(trace)) * 0.2, atol=1e-12)
    np.testing.assert_allclose(trace.ttft_s, 0.01)
    np.testing.assert_allclose(trace.e2e_s, 0.1)
    np.testing.assert_allclose(trace.tpot_s, 0.01)


def test_the_way_to_the_engine_is_part_of_ttft() -> None:
    trace = closed(1, 0.05, overhead_s=0.03, drain=True).trace
    np.testing.assert_allclose(trace.ttft_s, [0.04])


def test_a_trace_says_it_is_the_twins_and_what_was_cut() -> None:
    trace = closed(2, 0.155, think_s=0.015).trace
    assert trace.source == "twin"
    assert trace.ok.tolist() == [True, True, False, False]
    assert trace.incomplete.tolist() == [False, False, True, True]
    assert np.isnan(trace.stream_end_s[2:]).all()
    # sent at 0.115, begun at once by the idle engine: the fourth token came at 0.155
    assert trace.output_tokens.tolist() == [10, 10, 4, 4]
    np.testing.assert_allclose(trace.e2e_s[2:], 0.04)
    np.testing.assert_allclose(trace.tpot_s[2:], 0.01)
    assert trace.user.tolist() == [0, 1, 0, 1]


def test_a_request_cut_before_its_first_token_has_none() -> None:
    trace = closed(1, 0.105).trace
    assert np.isnan(trace.output_tokens[1])
    assert np.isnan(trace.ttft_s[1])
    assert np.isnan(trace.e2e_s[1])


def test_drained_requests_end() -> None:
    trace = closed(2, 0.15, drain=True).trace
    assert trace.ok.all()


def test_nothing_is_sent_beyond_the_number_asked_for() -> None:
    assert len(closed(3, 10.0, max_requests=7, drain=True).trace) == 7


def test_users_start_when_told() -> None:
    run = closed_loop([Engine(CONFIG, STEP)], lambda user, nth: Sequence(16, 10), [0.0, 0.5, 2.0], 1.0)
    assert sorted(set(run.trace.user.tolist())) == [0, 1]
    assert run.trace.sent_s[run.trace.user == 1][0] == 0.5


def test_littles_law_holds_in_a_closed_loop() -> None:
    run = closed(8, 20.0, think_s=0.05)
    steps, done = run.steps[0], run.trace.ok
    throughput = np.count_nonzero(done) / 20.0
    in_flight = throughput * float(np.mean(run.trace.e2e_s[done]))
    mean = steps.mean(steps.running, 0.0, 20.0)
    assert mean is not None
    assert in_flight == pytest.approx(8 - throughput * 0.05, rel=0.02)
    assert mean == pytest.approx(in_flight, rel=0.12)


def test_open_arrivals_are_sent_on_time_however_slow_the_server() -> None:
    run = open_loop([Engine(CONFIG, STEP)], lambda user, nth: Sequence(16, 10), [0.0, 0.001, 0.5, 9.0], 1.0, drain=True)
    assert run.trace.sent_s.tolist() == [0.0, 0.001, 0.5]
    assert run.trace.ok.all()
    assert run.trace.ttft_s[1] == pytest.approx(0.019)


def test_engines_share_the_load() -> None:
    run = closed_loop(
        [Engine(CONFIG, STEP), Engine(CONFIG, STEP)], lambda user, nth: Sequence(16, 10), [0.0] * 4, 1.0, think_s=0.01
    )
    assert [int(steps.running.max()) for steps in run.steps] == [2, 2]
    assert sum(engine.counters.request_success["length"] for engine in run.engines) == np.count_nonzero(run.trace.ok)


def test_step_columns_are_the_steps() -> None:
    steps = closed(2, 0.05, drain=True).steps[0]
    np.testing.assert_allclose(steps.end_s, np.arange(1, 11) * 0.01)
    np.testing.assert_allclose(steps.length_s, 0.01)
    assert steps.decode_seqs.tolist() == [0] + [2] * 9
    assert steps.prefill_tokens.tolist() == [32] + [0] * 9
    assert steps.generation_tokens.tolist() == list(range(2, 21, 2))
    assert steps.running.tolist() == [2] * 9 + [0]


def test_the_time_average_counts_idle_time_as_it_is() -> None:
    steps = closed(2, 0.05, drain=True).steps[0]
    # 2 run from 0.01 on, when the gauge first shows them, to 0.10
    assert steps.mean(steps.running, 0.0, 0.2) == pytest.approx(2 * 0.09 / 0.2)
    assert steps.mean(steps.running, 0.5, 0.5) is None
    assert steps.mean(steps.running, 0.0, 0.005) is None


def test_gaps_between_chunks_are_step_lengths_by_sequences() -> None:
    gaps, counts = closed(2, 0.05, drain=True).chunk_gaps_s(0.0, 1.0)
    np.testing.assert_allclose(gaps, 0.01)
    assert counts.tolist() == [2] * 9


def test_a_pause_is_no_step() -> None:
    steps = closed(1, 1.0, think_s=0.5).steps[0]
    np.testing.assert_allclose(steps.length_s, 0.01)


def test_requests_under_way_are_cut_after_the_grace() -> None:
    run = closed_loop(
        [Engine(EngineConfig(num_gpu_blocks=600, max_model_len=512), LinearStep(0.01, 0, 0, 0))],
        lambda user, nth: Sequence(16, 100),
        [0.0, 0.5],
        1.2,
        grace_s=0.5,
    )
    ends = run.trace.sent_s + run.trace.e2e_s
    # user 0 sends at 0 and 1, user 1 at 0.5; user 0's second would end at 2
    assert run.trace.sent_s.tolist() == pytest.approx([0.0, 0.5, 1.0])
    assert run.trace.ok.tolist() == [True, True, False]
    assert run.trace.incomplete.tolist() == [False, False, True]
    assert ends.max() <= 1.7
    assert run.end_s == pytest.approx(1.7)


def test_a_watch_looks_at_its_times_until_nothing_is_left() -> None:
    looked: list[tuple[float, int]] = []
    closed_loop(
        [Engine(EngineConfig(num_gpu_blocks=600, max_model_len=512), LinearStep(0.01, 0, 0, 0))],
        lambda user, nth: Sequence(16, 100),
        [0.0],
        3600.0,
        max_requests=2,
        watch=Watch(0.5, lambda now_s, engines: looked.append((now_s, engines[0].counters.generation_tokens))),
    )
    assert [time for time, _ in looked] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert looked[-1][1] == 200
    assert 0 < looked[1][1] < 100


def test_arrivals_beyond_the_cap_wait_at_the_client_in_order() -> None:
    run = open_loop(
        [Engine(EngineConfig(num_gpu_blocks=600, max_model_len=512), LinearStep(0.01, 0, 0, 0))],
        lambda user, nth: Sequence(16, 10),
        [0.0, 0.01, 0.02, 0.03],
        1.0,
        max_in_flight=1,
        drain=True,
    )
    trace = run.trace
    assert trace.scheduled_s.tolist() == [0.0, 0.01, 0.02, 0.03]
    ends = trace.sent_s + trace.e2e_s
    assert trace.sent_s[1:] == pytest.approx(ends[:-1])
    assert trace.ok.all()
