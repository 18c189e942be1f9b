"""The most users with whom requests meet their limits: double until they do not, then halve in between.

A probe *passes* when the share of requests that met the limits is at least the attainment asked, with the confidence
asked, and *fails* when it is not, with the same; a probe that does neither is run again and the counts are pooled, up to
``max_repeats``, after which the likelier side counts. A probe that was not usable (invalid, not steady, cut short) bounds
nothing: it is tried again, longer each time, and a level that cannot be had at all only keeps the search below itself.

What is said with confidence is that the lower bound passes and the upper one fails; it is at least one less the chances
that either is wrong (Bonferroni).
"""

from __future__ import annotations

import math

from harness.load.search import Answer, Ask, Book, Probe, rounded
from harness.measure.intervals import share_at_least
from loadprofiles.search import SloSearch


class SloMachine:
    """A search by a profile's ``search: {kind: slo}``; see :class:`harness.load.search.Search`."""

    def __init__(self, spec: SloSearch, first: int, duration_s: float) -> None:
        self._spec = spec
        self._book = Book(spec, duration_s)
        self._level = min(first, spec.most)
        #: largest level that passed, smallest that failed, smallest that could not be probed
        self._low = 0
        self._high: int | None = None
        self._ceiling: int | None = None
        self._answer: Answer | None = None

    def next(self) -> Ask | Answer:
        return self._answer or self._book.ask(self._level)

    def feed(self, probe: Probe) -> None:
        self._book.add(probe)
        if len(self._book.probes) >= self._spec.max_probes:
            self._judge()
            self._answer = self._found(f"after {self._spec.max_probes} probes, the most allowed")
        elif self._judge():
            self._advance()

    def chance(self, users: int) -> float | None:
        """Probability that a level passes, of its usable probes together; None without any."""
        probes = [probe for probe in self._book.at(users) if probe.of]
        if not probes:
            return None
        met, of = (math.fsum(getattr(probe, name) or 0.0 for probe in probes) for name in ("met", "of"))
        return share_at_least(met, of, self._spec.attainment)

    def _judge(self) -> bool:
        """Whether the level is decided: it passed, failed, or cannot be probed."""
        level, chance = self._level, self.chance(self._level)
        if chance is None:
            if self._book.given_up(level):
                self._ceiling = level if self._ceiling is None else min(level, self._ceiling)
                return True
            return False
        sure = max(chance, 1 - chance) >= self._spec.confidence
        if not sure and len(self._book.at(level)) <= self._spec.max_repeats:
            return False
        if chance >= 0.5:
            self._low = max(self._low, level)
        else:
            self._high = level if self._high is None else min(level, self._high)
        return True

    def _advance(self) -> None:
        top = min((bound for bound in (self._high, self._ceiling) if bound is not None), default=None)
        if top is None:
            if self._low >= self._spec.most:
                self._answer = self._found("")
                return
            self._level = min(2 * self._low, self._spec.most)
            return
        if top - self._low <= max(1.0, self._spec.precision * self._low):
            self._answer = self._found("")
            return
        # by halves of the ratio while the bounds are far apart, of the difference when they are near
        middle = math.sqrt(self._low * top) if self._low and top / self._low > 1.5 else (self._low + top) / 2
        self._level = min(max(rounded(middle), self._low + 1), top - 1)

    def _found(self, stopped: str) -> Answer:
        passes = self.chance(self._low) if self._low else 1.0
        fails = None if self._high is None else self.chance(self._high)
        confidence = None if passes is None else max(0.0, passes - (fails or 0.0))
        nothing = not self._low and self._high is None
        return Answer(
            kind="slo",
            users=None if nothing else self._low,
            low=None if nothing else self._low,
            high=self._high,
            confidence=None if nothing else confidence,
            sentence=self._sentence(confidence, nothing) + (f"; the search ended {stopped}" if stopped else ""),
            probes=len(self._book.probes),
            unusable=self._book.unusable,
        )

    def _sentence(self, confidence: float | None, nothing: bool) -> str:
        share = f"{self._spec.attainment:.0%} of the requests"
        limits = _limits(self._spec)
        if nothing:
            return "no level could be probed: no probe was valid and steady"
        sure = f" (confidence {confidence:.0%})" if confidence is not None else ""
        if not self._low:
            return f"not even one user meets {limits} in {share}{sure}"
        if self._high is not None:
            beyond = f"{self._high} do not"
        elif self._ceiling is not None:
            beyond = f"whether {self._ceiling} would is not known: no probe there was valid and steady"
        else:
            beyond = "more were not tried"
        return f"{self._low} users meet {limits} in {share}; {beyond}{sure}"


def _limits(spec: SloSearch) -> str:
    named = {"ttft": spec.slo.ttft, "tpot": spec.slo.tpot, "e2e": spec.slo.e2e}
    return " and ".join(f"{name.upper()} <= {limit:g} ms" for name, limit in named.items() if limit is not None)
