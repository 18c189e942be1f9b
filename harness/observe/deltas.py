"""What grew between scrapes, with restarts of the server seen. Pure.

A restart is a changed ``process_start_time_seconds`` or, where there is none (several API server processes export no
process metrics), any counter below its earlier value. Then every counter began again at 0, so its new value is what grew
since: a lower bound, as growth between the earlier scrape and the restart is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from harness.observe.snapshot import Counters, Snapshot

Value = float | Mapping[str, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta(Counters):
    """Growth of every counter; None where an end of the span lacks it."""

    #: the server began anew inside the span: the values are lower bounds
    restarted: bool = False


#: every counter's field
COUNTER_FIELDS = tuple(f.name for f in fields(Counters))


def delta(before: Snapshot, after: Snapshot) -> Delta:
    """Growth from one scrape to a later one."""
    restarted = has_restarted(before, after)
    grown: dict[str, Any] = {
        name: _grown(getattr(before, name), getattr(after, name), restarted, before.via_ray) for name in COUNTER_FIELDS
    }
    return Delta(restarted=restarted, **grown)


def delta_over(snapshots: Sequence[Snapshot]) -> Delta | None:
    """Growth from the first to the last of several scrapes; None for fewer than two.

    Step by step, so that what grew before a restart in the middle is kept.
    """
    steps = [delta(before, after) for before, after in pairwise(snapshots)]
    if not steps:
        return None
    grown: dict[str, Any] = {name: _total([getattr(step, name) for step in steps]) for name in COUNTER_FIELDS}
    return Delta(restarted=any(step.restarted for step in steps), **grown)


def has_restarted(before: Snapshot, after: Snapshot) -> bool:
    """Whether the server began anew between two scrapes."""
    old, new = before.process_start_time_s, after.process_start_time_s
    if old is not None and new is not None and old != new:
        return True
    return any(_fell(getattr(before, name), getattr(after, name)) for name in COUNTER_FIELDS)


def _fell(old: Value, new: Value) -> bool:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return any(new.get(key, 0) < value for key, value in old.items())
    if isinstance(old, int | float) and isinstance(new, int | float):
        return new < old
    return False


def _grown(old: Value, new: Value, restarted: bool, lazy: bool) -> Value:
    """``lazy``: Ray exports a counter only after its first event, so one that was absent was 0."""
    if new is None or restarted:
        return new
    if isinstance(new, Mapping):
        # children of a labelled counter may come into being at their first event (http_requests_total does)
        earlier = old if isinstance(old, Mapping) else {}
        return {key: value - earlier.get(key, 0) for key, value in new.items()} if old is not None or lazy else None
    if old is None:
        return new if lazy else None
    return new - old if isinstance(old, int | float) else None


def _total(steps: list[Value]) -> Value:
    if any(step is None for step in steps):
        return None
    if isinstance(steps[0], Mapping):
        total: dict[str, float] = {}
        for step in steps:
            for key, value in step.items() if isinstance(step, Mapping) else ():
                total[key] = total.get(key, 0) + value
        return total
    return sum(step for step in steps if isinstance(step, int | float))
