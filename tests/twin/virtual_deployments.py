"""Deployments of the twin, drawn at random, to be probed on the virtual clock; and their true limits, from the engine."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

from calibration.steptime import LinearStep
from calibration.trace import Floats
from calibration.twin.config import EngineConfig
from calibration.twin.engine import Engine
from calibration.twin.sequence import Sequence
from calibration.twin.simulate import Run, closed_loop
from harness.load.search import Answer, Ask, Search, probe_of
from harness.measure.summary import summarise
from harness.measure.window import StageLoad

BLOCK = 16
#: no length is more than so many times the mean
LONGEST = 3


#: requests after which every quantile of the lengths has come about equally often: what a load asks in the long run is then
#: the same at every level, and does not hide what a level does to the server
ROUND = 256


class _Lengths:
    """Requests of one run by their order: lognormal lengths, shuffled within each :data:`ROUND`."""

    def __init__(self, prompt: float, output: float, spread: float, rng: np.random.Generator) -> None:
        self._means = np.array([prompt, output])
        self._sigma = math.sqrt(math.log1p(spread**2))
        self._rng = rng
        self._left: list[list[int]] = []

    def _round(self) -> list[list[int]]:
        """Pairs of quantiles that fill the square evenly (the additive recurrence R2 of Roberts), in a random order."""
        plastic = 1.324717957244746
        n = np.arange(ROUND)[:, None]
        even = (self._rng.random(2) + n * np.array([1 / plastic, 1 / plastic**2])) % 1.0
        normal = np.vectorize(NormalDist().inv_cdf)(np.clip(even, 1e-4, 1 - 1e-4))
        lengths = self._means * np.exp(self._sigma * normal - self._sigma**2 / 2)
        pairs: list[list[int]] = np.clip(np.rint(lengths), 2, LONGEST * self._means).astype(int).tolist()
        self._rng.shuffle(pairs)
        return pairs

    def make(self, user: int, nth: int) -> Sequence:
        if not self._left:
            self._left = self._round()
        return Sequence(*self._left.pop())


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """An engine and the load it gets. Seconds and tokens."""

    step: LinearStep
    config: EngineConfig
    prompt: float
    output: float
    #: of the lengths, relative
    spread: float
    think_s: float
    overhead_s: float
    limits_ms: dict[str, float] = field(default_factory=dict)

    def run(self, users: int, duration_s: float, ramp_up_s: float, seed: object) -> Run:
        rng = np.random.default_rng(zlib.crc32(repr(seed).encode()))
        lengths = _Lengths(self.prompt, self.output, self.spread, rng)
        starts = np.linspace(0.0, ramp_up_s, users).tolist() if users > 1 else [0.0]
        return closed_loop(
            [Engine(self.config, self.step)],
            lengths.make,
            starts,
            duration_s,
            think_s=self.think_s,
            overhead_s=self.overhead_s,
        )

    def stage(self, ask: Ask, seed: object, index: int = 0) -> dict[str, Any]:
        """The summary of a stage of this load, as a ramp would have it."""
        ramp_up_s = ask.ramp_up_s if ask.ramp_up_s is not None else min((ask.users - 1) / 500, 0.1 * ask.duration_s)
        run = self.run(ask.users, ask.duration_s, ramp_up_s, seed)
        load = StageLoad(users=ask.users, think_s=self.think_s, planned_end_s=ask.duration_s)
        return summarise(index, run.trace, load, slo=self.limits_ms or None)

    @cached_property
    def lone_s(self) -> float:
        """How long a request lasts alone, about."""
        return self.overhead_s + self.step.step_s(1, self.prompt + self.output / 2, 0) * self.output

    def long_run(self, users: int, requests: int) -> tuple[float, float]:
        """(tokens per second, attainment) in the long run: of so many requests after the first three a user."""
        rate = None
        residence = self.lone_s * 1.5
        while True:
            # as long as it takes, at the pace of what was seen so far
            pace = users / (residence + self.think_s)
            duration_s = (requests + 4 * users) / pace
            run = self.run(users, duration_s, residence, "truth")
            trace = run.trace
            done = trace.ok & (trace.sent_s > 3 * residence)
            if done.sum() >= requests / 2:
                break
            residence *= 2
        first_s = float((trace.sent_s + trace.e2e_s)[done].min())
        series = run.steps[0]
        tokens = np.interp([first_s, duration_s], series.end_s, series.generation_tokens)
        rate = float(np.diff(tokens)[0] / (duration_s - first_s))
        met = np.ones(int(done.sum()), dtype=bool)
        columns = {"ttft": trace.ttft_s, "tpot": trace.tpot_s, "e2e": trace.e2e_s}
        for name, limit in self.limits_ms.items():
            met &= columns[name][done] * 1e3 <= limit
        return rate, float(met.mean())


def drive(search: Search, deployment: Deployment, seed: object) -> Iterator[Ask | Answer]:
    """Run a search against a deployment; gives every ask and, last, the answer."""
    number = 0
    while isinstance(step := search.next(), Ask):
        yield step
        search.feed(probe_of(deployment.stage(step, (seed, number)), think_s=deployment.think_s))
        number += 1
    yield step


def draw(rng: np.random.Generator, spreads: tuple[float, ...] = (0.0, 0.3, 0.6)) -> Deployment:
    """A deployment whose wall or knee lies at some 5 to 200 users. With fixed lengths (a spread of 0) users may stay in the
    order they began in, for ever: what a request waits then depends on that order, and no limit on it is the server's."""
    prompt = float(rng.integers(64, 2049))
    output = float(rng.integers(48, 385))
    spread = float(rng.choice(spreads))
    base_s = float(rng.uniform(0.006, 0.04))
    step = LinearStep(
        base_s,
        base_s / float(np.exp(rng.uniform(math.log(15), math.log(250)))),
        base_s / float(np.exp(rng.uniform(math.log(2e4), math.log(5e5)))),
        base_s / float(np.exp(rng.uniform(math.log(300), math.log(4000)))),
    )
    wall = float(np.exp(rng.uniform(math.log(8), math.log(200))))
    longest = int(LONGEST * (prompt + output)) + BLOCK
    blocks = max(int(wall * (prompt + output) / BLOCK), longest // BLOCK) + 3
    config = EngineConfig(
        num_gpu_blocks=blocks,
        block_size=BLOCK,
        max_model_len=longest,
        max_num_seqs=int(rng.choice([32, 64, 128, 256])),
        max_num_batched_tokens=int(rng.choice([2048, 8192])),
        enable_prefix_caching=False,
    )
    return Deployment(
        step=step,
        config=config,
        prompt=prompt,
        output=output,
        spread=spread,
        think_s=float(rng.choice([0.0, 0.0, 2.0])),
        overhead_s=float(rng.uniform(0.002, 0.02)),
    )


def true_knee(deployment: Deployment, slope: float, near: float, requests: int) -> float:
    """Users at which throughput's slope falls to ``slope`` of X(1), in the long run of the engine: from levels a twelfth
    apart around ``near``, as many as it takes for their slopes to be on both sides, made to fall by pooling neighbours
    (PAVA; Ayer et al., 1955)."""
    first, _ = deployment.long_run(1, requests // 8)
    step = max(1, round(near / 12))
    low, high = max(1, round(near) - 3 * step), round(near) + 3 * step
    known = {level: deployment.long_run(level, requests)[0] for level in range(low, high + 1, step)}
    while True:
        levels = np.array(sorted(known))
        slopes = _falling(np.diff([known[level] for level in levels]) / np.diff(levels) / first)
        if slopes[-1] > slope:
            known[int(levels[-1]) + step] = deployment.long_run(int(levels[-1]) + step, requests)[0]
        elif slopes[0] < slope and levels[0] > step:
            known[int(levels[0]) - step] = deployment.long_run(int(levels[0]) - step, requests)[0]
        else:
            # falling; interp wants rising
            return float(np.interp(-slope, -slopes, (levels[:-1] + levels[1:]) / 2))


def _falling(values: Floats) -> Floats:
    blocks: list[list[float]] = []
    for value in values.tolist():
        blocks.append([value, 1.0])
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            pooled, weight = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + pooled * weight) / (last[1] + weight)
            last[1] += weight
    return np.array([value for value, weight in blocks for _ in range(int(weight))])


def true_slo(deployment: Deployment, attainment: float, near: int, requests: int) -> int:
    """Most users with whom the long run of the engine meets the limits in ``attainment`` of the requests."""

    def passes(users: int) -> bool:
        return users <= 0 or deployment.long_run(users, max(requests, 6 * users))[1] >= attainment

    step = max(1, near // 16)
    low = high = max(1, near)
    while not passes(low):
        low, step = max(0, low - step), 2 * step
    step = max(1, near // 16)
    high = max(high, low + 1)
    while passes(high):
        high, step = high + step, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def draw_with_limits(rng: np.random.Generator) -> Deployment:
    """A deployment with limits on TTFT, TPOT or both that some 4 to 120 users about meet."""
    deployment = draw(rng, spreads=(0.3, 0.6))
    users = int(np.exp(rng.uniform(math.log(4), math.log(120))))
    run = deployment.run(users, 40 * deployment.lone_s, deployment.lone_s, "limits")
    ttft_ms, tpot_ms = (1e3 * column[run.trace.ok] for column in (run.trace.ttft_s, run.trace.tpot_s))
    which = rng.choice(["ttft", "tpot", "both"])
    limits = {}
    if which in ("ttft", "both"):
        limits["ttft"] = float(np.quantile(ttft_ms, 0.9) * rng.uniform(0.9, 1.3))
    if which in ("tpot", "both"):
        limits["tpot"] = float(np.quantile(tpot_ms, 0.9) * rng.uniform(0.95, 1.1))
    return replace(deployment, limits_ms=limits)
