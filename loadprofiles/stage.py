"""Stages: as a profile writes them (:class:`StageSpec`, which may stand for several levels) and as they are run
(:class:`Stage`, one level each)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from loadprofiles.lengths import Lengths
from loadprofiles.pauses import Pauses
from loadprofiles.units import ProfileError, Seconds, Strict
from loadprofiles.workload import PromptLengths

Users = Annotated[int, Field(ge=1, le=100_000)]
Rate = Annotated[float, Field(gt=0, le=100_000)]
MOST_LEVELS = 1_000


class FillPool(Strict):
    """As many users as hold this multiple of the KV pool at the end of their requests."""

    fill_pool: float = Field(gt=0, le=100)


class _Steps(Strict):
    start: Rate
    end: Rate
    step: Annotated[float, Field(gt=0)]


class Linear(Strict):
    """Levels from ``start`` by ``step`` to ``end``, both included; downwards where end is below start."""

    linear: _Steps

    def levels(self) -> Iterator[float]:
        start, end, step = self.linear.start, self.linear.end, self.linear.step
        for number in range(min(MOST_LEVELS, int(abs(end - start) / step + 1e-9)) + 1):
            yield start + (step if end >= start else -step) * number


class _Factor(Strict):
    start: Rate
    end: Rate
    factor: Annotated[float, Field(gt=1, le=1000)] = 2.0


class Geometric(Strict):
    """Levels from ``start``, each ``factor`` times the one before, to ``end``; downwards where end is below start."""

    geometric: _Factor

    def levels(self) -> Iterator[float]:
        level, factor = self.geometric.start, self.geometric.factor
        low, high = sorted((level, self.geometric.end))
        factor = factor if self.geometric.end >= level else 1 / factor
        for _ in range(MOST_LEVELS):
            if not low * (1 - 1e-9) <= level <= high * (1 + 1e-9):
                return
            yield level
            level *= factor


class _Spike(Strict):
    base: Rate
    peak: Rate
    peak_duration: Seconds | None = None
    """How long the peak lasts; the stage's duration without it."""


class Spike(Strict):
    """Calm, a sudden peak, calm again: three levels."""

    spike: _Spike

    def levels(self) -> Iterator[float]:
        yield from (self.spike.base, self.spike.peak, self.spike.base)


class _Ramp(Strict):
    start: Rate
    end: Rate
    shape: Literal["linear", "exponential"] = "linear"


class RateRamp(Strict):
    """A rate that moves from ``start`` to ``end`` within one stage."""

    ramp: _Ramp

    @property
    def mean(self) -> float:
        """Mean rate over the stage, per second."""
        start, end = self.ramp.start, self.ramp.end
        if self.ramp.shape == "linear" or start == end:
            return (start + end) / 2
        return (end - start) / math.log(end / start)


Generator = Linear | Geometric | Spike


def _shape(value: Any) -> str:
    """Which member of a union of levels a value means. In brackets, so that no tag passes for a key in a message."""
    if isinstance(value, list | tuple):
        return "<levels>"
    known = ("linear", "geometric", "spike", "fill_pool", "ramp")
    if isinstance(value, dict):
        return next((f"<{key}>" for key in known if key in value), "unknown")
    return next((f"<{key}>" for member, key in _MEMBERS if isinstance(value, member)), "<level>")


_MEMBERS: tuple[tuple[type[Strict], str], ...] = (
    (Linear, "linear"),
    (Geometric, "geometric"),
    (Spike, "spike"),
    (FillPool, "fill_pool"),
    (RateRamp, "ramp"),
)


UserLevels = Annotated[
    Annotated[Users, Tag("<level>")]
    | Annotated[tuple[Users, ...], Field(min_length=1, max_length=MOST_LEVELS, strict=False), Tag("<levels>")]
    | Annotated[Linear, Tag("<linear>")]
    | Annotated[Geometric, Tag("<geometric>")]
    | Annotated[Spike, Tag("<spike>")]
    | Annotated[FillPool, Tag("<fill_pool>")],
    Discriminator(
        _shape,
        custom_error_type="levels",
        custom_error_message="expected users, a list of them, or one of linear, geometric, spike, fill_pool",
    ),
]
RateLevels = Annotated[
    Annotated[Rate, Tag("<level>")]
    | Annotated[tuple[Rate, ...], Field(min_length=1, max_length=MOST_LEVELS, strict=False), Tag("<levels>")]
    | Annotated[Linear, Tag("<linear>")]
    | Annotated[Geometric, Tag("<geometric>")]
    | Annotated[Spike, Tag("<spike>")]
    | Annotated[RateRamp, Tag("<ramp>")],
    Discriminator(
        _shape,
        custom_error_type="levels",
        custom_error_message="expected requests a second, a list of them, or one of linear, geometric, spike, ramp",
    ),
]


