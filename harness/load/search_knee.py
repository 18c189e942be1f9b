"""Users beyond which an added one brings little: double until throughput has bent, then set levels around the bend until
its interval (:mod:`harness.load.knee_fit`) is narrow enough."""

from __future__ import annotations

import math
from itertools import pairwise

from harness.load.knee_fit import KneeFit, LevelRate, fit_knee
from harness.load.search import Answer, Ask, Book, Probe, rounded
from loadprofiles.search import KneeSearch

#: throughput has bent where a doubling brings less a user than this share of the slope that makes the knee
BENT = 0.5
#: where levels are wanted, in times of the knee as it is known so far
AROUND = (1.0, 0.85, 1.18, 0.7, 1.4, 0.5)
#: a level this near to one that was probed is a repetition of it
NEAR = 0.04


class KneeMachine:
    """A search by a profile's ``search: {kind: knee}``; see :class:`harness.load.search.Search`."""

    def __init__(self, spec: KneeSearch, first: int, duration_s: float) -> None:
        self._spec = spec
        self._book = Book(spec, duration_s)
        self._level = min(first, spec.most)
        self._ceiling: int | None = None
        self._bent = False
        self._answer: Answer | None = None

    def next(self) -> Ask | Answer:
        return self._answer or self._book.ask(self._level)

    def feed(self, probe: Probe) -> None:
        self._book.add(probe)
        given_up = self._book.given_up(self._level)
        if not probe.usable and not given_up and len(self._book.probes) < self._spec.max_probes:
            return
        if given_up:
            self._ceiling = self._level if self._ceiling is None else min(self._ceiling, self._level)
        if not self._bent and self._rise():
            return
        self._refine()

    def levels(self) -> list[LevelRate]:
        """Usable levels in order, the probes of each together."""
        levels = []
        for users in sorted({probe.users for probe in self._book.probes}):
            probes = [probe for probe in self._book.at(users) if probe.output_tokens_per_s]
            if probes:
                rates = [probe.output_tokens_per_s or 0.0 for probe in probes]
                errors = [probe.rate_se or 0.0 for probe in probes]
                error = math.sqrt(math.fsum(e * e for e in errors)) / len(errors)
                levels.append(LevelRate(users, math.fsum(rates) / len(rates), error))
        return levels

    def _rise(self) -> bool:
        """Double once more; False when throughput has bent or the levels end."""
        levels = self.levels()
        if len(levels) >= 2:
            (low, high), first = levels[-2:], levels[0]
            gained = (high.rate - low.rate) / (high.users - low.users)
            self._bent = gained < BENT * self._spec.slope * first.rate / first.users
        top = levels[-1].users if levels else 0
        if self._bent or not levels or self._ceiling is not None or top >= self._spec.most:
            self._bent = True
            return False
        if len(self._book.probes) >= self._spec.max_probes:
            return False
        self._level = min(2 * top, self._spec.most)
        return True

    def _refine(self) -> None:
        levels = self.levels()
        usable = [probe.think_s_per_token for probe in self._book.probes if probe.usable]
        think = math.fsum(usable) / max(1, len(usable))
        fit = fit_knee(levels, self._spec.slope, self._spec.confidence, think)
        enough = len(self._book.probes) >= self._spec.max_probes
        if fit is not None and (enough or self._is_narrow(fit, levels)):
            self._answer = self._found(fit, levels)
            return
        level = None if enough else self._wanted(fit, levels)
        if level is None:
            self._answer = self._found(fit, levels)
        else:
            self._level = level

    def _is_narrow(self, fit: KneeFit, levels: list[LevelRate]) -> bool:
        half = max(fit.high - fit.users, fit.users - fit.low)
        near = [level for level in levels if fit.users / 1.5 <= level.users <= 1.5 * fit.users]
        below = any(level.users <= fit.users for level in near)
        above = any(level.users >= fit.users for level in near)
        needed = min(4, self._whole_levels(fit))
        return half <= max(self._spec.precision * fit.users, 0.5) and below and above and len(near) >= needed

    @staticmethod
    def _whole_levels(fit: KneeFit) -> int:
        """Whole numbers of users within half of the knee on either side."""
        return math.floor(1.5 * fit.users) - math.ceil(fit.users / 1.5) + 1

    def _wanted(self, fit: KneeFit | None, levels: list[LevelRate]) -> int | None:
        """The next level: the one around the bend that is farthest from all that were probed; None without any left."""
        if not levels:
            return None
        done = [level.users for level in levels]
        if fit is None:
            return self._between(done)
        top = self._spec.most if self._ceiling is None else min(self._spec.most, self._ceiling - 1)
        wanted = [level for ratio in AROUND if 1 <= (level := rounded(ratio * fit.users)) <= top]
        if not wanted:
            return None
        far = max(wanted, key=lambda level: min(abs(math.log(level / one)) for one in done))
        if min(abs(math.log(far / one)) for one in done) > NEAR:
            return far
        # every level around it is known: the one with fewest probes is run again
        return min(wanted, key=lambda level: (len(self._book.at(level)), abs(level - fit.users)))

    def _between(self, done: list[int]) -> int | None:
        """Nothing can be fitted yet: the widest gap between the levels."""
        gaps = [(high / low, rounded(math.sqrt(low * high))) for low, high in pairwise(done)]
        gaps = [(width, level) for width, level in gaps if level not in done]
        return max(gaps)[1] if gaps else None

    def _found(self, fit: KneeFit | None, levels: list[LevelRate]) -> Answer:
        highest = levels[-1].users if levels else None
        reached = fit is not None and highest is not None and fit.users <= highest
        return Answer(
            kind="knee",
            users=fit.users if fit is not None and reached else None,
            low=None if fit is None or not reached else fit.low,
            high=None if fit is None or not reached else fit.high,
            confidence=self._spec.confidence if reached else None,
            sentence=self._sentence(fit if reached else None, highest),
            probes=len(self._book.probes),
            unusable=self._book.unusable,
        )

    def _sentence(self, fit: KneeFit | None, highest: int | None) -> str:
        if highest is None:
            return "no level could be probed: no probe was valid and steady"
        little = f"an added user brings less than {self._spec.slope:.0%} of what the first brings"
        if fit is None:
            ceiling = f"; no probe at {self._ceiling} was valid and steady" if self._ceiling is not None else ""
            return f"no knee up to {highest} users: nowhere can it be told that {little}{ceiling}"
        return (
            f"the knee is at {fit.users:.1f} users, {self._spec.confidence:.0%} of it between {fit.low:.1f} and"
            f" {fit.high:.1f}: beyond it {little}"
        )
