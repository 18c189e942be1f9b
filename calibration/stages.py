"""A stage of ``summary.json`` as an observation, or left out with the reason. Pure.

Used is what a closed loop below the wall gave in a steady window, undisturbed; one that only was too short to be called
steady counts for less. Where the load had settled before the window (a warm-up of the users' start and a request's life),
TPOT is the mean over requests: each saw every other one pass by. Else some of the window's requests began while users were
still coming, and it is the mean gap between tokens where each token came in a chunk of its own: every gap of the window
counts, those of streams under way too. How many decoded beside a stream follows from Little's law and the client's own
times; the server's gauge counts
sequences whose prompt is still computed as running, so it stands beside as a check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from calibration.errors import InputError
from calibration.factors import Z90
from calibration.observation import Observation
from calibration.queueing import Shape
from calibration.saturation import Level, sign_of

#: share of failed requests beyond which a stage says little of the server
MOST_FAILED = 0.02
#: tokens of a window beside its chunks: one token a chunk, up to what the edges of a window hide
_ONE_TOKEN_A_CHUNK = 0.03
_REQUESTS_OF_A_USER = 2
#: a life's length is known before the stage only so well
_MOST_OF_A_LIFE = 0.8
#: a mean of few requests is never surer than this
_LEAST_LOG_SD = 1e-3
#: how users start where their stage does not say: so far apart, over this share of it at most (loadprofiles.arrivals)
_STARTS_APART_S, _START_SHARE = 1 / 500, 0.1
#: what a window too short to be called steady is worth
_SHORT_LOG_SD = {"tpot_ms": 0.02, "ttft_ms": 0.06}
#: what the means are worth that another tool printed of its whole run, fill and drain among them
_PRINTED_LOG_SD = {"tpot_ms": 0.05, "ttft_ms": 0.2}
#: with fewer of the level's streams in flight on average, it is another level that was measured
_LEAST_DELIVERED = 0.9
#: where users start faster than requests end, but not all but at once, it depends on trifles whose prompts come together:
#: errors (log sd) of the means per share of a life that the starts fall short of one. On one real server the TTFT of 16
#: users of 128 + 16 tokens was 1.8 s started over a whole life, 3.2 s over half of one and 5.4 s over a quarter
_AT_ONCE_LIVES = 0.1
_CROWDED_LOG_SD = {"tpot_ms": 0.3, "ttft_ms": 1.2}
#: a stage whose means are less sure than this tells nothing
_MOST_LOG_SD = 0.5


class Reading(NamedTuple):
    """A stage as it was read: an observation, or the ``reason`` why not. ``little_error``: users over (first token +
    decoding + thinking), times the tokens of a request, over the measured throughput, less one."""

    label: str
    users: float | None
    prompt_tokens: float | None
    output_tokens: float | None
    observation: Observation | None
    reason: str
    output_tokens_per_s: float | None = None
    little_error: float | None = None


def read_stage(
    stage: Mapping[str, Any],
    planned: Mapping[str, Any] | None = None,
    *,
    max_num_seqs: int | None = None,
    wall_users: float | None = None,
    unsteady_is_used: bool = False,
) -> Reading:
    """Read a stage.

    Args:
        stage: as in ``summary.json``.
        planned: as in the profile of ``run.json``, for what a summary does not say: think time and warm-up.
        max_num_seqs: over all engines; None where that is unknown.
        wall_users: users at which the pool is full on average; stages beyond are left out whatever they show.
        unsteady_is_used: for stages that were meant short, to learn how fast a server is.

    Raises:
        InputError: the stage is not what a run writes; names the key.
    """
    try:
        return _read(stage, planned or {}, max_num_seqs, wall_users, unsteady_is_used)
    except (KeyError, TypeError) as error:
        raise InputError(f"a stage cannot be read: {error!r}", "expected what summary.json of a run holds") from error


def _read(
    stage: Mapping[str, Any],
    planned: Mapping[str, Any],
    max_num_seqs: int | None,
    wall_users: float | None,
    unsteady: bool,
) -> Reading:
    totals = stage["totals"]
    prompt, output, users = totals["prompt_tokens_mean"], totals["output_tokens_mean"], stage["users"]
    lengths = "" if prompt is None or output is None else f", {prompt:.0f} + {output:.0f} tokens"
    label = f"stage {stage['index'] + 1}: {users if users is not None else '-'} users{lengths}"
    found = Reading(label, users, prompt, output, None, "", stage["output_tokens_per_s"])
    reason = _reason(stage, max_num_seqs, wall_users, unsteady) or _undelivered(stage, planned)
    if reason:
        return found._replace(reason=reason)
    shape = Shape(
        prompt_tokens=prompt,
        output_tokens=output,
        think_s=float(planned.get("think") or 0.0),
        start_gap_s=_start_gap_s(stage, planned),
    )
    tpot_s = _tpot_s(stage, settled=_settled(stage, planned))
    if tpot_s is None:
        return found._replace(reason="no time per output token: answers of one token, or none ended in the window")
    crowded = _crowded(stage, planned)
    step_s, step_running, step_log_sd = _step(stage, shape, users)
    observation = Observation(
        label=label,
        shape=shape,
        users=users,
        tpot_s=tpot_s,
        ttft_s=_seconds(stage["ttft_ms"]["mean"]),
        tpot_log_sd=math.hypot(_log_sd(stage, "tpot_ms", users), crowded * _CROWDED_LOG_SD["tpot_ms"]),
        ttft_log_sd=math.hypot(_log_sd(stage, "ttft_ms", users), crowded * _CROWDED_LOG_SD["ttft_ms"]),
        step_s=step_s,
        step_running=step_running,
        step_log_sd=step_log_sd,
    )
    if observation.tpot_log_sd > _MOST_LOG_SD:
        return found._replace(reason="too few answers ended in the window to tell a mean")
    little_error = _little(stage, observation)
    if stage.get("carried_over") and (little_error is None or little_error > 1 / _LEAST_DELIVERED - 1):
        return found._replace(reason="only the numbers of a whole run are known, and fill and drain are too much of it")
    return found._replace(observation=observation, little_error=little_error)


def _reason(stage: Mapping[str, Any], max_num_seqs: int | None, wall_users: float | None, unsteady: bool) -> str:
    """Why a stage is left out; empty where it is used."""
    requests, server, users = stage["requests"], stage["server"] or {}, stage["users"]
    if users is None or stage["request_rate"] is not None:
        return "an arrival rate, not users"
    if not stage["valid"]:
        return f"invalid: {'; '.join(stage['reasons']) or 'no reason given'}"
    ended = requests["ok"] + requests["failed"]
    if requests["failed"] > MOST_FAILED * ended:
        return f"{requests['failed']} of {ended} requests failed"
    if stage["totals"]["output_tokens_mean"] is None or stage["totals"]["prompt_tokens_mean"] is None:
        return "no token counts"
    if server.get("contamination"):
        return f"contaminated: {server['contamination'][0]}"
    level = Level(
        users=users,
        preemptions=server.get("preemptions"),
        waiting=_waiting(server),
        kv_usage=server.get("kv_cache_usage_max"),
        running=server.get("running_max"),
    )
    sign = sign_of(level, max_num_seqs=max_num_seqs)
    if sign is not None:
        return f"beyond the {'wall' if sign.limit == 'wall' else 'limit max_num_seqs'}: {sign.evidence}"
    if wall_users is not None and users > wall_users:
        return f"beyond the wall: the pool holds {wall_users:.1f} streams on average"
    if max_num_seqs is not None and users > max_num_seqs:
        return f"beyond the limit max_num_seqs of {max_num_seqs}"
    if stage.get("carried_over"):
        return ""
    window = stage["window"]
    if window is None or (not window["steady"] and not unsteady and not _is_only_short(stage)):
        return f"not steady: {'; '.join(_faults(stage)) or 'no window'}"
    return ""


def _undelivered(stage: Mapping[str, Any], planned: Mapping[str, Any]) -> str:
    """Why it is another level that was measured; empty where it is not. Users that think are not in flight all the time."""
    delivered = (stage.get("client") or {}).get("concurrency_mean")
    if planned.get("think") or delivered is None or delivered >= _LEAST_DELIVERED * stage["users"]:
        return ""
    return f"only {delivered:.3g} of {stage['users']} streams were in flight on average"


def _faults(stage: Mapping[str, Any]) -> list[str]:
    """Why a stage is not steady."""
    return [text.removeprefix("not steady: ") for text in stage["reasons"] if text.startswith("not steady")]


def _is_only_short(stage: Mapping[str, Any]) -> bool:
    """Nothing moved in the window, it only was too short to be sure: it counts, for what a short window is worth."""
    window, life_ms = stage["window"], stage["e2e_ms"]["mean"]
    faults = _faults(stage)
    short = bool(faults) and all(text.startswith("too short") for text in faults)
    enough = stage["requests"]["ok"] >= stage["users"] and life_ms is not None
    return short and enough and (window["end_s"] - window["start_s"]) * 1e3 >= life_ms


def _waiting(server: Mapping[str, Any]) -> float | None:
    capacity = server.get("waiting_capacity_mean")
    value = server.get("waiting_mean") if capacity is None else capacity
    return None if value is None else float(value)


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1e3


def _gap_s(stage: Mapping[str, Any], planned: Mapping[str, Any]) -> float | None:
    """Time between two users' starts where the requests are equal, so that who began together stays together; None where
    they are not, or where nobody knows."""
    users, life_ms = stage["users"], stage["e2e_ms"]["mean"]
    equal = all(isinstance(planned.get(name), int) for name in ("prompt_tokens", "output_tokens"))
    # users who are handed over are where the level before left them
    if not equal or users is None or users < 2 or life_ms is None or planned.get("handover"):
        return None
    gaps = float(users - 1)
    if planned.get("ramp_up") is not None:
        return float(planned["ramp_up"]) / gaps
    if planned.get("duration") is not None:
        return min(_STARTS_APART_S, _START_SHARE * float(planned["duration"]) / gaps)
    return _STARTS_APART_S


def _start_gap_s(stage: Mapping[str, Any], planned: Mapping[str, Any]) -> float | None:
    """The same where starts are closer than a life has room for; None: users are spread, or nobody knows."""
    gap_s = _gap_s(stage, planned)
    if gap_s is None:
        return None
    return gap_s if gap_s * (stage["users"] - 1) < stage["e2e_ms"]["mean"] / 2e3 else None


def _crowded(stage: Mapping[str, Any], planned: Mapping[str, Any]) -> float:
    """By which share of a life the starts fall short of one; 0 where they do not, and where users start all but at once,
    for then it is plain who stays with whom."""
    gap_s = _gap_s(stage, planned)
    lives = 0.0 if gap_s is None else gap_s * stage["users"] * 1e3 / stage["e2e_ms"]["mean"]
    return 0.0 if lives < _AT_ONCE_LIVES else max(0.0, 1.0 - lives)


def _settled(stage: Mapping[str, Any], planned: Mapping[str, Any]) -> bool:
    """Did those whose answers were measured begin after all users had come, each of them twice?"""
    life_ms = stage["e2e_ms"]["mean"]
    if life_ms is None or stage["tpot_ms"]["n"] < _REQUESTS_OF_A_USER * stage["users"]:
        return False
    started_s = float(planned.get("ramp_up") or 0.0)
    return bool(float(planned.get("warm_up") or 0.0) >= started_s + _MOST_OF_A_LIFE * life_ms / 1e3)


def _tpot_s(stage: Mapping[str, Any], *, settled: bool) -> float | None:
    """Mean time between two tokens of a stream."""
    window, gaps, rate = stage["window"], stage["chunk_gap_ms"], stage["output_tokens_per_s"]
    by_request = _seconds(stage["tpot_ms"]["mean"])
    if settled or gaps["mean"] is None or rate is None or not gaps["n"]:
        return by_request
    tokens = rate * (window["end_s"] - window["start_s"])
    chunks = gaps["n"] + stage["ttft_ms"]["n"]
    # with several tokens a chunk a gap is no time per token
    return gaps["mean"] / 1e3 if abs(tokens / chunks - 1) <= _ONE_TOKEN_A_CHUNK else by_request


def _log_sd(stage: Mapping[str, Any], key: str, users: float) -> float:
    """Relative standard error of a mean: from its interval, which knows how alike neighbours are; else as if requests
    that ran side by side were one, for they shared their steps."""
    stats = stage[key]
    if not stats["mean"]:
        return 0.0
    interval = (stage.get("intervals") or {}).get(key)
    if interval is not None:
        error = (interval["high"] - interval["low"]) / (2 * Z90)
    elif stats["n"] and stats["std"] is not None:
        error = stats["std"] / math.sqrt(max(1.0, stats["n"] / users))
    else:
        return _MOST_LOG_SD
    least = _LEAST_LOG_SD if stage["window"]["steady"] else _SHORT_LOG_SD[key]
    least = _PRINTED_LOG_SD[key] if stage.get("carried_over") else least
    return float(max(least, error / stats["mean"]))


def _step(stage: Mapping[str, Any], shape: Shape, users: float) -> tuple[float | None, float | None, float]:
    """The server's own step. With one user it stands idle between requests, which a gauge read now and then cannot tell."""
    server = stage["server"] or {}
    step_ms, steps, tokens = (server.get(key) for key in ("step_ms_mean", "steps", "tokens_per_step_mean"))
    if users < 2 or not (step_ms and steps and tokens):
        return None, None, 0.0
    # of the tokens of a step, those that decode and the first tokens are output
    decoding = tokens / (1 + shape.computed_tokens / shape.output_tokens)
    return step_ms / 1e3, decoding, max(_LEAST_LOG_SD, 0.5 / math.sqrt(steps))


def _little(stage: Mapping[str, Any], o: Observation) -> float | None:
    rate = stage["output_tokens_per_s"]
    if not rate or o.ttft_s is None:
        return None
    life_s = o.ttft_s + (o.shape.output_tokens - 1) * o.tpot_s + o.shape.think_s
    return float(o.users * o.shape.output_tokens / life_s / rate - 1)
