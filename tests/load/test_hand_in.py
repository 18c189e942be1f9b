"""How long the controller waits for its workers' last records."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from harness.clock import NS_PER_S, now_ns
from harness.load import controller
from harness.load.controller import Fleet


def worker() -> Any:
    return SimpleNamespace(done=asyncio.Event())


async def test_a_worker_that_hands_in_in_time_is_waited_for() -> None:
    late = worker()
    asyncio.get_running_loop().call_later(0.05, late.done.set)
    assert await Fleet._ended([late], now_ns())


async def test_a_worker_that_never_hands_in_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "HAND_IN_S", 0.05)
    monkeypatch.setattr(controller, "LOOK_S", 0.01)
    assert not await Fleet._ended([worker()], now_ns())


async def test_time_in_which_the_machine_was_away_is_not_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a suspension of minutes the workers have just woken up, as the controller has."""
    monkeypatch.setattr(controller, "LOOK_S", 0.01)
    jumps = itertools.chain([0], itertools.repeat(400 * NS_PER_S))
    monkeypatch.setattr(controller, "now_ns", lambda: now_ns() + next(jumps))
    late = worker()
    asyncio.get_running_loop().call_later(0.1, late.done.set)
    assert await Fleet._ended([late], now_ns())
