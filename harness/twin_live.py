"""One engine of the twin on the real clock. The clock and the timers are handed in; the steps are the engine's.

It gives the run the virtual clock gives: an arrival comes after every step that was due before it, and an idle engine
wakes when all that has come at that moment has been read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from calibration.twin.engine import Engine, Output
from calibration.twin.sequence import Sequence


class Timer(Protocol):
    """What an event loop returns for a callback to come."""

    def cancel(self) -> None: ...


class LiveEngine:
    """One engine on the real clock: woken at its due times, it hands outputs on.

    Args:
        engine: advanced here and nowhere else.
        now_s: engine seconds now.
        time_scale: engine seconds in a real second.
        deliver: takes an output, at or after its ``at_s``.
        call_later: an event loop's, in real seconds.
    """

    def __init__(
        self,
        engine: Engine,
        now_s: Callable[[], float],
        time_scale: float,
        deliver: Callable[[Output], None],
        call_later: Callable[[float, Callable[[], None]], Timer],
    ) -> None:
        self.engine = engine
        self._now_s = now_s
        self._time_scale = time_scale
        self._deliver = deliver
        self._call_later = call_later
        self._timer: Timer | None = None

    def submit(self, seq: Sequence) -> None:
        """A request arrives now; an idle engine wakes when all that came with it has been read."""
        self.engine.add(seq, self._catch_up())
        self._arm()

    def abort(self, seq: Sequence) -> None:
        self.engine.abort(seq, self._catch_up())
        self._arm()

    def _catch_up(self) -> float:
        """End every step that is due; engine seconds now. What arrives now comes after them."""
        now_s = self._now_s()
        while self.engine.due_s is not None and not self.engine.waking and self.engine.due_s <= now_s:
            if (output := self.engine.advance(self.engine.due_s)) is not None:
                self._deliver(output)
            now_s = self._now_s()
        return now_s

    def _wake(self) -> None:
        self._timer = None
        if self.engine.waking:
            self.engine.advance(self._now_s())
        self._catch_up()
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and self.engine.due_s is not None:
            left_s = (self.engine.due_s - self._now_s()) / self._time_scale
            self._timer = self._call_later(max(0.0, left_s), self._wake)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
