"""Sums that take tens of milliseconds, off the loop that answers: one at a time, a bounded line, and an answer kept for who
asks the same again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Busy(Exception):
    """More wait than will be served soon."""


class Work(Generic[T]):
    """A thread for sums.

    Args:
        most_waiting: beyond so many in line, more are refused.
        kept: answers remembered, the latest used.
    """

    def __init__(self, most_waiting: int = 64, kept: int = 256) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sizing")
        self._most_waiting = most_waiting
        self._kept = kept
        self._answers: OrderedDict[bytes, T] = OrderedDict()
        self._underway: dict[bytes, asyncio.Future[T]] = {}
        self._waiting = 0

    async def do(self, key: bytes, call: Callable[[], T]) -> T:
        """The answer to a question; who asks what is asked already waits for that one answer.

        Raises:
            Busy: the line is full.
        """
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        if (underway := self._underway.get(key)) is not None:
            return await asyncio.shield(underway)
        if self._waiting >= self._most_waiting:
            raise Busy
        self._waiting += 1
        future = self._underway[key] = asyncio.ensure_future(self._run(call))
        future.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(future)

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _done(self, key: bytes, done: asyncio.Future[T]) -> None:
        self._waiting -= 1
        del self._underway[key]
        # also looks at an error nobody waits for any more
        if done.cancelled() or done.exception() is not None:
            return
        self._answers[key] = done.result()
        while len(self._answers) > self._kept:
            self._answers.popitem(last=False)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
