"""Who waits, in which order (vLLM 0.32.0 ``v1/core/sched/request_queue.py``)."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Protocol

from calibration.twin.sequence import Sequence


class WaitingQueue(Protocol):
    """The requests not admitted yet. ``put_back`` is for preempted ones."""

    def add(self, seq: Sequence) -> None: ...

    def put_back(self, seq: Sequence) -> None: ...

    def head(self) -> Sequence: ...

    def take(self) -> Sequence: ...

    def remove(self, seq: Sequence) -> None: ...

    def __len__(self) -> int: ...


class FcfsQueue(deque[Sequence]):
    """First come, first served; the preempted wait at the head."""

    add = deque.append
    put_back = deque.appendleft
    take = deque.popleft

    def head(self) -> Sequence:
        return self[0]


class PriorityQueue:
    """Smallest (priority, arrival) first; a preempted request takes the place these give it."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Sequence]] = []
        self._added = 0

    def add(self, seq: Sequence) -> None:
        self._added += 1
        heapq.heappush(self._heap, (seq.priority, seq.arrived_s, self._added, seq))

    put_back = add

    def head(self) -> Sequence:
        return self._heap[0][3]

    def take(self) -> Sequence:
        return heapq.heappop(self._heap)[3]

    def remove(self, seq: Sequence) -> None:
        self._heap = [entry for entry in self._heap if entry[3] is not seq]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)
