"""Two runs side by side: differences with intervals that respect noise, and a verdict for each metric.

Requests of one run are no independent sample: they share steps, wait for each other, and rise and fall together. So a
window is cut into blocks of time at least as long as a request lives, and blocks are what varies:

* a mean is a ratio of sums over blocks; its variance is that of the non-overlapping block bootstrap in closed form (the
  resampling variance of a ratio of block sums, times b / (b - 1)), its quantile Student's with b - 1 degrees of freedom,
  for blocks are few (Kuensch, Annals of Statistics 17, 1989; batch means: Law and Kelton, Simulation Modeling, ch. 9);
* a percentile gets its interval by inversion: the share of requests below it is such a mean, and the percentiles at the
  ends of that share's interval are the ends (Woodruff, JASA 47, 1952). Where the sample is too small to hold the upper end,
  there is none;
* a rate is the mean of the rates of the blocks.

Two runs are independent: the interval of the ratio of two values joins theirs on the logarithm (MOVER: Zou and Donner,
Statistics in Medicine 27, 2008). Of all rows compared together the chance that any calls an equal pair different is held to
``alpha`` (Bonferroni). Levels that a run repeats tell how runs differ beyond what blocks show; where nothing is
repeated, ``run_log_sd`` may say it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np

from calibration.errors import InputError
from calibration.trace import Floats, Ints

Verdict = Literal["worse", "better", "same", "unclear", "missing"]

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
#: requests a second are none of them: a window of a closed loop holds a wave of its users more or less
RATES = ("output_tokens_per_s",)
#: every metric that is compared; of failures the share, in place of a ratio the difference
METRICS = (
    *RATES,
    *(f"{name}.{key}" for name in LATENCIES for key in ("mean", *(f"p{p}" for p in PERCENTILES))),
    "failure_rate",
)
ALPHA = 0.05
#: a change of less is of no matter, however sure
NEGLIGIBLE = 0.01
#: an interval that reaches so far from no change tells nothing
TELLING = 0.10
#: lengths and rates of one load differ between runs by what rounding leaves
_SAME = 0.05
#: logarithms from here on are of no finite number
_MOST_LOG = 700.0
#: and where lengths are drawn, by so many standard errors of their means: one pair in 16,000 is farther apart
_DRAWN = 4.0


class LoadKey(NamedTuple):
    """What makes two stages comparable: users or rate, and the mean lengths of their requests."""

    users: int | None
    request_rate: float | None
    prompt_tokens: float
    output_tokens: float

    def matches(self, other: LoadKey, room: tuple[float, float] = (0.0, 0.0)) -> bool:
        """Is it the same load? ``room``: tokens that the mean prompt and output may be apart besides."""
        if self.users != other.users or (self.request_rate is None) != (other.request_rate is None):
            return False
        pairs = [(self.prompt_tokens, other.prompt_tokens, room[0]), (self.output_tokens, other.output_tokens, room[1])]
        if self.request_rate is not None and other.request_rate is not None:
            pairs.append((self.request_rate, other.request_rate, 0.0))
        return all(abs(a - b) <= max(_SAME * max(a, b), more) for a, b, more in pairs)

    def __str__(self) -> str:
        load = f"{self.users} users" if self.request_rate is None else f"{self.request_rate:g}/s"
        return f"{load}, {self.prompt_tokens:.0f} + {self.output_tokens:.0f} tokens"


@dataclass(frozen=True)
class Blocked:
    """A number of requests by the block of time each belongs to. ``values`` > 0 and ``block`` from 0, shape (n,);
    ``blocks`` there are, some may be empty."""

    values: Floats
    block: Ints
    blocks: int

    @cached_property
    def counts(self) -> Floats:
        return np.bincount(self.block, minlength=self.blocks).astype(np.float64)

    @cached_property
    def sums(self) -> Floats:
        return np.bincount(self.block, weights=self.values, minlength=self.blocks).astype(np.float64)

    @cached_property
    def ordered(self) -> Floats:
        return np.sort(self.values)


@dataclass(frozen=True)
class Sample:
    """The steady part of one stage. ``rates`` by metric and block; ``failed`` of ``ended`` requests ended badly;
    ``length_errors``: standard errors of the mean prompt and output, tokens (0 where every request is alike)."""

    load: LoadKey
    latencies: Mapping[str, Blocked]
    rates: Mapping[str, Floats]
    failed: int
    ended: int
    length_errors: tuple[float, float] = (0.0, 0.0)

    def same_load(self, other: Sample) -> bool:
        """Are they comparable? Means of lengths that were drawn differ by their draws."""
        a, b = self.length_errors, other.length_errors
        return self.load.matches(other.load, (_DRAWN * math.hypot(a[0], b[0]), _DRAWN * math.hypot(a[1], b[1])))

    @property
    def blocks(self) -> int:
        return max((len(rate) for rate in self.rates.values()), default=0)


class Spot(NamedTuple):
    """A metric's value with the ends of its interval; an end that the sample does not hold is 0 or infinite."""

    value: float
    low: float
    high: float


