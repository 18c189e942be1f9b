"""What a run says of itself in its files: ``run.json`` and the stages of ``summary.json``."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from calibration.compare import KvPool, predict_wall
from harness.load.controller import StageOutcome
from harness.load.stages import mean_rate, user_starts_s
from harness.load.tally import Tally
from harness.measure.from_records import Requests, requests_of
from harness.measure.gaps import merged
from harness.measure.summary import StageReadings, summarise
from harness.measure.window import StageLoad
from harness.observe.scrape import Scrape
from harness.observe.summary import OurTraffic, summarise_server
from harness.record import Record
from harness.selftest import beyond
from harness.store import Mark
from loadprofiles.pauses import mean_pause_s
from loadprofiles.profile import Profile, Stage

if TYPE_CHECKING:
    from calibration.compare import Prediction
    from harness.load.options import RampOptions
    from harness.observe.probe import ProbeResult
    from harness.workload.prepare import Prepared

#: a load worker away for longer was suspended, not busy, and its stage says nothing of the server
SUSPENDED_S = 1.0


def description(
    options: RampOptions,
    probed: ProbeResult,
    profile: Profile,
    *,
    started: datetime,
    ended: datetime | None,
    selftest: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """``run.json``, without its schema version.

    Args:
        profile: resolved, as it is run.
        ended: None while the run goes on.
        selftest: of :func:`harness.selftest.kept`.
    """
    return {
        "versions": {"vllm-harness": version("vllm-harness"), "python": platform.python_version()},
        "started": started.isoformat(timespec="seconds"),
        "ended": ended.isoformat(timespec="seconds") if ended else None,
        "deployment": probed.to_dict(),
        "profile": profile.model_dump(mode="json", exclude_none=True),
        "options": {
            "seed": options.seed,
            "slo_ms": dict(options.slo_ms),
            "slo_tiers": [dict(tier) for tier in options.slo_tiers],
            "processes": options.processes,
            "scrape_interval_s": options.scrape_interval_s,
            "stall_timeout_s": options.stall_timeout_s,
            "request_timeout_s": options.request_timeout_s,
            "grace_s": options.grace_s,
        },
        "selftest": selftest,
        "host": {"system": platform.platform(), "machine": platform.machine(), "cores": os.cpu_count()},
        "command": ["vllm-harness", *redacted(sys.argv[1:])],
    }


def stage_summary(
    index: int,
    stage: Stage,
    span: tuple[float, float],
    records: Iterable[Record],
    outcome: StageOutcome,
    tally: Tally,
    *,
    slo_ms: Mapping[str, float],
    slo_tiers: Sequence[Mapping[str, float]] = (),
    selftest: Mapping[str, Any] | None,
    work: Prepared,
    taken_over: tuple[float, int] | None = None,
) -> dict[str, Any]:
    """A stage of ``summary.json`` but for the server's side (:func:`add_server`).

    Args:
        stage: resolved.
        span: of the stage, seconds since the run's start.
        records: of the stage, in any order.
        outcome: what its workers said.
        work: what was asked.
        taken_over: of the stage whose users this one took over: when its last stream ended, seconds since the run's
            start, and its users. None: all users are new.
    """
    requests = requests_of(records, "live")
    summary = summarise(
        index,
        requests.trace,
        load_of(stage, span[0], work.mean_rate(stage), taken_over),
        StageReadings(loop_lag_ms_p99=outcome.loop_lag_ms_p99, cpu=outcome.cpu, gaps=merged(outcome.gaps)),
        requests.deltas,
        slo_ms,
        tiers=slo_tiers,
    )
    summary["totals"] |= _asked_means(requests, work.mean_lengths(stage))
    # with a request_rate, users is the cap on the requests in flight
    summary["users"] = stage.users
    summary["repetition"] = stage.repetition
    if taken_over is not None:
        # how long the last stream lasted that the stage before had sent
        summary["handover_s"] = max(0.0, taken_over[0] - span[0])
        if stage.duration is not None and summary["handover_s"] >= stage.duration:
            summary["reasons"].append(
                f"handover: streams of the level before went on for {summary['handover_s']:.1f} s, as long as this one lasted"
            )
    if outcome.away_s > SUSPENDED_S:
        summary["valid"] = False
        summary["reasons"].append(
            f"client: suspended for {outcome.away_s:.1f} s (a paused machine, a laptop's lid, SIGSTOP)"
        )
    if outcome.faults:
        summary["valid"] = False
    summary["reasons"] += outcome.faults
    if tally.short:
        summary["reasons"].append(
            f"{tally.short} of {tally.ok} good answers are shorter than asked: the server cut them,"
            " as vLLM does at its max_model_len"
        )
    summary["reasons"] += beyond(selftest, summary)
    if outcome.not_sent:
        summary["reasons"].append(f"{outcome.not_sent} due requests were not sent before the stage was ended")
    return summary


def _asked_means(requests: Requests, planned: tuple[float, float] | None) -> dict[str, float | None]:
    """What was asked, beside what came (``prompt_tokens_mean``, ``output_tokens_mean``): of the good requests; a prompt's
    asked length is known of its plan alone."""
    asked = requests.asked_output_tokens[requests.trace.ok]
    asked = asked[~np.isnan(asked)]
    return {
        "asked_prompt_tokens_mean": None if planned is None else planned[0],
        "asked_output_tokens_mean": float(asked.mean()) if len(asked) else None,
    }


def add_server(
    summary: dict[str, Any],
    scrapes: Sequence[Scrape],
    span: tuple[float, float],
    ours: OurTraffic | None,
    *,
    prompts_unique: bool,
) -> None:
    """Put the server's side into a stage's summary: ``server``, and what else was going on there into ``reasons``.

    Args:
        ours: what the stage's requests account for; None where streams went on over its borders.
    """
    window = summary["window"]
    summary["server"] = summarise_server(
        scrapes,
        (window["start_s"], window["end_s"]) if window else None,
        span,
        ours=ours,
        prompts_unique=prompts_unique,
    ).to_dict()
    summary["reasons"] += summary["server"]["contamination"]


def ours_of(tally: Tally) -> OurTraffic:
    """What the requests of a stage account for at the server."""
    known = tally.output_unknown == 0
    return OurTraffic(
        output_tokens=tally.output_tokens if known else None, ended=tally.ok, cut=tally.failed + tally.incomplete
    )


@dataclass(slots=True)
class Relay:
    """Stages that handed their users over, as one: only over all of them do our requests add up to what the server did."""

    first: int = -1
    mark: Mark = field(default_factory=lambda: Mark(0, 0))
    baseline: Scrape | None = None
    start_s: float = 0.0
    stages: list[OurTraffic] = field(default_factory=list)

    def begin(self, index: int, mark: Mark, baseline: Scrape | None, start_s: float) -> None:
        """A stage of it begins; what the first says holds."""
        if self.first < 0:
            self.first, self.mark, self.baseline, self.start_s = index, mark, baseline, start_s

    def add(self, tally: Tally) -> None:
        self.stages.append(ours_of(tally))

    def other_traffic(self, scrapes: Sequence[Scrape], end_s: float) -> list[str]:
        """What else the server did than our requests, from the first stage's start to the last one's end."""
        tokens = [stage.output_tokens for stage in self.stages]
        ours = OurTraffic(
            output_tokens=None if None in tokens else sum(count or 0 for count in tokens),
            ended=sum(stage.ended for stage in self.stages),
            cut=sum(stage.cut for stage in self.stages),
        )
        found = summarise_server(scrapes, None, (self.start_s, end_s), ours=ours).contamination
        over = f" (over stages {self.first + 1} to {self.first + len(self.stages)})"
        return [f"{said}{over}" for said in found if said.startswith("other_traffic")]


def predicted_wall(probed: ProbeResult, profile: Profile, work: Prepared) -> Prediction | None:
    """The limits of the probed pool for the mean lengths of the profile's first stage; None when the server does not show
    its pool, or only the run will tell the lengths."""
    pool, lengths = probed.pool, work.mean_lengths(profile.stages[0])
    if (
        lengths is None
        or pool is None
        or pool.usable_blocks is None
        or pool.block_size is None
        or pool.usable_tokens is None
    ):
        return None
    sizes = KvPool(
        usable_blocks=pool.usable_blocks,
        block_size=pool.block_size,
        usable_tokens=pool.usable_tokens,
        engines=probed.engines or 1,
    )
    return predict_wall(sizes, *lengths, probed.max_num_seqs)


def load_of(
    stage: Stage, start_s: float, replay_rate: float | None = None, taken_over: tuple[float, int] | None = None
) -> StageLoad:
    """What a resolved stage asks for, as measuring wants it.

    Args:
        start_s: when it started, seconds since the run's start.
        replay_rate: mean arrivals a second of a stage that replays a trace.
        taken_over: as :func:`stage_summary` has it: what comes before all users have begun, or while a stream goes on that
            was sent at the level before, is not of this level.
    """
    end_s = None if stage.duration is None else start_s + stage.duration
    begin_s = start_s + stage.warm_up if stage.warm_up else None
    rate = replay_rate if stage.replay else mean_rate(stage)
    if rate is not None:
        return StageLoad(request_rate=rate, planned_end_s=end_s, not_before_s=begin_s)
    assert isinstance(stage.users, int), "a resolved stage has a number of users"
    if taken_over is not None:
        ended_s, users = taken_over
        begin_s = max(begin_s or start_s, ended_s, start_s + float(user_starts_s(stage, users).max()))
    return StageLoad(users=stage.users, think_s=mean_pause_s(stage.think), planned_end_s=end_s, not_before_s=begin_s)


_SECRETS = ("--api-key",)


def redacted(command: Sequence[str]) -> list[str]:
    """The command line with the values of secret options and the user part of URLs replaced by ``***``."""
    shown, hide_next = [], False
    for word in command:
        option, equals, _ = word.partition("=")
        if hide_next:
            word = "***"
        elif equals and option in _SECRETS:
            word = f"{option}=***"
        shown.append(re.sub(r"(://)[^/@\s]+@", r"\1***@", word))
        hide_next = word in _SECRETS
    return shown
