"""Laws of the engine under random loads: they hold whatever vLLM decides."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from calibration.steptime import LinearStep
from calibration.twin.config import EngineConfig, Speculation
from calibration.twin.content import Content
from calibration.twin.engine import Engine, Output
from calibration.twin.kernel import Kernel
from calibration.twin.sequence import Sequence, Status
from calibration.twin.simulate import closed_loop
from harness.twin_live import LiveEngine

STEP = LinearStep(0.01, 2e-4, 1e-6, 5e-5)
#: a prompt of 9 tokens takes two steps, the second scheduled while the first runs
PROMPT_ENDS_AHEAD = EngineConfig(
    num_gpu_blocks=17,
    block_size=4,
    max_model_len=64,
    max_num_seqs=1,
    max_num_batched_tokens=8,
    enable_prefix_caching=False,
    async_scheduling=True,
)


@st.composite
def engine_configs(draw: st.DrawFn, kinds: bool = True) -> EngineConfig:
    """Small engines, short of blocks."""
    block = draw(st.sampled_from([4, 8, 16]))
    max_len = draw(st.sampled_from([64, 128]))
    drafts = draw(st.sampled_from([0, 0, 2])) if kinds else 0
    seqs = draw(st.integers(1, 12))
    return EngineConfig(
        num_gpu_blocks=max_len // block + 1 + draw(st.integers(0, 2 * max_len // block)),
        block_size=block,
        max_model_len=max_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs * (1 + drafts), draw(st.sampled_from([8, 32, 256]))),
        enable_prefix_caching=draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])) if kinds else "fcfs",
        async_scheduling=draw(st.booleans()) and not drafts,
        speculation=Speculation(acceptance=(0.7,) * drafts) if drafts else None,
    )


@st.composite
def loads(draw: st.DrawFn, max_len: int) -> list[tuple[float, int, int, int, float | None]]:
    """(arrival, prompt, output, shared prefix, time until the client leaves) of each request."""
    arrival = st.integers(0, 40).map(lambda n: n * 0.013)
    size = st.integers(1, max_len // 2)
    leaves = st.one_of(st.none(), st.none(), st.none(), st.integers(0, 30).map(lambda n: n * 0.0171))
    row = st.tuples(arrival, size, size, st.integers(0, 3), leaves)
    return draw(st.lists(row, min_size=1, max_size=25))


Load = list[tuple[float, int, int, int, float | None]]


def sequences(load: Load) -> list[Sequence]:
    return [
        Sequence(prompt, output, content=Content([100 * prefix + i for i in range(8)]), priority=number % 3)
        for number, (_, prompt, output, prefix, _) in enumerate(load)
    ]


def run_virtual(
    engine: Engine, load: Load, seqs: list[Sequence], watch: Callable[[Output], None] = lambda _: None
) -> None:
    kernel = Kernel([engine], lambda _, output: watch(output))
    for (arrival_s, *_, leaves_s), seq in zip(load, seqs, strict=True):
        kernel.at(arrival_s, lambda _, seq=seq: kernel.submit(0, seq))  # type: ignore[misc]
        if leaves_s is not None:
            kernel.at(arrival_s + leaves_s, lambda _, seq=seq: kernel.abort(0, seq))  # type: ignore[misc]
    kernel.run()


cases = engine_configs().flatmap(lambda config: st.tuples(st.just(config), loads(config.max_model_len)))


@settings(max_examples=80, deadline=None)
@given(cases)
def test_everything_ends_and_every_block_comes_back(case: tuple[EngineConfig, Load]) -> None:
    config, load = case
    engine, seqs = Engine(config, STEP), sequences(load)
    run_virtual(engine, load, seqs)
    assert all(seq.ended for seq in seqs)
    assert engine.scheduler.pool.free == config.usable_blocks
    assert engine.scheduler.idle
    assert engine.due_s is None


@settings(max_examples=80, deadline=None)
@given(cases)
def test_blocks_conserve_and_usage_is_a_fraction(case: tuple[EngineConfig, Load]) -> None:
    config, load = case
    engine, seqs = Engine(config, STEP), sequences(load)

    def watch(output: Output) -> None:
        scheduler = engine.scheduler
        private = sum(scheduler.blocks_of(seq) for seq in scheduler.running)
        used = config.usable_blocks - scheduler.pool.free
        # shared blocks are held by several and used once
        assert used <= private
        assert used == private or config.enable_prefix_caching
        assert 0 <= engine.counters.kv_cache_usage <= 1
        assert len(scheduler.running) <= config.max_num_seqs
        assert output.step.scheduled_tokens <= config.max_num_batched_tokens

    run_virtual(engine, load, seqs, watch)


@settings(max_examples=80, deadline=None)
@given(cases)
def test_tokens_out_are_tokens_asked(case: tuple[EngineConfig, Load]) -> None:
    config, load = case
    engine, seqs = Engine(config, STEP, keep_members=True), sequences(load)
    given_out = dict.fromkeys(seqs, 0)

    def watch(output: Output) -> None:
        for seq in (*output.started, *output.resumed):
            given_out[seq] += 1
        for seq in output.decoded or ():
            if not seq.ended or seq in output.finished:
                given_out[seq] += 1 if output.tokens is None else output.tokens[seq]

    run_virtual(engine, load, seqs, watch)
    finished = [seq for seq in seqs if seq.status is Status.FINISHED]
    assert all(given_out[seq] == seq.output_tokens for seq in finished)
    assert all(given_out[seq] <= seq.output_tokens for seq in seqs)
    assert engine.counters.generation_tokens == sum(given_out.values())
    assert engine.counters.request_success["length"] == len(finished)


@settings(max_examples=60, deadline=None)
@given(cases, st.integers(0, 60))
@example((PROMPT_ENDS_AHEAD, [(0.0, 9, 1, 0, None)]), 0)
def test_at_any_moment_every_request_knows_what_came_of_it(case: tuple[EngineConfig, Load], moment: int) -> None:
    config, load = case
    load = [(*row[:4], None) for row in load]
    engine, seqs = Engine(config, STEP), sequences(load)
    kernel = Kernel([engine], lambda index, output: None)
    for (arrival_s, *_), seq in zip(load, seqs, strict=True):
        kernel.at(arrival_s, lambda _, seq=seq: kernel.submit(0, seq))  # type: ignore[misc]
    kernel.run(moment * 0.0137)
    progress = [engine.progress(seq) for seq in seqs]
    assert sum(tokens for tokens, _ in progress) == engine.counters.generation_tokens
    for seq, (tokens, last_s) in zip(seqs, progress, strict=True):
        assert (tokens > 0) == (seq.first_token_s is not None) == (last_s is not None)
        assert last_s is None or last_s <= kernel.now_s


@settings(max_examples=60, deadline=None)
@given(cases)
def test_vllms_identities_hold(case: tuple[EngineConfig, Load]) -> None:
    config, load = case
    engine, seqs = Engine(config, STEP), sequences(load)
    run_virtual(engine, load, seqs)
    counters = engine.counters
    started = [seq for seq in seqs if seq.first_token_s is not None]
    assert counters.time_to_first_token.count == len(started)
    assert counters.prompt_tokens == sum(seq.prompt_tokens for seq in started)
    assert counters.prompt_tokens_cached <= counters.prefix_cache_hits <= counters.prefix_cache_queries
    if config.speculation is None:
        assert counters.inter_token_latency.count == counters.generation_tokens - counters.time_to_first_token.count
    computed = counters.prompt_tokens - counters.prompt_tokens_cached
    assert counters.iteration_tokens.sum == computed + counters.generation_tokens
    if not any(leaves for *_, leaves in load):
        assert counters.num_preemptions == sum(seq.preemptions for seq in seqs)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_times_are_in_order(case: tuple[EngineConfig, Load]) -> None:
    config, load = case
    seqs = sequences(load)
    run_virtual(Engine(config, STEP), load, seqs)
    for seq in seqs:
        if seq.status is Status.FINISHED:
            assert seq.scheduled_s is not None
            assert seq.first_token_s is not None
            assert seq.finished_s is not None
            assert seq.arrived_s <= seq.queued_s <= seq.scheduled_s < seq.first_token_s <= seq.finished_s


fcfs = engine_configs(kinds=False).flatmap(lambda config: st.tuples(st.just(config), loads(config.max_model_len)))


@settings(max_examples=80, deadline=None)
@given(fcfs)
def test_under_fcfs_nobody_is_passed_for_ever(case: tuple[EngineConfig, Load]) -> None:
    """First admissions are in the order of arrival."""
    config, load = case
    load = [(arrival, prompt, output, prefix, None) for arrival, prompt, output, prefix, _ in load]
    seqs = sequences(load)
    run_virtual(Engine(config, STEP), load, seqs)
    by_arrival = sorted(seqs, key=lambda seq: seq.arrived_s)
    admitted = [seq.scheduled_s for seq in by_arrival]
    assert None not in admitted
    assert admitted == sorted(admitted)  # type: ignore[type-var]


def history(config: EngineConfig, load: Load, seed: int) -> list[tuple[float | None, ...]]:
    seqs = sequences(load)
    run_virtual(Engine(config, STEP, seed=seed, noise=0.2), load, seqs)
    return [(seq.first_token_s, seq.finished_s, seq.preemptions) for seq in seqs]


@settings(max_examples=50, deadline=None)
@given(cases, st.integers(0, 3))
def test_one_seed_one_run(case: tuple[EngineConfig, Load], seed: int) -> None:
    assert history(*case, seed) == history(*case, seed)


class FakeLoop:
    """Timers and a clock that jumps to the next of them; between timers no time passes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[list[Any]] = []
        self._number = 0

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        self._number += 1
        timer = [self.now_s + delay_s, self._number, callback]
        self._timers.append(timer)
        return timer

    def at(self, time_s: float, callback: Callable[[], None]) -> None:
        self._number += 1
        self._timers.append([time_s, self._number, callback])

    def run(self) -> None:
        while self._timers:
            timer = min(self._timers, key=lambda timer: (timer[0], timer[1]))
            self._timers.remove(timer)
            self.now_s = max(self.now_s, timer[0])
            timer[2]()


