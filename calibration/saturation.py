"""Where a sweep over users saturates: the first level that shows a limit of the server, and the knee of its throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from calibration.knee import KNEE_SLOPE

Limit = Literal["wall", "max_num_seqs"]

#: streams waiting, on average over a window: a stream that only waits for the running step to end stays under it
WAITING_STREAMS = 0.5
WAITING_SHARE = 0.02
#: a scrape twice a second may miss the fullest moment of the pool
USAGE_SLACK = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One stage of a sweep. None means not measured; sums are over all engines.

    ``preemptions`` of the stage, ``waiting`` the mean number of streams waiting for capacity, ``kv_usage`` the fullest
    moment of the pool (0 to 1), ``running`` the most streams seen running.
    """

    users: int
    output_tokens_per_s: float | None = None
    preemptions: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    running: float | None = None

    @property
    def readable(self) -> bool:
        """Whether the server said anything by which a limit would show."""
        return self.preemptions is not None or self.waiting is not None


@dataclass(frozen=True, slots=True)
class Sign:
    """A limit that shows in a level, and by what."""

    limit: Limit
    evidence: str


def sign_of(level: Level, request_share: float | None = None, max_num_seqs: int | None = None) -> Sign | None:
    """The limit a level shows; None where it shows none.

    The wall shows by preemptions, or by streams that wait while the pool has no room for one more request. Streams that
    wait while as many run as ``max_num_seqs`` lets show that limit instead. A few streams always wait, for the end of the
    running step: only more than half a stream, and more than 2 % of the users, count.

    Args:
        level: what was measured.
        request_share: share of the pool that one request takes at its end, 0 to 1; None where that is unknown.
        max_num_seqs: streams that may run at once, over all engines; None where that is unknown.
    """
    if level.preemptions:
        return Sign("wall", f"{level.preemptions:g} preemptions")
    if level.waiting is None or level.waiting <= max(WAITING_STREAMS, WAITING_SHARE * level.users):
        return None
    waits = f"{level.waiting:.1f} streams waiting"
    if max_num_seqs is not None and level.running is not None and level.running >= max_num_seqs:
        return Sign("max_num_seqs", f"{waits} with {level.running:g} running")
    if level.kv_usage is None:
        return Sign("wall", waits)
    full = 1 - (request_share if request_share is not None else 0.1) - USAGE_SLACK
    return Sign("wall", f"{waits} with the pool {level.kv_usage:.0%} full") if level.kv_usage >= full else None


@dataclass(frozen=True, slots=True)
class Onset:
    """The step of the sweep in which a limit begins to show.

    ``last_good``: highest level below it that shows none (None: the lowest level already shows it); ``first_bad``: the
    first that does (None: not reached), and its sign.
    """

    last_good: int | None
    first_bad: int | None = None
    sign: Sign | None = None


def onset(levels: Sequence[Level], signs: Sequence[Sign | None]) -> Onset | None:
    """The onset of any limit in a sweep; None where no level was readable.

    Args:
        levels: in any order; of several runs of one level, the worst counts.
        signs: of each level.
    """
    readable = sorted(
        ((level.users, sign) for level, sign in zip(levels, signs, strict=True) if level.readable),
        key=lambda pair: (pair[0], pair[1] is None),
    )
    if not readable:
        return None
    first = next(((users, sign) for users, sign in readable if sign is not None), None)
    good = [users for users, _ in readable if first is None or users < first[0]]
    last_good = max(good, default=None)
    return Onset(last_good) if first is None else Onset(last_good, *first)


@dataclass(frozen=True, slots=True)
class Knee:
    """Users beyond which added users bring little.

    ``users`` is the estimate, ``low`` and ``high`` the levels it lies between; all None when the sweep does not bend or
    is too short to tell, with the ``reason``.
    """

    users: float | None
    low: int | None
    high: int | None
    reason: str


def knee(users: Sequence[int], tokens_per_s: Sequence[float]) -> Knee:
    """The knee of throughput over users: where the slope falls below ``KNEE_SLOPE`` of the initial one, and stays there.

    The initial slope is the best throughput per user of any level, which is the lowest level's on a curve that bends
    only one way. Slopes between neighbouring levels stand at the geometric mean of their users; the estimate
    interpolates between the last slope above the threshold and the first below, linearly over the logarithm of users. The
    knee lies between the beginning
    of the last segment above the threshold and the end of the first below: so does the bend of two straight lines.

    Args:
        users: levels, ascending, all different, at least 1.
        tokens_per_s: throughput of each.
    """
    if len(users) < 3:
        return Knee(None, None, None, f"{len(users)} levels with a throughput, at least 3 are needed")
    initial = max(tokens / n for n, tokens in zip(users, tokens_per_s, strict=True))
    if initial <= 0:
        return Knee(None, None, None, "no throughput at any level")
    points = list(zip(users, tokens_per_s, strict=True))
    slopes = [(y2 - y1) / (n2 - n1) / initial for (n1, y1), (n2, y2) in pairwise(points)]
    flat = next((i for i in range(len(slopes)) if _stays_flat(points[i:], initial)), None)
    if flat is None:
        return Knee(None, None, None, f"not reached: throughput still grows at {users[-1]} users")
    if flat == 0:
        return Knee(float(users[0]), users[0], users[1], f"already at the lowest level, {users[0]} users")
    estimate = _crossing(users, slopes, flat)
    return Knee(
        estimate, users[flat - 1], users[flat + 1], f"an added user brings less than {KNEE_SLOPE:.0%} of the first"
    )


def _stays_flat(points: Sequence[tuple[int, float]], initial: float) -> bool:
    """From the first point on, neither the next segment nor the way to any later level is steep."""
    n0, y0 = points[0]
    return all((y - y0) / (n - n0) < KNEE_SLOPE * initial for n, y in points[1:])


def _crossing(users: Sequence[int], slopes: Sequence[float], flat: int) -> float:
    """Where the slope passes the threshold, between the middles of the segments before and after ``users[flat]``.

    The one before is at the threshold or above it: were it below, the curve would stay flat from its beginning on.
    """
    before, after = (math.log(users[i] * users[i + 1]) / 2 for i in (flat - 1, flat))
    steep, low = slopes[flat - 1], slopes[flat]
    return math.exp(before + (after - before) * (steep - KNEE_SLOPE) / (steep - low))
