"""The most users with whom requests meet their limits: double until they do not, then halve in between.

A probe *passes* when the share of requests that met the limits is at least the attainment asked, with the confidence
asked, and *fails* when it is not, with the same; a probe that does neither is run again and the counts are pooled, up to
``max_repeats``, after which the likelier side counts. A probe that was not usable (invalid, not steady, cut short) bounds
nothing: it is tried again, longer each time, and a level that cannot be had at all only keeps the search below itself.

The answer is the most users who likelier pass than not. Its bounds are the nearest levels that pass and fail with the
confidence asked; what is said with confidence is that both do, which is at least one less the chances that either is wrong
(Bonferroni). Fewer users pass where more do, so that a level's probes speak for those below it too.
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
        (low, passes), (high, fails) = self._surely_passes(), self._surely_fails()
        confidence = max(0.0, passes - fails)
        nothing = not self._low and self._high is None
        sentence = self._sentence(low, high, confidence, nothing)
        return Answer(
            kind="slo",
            users=None if nothing else self._low,
            low=None if nothing else low,
            high=high,
            confidence=None if nothing else confidence,
            sentence=sentence + (f"; the search ended {stopped}" if stopped else ""),
            probes=len(self._book.probes),
            unusable=self._book.unusable,
        )

    def _chances(self) -> dict[int, float]:
        """By level, ascending: the probability that it passes."""
        levels = sorted({probe.users for probe in self._book.probes})
        return {level: chance for level in levels if (chance := self.chance(level)) is not None}

    def _surely_passes(self) -> tuple[int, float]:
        """The largest level up to the answer that passes with the confidence asked, and how surely; 0 passes for certain."""
        sure = 0.0
        for level, chance in sorted(self._chances().items(), reverse=True):
            if level <= self._low:
                sure = max(sure, chance)
                if sure >= self._spec.confidence:
                    return level, sure
        return 0, 1.0

    def _surely_fails(self) -> tuple[int | None, float]:
        """The smallest level beyond the answer that fails with the confidence asked, or the likeliest to, and its
        probability to pass; None where none fails."""
        if self._high is None:
            return None, 0.0
        least, known = 1.0, [(level, chance) for level, chance in self._chances().items() if level >= self._high]
        for level, chance in known:
            least = min(least, chance)
            if 1 - least >= self._spec.confidence:
                return level, least
        return known[-1][0], least

    def _sentence(self, low: int, high: int | None, confidence: float, nothing: bool) -> str:
        share = f"{self._spec.attainment:.0%} of the requests"
        limits = _limits(self._spec)
        if nothing:
            return "no level could be probed: no probe was valid and steady"
        sure = f" (confidence {confidence:.0%})"
        if not self._low:
            return f"not even one user meets {limits} in {share}{sure}"
        if high is not None:
            beyond = f"{high} do not"
        elif self._ceiling is not None:
            beyond = f"whether {self._ceiling} would is not known: no probe there was valid and steady"
        else:
            beyond = "more were not tried"
        if (low, high) == (self._low, self._high):
            return f"{self._low} users meet {limits} in {share}; {beyond}{sure}"
        return f"about {self._low} users meet {limits} in {share}: {f'{low} do; ' if low else ''}{beyond}{sure}"


def _limits(spec: SloSearch) -> str:
    named = {"ttft": spec.slo.ttft, "tpot": spec.slo.tpot, "e2e": spec.slo.e2e}
    return " and ".join(f"{name.upper()} <= {limit:g} ms" for name, limit in named.items() if limit is not None)
