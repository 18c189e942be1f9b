"""Profile stage -> the order a fleet can run: absolute times, user starts, due times, bounds. Pure but for its inputs."""

from __future__ import annotations

import numpy as np

from harness.clock import NS_PER_S
from harness.load.orders import StageOrder
from harness.workload.lengths import plain
from loadprofiles.arrivals import due_times_s, ramp_up_s, ramped_times_s, start_times_s
from loadprofiles.profile import RateRamp, Stage

Times = np.ndarray[tuple[int], np.dtype[np.float64]]

#: a stage that ends by count ends after this long all the same
COUNT_BOUND_S = 3600.0


def order_of(
    stage: Stage,
    index: int,
    *,
    start_ns: int,
    seed: int,
    grace_s: float,
    replay_s: Times | None = None,
    taken_over: int | None = None,
) -> StageOrder:
    """The whole stage as one order (:func:`harness.load.controller.share` splits it).

    Args:
        stage: resolved: its users and lengths are numbers.
        start_ns: when it starts, on the run's clock.
        seed: of the run; the arrivals of a stage depend on it and on ``index`` alone.
        grace_s: how long requests in flight may go on after the planned end.
        replay_s: when the requests of a stage that replays a trace are due, seconds from its start.
        taken_over: users of the stage before, where this one takes them over; None: all its users are new.
    """
    assert stage.users is None or isinstance(stage.users, int), "a resolved stage has a number of users"
    end_ns = None if stage.duration is None else start_ns + int(stage.duration * NS_PER_S)
    bound_ns = end_ns if end_ns is not None else start_ns + int(COUNT_BOUND_S * NS_PER_S)
    users: list[int] = []
    user_start_ns: list[int] = []
    due_ns: list[int] = []
    open_loop = stage.request_rate is not None or stage.replay
    if not open_loop:
        assert stage.users is not None, "a closed-loop stage has users"
        users = list(range(stage.users))
        user_start_ns = _absolute(user_starts_s(stage, taken_over or 0), start_ns)
    else:
        assert not stage.replay or replay_s is not None, "a stage that replays has its times"
        due = replay_s if replay_s is not None else _arrivals_s(stage, np.random.default_rng((seed, index)))
        due_ns = _absolute(due, start_ns)
    return StageOrder(
        index=index,
        start_ns=start_ns,
        end_ns=end_ns,
        kill_ns=bound_ns + int(grace_s * NS_PER_S),
        prompt_tokens=plain(stage.prompt_tokens),
        output_tokens=plain(stage.output_tokens),
        users=users,
        user_start_ns=user_start_ns,
        requests=None if open_loop else stage.requests,
        think=plain(stage.think),
        due_ns=due_ns,
        max_in_flight=stage.users if open_loop else None,
        open_loop=open_loop,
        replay=stage.replay,
        takes_over=taken_over is not None,
    )


def user_starts_s(stage: Stage, taken_over: int = 0) -> Times:
    """When each user of a resolved stage starts, seconds from the stage's start; those taken over go on at once."""
    assert isinstance(stage.users, int), "a resolved stage has a number of users"
    new = max(0, stage.users - taken_over)
    starts = start_times_s(new, ramp_up_s(new, stage.ramp_up, stage.duration))
    return np.concatenate([np.zeros(stage.users - new), starts])


def _arrivals_s(stage: Stage, rng: np.random.Generator) -> Times:
    """When the requests of an open-loop stage are due, seconds from its start."""
    rate = stage.request_rate
    assert rate is not None
    if isinstance(rate, RateRamp):
        assert stage.duration is not None, "a ramp of the rate has a duration"
        return ramped_times_s(
            rate.ramp.start,
            rate.ramp.end,
            duration_s=stage.duration,
            shape=rate.ramp.shape,
            rng=rng,
            arrival=stage.arrival,
            burstiness=stage.burstiness,
            requests=stage.requests,
        )
    return due_times_s(
        rate,
        rng=rng,
        arrival=stage.arrival,
        burstiness=stage.burstiness,
        duration_s=stage.duration,
        requests=stage.requests,
    )


def mean_rate(stage: Stage) -> float | None:
    """Mean arrivals a second of a stage; None of users."""
    return stage.request_rate.mean if isinstance(stage.request_rate, RateRamp) else stage.request_rate


def _absolute(times_s: Times, start_ns: int) -> list[int]:
    return [start_ns + round(second * NS_PER_S) for second in times_s.tolist()]
