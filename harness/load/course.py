"""The stages of a run in their order: one after another, handed over from level to level, or as a search asks for them.

A stage that takes over the users of the one before begins at that one's planned end, while its last streams still go on.
Each request belongs to the stage it was sent in, whichever was running when it ended; the stage before is summed up once
its last stream has ended, and until then the stage that took over measures nothing (DESIGN section 4: only the window is
summarised), so that nothing is counted in two stages and nothing in none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.clock import NS_PER_MS, NS_PER_S, now_ns
from harness.errors import LocalFault
from harness.load.account import Relay, add_server, ours_of, stage_summary
from harness.load.controller import Fleet, StageOutcome, share
from harness.load.ending import Ending, Files
from harness.load.options import RampOptions, Tick, View
from harness.load.search import Answer, Ask, probe_of, search_of
from harness.load.stages import order_of
from harness.load.stops import out_of_time, reason_to_stop
from harness.load.tally import Tally
from harness.observe.scrape import Scrape, ScrapeLoop, from_rows
from harness.record import Record
from harness.store import Mark
from harness.workload.prepare import Prepared
from loadprofiles.pauses import mean_pause_s
from loadprofiles.profile import Profile, Stage
from loadprofiles.stage import takes_over

if TYPE_CHECKING:
    from harness.export.prometheus import Exporter

#: between the order and a stage's start, so that every worker has it in time
LEAD_S = 0.25
#: the same where users are handed over: a busy controller may be late, and then they would wait
HANDOVER_LEAD_S = 1.0
TICK_S = 0.25
KEPT = "the run ended; what was measured is on disk"


@dataclass(slots=True, eq=False, kw_only=True)
class _Level:
    """A stage that was begun and is not summed up yet."""

    index: int
    stage: Stage
    start_ns: int
    tally: Tally
    mark: Mark
    #: the last scrape before it
    baseline: Scrape | None
    #: whose users it took over
    before: _Level | None = None
    #: the next one has been told to take over its users
    handed_over: bool = False
    #: why it was ended before its time
    cut: str = ""
    #: when its last stream had ended, on the run's clock
    ended_ns: int = 0
    #: the levels it was handed over from, and itself, as one
    relay: Relay = field(default_factory=Relay)

    @property
    def asked(self) -> int | None:
        return self.stage.users if isinstance(self.stage.users, int) else None

    @property
    def border_ns(self) -> int:
        """Its planned end."""
        assert self.stage.duration is not None, "a level that hands over has a duration"
        return self.start_ns + int(self.stage.duration * NS_PER_S)


class Course:
    """The load of a run.

    Args:
        profile: resolved.
        work: what is asked.
        scraper, exporter: None where the run has none.
        run_start_ns: origin of the run's times.
        slo_ms: limits of the run.
        selftest: of :func:`harness.selftest.kept`.
    """

    def __init__(
        self,
        options: RampOptions,
        profile: Profile,
        work: Prepared,
        *,
        view: View,
        files: Files,
        ending: Ending,
        scraper: ScrapeLoop | None,
        exporter: Exporter | None,
        run_start_ns: int,
        slo_ms: Mapping[str, float],
        selftest: Mapping[str, Any] | None,
    ) -> None:
        self._options, self._profile, self._work = options, profile, work
        self._view, self._files, self._ending = view, files, ending
        self._scraper, self._exporter = scraper, exporter
        self._run_start_ns, self._slo_ms, self._selftest = run_start_ns, slo_ms, selftest
        self._first_stage_ns = 0
        self._stopped = False
        self._running: dict[int, _Level] = {}
        #: summaries of the stages that ended, as in summary.json
        self.stages: list[dict[str, Any]] = []
        #: what a profile's search found; None before it has, and without one
        self.answer: Answer | None = None

    async def run(self) -> None:
        """All stages, until there is a reason to end."""
        self._first_stage_ns = now_ns()
        await (self._levels() if self._profile.search is None else self._search())

    def recorded(self, line: bytes) -> None:
        """A worker's record: counted, judged and written."""
        record = Record.from_json(line)
        if self._exporter is not None:
            self._exporter.on_record(record)
        self._files.append(lambda writer: writer.add_record(line))
        tally = self._running[record.stage].tally
        tally.add(record)
        if (
            self._ending.fault is None
            and (verdict := tally.verdict((now_ns() - self._run_start_ns) / NS_PER_MS)) is not None
        ):
            self._ending.give_up(verdict)

    @property
    def _fleet(self) -> Fleet:
        assert self._ending.fleet is not None, "the load has begun"
        return self._ending.fleet

    async def _levels(self) -> None:
        """The stages of the profile. One that hands over is summed up beside the one that takes over."""
        stages: Sequence[Stage] = self._profile.stages
        before: _Level | None = None
        summed: asyncio.Task[None] | None = None
        try:
            for index, stage in enumerate(stages):
                following = stages[index + 1] if index + 1 < len(stages) else None
                if self._ends_before(stage):
                    break
                level = await self._begin(index, stage, before)
                summed = asyncio.ensure_future(self._sum_up(level, following, summed))
                if following is not None and takes_over(stage, following):
                    await self._until_handover(level, summed)
                    before = level
                else:
                    await summed
                    before = None
            if summed is not None:
                await summed
        finally:
            if summed is not None:
                summed.cancel()

    async def _search(self) -> None:
        """Stages as the profile's search asks for them, until it has an answer."""
        pattern = self._profile.stages[0]
        assert self._profile.search is not None
        assert isinstance(pattern.users, int), "a search begins with a number of users"
        assert pattern.duration is not None, "a search's stage has a duration"
        search = search_of(self._profile.search, pattern.users, pattern.duration)
        while isinstance(step := search.next(), Ask):
            ramp_up = pattern.ramp_up if pattern.ramp_up is not None else step.ramp_up_s
            stage = pattern.model_copy(update={"users": step.users, "duration": step.duration_s, "ramp_up": ramp_up})
            if self._ends_before(stage):
                return
            before = len(self.stages)
            await self._sum_up(await self._begin(before, stage, None), None, None)
            if len(self.stages) > before:
                think_s = mean_pause_s(stage.think)
                search.feed(probe_of(self.stages[-1], think_s=think_s, cut=self._ending.over))
            if self._ending.over:
                return
        self.answer = step
        self._files.write(lambda writer: writer.write_summary(self.stages, **self.found()))

    def found(self) -> dict[str, Any]:
        """What ``summary.json`` holds beside the stages."""
        return {} if self.answer is None else {"search": self.answer.to_dict()}

    def _ends_before(self, following: Stage) -> bool:
        if self._ending.over or self._stopped:
            return True
        late = out_of_time(self._profile, (now_ns() - self._first_stage_ns) / NS_PER_S, following)
        if late is not None:
            self._view.says(f"{late}; the run ends here")
        return late is not None

    async def _begin(self, index: int, stage: Stage, before: _Level | None) -> _Level:
        """A level that is about to be ordered: after whatever was, or at the planned end of the one it takes over from."""
        mark, baseline = self._files.writer.mark(), None if self._scraper is None else self._scraper.last_good
        if before is None and self._scraper is not None:
            await self._scraper.scrape_now()
        asked = stage.users if isinstance(stage.users, int) else None
        level = _Level(
            index=index,
            stage=stage,
            start_ns=now_ns() + int(LEAD_S * NS_PER_S) if before is None else before.border_ns,
            tally=Tally(users=asked or 3),
            mark=mark,
            baseline=baseline,
            before=before,
            relay=Relay() if before is None else before.relay,
        )
        level.relay.begin(index, mark, baseline, self._seconds(level.start_ns))
        self._running[index] = level
        return level

    async def _until_handover(self, level: _Level, summed: asyncio.Task[None]) -> None:
        """Until the next level has to be ordered, or this one ended before its time."""
        lead_s = min(HANDOVER_LEAD_S, (level.stage.duration or 0.0) / 4)
        left_s = (level.border_ns - now_ns()) / NS_PER_S - lead_s
        await asyncio.wait({summed}, timeout=max(0.0, left_s))
        if summed.done():
            summed.result()

    async def _sum_up(self, level: _Level, following: Stage | None, before: asyncio.Task[None] | None) -> None:
        """Run a level to its last request's end, then say what it showed.

        Args:
            before: the summing up of the level it takes over from; the stages of a run are told in their order.
        """
        outcome = await self._run(level)
        if before is not None:
            await before
        if outcome is None:
            del self._running[level.index]
            return
        if outcome.faults:
            self._ending.give_up(LocalFault(outcome.faults[0], KEPT))
        self._summarise(level, outcome)
        # whoever took over from it has its own end of it by now
        level.before = None
        del self._running[level.index]
        if self._ending.over or self._stopped:
            return
        failed = level.tally.failed, level.tally.ok + level.tally.failed
        if (why := reason_to_stop(self._profile, self.stages, failed, following)) is not None:
            self._stop(why)

    def _stop(self, why: str) -> None:
        self._view.says(f"{why}; the run ends here")
        self._stopped = True
        for level in self._running.values():
            level.cut = f"ended before its time: {why}"
        self._fleet.drain()

    async def _run(self, level: _Level) -> StageOutcome | None:
        """Order a level and wait for the last of its records; None where the run is over before."""
        before = level.before
        order = order_of(
            level.stage,
            level.index,
            start_ns=level.start_ns,
            seed=self._options.seed,
            grace_s=self._options.grace_s,
            replay_s=self._work.due_s(level.stage),
            taken_over=None if before is None else before.asked,
        )
        if (dead := self._fleet.dead) is not None:
            self._ending.give_up(LocalFault(dead, KEPT))
        if self._ending.over or self._stopped:  # nothing between here and the orders' leaving gives way to a signal
            return None
        if before is not None:
            before.handed_over = True
        beside = [asyncio.ensure_future(self._tick_forever(level))]
        if before is not None and self._scraper is not None:
            beside.append(asyncio.ensure_future(self._scrape_at(level.start_ns)))
        try:
            outcome = await self._fleet.stage(share(order, self._options.processes))
        finally:
            for task in beside:
                task.cancel()
        level.ended_ns = now_ns()
        if not level.handed_over and self._scraper is not None:
            await self._scraper.scrape_now()
        return outcome

    async def _scrape_at(self, moment_ns: int) -> None:
        assert self._scraper is not None
        await asyncio.sleep(max(0.0, (moment_ns - now_ns()) / NS_PER_S))
        await self._scraper.scrape_now()

    async def _tick_forever(self, level: _Level) -> None:
        """Tell whoever watches, from the level's start until another takes over."""
        if level.before is not None:
            await asyncio.sleep(max(0.0, (level.start_ns - now_ns()) / NS_PER_S))
        if self._exporter is not None:
            self._exporter.on_stage(level.index)
        while not (level.handed_over and now_ns() >= level.border_ns):
            tick = Tick(
                stage=level.index,
                asked=level.asked,
                in_flight=self._fleet.in_flight(),
                tally=level.tally,
                elapsed_s=max(0.0, (now_ns() - level.start_ns) / NS_PER_S),
                planned_s=level.stage.duration,
                loop_lag_ms=self._fleet.loop_lag_ms(),
            )
            self._view.tick(tick)
            if self._exporter is not None:
                self._exporter.on_progress(
                    users=level.asked, in_flight=tick.in_flight, loop_lag_s=tick.loop_lag_ms / 1e3
                )
            await asyncio.sleep(TICK_S)

    def _seconds(self, moment_ns: int) -> float:
        return (moment_ns - self._run_start_ns) / NS_PER_S

    def _summarise(self, level: _Level, outcome: StageOutcome) -> None:
        self._files.append(lambda writer: writer.flush())
        end_ns = min(level.border_ns, level.ended_ns) if level.handed_over else level.ended_ns
        span = self._seconds(level.start_ns), self._seconds(end_ns)
        taken_over = None
        if level.before is not None:
            taken_over = self._seconds(level.before.ended_ns), level.before.asked or 0
        records = self._files.writer.records_since(level.mark)
        summary = stage_summary(
            level.index,
            level.stage,
            span,
            (record for record in records if record.stage == level.index),
            outcome,
            level.tally,
            slo_ms=self._slo_ms,
            slo_tiers=self._options.slo_tiers,
            selftest=self._selftest,
            work=self._work,
            taken_over=taken_over,
        )
        summary["reasons"] += [level.cut] if level.cut else []
        level.relay.add(level.tally)
        if self._scraper is not None:
            self._add_server(level, summary, span)
        self.stages.append(summary)
        self._files.write(lambda writer: writer.write_summary(self.stages))
        if self._exporter is not None:
            self._exporter.on_stage_end(self.stages)
        self._view.summarised(summary)

    def _add_server(self, level: _Level, summary: dict[str, Any], span: tuple[float, float]) -> None:
        # the chat template is a prefix that all prompts share
        unique = self._options.profile.workload.endpoint == "completions" and not self._work.shares_prompts
        scrapes = from_rows(self._files.writer.scrapes_since(level.mark), level.baseline)
        alone = level.before is None and not level.handed_over
        add_server(summary, scrapes, span, ours_of(level.tally) if alone else None, prompts_unique=unique)
        relay = level.relay
        if not alone and not level.handed_over:
            since = from_rows(self._files.writer.scrapes_since(relay.mark), relay.baseline)
            summary["reasons"] += relay.other_traffic(since, span[1])