class Row(NamedTuple):
    """One metric at one load. ``change``: B over A, less one (of ``failure_rate`` the difference of the shares), with its
    interval; None where there is none. ``n``: requests or blocks behind each value."""

    load: LoadKey
    metric: str
    a: float | None
    b: float | None
    change: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    n: tuple[int, int]


class Options(NamedTuple):
    """``alpha`` over all rows together; ``negligible`` changes are none; ``run_log_sd`` is how runs of one configuration
    scatter beyond their blocks (standard deviation of the logarithm)."""

    alpha: float = ALPHA
    negligible: float = NEGLIGIBLE
    run_log_sd: float = 0.0


def compare_samples(
    a: Sequence[Sample], b: Sequence[Sample], options: Options | None = None, metrics: Sequence[str] = METRICS
) -> list[Row]:
    """Each of the metrics at every load that both runs have, in the order of ``a``; ``alpha`` is over all of them.

    Raises:
        InputError: no load is in both.
    """
    options = options or Options()
    pairs = matched(a, b)
    if not pairs:
        known = [" and ".join(sorted({str(s.load) for s in side})) or "none" for side in (a, b)]
        raise InputError(f"no load is in both runs: {known[0]} here, {known[1]} there", "compare runs of one profile")
    level = options.alpha / (len(pairs) * len(metrics))
    return [_row(metric, here, there, level, options) for here, there in pairs for metric in metrics]


def matched(a: Iterable[Sample], b: Iterable[Sample]) -> list[tuple[list[Sample], list[Sample]]]:
    """Stages of one load together, repeated ones too, and those of the other run."""
    groups: list[list[Sample]] = []
    for sample in a:
        group = next((g for g in groups if g[0].same_load(sample)), None)
        if group is None:
            groups.append([sample])
        else:
            group.append(sample)
    others = list(b)
    pairs = [(group, [s for s in others if group[0].same_load(s)]) for group in groups]
    return [(here, there) for here, there in pairs if there]


def worse_is_more(metric: str) -> bool:
    """Is a larger value the worse one?"""
    return metric not in RATES


def _row(metric: str, a: Sequence[Sample], b: Sequence[Sample], level: float, options: Options) -> Row:
    load = a[0].load
    if metric == "failure_rate":
        return _failures(load, a, b, level, options)
    sides = [spot_of(metric, samples, level, options.run_log_sd) for samples in (a, b)]
    n = (_size(metric, a), _size(metric, b))
    here, there = sides
    if here is None or there is None:
        known_a, known_b = (None if spot is None else spot.value for spot in sides)
        return Row(load, metric, known_a, known_b, None, None, None, "missing", n)
    low, high = ratio_interval(here, there)
    change = there.value / here.value - 1
    verdict = verdict_on(change, low, high, bad=1 if worse_is_more(metric) else -1, options=options)
    return Row(load, metric, here.value, there.value, change, low, high, verdict, n)


def _size(metric: str, samples: Sequence[Sample]) -> int:
    name = metric.partition(".")[0]
    if name in RATES:
        return sum(len(s.rates[name]) for s in samples if name in s.rates)
    return sum(len(s.latencies[name].values) for s in samples if name in s.latencies)


def verdict_on(change: float, low: float, high: float, *, bad: int, options: Options) -> Verdict:
    """``bad``: 1 where more is worse, -1 where less is."""
    if abs(change) >= options.negligible and (low > 0 or high < 0):
        return "worse" if change * bad > 0 else "better"
    return "same" if low >= -TELLING and high <= TELLING else "unclear"


