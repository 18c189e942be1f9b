"""One load on the virtual clock: what closed forms cannot give of it, percentiles and everything beyond the wall.

Users begin at moments drawn over one life of a request, so that what is read is a steady state of independent users; or
evenly over a given time, as a ramp starts them, whose wave of a common start equal requests never lose. Of the run, one and
a half lives are cut as warm-up. A request reaches the engine an overhead after it was
sent: what the network, the HTTP layer and the tokenizer take, and whatever a calibration measured in front of the first
token beyond what the scheduler itself explains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from calibration.queueing import Shape
from calibration.steptime import StepModel
from calibration.trace import Floats
from calibration.twin.config import EngineConfig
from calibration.twin.engine import Engine
from calibration.twin.sequence import Sequence
from calibration.twin.simulate import Run, StepSeries, closed_loop, open_loop

PERCENTILES = (50, 90, 95, 99)
#: requests that a run means to end, and the lives of a request it lasts at least and at most, warm-up left out
_REQUESTS, _LEAST_LIVES, _MOST_LIVES = 240, 3, 20
_WARM_UP_LIVES = 1.5
#: of an open loop, whose arrivals scatter
_OPEN_REQUESTS = 600
_Z90 = 1.6448536269514722
#: steps of a run whose amounts are kept, evenly over its window
_KEPT_STEPS = 200


@dataclass(frozen=True, slots=True)
class Quantile:
    """A percentile with the ends between which its own rank scatters in a sample of this size (90 %)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinLoad:
    """A load for the twin: ``users``, or ``request_rate`` with Poisson arrivals; one of them is None."""

    shape: Shape
    users: int | None
    request_rate: float | None
    #: seconds from sending to the engine
    overhead_s: float
    #: a request's life as far as it is known before the run, seconds
    life_s: float
    #: over which users start; None: over a life, at random
    start_spread_s: float | None = None
    replicas: int = 1
    max_in_flight: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Amounts:
    """What steps of a run had to do: sequences that decode, tokens of cache resident, prompt tokens; shape (n,) each."""

    decode_seqs: Floats
    kv_tokens: Floats
    prefill_tokens: Floats

    def mean_step_s(self, step: StepModel) -> float:
        """What such a step takes on average."""
        return float(step.step_s_many(self.decode_seqs, self.kv_tokens, self.prefill_tokens).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinReading:
    """What the window of a run gave. Seconds; rates are per second; state is the mean over the window, summed over engines
    (KV usage: mean over engines)."""

    requests: int
    means: Mapping[str, float]
    quantiles: Mapping[str, Mapping[str, Quantile]]
    output_tokens_per_s: float
    requests_per_s: float
    running: float
    waiting: float
    kv_cache_usage: float
    preemptions_per_request: float
    steps: Amounts


def read_load(config: EngineConfig, step: StepModel, load: TwinLoad) -> TwinReading | None:
    """Simulate a load and read its steady part; None where no request ended in it."""
    shape = load.shape
    lengths = max(1, round(shape.prompt_tokens)), max(1, round(shape.output_tokens))
    engines = [Engine(config, step, seed=load.seed * 1_000 + rank) for rank in range(load.replicas)]
    start_s, end_s, run = _run(engines, load, lengths)
    return _read(run, start_s, end_s, config)


def _run(engines: list[Engine], load: TwinLoad, lengths: tuple[int, int]) -> tuple[float, float, Run]:
    rng = np.random.default_rng((load.seed, 7))
    warm_up_s = _WARM_UP_LIVES * load.life_s

    def make(user: int, nth: int) -> Sequence:
        return Sequence(*lengths)

    if load.users is not None:
        lives = min(max(_REQUESTS / load.users, _LEAST_LIVES), _MOST_LIVES)
        end_s = warm_up_s + lives * (load.life_s + load.shape.think_s)
        starts = _starts_s(load, load.users, rng)
        run = closed_loop(engines, make, starts.tolist(), end_s, think_s=load.shape.think_s, overhead_s=load.overhead_s)
        return warm_up_s, end_s, run
    assert load.request_rate is not None
    end_s = warm_up_s + max(_OPEN_REQUESTS / load.request_rate, _LEAST_LIVES * load.life_s)
    gaps = rng.exponential(1 / load.request_rate, math.ceil(load.request_rate * end_s * 1.2) + 50)
    run = open_loop(engines, make, np.cumsum(gaps), end_s, overhead_s=load.overhead_s, max_in_flight=load.max_in_flight)
    return warm_up_s, end_s, run


def _starts_s(load: TwinLoad, users: int, rng: np.random.Generator) -> Floats:
    if load.start_spread_s is None:
        return np.sort(rng.uniform(0.0, load.life_s + load.shape.think_s, users))
    return np.linspace(0.0, load.start_spread_s, users)


def _read(run: Run, start_s: float, end_s: float, config: EngineConfig) -> TwinReading | None:
    trace = run.trace
    first_s, last_s = trace.sent_s + trace.ttft_s, trace.sent_s + trace.e2e_s
    begun = (first_s >= start_s) & (first_s <= end_s)
    ended = trace.ok & (last_s >= start_s) & (last_s <= end_s)
    if not ended.any() or not begun.any():
        return None
    columns = {"ttft": trace.ttft_s[begun], "tpot": trace.tpot_s[ended], "e2e": trace.e2e_s[ended]}
    columns = {name: column[~np.isnan(column)] for name, column in columns.items()}
    columns = {name: column for name, column in columns.items() if len(column)}
    length_s = end_s - start_s

    def state(name: str) -> float:
        return sum(series.mean(getattr(series, name), start_s, end_s) or 0.0 for series in run.steps)

    preemptions = generated = 0.0
    for series in run.steps:
        generated += _grown(series.end_s, series.generation_tokens, start_s, end_s)
        preemptions += _grown(series.end_s, series.preemptions, start_s, end_s)
    return TwinReading(
        requests=int(ended.sum()),
        means={name: float(column.mean()) for name, column in columns.items()},
        quantiles={name: quantiles(column) for name, column in columns.items()},
        output_tokens_per_s=generated / length_s,
        requests_per_s=float(ended.sum()) / length_s,
        running=state("running"),
        waiting=state("waiting"),
        kv_cache_usage=state("kv_cache_usage") / len(run.steps),
        preemptions_per_request=preemptions / float(ended.sum()),
        steps=_amounts(run.steps, start_s, end_s, config),
    )


def _amounts(steps: Many[StepSeries], start_s: float, end_s: float, config: EngineConfig) -> Amounts:
    """Of steps that ended in the window; the cache's tokens from its usage."""
    pool_tokens = config.usable_blocks * config.block_size
    columns: list[tuple[Floats, Floats, Floats]] = []
    for series in steps:
        inside = np.flatnonzero((series.end_s >= start_s) & (series.end_s <= end_s))
        rows = inside[:: max(1, len(inside) // _KEPT_STEPS)]
        counts = series.decode_seqs[rows].astype(np.float64), series.prefill_tokens[rows].astype(np.float64)
        columns.append((counts[0], series.kv_cache_usage[rows] * pool_tokens, counts[1]))
    return Amounts(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _grown(times_s: Floats, counter: np.ndarray[tuple[int], np.dtype[np.int64]], start_s: float, end_s: float) -> float:
    """How far a counter grew between two moments."""
    before, after = (int(np.searchsorted(times_s, moment, side="right")) for moment in (start_s, end_s))
    if not after:
        return 0.0
    return float(counter[after - 1]) - (float(counter[before - 1]) if before else 0.0)


def quantiles(values: Floats) -> dict[str, Quantile]:
    """Percentiles of a sample, n >= 1, by linear interpolation; ends by the binomial spread of their ranks."""
    n = len(values)
    found = {}
    for percent in PERCENTILES:
        share = percent / 100
        spread = _Z90 * math.sqrt(share * (1 - share) / n)
        shares = [share, max(0.0, share - spread), min(1.0, share + spread)]
        found[f"p{percent}"] = Quantile(*map(float, np.quantile(values, shares)))
    return found
