"""What a deployment does under a load nobody ran yet: throughput, TPOT, TTFT, their percentiles, with intervals.

Below every limit means come from the closed forms (:mod:`calibration.queueing`) under the calibrated factors, whose joint
covariance gives the intervals. Percentiles, and everything from the wall on, come from the twin
(:mod:`calibration.predict_twin`). Beyond the wall its numbers are as uncertain as the mean of its steps under the factors.
Below the wall a percentile is as uncertain
as the mean of its quantity. What the calibration measured in front of the first token beyond what the twin's scheduler does
by itself is put in front of it, so that the mean of both is one. The closed forms hold for users who start evenly;
what it changes that they start together is the twin's to say, for as long as equal requests stay together: always.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from calibration.errors import CalibrationError, InputError
from calibration.factors import Z90, Basis, FactorSet
from calibration.limits import Limits, Slo, limits_of
from calibration.predict_twin import Quantile, TwinLoad, TwinReading, read_load
from calibration.prediction import Estimate, Outcome, propagate
from calibration.queueing import OperatingPoint, Regime, Shape, closed_loop, most_requests_per_s, open_loop
from calibration.serving import Serving
from calibration.steptime import step_time
from calibration.twin.config import EngineConfig
from calibration.twin.deploy import engine_config

Method = Literal["closed_form", "twin"]

#: where the share of a request's wait that the scheduler does not explain is taken for loads beyond the wall
_BELOW_WALL = 0.75
#: what users who start together change is taken to be known to this share of it (log sd): about twice of what four seeds
#: with 10 % of noise on every step moved the TTFT of 32 and 64 users of 128 + 16 tokens on the virtual clock
_OF_TOGETHER = 0.3
#: lives of a request over which starts no longer crowd, and below which they do; in between it depends on trifles (two runs
#: of a real vLLM at 0.65 lives had bunches at some levels and none at others)
_EVEN_LIVES, _CROWDED_LIVES = 1.2, 0.5
#: TPOT that depends further than this (log sd) on whose prompts share a step is played, where it is known who starts when
_ORDER_MATTERS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """``users`` (closed loop) or ``request_rate`` (open loop, Poisson, a second) of one shape.

    Raises:
        InputError: both or neither, or a number that cannot be.
    """

    shape: Shape
    users: int | None = None
    request_rate: float | None = None
    #: of an open loop
    max_in_flight: int | None = None
    #: seconds over which a closed loop's users start, as a ramp starts them; None: at moments of their own
    start_spread_s: float | None = None

    def __post_init__(self) -> None:
        if (self.users is None) == (self.request_rate is None):
            raise InputError(f"a load has users or a request_rate, not {self.users} and {self.request_rate}")
        for name in ("users", "request_rate", "max_in_flight"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} = {value!r}, expected more than 0")


class Measured(NamedTuple):
    """A load that was run and fitted."""

    users: float
    prompt_tokens: float
    output_tokens: float

    def is_like(self, users: float, shape: Shape) -> bool:
        """The same users and lengths, but for the rounding of means."""
        pairs = zip(self, (users, shape.prompt_tokens, shape.output_tokens), strict=True)
        return all(abs(a - b) <= 0.01 * b for a, b in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a load gives. Times in seconds, rates per second, sums over replicas.

    ``percentiles``: by quantity (ttft, tpot, e2e) and "p50" .. "p99"; empty where there is no twin of the deployment, and
    ``notes`` says why. ``in_flight``: users, or what a rate keeps in flight. ``waiting``, ``kv_cache_usage`` and
    ``preemptions_per_request`` are the twin's means; None without it.
    """

    load: Load
    method: Method
    regime: Regime
    in_flight: float
    running: float
    output_tokens_per_s: Estimate
    output_tokens_per_s_per_user: Estimate
    requests_per_s: Estimate
    tpot_s: Estimate
    ttft_s: Estimate
    e2e_s: Estimate
    percentiles: Mapping[str, Mapping[str, Estimate]]
    waiting: float | None
    kv_cache_usage: float | None
    preemptions_per_request: float | None
    notes: tuple[str, ...] = ()

    @property
    def basis(self) -> Basis:
        return self.tpot_s.basis


class Overloaded(NamedTuple):
    """More arrives than can be served: nothing settles. ``most_requests_per_s`` could be."""

    load: Load
    most_requests_per_s: Estimate


