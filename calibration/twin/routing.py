"""Which data-parallel engine gets the next request."""

from __future__ import annotations

from collections.abc import Sequence as Engines

from calibration.twin.engine import Engine


class Router:
    """The engine with the smallest score; among equals the first from where the scan starts, which moves on.

    Score: unfinished requests, plus ``6 * waiting * (KV usage - 0.5)`` where requests wait on an engine more than half
    full. Rule of vLLM 0.32.0 ``v1/engine/core_client.py`` (DPLBAsyncMPClient.get_core_engine_for_request). Its counts
    of waiting requests and its KV usage are up to 100 ms old, ours are of now.
    """

    def __init__(self, engines: Engines[Engine]) -> None:
        self._engines = engines
        self._start = 0

    def choose(self) -> int:
        """Index of the engine for the next request."""
        count = len(self._engines)
        if count == 1:
            return 0
        order = [(self._start + i) % count for i in range(count)]
        best = min(order, key=lambda index: self._score(self._engines[index]))
        self._start = (self._start + 1) % count
        return best

    @staticmethod
    def _score(engine: Engine) -> float:
        waiting = len(engine.scheduler.waiting)
        return engine.unfinished + 6.0 * waiting * max(0.0, engine.scheduler.pool.usage - 0.5)