@settings(max_examples=60, deadline=None)
@given(cases)
def test_both_clocks_decide_alike(case: tuple[EngineConfig, Load]) -> None:
    config, load = case
    virtual: list[tuple[Any, ...]] = []
    live: list[tuple[Any, ...]] = []

    def row(output: Output, engine: Engine) -> tuple[Any, ...]:
        step, counters = output.step, engine.counters
        return (
            step.index,
            step.decode_seqs,
            step.prefill_tokens,
            len(step.preempted),
            counters.num_requests_running,
            counters.kv_cache_usage,
            round(output.at_s, 9),
        )

    engine = Engine(config, STEP)
    run_virtual(engine, load, sequences(load), lambda output: virtual.append(row(output, engine)))

    loop, other = FakeLoop(), Engine(config, STEP)
    driver = LiveEngine(other, lambda: loop.now_s, 1.0, lambda output: live.append(row(output, other)), loop.call_later)
    for (arrival_s, *_, leaves_s), seq in zip(load, sequences(load), strict=True):
        loop.at(arrival_s, lambda seq=seq: driver.submit(seq))  # type: ignore[misc]
        if leaves_s is not None:
            loop.at(arrival_s + leaves_s, lambda seq=seq: driver.abort(seq))  # type: ignore[misc]
    loop.run()
    assert live == virtual