@dataclass(frozen=True)
class Predictor:
    """Predicts loads of one deployment.

    Args:
        served: the deployment.
        factors: of its calibration, or the priors.
        measured: the loads that were fitted.
        seed: of the twin's arrivals.
    """

    served: Serving
    factors: FactorSet
    measured: tuple[Measured, ...] = ()
    seed: int = 0
    twin: EngineConfig | None = field(init=False)
    #: why there is no twin
    no_twin: str = field(init=False)
    _overheads: dict[Load, float] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        config, why = None, ""
        try:
            config = engine_config(self.served)
        except CalibrationError as error:
            why = error.message
        object.__setattr__(self, "twin", config)
        object.__setattr__(self, "no_twin", why)

    # ------------------------------------------------------------------ one load

    def predict(self, load: Load, *, percentiles: bool = True) -> Prediction | Overloaded:
        """What a load gives.

        Args:
            percentiles: without them, and below the wall, nothing is simulated.
        """
        point = self._point(self.factors, load)
        if point is None:
            return self._overloaded(load)
        beyond = self._beyond(load, point)
        basis = self.basis(point.users, load.shape)
        means = propagate(lambda factors: self._means(factors, load), self.factors, basis)
        reading = None
        if self.twin is not None and not beyond and self._begin_together(load, means["e2e"].value):
            means = self._together(load, means)
        elif self.twin is not None and not beyond and load.start_spread_s is not None:
            means = self._in_order(load, point, means)
        if self.twin is not None and (percentiles or beyond):
            reading = self._simulate(self.factors, load, self._overhead_s(load, beyond=beyond))
        if reading is None:
            return _prediction(load, point, means, {}, None, self._notes(beyond=beyond, asked=percentiles))
        # near the wall it is the order of requests that decides: where none was short of blocks, it was below
        beyond = beyond and (point.regime != "below_limits" or reading.preemptions_per_request > 0)
        if beyond:
            means, spread = self._beyond_wall(basis, reading)
        else:
            spread = {name: (_log_sd(means[name]), _log_sd(means[name])) for name in ("ttft", "tpot", "e2e")}
        found = {
            name: {
                # the twin gives how a quantity spreads about its mean
                key: _with_spread(quantile, means[name].value / reading.means[name], *spread[name], basis)
                for key, quantile in quantiles.items()
            }
            for name, quantiles in reading.quantiles.items()
        }
        return _prediction(load, point, means, found, reading, (), method="twin" if beyond else "closed_form")

    @staticmethod
    def _begin_together(load: Load, life_s: float) -> bool:
        """Do several users start so fast that their prompts crowd, whatever else happens?"""
        spread_s = load.start_spread_s
        return spread_s is not None and load.users is not None and load.users > 1 and spread_s < _CROWDED_LIVES * life_s

    def _together(self, load: Load, means: Mapping[str, Estimate]) -> dict[str, Estimate]:
        """Means of users who start as the load says, by how they stand on the virtual clock to those of users who start
        evenly over more than a life, for whom the closed form speaks. Equal requests that began together wait for each
        other's prompts ever after: by how much depends on who met whom, so the intervals widen with it."""
        assert load.start_spread_s is not None
        even = replace(load, start_spread_s=_EVEN_LIVES * means["e2e"].value)
        overhead_s = self._overhead_s(even, beyond=False)
        # neighbouring starts, for a single run of such a load tells little of the next
        near = [replace(load, start_spread_s=load.start_spread_s * share) for share in (0.85, 1.0, 1.15)]
        readings = [self._simulate(self.factors, each, overhead_s) for each in (even, *near)]
        if None in readings:  # as :meth:`_in_order`: where no request ended there is nothing to compare
            return dict(means)
        first, *others = [_values(reading) for reading in readings if reading is not None]
        found = dict(means)
        for name, estimate in means.items():
            moved = [math.log(values[name] / first[name]) for values in others]
            ratio = math.exp(sum(moved) / len(moved))
            unsure = math.exp(Z90 * max(_OF_TOGETHER * abs(math.log(ratio)), (max(moved) - min(moved)) / 2))
            found[name] = estimate._replace(
                value=estimate.value * ratio, low=estimate.low * ratio / unsure, high=estimate.high * ratio * unsure
            )
        return found

    def _in_order(self, load: Load, point: OperatingPoint, means: dict[str, Estimate]) -> dict[str, Estimate]:
        """Means of users whose starts are known, where much depends on how many prompts fall into one step: short outputs,
        experts that a prompt's step reads. The closed form takes that half-way; the virtual clock plays it."""
        if point.order_log_sd < _ORDER_MATTERS:
            return means
        reading = self._simulate(self.factors, load, self._fixed_s(self.factors, load.shape))
        if reading is None:
            return means
        moved = {"tpot": reading.means.get("tpot", reading.means["e2e"]) / point.tpot_s}
        life_s = point.ttft_s + load.shape.decode_steps * point.tpot_s
        slower = load.shape.decode_steps * point.tpot_s * (moved["tpot"] - 1)
        moved |= {"per_user": 1 / moved["tpot"], "e2e": 1 + slower / life_s}
        moved["throughput"] = moved["requests"] = (life_s + load.shape.think_s) / (life_s + slower + load.shape.think_s)
        unsure = math.exp(Z90 * point.order_log_sd)
        return means | {
            name: means[name]._replace(
                value=means[name].value * ratio,
                low=means[name].low * ratio / unsure,
                high=means[name].high * ratio * unsure,
            )
            for name, ratio in moved.items()
        }

    def basis(self, users: float, shape: Shape) -> Basis:
        """How a load stands to the data."""
        if any(load.is_like(users, shape) for load in self.measured):
            return "measured"
        return self.factors.basis(users, shape.prompt_tokens, shape.output_tokens)

    def _point(self, factors: FactorSet, load: Load) -> OperatingPoint | None:
        server = self.served.server(factors, load.shape)
        if load.users is not None:
            return closed_loop(server, load.shape, load.users)
        assert load.request_rate is not None
        return open_loop(server, load.shape, load.request_rate)

    def _means(self, factors: FactorSet, load: Load) -> Outcome:
        """The positive quantities of a load. Where slower factors could not serve a rate, what they would give at the most
        they can."""
        point = self._point(factors, load)
        if point is None:
            server = self.served.server(factors, load.shape)
            point = open_loop(server, load.shape, 0.999 * most_requests_per_s(server, load.shape))
        assert point is not None
        return {
            "throughput": point.output_tokens_per_s,
            "per_user": point.output_tokens_per_s_per_user,
            "requests": point.requests_per_s,
            "tpot": point.tpot_s,
            "ttft": point.ttft_s,
            "e2e": point.ttft_s + load.shape.decode_steps * point.tpot_s,
        }

    def _beyond(self, load: Load, point: OperatingPoint) -> bool:
        """Is the load at a limit, or so near that requests which end together would be?"""
        if load.users is None:
            return False
        return point.regime != "below_limits" or load.users > self._most(load.shape)

    def _most(self, shape: Shape) -> float:
        """Users that never wait for each other's blocks or places, wherever they are in their requests."""
        wall, deployment = self.served.wall(shape), self.served.deployment
        return min(math.inf if wall is None else wall[0], float(deployment.max_num_seqs * deployment.dp))

    def _overloaded(self, load: Load) -> Overloaded:
        def most(factors: FactorSet) -> Outcome:
            return {"requests": most_requests_per_s(self.served.server(factors, load.shape), load.shape)}

        basis = self.basis(math.inf, load.shape)
        return Overloaded(load, propagate(most, self.factors, basis)["requests"])

    def _notes(self, *, beyond: bool, asked: bool) -> tuple[str, ...]:
        notes = []
        if asked and self.no_twin:
            notes.append(f"no percentiles: {self.no_twin}")
        if beyond:
            notes.append("beyond the wall without the twin: the mean of the plateau, preemption's cost left out")
        return tuple(notes)

    # ------------------------------------------------------------------ the twin

    def _simulate(self, factors: FactorSet, load: Load, overhead_s: float) -> TwinReading | None:
        assert self.twin is not None
        means = self._means(factors, load)
        return read_load(
            self.twin,
            step_time(self.served.physics, factors),
            TwinLoad(
                shape=load.shape,
                users=load.users,
                request_rate=load.request_rate,
                overhead_s=overhead_s,
                life_s=means["e2e"],
                replicas=self.served.deployment.dp,
                max_in_flight=load.max_in_flight,
                start_spread_s=load.start_spread_s,
                seed=self.seed,
            ),
        )

    def _overhead_s(self, load: Load, *, beyond: bool) -> float:
        """Seconds in front of the engine under which the twin's mean TTFT is that of the closed form; beyond the wall,
        those of a load below it."""
        base = self._fixed_s(self.factors, load.shape)
        if beyond:
            load = replace(load, users=max(1, math.floor(_BELOW_WALL * self._most(load.shape))))
            if (known := self._overheads.get(load)) is not None:
                return known
        self._overheads[load] = found = self._matched_s(load, base)
        return found

    def _matched_s(self, load: Load, base: float) -> float:
        point = self._point(self.factors, load)
        reading = self._simulate(self.factors, load, base)
        if point is None or reading is None:
            return base
        return base + max(0.0, point.ttft_s - reading.means["ttft"])

    def overhead_s(self, load: Load) -> float:
        """Seconds between a client and the engine of the twin, for this load; without a twin, what is fixed of it."""
        point = self._point(self.factors, load)
        if self.twin is None or point is None:
            return self._fixed_s(self.factors, load.shape)
        return self._overhead_s(load, beyond=self._beyond(load, point))

    @staticmethod
    def _fixed_s(factors: FactorSet, shape: Shape) -> float:
        return factors.value("request_overhead") + factors.value("request_token") * shape.prompt_tokens

    def _beyond_wall(
        self, basis: Basis, reading: TwinReading
    ) -> tuple[dict[str, Estimate], dict[str, tuple[float, float]]]:
        """Means from the twin, and the spread of each quantity's logarithm to either side (standard deviations).

        Where as many run as can, every time is a number of steps: all are as uncertain as the mean step of that run, whose
        prompts, recomputed ones among them, and contexts weigh the factors as they came there.
        """

        def mean_step(factors: FactorSet) -> Outcome:
            return {"step": reading.steps.mean_step_s(step_time(self.served.physics, factors))}

        own = _log_sd(propagate(mean_step, self.factors, basis)["step"])
        sds = {name: math.hypot(own, self.factors.residual_log_sd.get(name, 0.0)) for name in _values(reading)}
        means = {
            name: Estimate(value, value * math.exp(-Z90 * sds[name]), value * math.exp(Z90 * sds[name]), basis)
            for name, value in _values(reading).items()
        }
        return means, {name: (sd, sd) for name, sd in sds.items()}

    # ------------------------------------------------------------------ limits

    def limits(self, shape: Shape, slo: Slo | None = None) -> Limits:
        """Every limit on users, the binding one first; latency limits and the knee with intervals."""
        found = limits_of(self.served, self.factors, shape, slo or Slo())
        knee = found.knee
        if knee is not None:
            centre = knee.value

            def bend(factors: FactorSet) -> Outcome:
                again = limits_of(self.served, factors, shape, Slo(), intervals=False).knee
                return {"knee": centre if again is None else again.value}

            knee = propagate(bend, self.factors, "extrapolated")["knee"]
        tpot, ttft, knee = (
            None if at is None else at._replace(basis=self.basis(at.value, shape))
            for at in (found.tpot, found.ttft, knee)
        )
        return found._replace(tpot=tpot, ttft=ttft, knee=knee)

    def slo_users(self, limits: Limits) -> Estimate:
        """Users that fit under every limit but the knee, which stops nobody. At the low end no two requests need to be
        apart (the pool full with all at their end), at the high end they are spread evenly."""
        lows, values, highs = [limits.kv_full, limits.max_num_seqs], [limits.kv_staggered, limits.max_num_seqs], []
        highs += values
        for at in (limits.tpot, limits.ttft):
            if at is not None:
                lows.append(at.low)
                values.append(at.value)
                highs.append(at.high)
        users, shape_basis = min(values), (limits.tpot or limits.ttft or limits.knee)
        return Estimate(users, min(lows), min(highs), "extrapolated" if shape_basis is None else shape_basis.basis)


