"""Rules of the engine, one by one, with hand-made numbers: every step takes 10 ms plus 1 ms a prompt token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from calibration.errors import InputError
from calibration.steptime import LinearStep
from calibration.twin.config import EngineConfig, Speculation
from calibration.twin.content import Content
from calibration.twin.engine import Engine, Output
from calibration.twin.kernel import Kernel
from calibration.twin.routing import Router
from calibration.twin.sequence import Sequence, Status

STEP = LinearStep(0.01, 0.0, 0.0, 0.001)


def small(**changes: Any) -> EngineConfig:
    flags = {
        "num_gpu_blocks": 17,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }
    return EngineConfig(**{**flags, **changes})


class Bench:
    """An engine on the virtual clock and all it put out."""

    def __init__(self, config: EngineConfig, **engine: Any) -> None:
        self.engine = Engine(config, STEP, **engine)
        self.outputs: list[Output] = []
        self.kernel = Kernel([self.engine], lambda _, output: self.outputs.append(output))

    def send(self, at_s: float, seq: Sequence) -> Sequence:
        self.kernel.at(at_s, lambda _: self.kernel.submit(0, seq))
        return seq

    def leave(self, at_s: float, seq: Sequence) -> None:
        self.kernel.at(at_s, lambda _: self.kernel.abort(0, seq))

    def run(self, until_s: float = 1e9) -> Bench:
        self.kernel.run(until_s)
        return self

    @property
    def counters(self) -> Any:
        return self.engine.counters


def test_one_request_takes_a_prefill_and_a_step_for_each_further_token() -> None:
    bench = Bench(small())
    seq = bench.send(1.0, Sequence(10, 3))
    bench.run()
    assert seq.first_token_s == pytest.approx(1.02)
    assert seq.finished_s == pytest.approx(1.04)
    assert [output.step.prefill_tokens for output in bench.outputs] == [10, 0, 0]


def test_what_arrives_during_a_step_waits_for_its_end() -> None:
    bench = Bench(small())
    bench.send(0.0, Sequence(10, 50))
    late = bench.send(0.005, Sequence(10, 1))
    bench.run()
    assert late.queued_s == pytest.approx(0.02)
    assert late.first_token_s == pytest.approx(0.04)


def test_what_arrives_at_one_moment_at_an_idle_engine_runs_together() -> None:
    bench = Bench(small())
    first, second = bench.send(0.0, Sequence(10, 1)), bench.send(0.0, Sequence(10, 1))
    bench.run()
    assert first.first_token_s == second.first_token_s == pytest.approx(0.03)


def test_a_request_sent_the_moment_a_step_ends_misses_the_next_one() -> None:
    bench = Bench(small())
    bench.send(0.0, Sequence(10, 50))
    late = bench.send(0.02, Sequence(10, 1))
    bench.run()
    assert late.scheduled_s == pytest.approx(0.03)


def test_under_asynchronous_scheduling_an_arrival_waits_one_step_more() -> None:
    bench = Bench(small(async_scheduling=True))
    bench.send(0.0, Sequence(10, 50))
    late = bench.send(0.025, Sequence(10, 1))
    bench.run()
    # the step that runs ends at 0.03; the one after was made up before; the third takes it in
    assert late.first_token_s == pytest.approx(0.06)


def test_a_long_prompt_is_cut_into_the_budget() -> None:
    bench = Bench(small(max_num_batched_tokens=8))
    seq = bench.send(0.0, Sequence(20, 2))
    bench.run()
    assert [output.step.prefill_tokens for output in bench.outputs] == [8, 8, 4, 0]
    assert seq.first_token_s == pytest.approx(0.03 + 0.02)


def test_several_prompts_share_one_budget() -> None:
    bench = Bench(small(max_num_batched_tokens=20))
    for _ in range(3):
        bench.send(0.0, Sequence(8, 1))
    bench.run()
    assert [output.step.prefill_tokens for output in bench.outputs] == [20, 4]


def test_only_steps_that_put_something_out_are_iterations() -> None:
    bench = Bench(small(max_num_batched_tokens=8))
    bench.send(0.0, Sequence(20, 2))
    bench.run()
    assert bench.counters.steps == 4
    assert bench.counters.iteration_tokens.count == 2
    assert bench.counters.iteration_tokens.sum == 20 + 2


def test_no_more_run_than_max_num_seqs() -> None:
    bench = Bench(small(max_num_seqs=2))
    for _ in range(5):
        bench.send(0.0, Sequence(4, 3))
    bench.run()
    assert max(len(output.step.admitted) + output.step.decode_seqs for output in bench.outputs) == 2


def test_a_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    bench = Bench(small(max_num_batched_tokens=8))
    bench.send(0.0, Sequence(40, 10))
    second = bench.send(0.001, Sequence(40, 1))
    bench.run(0.15)
    # 10 of 16 blocks are taken; the first chunk would fit, the prompt does not
    assert second.scheduled_s is None
    assert bench.counters.num_requests_waiting == 1


def test_without_the_reserve_the_first_chunk_is_enough() -> None:
    bench = Bench(small(max_num_batched_tokens=8, scheduler_reserve_full_isl=False))
    bench.send(0.0, Sequence(40, 10))
    second = bench.send(0.001, Sequence(40, 1))
    bench.run(0.2)
    assert second.scheduled_s is not None


def test_the_last_of_the_running_is_preempted_and_comes_back_first() -> None:
    bench = Bench(small(enable_prefix_caching=False))
    old = bench.send(0.0, Sequence(28, 20))
    young = bench.send(0.001, Sequence(28, 20))
    third = bench.send(0.002, Sequence(28, 1))
    bench.run()
    assert (old.preemptions, young.preemptions) == (0, 1)
    assert old.finished_s is not None
    assert young.finished_s is not None
    assert third.scheduled_s is not None
    # it had to wait for the preempted one, which waits at the head
    assert third.scheduled_s >= old.finished_s


def test_a_preemption_is_counted_with_the_next_output() -> None:
    bench = Bench(small(enable_prefix_caching=False))
    bench.send(0.0, Sequence(28, 30))
    young = bench.send(0.001, Sequence(28, 20))
    bench.run(0.2)
    assert young.status is Status.PREEMPTED
    assert bench.counters.num_preemptions == 0
    bench.run()
    assert bench.counters.num_preemptions == 1
    assert bench.counters.request_num_preemptions.sum == 1


def test_a_preempted_request_that_is_aborted_is_never_counted() -> None:
    bench = Bench(small(enable_prefix_caching=False))
    bench.send(0.0, Sequence(28, 30))
    young = bench.send(0.001, Sequence(28, 20))
    bench.leave(0.2, young)
    bench.run()
    assert young.preemptions == 1
    assert bench.counters.num_preemptions == 0


def test_recomputing_is_counted_nowhere() -> None:
    bench = Bench(small(enable_prefix_caching=False))
    seqs = [bench.send(0.001 * n, Sequence(28, 20)) for n in range(2)]
    bench.run()
    assert seqs[1].preemptions == 1
    assert bench.counters.prompt_tokens == 56
    assert bench.counters.iteration_tokens.sum == 56 + 40
    assert bench.counters.time_to_first_token.count == 2


def test_the_gap_over_a_preemption_is_one_sample_of_the_time_between_tokens() -> None:
    bench = Bench(small(enable_prefix_caching=False))
    seqs = [bench.send(0.001 * n, Sequence(28, 20)) for n in range(2)]
    bench.run()
    total = sum((seq.finished_s or 0.0) - (seq.first_token_s or 0.0) for seq in seqs)
    assert bench.counters.inter_token_latency.count == 38
    assert bench.counters.inter_token_latency.sum == pytest.approx(total)


def test_under_priority_the_largest_value_goes_first_whenever_it_came() -> None:
    bench = Bench(small(scheduling_policy="priority", enable_prefix_caching=False))
    old = bench.send(0.0, Sequence(28, 20, priority=5))
    young = bench.send(0.001, Sequence(28, 20, priority=0))
    bench.run()
    assert (old.preemptions, young.preemptions) == (1, 0)


def test_under_priority_the_smallest_value_is_admitted_first() -> None:
    bench = Bench(small(scheduling_policy="priority", max_num_seqs=1))
    bench.send(0.0, Sequence(4, 5))
    low, high = bench.send(0.001, Sequence(4, 1, priority=2)), bench.send(0.002, Sequence(4, 1, priority=1))
    bench.run()
    assert high.scheduled_s is not None
    assert low.scheduled_s is not None
    assert high.scheduled_s < low.scheduled_s


def test_a_known_prefix_is_not_computed_again_but_for_the_last_token() -> None:
    bench = Bench(small())
    keys = [1, 2, 3, 4]
    bench.send(0.0, Sequence(16, 1, content=Content(keys)))
    again = bench.send(1.0, Sequence(16, 1, content=Content(keys)))
    bench.run()
    # 4 full blocks; the last one is computed again, for its last token's logits
    assert again.cached_tokens == 12
    assert [output.step.prefill_tokens for output in bench.outputs] == [16, 4]
    assert (bench.counters.prefix_cache_queries, bench.counters.prefix_cache_hits) == (32, 12)
    assert (bench.counters.prompt_tokens, bench.counters.prompt_tokens_cached) == (32, 12)


def test_equal_prompts_of_one_step_share_their_blocks() -> None:
    bench = Bench(small())
    seqs = [bench.send(0.0, Sequence(16, 5, content=Content([1, 2, 3, 4]))) for _ in range(2)]
    bench.run(0.04)
    assert seqs[1].cached_tokens == 12
    assert bench.counters.kv_cache_usage == pytest.approx((5 + 5 - 3) / 16)


def test_gauges_show_the_end_of_a_step_and_stay() -> None:
    bench = Bench(small())
    bench.send(0.0, Sequence(10, 3))
    bench.run(0.015)
    assert bench.counters.num_requests_running == 0
    bench.run(0.021)
    assert (bench.counters.num_requests_running, bench.counters.kv_cache_usage) == (1, pytest.approx(3 / 16))
    bench.run()
    assert (bench.counters.num_requests_running, bench.counters.kv_cache_usage) == (0, 0)


def test_an_abort_frees_at_once_and_is_in_no_request_counter() -> None:
    bench = Bench(small())
    seq = bench.send(0.0, Sequence(10, 30))
    bench.leave(0.055, seq)
    bench.run()
    assert seq.status is Status.ABORTED
    assert bench.engine.scheduler.pool.free == 16
    assert bench.counters.num_requests_running == 0
    assert bench.counters.request_success == dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
    assert bench.counters.e2e_request_latency.count == 0
    # the token of the step that ran when it left is lost
    assert bench.counters.generation_tokens == 4


def test_an_abort_of_one_that_has_ended_changes_nothing() -> None:
    bench = Bench(small())
    seq = bench.send(0.0, Sequence(10, 1))
    bench.leave(1.0, seq)
    bench.run()
    assert seq.status is Status.FINISHED


def test_a_request_that_ends_by_itself_says_stop() -> None:
    bench = Bench(small())
    bench.send(0.0, Sequence(10, 3, max_tokens=20, finish_reason="stop"))
    bench.run()
    assert bench.counters.request_success["stop"] == 1
    assert bench.counters.request_params_max_tokens.sum == 20
    assert bench.counters.request_generation_tokens.sum == 3


def test_one_token_has_a_tpot_of_zero_as_vllm_counts() -> None:
    bench = Bench(small())
    bench.send(0.0, Sequence(10, 1))
    bench.run()
    assert bench.counters.request_time_per_output_token.count == 1
    assert bench.counters.request_time_per_output_token.sum == 0


def test_accepted_drafts_come_out_in_one_step() -> None:
    bench = Bench(small(speculation=Speculation(acceptance=(1.0, 1.0))))
    seq = bench.send(0.0, Sequence(10, 8))
    bench.run()
    # 1 with the prompt, then 3 a step, the last cut to what was asked
    assert [0 if o.tokens is None else sum(o.tokens.values()) for o in bench.outputs] == [0, 3, 3, 1]
    assert seq.outputs == 8
    assert bench.counters.spec_decode_num_drafts == 3
    assert bench.counters.spec_decode_num_draft_tokens == 6
    assert bench.counters.spec_decode_num_accepted_tokens_per_pos == (3, 3)


def test_rejected_drafts_cost_blocks_and_give_nothing() -> None:
    bench = Bench(small(speculation=Speculation(acceptance=(0.0, 0.0))))
    bench.send(0.0, Sequence(10, 4))
    bench.run()
    assert bench.counters.generation_tokens == 4
    assert bench.counters.spec_decode_num_accepted_tokens_per_pos == (0, 0)


def test_noise_keeps_the_mean_and_follows_the_seed() -> None:
    def times(seed: int, noise: float) -> list[float]:
        bench = Bench(EngineConfig(num_gpu_blocks=700, max_model_len=8192), seed=seed, noise=noise)
        bench.send(0.0, Sequence(1, 4000))
        bench.run()
        ends = [output.at_s for output in bench.outputs]
        return [b - a for a, b in pairwise(ends)]

    assert times(1, 0.3) == times(1, 0.3) != times(2, 0.3)
    assert sum(times(1, 0.3)) / 3999 == pytest.approx(0.01, rel=0.02)
    assert times(1, 0.0) == pytest.approx([0.01] * 3999)


def test_engines_behind_one_front_end_are_filled_evenly() -> None:
    engines = [Engine(small(), STEP) for _ in range(2)]
    router, kernel = Router(engines), Kernel(engines, lambda index, output: None)
    chosen = []
    for _ in range(4):
        chosen.append(router.choose())
        kernel.submit(chosen[-1], Sequence(4, 30))
    assert sorted(chosen) == [0, 0, 1, 1]


def test_a_busy_engine_is_passed_over() -> None:
    engines = [Engine(small(), STEP) for _ in range(2)]
    router, kernel = Router(engines), Kernel(engines, lambda index, output: None)
    for _ in range(3):
        kernel.submit(0, Sequence(4, 30))
    assert [router.choose() for _ in range(2)] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"num_gpu_blocks": 16}, "num_gpu_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"watermark": 1.0}, "watermark"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"speculation": Speculation(acceptance=(0.5,)), "max_num_batched_tokens": 4}, "max_num_batched_tokens"),
    ],
)
def test_flags_no_vllm_would_start_with_are_refused_by_name(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(InputError, match=names):
        small(**changes)


@pytest.mark.parametrize("acceptance", [(), (1.5,), (-0.1,)])
def test_chances_are_between_0_and_1(acceptance: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="acceptance"):
        Speculation(acceptance=acceptance)


def test_a_request_larger_than_the_model_is_refused() -> None:
    engine = Engine(small(), STEP)
    engine.add(Sequence(60, 4), 0.0)
    with pytest.raises(InputError, match="60 \\+ 5"):
        engine.add(Sequence(60, 5), 0.0)


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0)])
def test_a_sequence_has_tokens(prompt: int, output: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Sequence(prompt, output)


def test_slots_behind_the_drafts_are_not_fewer_than_none() -> None:
    with pytest.raises(InputError, match="lookahead_tokens"):
        Speculation(acceptance=(0.5,), lookahead_tokens=-1)


def test_a_drafter_with_a_cache_of_its_own_takes_slots_ahead() -> None:
    def most_blocks(lookahead: int) -> float:
        bench = Bench(small(speculation=Speculation(acceptance=(0.0, 0.0), lookahead_tokens=lookahead)))
        bench.send(0.0, Sequence(10, 20))
        usages = []
        for n in range(30):
            bench.run(0.01 * n)
            usages.append(bench.counters.kv_cache_usage)
        return float(max(usages) * 16)

    # 29 tokens computed at the end, 3 a step scheduled
    assert most_blocks(0) == 8
    assert most_blocks(4) == 9


def test_counting_goes_on_over_thousands_of_steps() -> None:
    bench = Bench(EngineConfig(num_gpu_blocks=700, max_model_len=8192))
    bench.send(0.0, Sequence(1, 5000))
    bench.run()
    assert bench.counters.iteration_tokens.count == 5000
    assert bench.counters.inter_token_latency.sum == pytest.approx(49.99)


def test_negative_noise_is_refused() -> None:
    with pytest.raises(InputError, match="noise"):
        Engine(small(), STEP, noise=-0.1)
