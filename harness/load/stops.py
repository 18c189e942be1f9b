"""When a run ends before its last stage: the limits of its profile, held against the stages that ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calibration.saturation import Level, sign_of
from loadprofiles.profile import Profile, Stage

#: throughput grows by less than this share of the users added: it no longer follows them
FOLLOWS = 0.1
#: fewer more users than this share tell nothing of growth
MORE_USERS = 0.2


def reason_to_stop(
    profile: Profile, stages: Sequence[Mapping[str, Any]], failed: tuple[int, int], following: Stage | None
) -> str | None:
    """Why no further stage is to begin, as a sentence; None to go on, or where no stage follows.

    Args:
        profile: resolved.
        stages: that ended, as in ``summary.json``.
        failed: of the last stage, requests that failed, of all that ended.
        following: the stage that would begin next.
    """
    if following is None:
        return None
    limits, last = profile.limits, stages[-1]
    bad, ended = failed
    if ended and bad / ended > limits.error_rate:
        return (
            f"stage {last['index'] + 1}: {bad} of {ended} requests failed, more than limits.error_rate of"
            f" {limits.error_rate:g}"
        )
    ttft_ms = last["ttft_ms"]["p50"]
    if limits.ttft is not None and ttft_ms is not None and ttft_ms > 1e3 * limits.ttft:
        return (
            f"stage {last['index'] + 1}: the median TTFT is {ttft_ms:.0f} ms, more than limits.ttft of"
            f" {1e3 * limits.ttft:g} ms"
        )
    return saturated(stages) if limits.saturation == "stop" else None


def out_of_time(profile: Profile, since_s: float, following: Stage) -> str | None:
    """Whether a stage would end after ``limits.total_time``.

    Args:
        since_s: seconds since the first stage began.
    """
    limit = profile.limits.total_time
    if limit is None or since_s + (following.duration or 0.0) <= limit:
        return None
    return f"limits.total_time of {limit:g} s leaves no room for another stage ({since_s:.0f} s are gone)"


def saturated(stages: Sequence[Mapping[str, Any]]) -> str | None:
    """What the last stage shows of the server's limit: preemptions or a queue for room, or throughput that no longer
    follows the users; None where it shows none, or does not count."""
    last = stages[-1]
    if not last["valid"] or last["users"] is None:
        return None
    where = f"stage {last['index'] + 1}: saturated at {last['users']} users"
    server = last.get("server") or {}
    sign = sign_of(
        Level(
            users=last["users"],
            preemptions=server.get("preemptions"),
            waiting=server.get("waiting_mean"),
            kv_usage=server.get("kv_cache_usage_max"),
            running=server.get("running_mean"),
        )
    )
    if sign is not None:
        return f"{where}: {sign.evidence}"
    rate, users = last["output_tokens_per_s"], last["users"]
    below = [
        stage
        for stage in stages[:-1]
        if stage["valid"] and stage["users"] and stage["users"] * (1 + MORE_USERS) <= users
    ]
    if rate is None or not below:
        return None
    near = max(below, key=lambda stage: int(stage["users"]))
    if not near["output_tokens_per_s"]:
        return None
    grown, added = rate / near["output_tokens_per_s"] - 1, users / near["users"] - 1
    if grown >= FOLLOWS * added:
        return None
    return f"{where}: {added:.0%} more users than {near['users']} brought {grown:+.0%} throughput"