def ratio_interval(a: Spot, b: Spot) -> tuple[float, float]:
    """Ends of b / a - 1 from the intervals of both."""
    log_a, low_a, high_a = (_log(x) for x in a)
    log_b, low_b, high_b = (_log(x) for x in b)
    middle = log_b - log_a
    low = middle - math.hypot(log_b - low_b, high_a - log_a)
    high = middle + math.hypot(high_b - log_b, log_a - low_a)
    return math.expm1(low), _exp(high) - 1


def _log(value: float) -> float:
    return -math.inf if value <= 0 else math.inf if math.isinf(value) else math.log(value)


def _exp(value: float) -> float:
    """Infinite where a number cannot hold it: an end that the sample does not tell."""
    return math.exp(value) if value < _MOST_LOG else math.inf


# --- one side --------------------------------------------------------------------------------------------------------


def spot_of(metric: str, samples: Sequence[Sample], level: float, run_log_sd: float = 0.0) -> Spot | None:
    """A metric over the stages of one load, its interval with coverage 1 - ``level``; None where nothing was measured."""
    spots = [spot for sample in samples if (spot := _one(metric, sample, level)) is not None]
    if not spots:
        return None
    if len(spots) == 1:
        return _widened(spots[0], run_log_sd * student(1 - level / 2, 1_000))
    return repeated(spots, level, run_log_sd, _one(metric, _joined(samples), level))


def _joined(samples: Sequence[Sample]) -> Sample:
    """The blocks of all passes of a load together."""
    names = {name for sample in samples for name in sample.latencies}
    rates = {name for sample in samples for name in sample.rates}
    return Sample(
        load=samples[0].load,
        latencies={name: _chained([s.latencies[name] for s in samples if name in s.latencies]) for name in names},
        rates={name: np.concatenate([s.rates[name] for s in samples if name in s.rates]) for name in rates},
        failed=sum(s.failed for s in samples),
        ended=sum(s.ended for s in samples),
    )


def _chained(parts: Sequence[Blocked]) -> Blocked:
    starts = np.cumsum([0, *(part.blocks for part in parts)])
    blocks = [part.block + start for part, start in zip(parts, starts, strict=False)]
    return Blocked(np.concatenate([part.values for part in parts]), np.concatenate(blocks), int(starts[-1]))


def repeated(spots: Sequence[Spot], level: float, run_log_sd: float = 0.0, joined: Spot | None = None) -> Spot:
    """The geometric mean of two repeats or more. Its interval: from what the passes say of themselves (``joined``: all of
    their blocks as one sample, which tells ends that a single pass does not hold), or from how far they are apart where that
    is more."""
    k = len(spots)
    logs = np.log([spot.value for spot in spots])
    value = float(np.exp(logs.mean()))
    if joined is not None:
        own_low, own_high = _log(joined.value) - _log(joined.low), _log(joined.high) - _log(joined.value)
    else:
        own_low, own_high = (math.sqrt(sum(_log(end) ** 2 for end in ends)) / k for ends in (
            [spot.value / spot.low if spot.low > 0 else math.inf for spot in spots],
            [spot.high / spot.value for spot in spots],
        ))  # fmt: skip
    apart = student(1 - level / 2, k - 1) * float(logs.std(ddof=1)) / math.sqrt(k)
    given = run_log_sd / math.sqrt(k) * student(1 - level / 2, 1_000)
    low, high = (max(own, apart, math.hypot(own, given)) for own in (own_low, own_high))
    return Spot(value, value * math.exp(-low), value * _exp(high))


def _widened(spot: Spot, log_width: float) -> Spot:
    if log_width == 0:
        return spot
    low = math.hypot(_log(spot.value) - _log(spot.low), log_width)
    high = math.hypot(_log(spot.high) - _log(spot.value), log_width)
    return Spot(spot.value, spot.value * math.exp(-low), spot.value * _exp(high))


def _one(metric: str, sample: Sample, level: float) -> Spot | None:
    name, _, which = metric.partition(".")
    if name in RATES:
        return None if name not in sample.rates else rate_spot(sample.rates[name], level)
    blocked = sample.latencies.get(name)
    if blocked is None or not len(blocked.values):
        return None
    return mean_spot(blocked, level) if which == "mean" else quantile_spot(blocked, int(which[1:]) / 100, level)


