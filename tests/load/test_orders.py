"""Stages split over workers lose nothing and repeat nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.clock import NS_PER_S
from harness.load.controller import share
from harness.load.orders import Progress, Tag, line, split
from harness.load.stages import COUNT_BOUND_S, order_of
from loadprofiles.profile import Stage

START_NS = 10 * NS_PER_S


def closed(users: int = 10, **more: object) -> Stage:
    given = {"users": users, "duration": 5.0, "prompt_tokens": 8, "output_tokens": 4, **more}
    return Stage.model_validate(given)


def opened(**more: object) -> Stage:
    return Stage.model_validate({"request_rate": 10.0, "duration": 5.0, "prompt_tokens": 8, "output_tokens": 4, **more})


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 1000))
def test_shares_hold_every_user_and_request_once(users: int, processes: int, requests: int) -> None:
    order = order_of(closed(users, requests=requests), 0, start_ns=START_NS, seed=0, grace_s=1.0)
    shares = share(order, processes)
    assert sorted(user for part in shares for user in part.users) == list(range(users))
    assert sum(part.requests or 0 for part in shares) == requests
    assert all(len(part.users) == len(part.user_start_ns) for part in shares)
    numbers = sorted(user + k * part.number_step for part in shares for user in part.users for k in range(3))
    assert numbers == list(range(3 * users)), "whoever sends them"


@given(st.integers(1, 9), st.integers(0, 1000))
def test_arrivals_are_the_same_whatever_the_number_of_processes(processes: int, seed: int) -> None:
    order = order_of(opened(), 3, start_ns=START_NS, seed=seed, grace_s=1.0)
    shares = share(order, processes)
    assert sorted(due for part in shares for due in part.due_ns) == order.due_ns
    assert order.due_ns == order_of(opened(), 3, start_ns=START_NS, seed=seed, grace_s=1.0).due_ns
    numbered = {
        part.first_number + position * part.number_step: due
        for part in shares
        for position, due in enumerate(part.due_ns)
    }
    assert numbered == dict(enumerate(order.due_ns)), "and so are their numbers"


def test_a_cap_is_shared_and_never_nothing() -> None:
    order = order_of(opened(users=3), 0, start_ns=START_NS, seed=0, grace_s=1.0)
    assert order.max_in_flight == 3
    assert [part.max_in_flight for part in share(order, 2)] == [2, 1]
    assert [part.max_in_flight for part in share(order, 5)] == [1, 1, 1, 0, 0]
    assert [bool(part.due_ns) for part in share(order, 5)] == [True, True, True, False, False]


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 60))
def test_a_cap_is_never_exceeded_by_all_shares_together(cap: int, processes: int, seed: int) -> None:
    shares = share(order_of(opened(users=cap), 0, start_ns=START_NS, seed=seed, grace_s=1.0), processes)
    assert sum(part.max_in_flight or 0 for part in shares) == cap
    assert all(part.max_in_flight for part in shares if part.due_ns)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 500))
def test_nobody_without_users_is_given_requests(users: int, processes: int, requests: int) -> None:
    order = order_of(closed(users, requests=requests), 0, start_ns=START_NS, seed=0, grace_s=1.0)
    for part in share(order, processes):
        fair = requests * len(part.users) / users
        assert abs((part.requests or 0) - fair) < 1


def test_a_timed_stage_ends_after_its_duration_and_dies_after_its_grace() -> None:
    order = order_of(closed(), 0, start_ns=START_NS, seed=0, grace_s=2.0)
    assert order.end_ns == START_NS + 5 * NS_PER_S
    assert order.kill_ns == START_NS + 7 * NS_PER_S


def test_a_counted_stage_is_bounded_too() -> None:
    order = order_of(closed(duration=None, requests=5), 0, start_ns=START_NS, seed=0, grace_s=2.0)
    assert order.end_ns is None
    assert order.kill_ns == START_NS + round((COUNT_BOUND_S + 2.0) * NS_PER_S)


def test_users_start_spread_over_the_ramp_up() -> None:
    order = order_of(closed(5, ramp_up="1s"), 0, start_ns=START_NS, seed=0, grace_s=2.0)
    assert [start - START_NS for start in order.user_start_ns] == [
        0,
        250_000_000,
        500_000_000,
        750_000_000,
        1_000_000_000,
    ]


def test_a_message_survives_the_line() -> None:
    progress = Progress(stage=1, in_flight=2, sent=3, ended=1, output_chunks=9, loop_lag_ms_max=0.5)
    message = line(Tag.PROGRESS, progress)
    assert message.endswith(b"\n")
    assert message.count(b"\n") == 1
    tag, payload = split(message)
    assert tag is Tag.PROGRESS
    assert b'"in_flight":2' in payload
