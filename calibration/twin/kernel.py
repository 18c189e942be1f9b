"""The virtual clock: engines and a heap of things to come, run in the order of their times.

At equal times an engine's step ends first, and the next one starts, before anything else happens: an engine core does
not wait for what its output leads to. An idle engine wakes last: it takes everything that has arrived by then
(vLLM 0.32.0 ``v1/engine/core.py``, ``EngineCoreProc.run_busy_loop`` and ``_process_input_queue``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from collections.abc import Sequence as Engines

from calibration.twin.engine import Engine, Output, Stretch
from calibration.twin.sequence import Sequence

Action = Callable[[float], None]


class Kernel:
    """Runs engines on a virtual clock.

    Args:
        engines: driven here and nowhere else.
        deliver: takes every output at its time, with the index of its engine.
        skip: takes runs of steps in which nothing happens but that the same sequences decode; without it they come one
            by one as outputs.
    """

    def __init__(
        self,
        engines: Engines[Engine],
        deliver: Callable[[int, Output], None],
        skip: Callable[[int, Stretch], None] | None = None,
    ) -> None:
        self.engines = engines
        self.now_s = 0.0
        self._deliver = deliver
        self._skip = skip
        self._events: list[tuple[float, int, Action]] = []
        self._numbered = 0

    @property
    def idle(self) -> bool:
        """Nothing is left to happen."""
        return not self._events and all(engine.due_s is None for engine in self.engines)

    def at(self, time_s: float, action: Action) -> None:
        """Call ``action(time_s)`` at ``time_s``; what is due at one time runs in the order it was asked for."""
        self._numbered += 1
        heapq.heappush(self._events, (time_s if time_s > self.now_s else self.now_s, self._numbered, action))

    def submit(self, index: int, seq: Sequence) -> None:
        """``seq`` arrives at engine ``index`` now."""
        self.engines[index].add(seq, self.now_s)

    def abort(self, index: int, seq: Sequence) -> None:
        """The client of ``seq`` leaves now."""
        self.engines[index].abort(seq, self.now_s)

    def run(self, until_s: float = math.inf) -> None:
        """Let time pass up to and including ``until_s``, or until nothing is left to happen."""
        events, engines = self._events, self.engines
        while True:
            index = self._first_due() if len(engines) > 1 else 0
            engine = engines[index]
            due_s = math.inf if engine.due_s is None else engine.due_s
            event_s = events[0][0] if events else math.inf
            next_s = due_s if due_s < event_s else event_s
            if next_s > until_s or next_s == math.inf:
                break
            self.now_s = max(self.now_s, next_s)
            if due_s < event_s or (due_s == event_s and not engine.waking):
                if self._skip is not None and (stretch := engine.skip(min(event_s, until_s))) is not None:
                    self._skip(index, stretch)
                    continue
                output = engine.advance(next_s)
                if output is not None:
                    self._deliver(index, output)
            else:
                heapq.heappop(events)[2](next_s)
        if until_s < math.inf:
            self.now_s = until_s

    def _first_due(self) -> int:
        """The engine due first, one with a step under way before one that wakes."""
        best, best_s = 0, math.inf
        for index, engine in enumerate(self.engines):
            if (due_s := engine.due_s) is None:
                continue
            if due_s < best_s or (due_s == best_s and self.engines[best].waking and not engine.waking):
                best, best_s = index, due_s
        return best