def rate_spot(rates: Floats, level: float) -> Spot | None:
    """The mean of the rates of equally long blocks; None where it is 0."""
    value = float(rates.mean()) if len(rates) else 0.0
    if value <= 0:
        return None
    if len(rates) < 2:
        return Spot(value, 0.0, math.inf)
    half = student(1 - level / 2, len(rates) - 1) * float(rates.std(ddof=1)) / math.sqrt(len(rates))
    return _around(value, half)


def mean_spot(blocked: Blocked, level: float) -> Spot:
    """The mean of the requests' values."""
    total, n = float(blocked.sums.sum()), float(blocked.counts.sum())
    mean = total / n
    error = _ratio_error(blocked.sums, blocked.counts, mean)
    if error is None:
        return Spot(mean, 0.0, math.inf)
    return _around(mean, student(1 - level / 2, blocked.blocks - 1) * error)


def quantile_spot(blocked: Blocked, share: float, level: float) -> Spot:
    """A percentile, linear between ranks; an end beyond the sample's own ends is 0 or infinite."""
    ordered, n = blocked.ordered, len(blocked.values)
    value = float(np.quantile(ordered, share))
    below = np.bincount(blocked.block[blocked.values <= value], minlength=blocked.blocks).astype(np.float64)
    reached = float(below.sum()) / n
    error = _ratio_error(below, blocked.counts, reached)
    if error is None:
        return Spot(value, 0.0, math.inf)
    # blocks of equal values vary by nothing; a sample of n still knows a share no better than n draws do
    error = max(error, math.sqrt(share * (1 - share) / n))
    half = student(1 - level / 2, blocked.blocks - 1) * error
    low, high = share - half, share + half
    return Spot(
        value,
        float(np.quantile(ordered, low)) if low > 0 else 0.0,
        float(np.quantile(ordered, high)) if high < 1 else math.inf,
    )


def _ratio_error(sums: Floats, counts: Floats, ratio: float) -> float | None:
    """Standard error of sum(sums) / sum(counts) over blocks; None for fewer than two."""
    b = len(sums)
    if b < 2:
        return None
    return float(math.sqrt(b / (b - 1) * ((sums - ratio * counts) ** 2).sum())) / float(counts.sum())


def _around(value: float, half: float) -> Spot:
    """The interval on the logarithm, as wide as ``half`` makes it near the value."""
    log_half = half / value
    return Spot(value, value * math.exp(-log_half), value * _exp(log_half))


@lru_cache(maxsize=1024)
def student(probability: float, degrees: int) -> float:
    """Student's t quantile."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


# --- failures --------------------------------------------------------------------------------------------------------


def _failures(load: LoadKey, a: Sequence[Sample], b: Sequence[Sample], level: float, options: Options) -> Row:
    counts = [(sum(s.failed for s in side), sum(s.ended for s in side)) for side in (a, b)]
    n = (counts[0][1], counts[1][1])
    if not n[0] or not n[1]:
        return Row(load, "failure_rate", None, None, None, None, None, "missing", n)
    share_a, share_b = (failed / ended for failed, ended in counts)
    low, high = difference_interval(*counts[0], *counts[1], level)
    change = share_b - share_a
    # on shares a point is a point: what is negligible of a latency is so of a share
    verdict = verdict_on(change, low, high, bad=1, options=options)
    return Row(load, "failure_rate", share_a, share_b, change, low, high, verdict, n)


def difference_interval(failed_a: int, n_a: int, failed_b: int, n_b: int, level: float) -> tuple[float, float]:
    """Of share b less share a (Newcombe, Statistics in Medicine 17, 1998, method 10: Wilson's intervals joined)."""
    z = student(1 - level / 2, 1_000_000)
    (p_a, low_a, high_a), (p_b, low_b, high_b) = (_wilson(f, n, z) for f, n in ((failed_a, n_a), (failed_b, n_b)))
    difference = p_b - p_a
    return (
        difference - math.hypot(p_b - low_b, high_a - p_a),
        difference + math.hypot(high_b - p_b, p_a - low_a),
    )


def _wilson(failed: int, n: int, z: float) -> tuple[float, float, float]:
    share = failed / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return share, max(0.0, centre - half), min(1.0, centre + half)
