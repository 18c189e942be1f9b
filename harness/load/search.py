"""Searching for a level: what a probe says, what may be asked next, what an answer is. Pure: stage summaries in, the next
level or the answer out; the runner and the virtual clock of the tests drive the same machines.

    search = search_of(profile.search, first_users, duration_s)
    while isinstance(step := search.next(), Ask):
        search.feed(probe_of(summary of a stage with step.users for step.duration_s))
    # step is the Answer
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from loadprofiles.search import KneeSearch, SloSearch

#: a probe that is not usable is tried so often at one level
TRIES = 3
#: an estimate of how long a request lasts at an unknown level is taken so many times too long rather than too short
SLACK = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one stage says to a search.

    ``usable``: it was valid, steady and not cut short; one that is not bounds nothing, ``reason`` says why.
    ``met`` of ``of``: effective counts of requests that met the limits, and of all.
    ``rate_se``: standard error of ``output_tokens_per_s``; ``residence_s``: median seconds of a request. None: unknown.
    """

    users: int
    usable: bool
    reason: str = ""
    met: float | None = None
    of: float | None = None
    output_tokens_per_s: float | None = None
    rate_se: float | None = None
    residence_s: float | None = None
    #: seconds a user thinks for each token it is sent
    think_s_per_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """Probe so many users for so long. ``ramp_up_s``: over which they should start, so that they do not go in lock step;
    None where nothing is known of how long a request lasts."""

    users: int
    duration_s: float
    ramp_up_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a search found.

    ``users``: the answer; None where there is none, which ``sentence`` explains. ``low`` and ``high`` bound it with
    ``confidence``; a bound is None where no probe gave one.
    """

    kind: str
    users: float | None
    low: float | None
    high: float | None
    confidence: float | None
    sentence: str
    probes: int
    unusable: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For ``summary.json``."""
        return {
            "kind": self.kind,
            "users": self.users,
            "low": self.low,
            "high": self.high,
            "confidence": self.confidence,
            "sentence": self.sentence,
            "probes": self.probes,
            "unusable": list(self.unusable),
        }


class Search(Protocol):
    """A search: :meth:`next` and :meth:`feed` in turn, until next gives an answer."""

    def next(self) -> Ask | Answer: ...

    def feed(self, probe: Probe) -> None: ...


def search_of(spec: SloSearch | KneeSearch, first: int, duration_s: float) -> Search:
    """The machine of a profile's search.

    Args:
        first: users of the first probe.
        duration_s: of the profile's stage: a probe lasts at least so long.
    """
    from harness.load.search_knee import KneeMachine
    from harness.load.search_slo import SloMachine

    if isinstance(spec, SloSearch):
        return SloMachine(spec, first, duration_s)
    return KneeMachine(spec, first, duration_s)


def probe_of(stage: Mapping[str, Any], *, think_s: float = 0.0, cut: bool = False) -> Probe:
    """What a stage as in ``summary.json`` says to a search; the limits are those of its first tier.

    Args:
        think_s: mean think time of a user.
        cut: the stage was ended before its time (an interrupt, a dead worker).
    """
    window, tier, rate = stage["window"], (stage["slo"] or [None])[0], stage["intervals"]["output_tokens_per_s"]
    steady = window is not None and window["steady"]
    reason = "cut short" if cut else next(iter(stage["reasons"]), "") if not (stage["valid"] and steady) else ""
    worth = tier["n_effective"] if tier else None
    requests, tokens = stage["requests_per_s"], stage["output_tokens_per_s"]
    return Probe(
        users=stage["users"],
        usable=stage["valid"] and steady and not cut,
        reason=reason,
        met=None if worth is None else tier["attainment"] * worth,
        of=worth,
        output_tokens_per_s=stage["output_tokens_per_s"],
        rate_se=None if rate is None else (rate["high"] - rate["low"]) / 2 / 1.645,
        residence_s=None if stage["e2e_ms"]["p50"] is None else stage["e2e_ms"]["p50"] / 1e3,
        think_s_per_token=think_s * requests / tokens if requests and tokens else 0.0,
    )


@dataclass(slots=True)
class Book:
    """The probes of a search, and how long the next one has to be."""

    spec: SloSearch | KneeSearch
    duration_s: float
    probes: list[Probe] = field(default_factory=list)
    lasted_s: list[float] = field(default_factory=list)
    asked: Ask | None = None

    def ask(self, users: int) -> Ask:
        residence_s = self._residence_s(users)
        wanted = self.duration_s if residence_s is None else self.spec.min_residences * SLACK * residence_s
        most = max(self.spec.max_duration, self.duration_s)
        tries = len(self.unusable_at(users))
        seconds = min(most, max(self.duration_s, wanted) * 2**tries)
        self.asked = Ask(users, seconds, None if residence_s is None else min(residence_s, seconds / 4))
        return self.asked

    def add(self, probe: Probe) -> None:
        assert self.asked is not None, "a probe answers an ask"
        self.probes.append(probe)
        self.lasted_s.append(self.asked.duration_s)

    def at(self, users: int) -> list[Probe]:
        """Usable probes of a level."""
        return [probe for probe in self.probes if probe.users == users and probe.usable]

    def unusable_at(self, users: int) -> list[Probe]:
        return [probe for probe in self.probes if probe.users == users and not probe.usable]

    def given_up(self, users: int) -> bool:
        """A level that no probe could be had of."""
        return not self.at(users) and len(self.unusable_at(users)) >= TRIES

    @property
    def unusable(self) -> tuple[str, ...]:
        return tuple(f"{probe.users} users: {probe.reason}" for probe in self.probes if not probe.usable)

    def _residence_s(self, users: int) -> float | None:
        """How long a request lasts at a level: as measured there, else of the nearest level below, growing with the
        users at most, else of the nearest above."""
        known = {probe.users: probe.residence_s for probe in self.probes if probe.residence_s is not None}
        if users in known:
            return known[users]
        below = max((level for level in known if level < users), default=None)
        above = min((level for level in known if level > users), default=None)
        bounds = [] if below is None else [known[below] * users / below]
        bounds += [] if above is None else [known[above]]
        return min(bounds, default=None)


def rounded(users: float) -> int:
    """A level is a whole number of users, at least one."""
    return max(1, math.floor(users + 0.5))