def measured_loads(loads: Iterable[tuple[float, Shape]]) -> tuple[Measured, ...]:
    """(users, shape) of stages that were fitted."""
    return tuple(Measured(users, shape.prompt_tokens, shape.output_tokens) for users, shape in loads)


def _values(reading: TwinReading) -> dict[str, float]:
    """The means of a run by the names of the closed form; a request of one token has no TPOT: its life stands for it."""
    tpot = reading.means.get("tpot", reading.means["e2e"])
    return {
        "throughput": reading.output_tokens_per_s,
        "per_user": 1 / tpot,
        "requests": reading.requests_per_s,
        "tpot": tpot,
        "ttft": reading.means["ttft"],
        "e2e": reading.means["e2e"],
    }


def _log_sd(estimate: Estimate) -> float:
    return math.log(estimate.high / estimate.value) / Z90


def _with_spread(quantile: Quantile, scale: float, low_sd: float, high_sd: float, basis: Basis) -> Estimate:
    """A percentile with the spread of its quantity and of its own rank."""
    value = quantile.value * scale
    below = math.hypot(Z90 * low_sd, math.log(quantile.value / quantile.low))
    above = math.hypot(Z90 * high_sd, math.log(quantile.high / quantile.value))
    return Estimate(value, value * math.exp(-below), value * math.exp(above), basis)


def _prediction(
    load: Load,
    point: OperatingPoint,
    means: Mapping[str, Estimate],
    percentiles: Mapping[str, Mapping[str, Estimate]],
    reading: TwinReading | None,
    notes: tuple[str, ...],
    method: Method = "closed_form",
) -> Prediction:
    simulated = method == "twin" and reading is not None
    return Prediction(
        load=load,
        method=method,
        regime=point.regime,
        in_flight=point.users,
        running=reading.running if simulated and reading is not None else point.running,
        output_tokens_per_s=means["throughput"],
        output_tokens_per_s_per_user=means["per_user"],
        requests_per_s=means["requests"],
        tpot_s=means["tpot"],
        ttft_s=means["ttft"],
        e2e_s=means["e2e"],
        percentiles=percentiles,
        waiting=None if reading is None else reading.waiting,
        kv_cache_usage=None if reading is None else reading.kv_cache_usage,
        preemptions_per_request=None if reading is None else reading.preemptions_per_request,
        notes=notes,
    )