@settings(max_examples=60, deadline=None)
@given(engine_configs(kinds=False), st.integers(1, 12), st.integers(0, 5), st.sampled_from([0.0, 0.03]))
def test_skipping_equal_steps_changes_nothing(config: EngineConfig, users: int, seed: int, noise: float) -> None:
    def load() -> tuple[Engine, Any]:
        rng = random.Random(seed)
        engine = Engine(config, STEP, seed=seed, noise=noise)
        half = config.max_model_len // 2
        sizes = [(rng.randint(1, half), rng.randint(1, half)) for _ in range(users * 40)]
        run = closed_loop(
            [engine],
            lambda user, nth: Sequence(*sizes[user * 40 + nth % 40]),
            [0.02 * user for user in range(users)],
            3.0,
            think_s=0.004,
        )
        return engine, run

    skipped_engine, skipped = load()
    skip, Engine.skip = Engine.skip, lambda self, limit_s: None  # type: ignore[method-assign]
    try:
        plain_engine, plain = load()
    finally:
        Engine.skip = skip  # type: ignore[method-assign]
    for name in ("end_s", "length_s", "decode_seqs", "running", "waiting", "kv_cache_usage", "generation_tokens"):
        np.testing.assert_allclose(getattr(skipped.steps[0], name), getattr(plain.steps[0], name), rtol=1e-12)
    np.testing.assert_allclose(skipped.trace.e2e_s, plain.trace.e2e_s, rtol=1e-12)
    for name in ("generation_tokens", "steps", "num_preemptions", "kv_cache_usage", "num_requests_running"):
        assert math.isclose(getattr(skipped_engine.counters, name), getattr(plain_engine.counters, name))
    assert skipped_engine.counters.inter_token_latency.counts == plain_engine.counters.inter_token_latency.counts
    assert skipped_engine.counters.iteration_tokens.counts == plain_engine.counters.iteration_tokens.counts
