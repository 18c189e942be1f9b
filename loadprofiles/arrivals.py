"""Stage + rng -> due times of requests (open loop) or of users (closed loop). Pure."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: users a second that may open their first connection where a stage does not say: 500 handshakes cost a client core
#: about a tenth of its time, so the first tokens of the early users are still stamped on time
START_RATE_PER_S = 500.0
#: share of a stage's duration that the start of its users takes at most, where the stage does not say
START_SHARE = 0.1


def due_times_s(
    rate_per_s: float,
    *,
    rng: np.random.Generator,
    arrival: Literal["constant", "poisson", "gamma"] = "poisson",
    burstiness: float = 1.0,
    duration_s: float | None = None,
    requests: int | None = None,
) -> Floats:
    """Arrival times in seconds from the stage's start, ascending, shape (n,).

    ``constant`` sends the k-th at k/rate. ``poisson`` draws exponential gaps. ``gamma`` draws gaps of shape
    ``burstiness`` (1 is Poisson, below is burstier, above is smoother; the word and meaning of ``vllm bench serve``).
    The gaps are never stretched to hit the count: a Poisson process has a random one.

    Args:
        rate_per_s: mean arrivals a second.
        duration_s, requests: whichever comes first ends the list; one must be given.

    Raises:
        ValueError: neither end is given.
    """
    if duration_s is None and requests is None:
        raise ValueError("an arrival process needs duration_s or requests")
    if arrival == "constant":
        count = requests if duration_s is None else int(np.ceil(rate_per_s * duration_s - 1e-9))
        count = count if requests is None or count is None else min(count, requests)
        return np.arange(count or 0, dtype=np.float64) / rate_per_s
    shape = 1.0 if arrival == "poisson" else burstiness
    times = np.empty(0)
    expected = requests if duration_s is None else int(rate_per_s * duration_s * 1.2) + 64
    while True:
        gaps = rng.gamma(shape, 1.0 / (rate_per_s * shape), size=max(64, expected or 0))
        times = np.concatenate([times, (times[-1] if len(times) else 0.0) + np.cumsum(gaps)])
        if requests is not None and len(times) >= requests:
            times = times[:requests]
            break
        if duration_s is not None and times[-1] >= duration_s:
            break
    return times if duration_s is None else times[times < duration_s]


def ramped_times_s(
    start_per_s: float,
    end_per_s: float,
    *,
    duration_s: float,
    shape: Literal["linear", "exponential"],
    rng: np.random.Generator,
    arrival: Literal["constant", "poisson", "gamma"] = "poisson",
    burstiness: float = 1.0,
    requests: int | None = None,
) -> Floats:
    """Arrival times of a rate that moves from ``start_per_s`` to ``end_per_s`` over the stage; as :func:`due_times_s`.

    Arrivals of rate 1 are drawn and carried through the inverse of the expected count (Cinlar, Introduction to Stochastic
    Processes, 1975, section 4.7: the time change of an inhomogeneous Poisson process).
    """
    start, end, length = start_per_s, end_per_s, duration_s
    if start == end:
        return due_times_s(start, rng=rng, arrival=arrival, burstiness=burstiness, duration_s=length, requests=requests)
    growth = math.log(end / start)
    expected = (start + end) / 2 * length if shape == "linear" else (end - start) / growth * length
    counts = due_times_s(1.0, rng=rng, arrival=arrival, burstiness=burstiness, duration_s=expected, requests=requests)
    if shape == "linear":
        # count(t) = start t + (end - start) t^2 / (2 length), solved for t without a difference of near numbers
        slope = (end - start) / length
        return 2 * counts / (start + np.sqrt(start * start + 2 * slope * counts))
    return length / growth * np.log1p(counts * growth / (start * length))


def ramp_up_s(users: int, ramp_up: float | None, duration_s: float | None) -> float:
    """Seconds over which a stage's users start: as given, else at :data:`START_RATE_PER_S`, and within
    :data:`START_SHARE` of the duration."""
    if ramp_up is not None:
        return ramp_up
    spread = (users - 1) / START_RATE_PER_S
    return spread if duration_s is None else min(spread, START_SHARE * duration_s)


def start_times_s(users: int, spread_s: float) -> Floats:
    """When each user starts, seconds from the stage's start, evenly over ``spread_s``; shape (users,)."""
    return np.linspace(0.0, spread_s, users) if users > 1 else np.zeros(users)