class _StageBase(Strict):
    arrival: Literal["constant", "poisson", "gamma"] = "poisson"
    """How the gaps between arrivals vary; with request_rate."""
    burstiness: Annotated[float, Field(gt=0, le=1_000)] = 1.0
    """Shape of gamma arrivals: 1 is Poisson, below is burstier."""
    replay: bool = False
    """The times of the workload's trace in place of users or a rate; users then caps those in flight."""
    duration: Seconds | None = None
    requests: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """The stage ends with whichever of duration and requests comes first."""
    warm_up: Seconds = 0.0
    """At least so much of the stage's start is left out of what is measured."""
    ramp_up: Seconds | None = None
    """Over which the stage's users start."""
    think: Pauses = 0.0
    """Pause of a user between its requests: a duration, or a distribution of them."""
    handover: bool = False
    """The users of the level before go on: this level only adds users or lets some end, and the server is never idle
    between the two. What is measured begins when all its users have begun and the last stream sent before it has ended."""
    prompt_tokens: PromptLengths | None = None
    """In place of the workload's; synthetic workloads only."""
    output_tokens: Lengths | None = None


def _check(stage: StageSpec | Stage) -> None:
    if stage.replay and stage.request_rate is not None:
        raise ValueError("replay and request_rate both say when requests arrive")
    if stage.users is None and stage.request_rate is None and not stage.replay:
        raise ValueError("a stage needs users (closed loop) or request_rate (open loop)")
    if stage.duration is None and stage.requests is None and not stage.replay:
        raise ValueError("a stage needs duration or requests, or it would never end")
    if stage.duration is not None and stage.duration <= 0:
        raise ValueError("duration must be longer than 0")
    if stage.duration is not None and stage.warm_up >= stage.duration:
        raise ValueError("warm_up leaves nothing of the duration")
    if (stage.request_rate is not None or stage.replay) and stage.think:
        raise ValueError("think belongs to users; with request_rate the arrivals decide")
    if (stage.request_rate is not None or stage.replay) and stage.handover:
        raise ValueError("handover takes over users; with request_rate the arrivals decide")
    if isinstance(stage.request_rate, RateRamp) and stage.duration is None:
        raise ValueError("a ramp of the rate needs a duration")


class StageSpec(_StageBase):
    """One level, or several alike: N users (closed loop) or an arrival rate (open loop), for a time or a count.

    With ``request_rate``, ``users`` is the greatest number in flight.
    """

    users: UserLevels | None = None
    request_rate: RateLevels | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> StageSpec:
        _check(self)
        if self.request_rate is not None and not isinstance(self.users, int | FillPool | None):
            raise ValueError("users caps the requests in flight where there is a request_rate: one number")
        return self


class Stage(_StageBase):
    """One level held: N users (closed loop), or an arrival rate (open loop), for a time or a count.

    With ``request_rate``, ``users`` is the greatest number in flight.
    """

    users: Users | FillPool | None = None
    request_rate: Rate | RateRamp | None = None
    repetition: Annotated[int, Field(ge=0)] = 0
    """Which pass over the profile's stages this one belongs to, from 0."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Stage:
        _check(self)
        return self


def takes_over(before: Stage | None, stage: Stage) -> bool:
    """Whether a level takes over the users of the one before it; the first of a run has none to take over."""
    return stage.handover and before is not None


def begun_anew(stages: Sequence[Stage]) -> list[Stage]:
    """These levels, the first taking over from none: there is none before it."""
    return [stages[0].model_copy(update={"handover": False}), *stages[1:]]


def check_handovers(name: str, stages: Sequence[Stage]) -> None:
    """Whether each level that takes over users follows one that can hand them over.

    Args:
        name: of the profile.

    Raises:
        ProfileError: it does not; names the level, counted from 0.
    """
    for number, (before, stage) in enumerate(pairwise(stages), 1):
        if not takes_over(before, stage):
            continue
        if before.request_rate is not None or before.replay:
            raise ProfileError(
                f"{name}: level {number}: handover: the level before it has arrivals, no users to take over"
            )
        if before.requests is not None or before.duration is None:
            raise ProfileError(f"{name}: level {number}: handover: the level before it has to end by duration alone")


def levels_of(spec: StageSpec) -> Iterator[Stage]:
    """The stages that one entry of a profile stands for, in order."""
    shared = {name: getattr(spec, name) for name in _StageBase.model_fields if name in spec.model_fields_set}
    users: list[Any] = [spec.users]
    rates: list[Any] = [spec.request_rate]
    if isinstance(spec.users, Generator):
        users = _distinct(round(level) for level in spec.users.levels())
    elif isinstance(spec.users, tuple):
        users = list(spec.users)
    if isinstance(spec.request_rate, Generator):
        rates = list(spec.request_rate.levels())
    elif isinstance(spec.request_rate, tuple):
        rates = list(spec.request_rate)
    spikes = [made.spike.peak_duration for made in (spec.users, spec.request_rate) if isinstance(made, Spike)]
    both = [(user, rate) for user in users for rate in rates]
    for position, (user, rate) in enumerate(both):
        peak = {"duration": spikes[0]} if spikes and spikes[0] is not None and position == 1 else {}
        yield Stage(**{**shared, **peak}, users=user, request_rate=rate)


def _distinct(levels: Iterator[int]) -> list[int]:
    """Levels that rounding made equal to the one before are left out."""
    kept: list[int] = []
    for level in levels:
        if not kept or level != kept[-1]:
            kept.append(max(1, level))
    return kept
