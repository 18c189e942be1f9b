"""Who waits, in which order (vLLM 0.32.0 ``v1/core/sched/request_queue.py``)."""

from __future__ import annotations

import heapq
from collections import deque

from calibration.twin.sequence import Sequence


class WaitingQueue:
    """Who waits. ``put_back`` is for preempted requests."""

    def add(self, seq: Sequence) -> None:
        raise NotImplementedError

    def put_back(self, seq: Sequence) -> None:
        raise NotImplementedError

    def head(self) -> Sequence:
        raise NotImplementedError

    def pop(self) -> Sequence:
        raise NotImplementedError

    def remove(self, seq: Sequence) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


class FcfsQueue(WaitingQueue):
    """First come, first served; the preempted wait at the head."""

    def __init__(self) -> None:
        self._seqs: deque[Sequence] = deque()

    def add(self, seq: Sequence) -> None:
        self._seqs.append(seq)

    def put_back(self, seq: Sequence) -> None:
        self._seqs.appendleft(seq)

    def head(self) -> Sequence:
        return self._seqs[0]

    def pop(self) -> Sequence:
        return self._seqs.popleft()

    def remove(self, seq: Sequence) -> None:
        self._seqs.remove(seq)

    def __len__(self) -> int:
        return len(self._seqs)


class PriorityQueue(WaitingQueue):
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

    def pop(self) -> Sequence:
        return heapq.heappop(self._heap)[3]

    def remove(self, seq: Sequence) -> None:
        self._heap = [entry for entry in self._heap if entry[3] is not seq]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)
