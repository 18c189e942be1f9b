"""One run from its first question to its summary: probe, settle, stages, scrapes, files.

The order of things: everything that can be refused is refused before the folder is made; everything measured is on
disk before it is judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from harness.clock import NS_PER_MS, NS_PER_S, now_ns, wall_time
from harness.errors import HarnessError, Interrupted, LocalFault, RunInvalid, UsageError
from harness.http_get import Getter
from harness.limits import allow_open_files
from harness.load.account import add_server, description, predicted_wall, stage_summary
from harness.load.controller import Fleet, StageOutcome, share
from harness.load.orders import Setup
from harness.load.search import Answer, Ask, probe_of, search_of
from harness.load.stages import mean_rate, order_of
from harness.load.stops import out_of_time, reason_to_stop
from harness.load.tally import Tally
from harness.measure.health import run_fault
from harness.observe.probe import ProbeResult, probe
from harness.observe.scrape import Scrape, ScrapeLoop, from_rows
from harness.record import Record
from harness.selftest import kept
from harness.store import Mark, RunWriter
from harness.workload.learn import TextLaw, learn_rate, learn_text
from harness.workload.prepare import Prepared, prepared
from loadprofiles.profile import Conversation, Profile, ProfileError, Slo, SloSearch, Stage, resolve

if TYPE_CHECKING:
    from harness.export.prometheus import Exporter

#: between the order and a stage's start, so that every worker has it in time
LEAD_S = 0.25
#: well under the second that a kill may cost: a busy machine is late with it
FLUSH_S = 0.2
TICK_S = 0.25
SETTLE_S = 5.0
KEPT = "the run ended; what was measured is on disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class RampOptions:
    """Everything a run is told. Seconds unless the name says otherwise."""

    base_url: str
    profile: Profile
    out: Path
    model: str | None = None
    api_key: str | None = None
    metrics_url: str | None = None
    verify_tls: bool = True
    seed: int = 0
    slo_ms: Mapping[str, float] = field(default_factory=dict)
    #: further limits like slo_ms, whose goodput is told beside
    slo_tiers: Sequence[Mapping[str, float]] = ()
    processes: int = 1
    loop_name: str = "auto"
    scrape_interval_s: float | None = 0.5
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 120.0
    request_timeout_s: float = 600.0
    grace_s: float = 30.0
    save_content: bool = False
    save_gaps: bool = False
    honour_retry_after: bool = False
    prometheus: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """What a watcher sees a few times a second."""

    stage: int
    asked: int | None
    in_flight: int
    tally: Tally
    elapsed_s: float
    planned_s: float | None
    loop_lag_ms: float


class View(Protocol):
    """Who watches a run; the command line draws, tests listen."""

    def started(self, probed: ProbeResult, profile: Profile, out: Path) -> None: ...

    def tick(self, tick: Tick) -> None: ...

    def summarised(self, stage: Mapping[str, Any]) -> None: ...

    def says(self, message: str) -> None: ...


class Run:
    """One execution of a profile. :meth:`execute` may be awaited once.

    Args:
        exporter: of a caller who exports more than this run; it is told of the run and left open. None: one of the run's
            own where ``options.prometheus`` asks for it.
    """

    def __init__(self, options: RampOptions, view: View, exporter: Exporter | None = None) -> None:
        self._options = options
        self._view = view
        self._start_ns = now_ns()
        self._fault: HarnessError | None = None
        self._cannot_write = False
        self._interrupts = 0
        #: may be cancelled by an interrupt: nothing is in flight yet
        self._before_load: asyncio.Task[Any] | None = None
        self._tally = Tally(users=1)
        #: summaries of the stages that ended, as in summary.json
        self.stages: list[dict[str, Any]] = []
        #: what a profile's search found; None before it has, and without one
        self.answer: Answer | None = None
        self._first_stage_ns = 0
        self._started = wall_time()
        self._fleet: Fleet | None = None
        self._exporter = exporter
        self._writer: RunWriter | None = None
        self._scraper: ScrapeLoop | None = None
        #: what is asked; looked through before anything is sent
        self._work = Prepared(spec=options.profile.workload)
        #: what a selftest said of this machine
        self._selftest: dict[str, Any] | None = None

    async def execute(self) -> list[dict[str, Any]]:
        """Run all stages; returns their summaries, which are on disk by then.

        Raises:
            UsageError, ServerError: before anything was sent.
            Interrupted: Ctrl-C; RunInvalid: nothing valid was measured; Unreachable, Refused: the server went or refused
            everything; LocalFault: this machine failed. What was measured is on disk in each case.
        """
        self._before_load = asyncio.current_task()
        try:
            self._selftest = kept()
        except ValueError as error:
            self._view.says(str(error))
        with self._heeding_signals():
            try:
                await self._measure()
            except asyncio.CancelledError:
                if not self._interrupts:
                    raise
                raise Interrupted("interrupted before the first stage", "nothing was measured") from None
        self._judge()
        return self.stages

    async def _measure(self) -> None:
        options = self._options
        async with Getter(api_key=options.api_key, key_url=options.base_url, verify_tls=options.verify_tls) as getter:
            probed = await probe(getter, options.base_url, model=options.model, metrics_url=options.metrics_url)
            profile = self._resolved(probed)
            with (
                prepared(profile, seed=options.seed, max_model_len=probed.max_model_len) as self._work,
                self._exporting(probed, profile),
            ):
                allow_open_files(max(self._streams_of(stage) for stage in profile.stages))
                setup = await self._setup(getter, probed, profile)
                self._writer = RunWriter(options.out)
                try:
                    self._writer.write_run(self._description(probed, profile))
                    self._view.started(probed, profile, options.out)
                    for note in self._work.notes:
                        self._view.says(note)
                    async with self._scraping(getter, probed):
                        await self._load(profile, setup)
                    document = self._description(probed, profile, ended=wall_time())
                    self._write_document(lambda writer: writer.write_run(document))
                finally:
                    self._writer.close()

    def _resolved(self, probed: ProbeResult) -> Profile:
        wanted = self._options.profile
        if isinstance(wanted.search, SloSearch):
            if not self._slo_ms:
                raise UsageError("the search has no limits to look for", "give --slo ttft:500,tpot:50")
            search = wanted.search.model_copy(update={"slo": Slo(**self._slo_ms)})
            wanted = wanted.model_copy(update={"search": search})
        try:
            return resolve(
                wanted,
                max_model_len=probed.max_model_len,
                pool_tokens=probed.usable_pool_tokens,
                seed=self._options.seed,
            )
        except ProfileError as error:
            raise UsageError(error.message, error.hint) from error

    @property
    def _slo_ms(self) -> Mapping[str, float]:
        """The limits of the run: as given, else those of the profile's search."""
        search = self._options.profile.search
        if self._options.slo_ms or not isinstance(search, SloSearch):
            return self._options.slo_ms
        return search.slo.model_dump(exclude_none=True)

    def _streams_of(self, stage: Stage) -> int:
        if isinstance(stage.users, int):
            return stage.users
        # open loop without a cap: as many as may pile up while a server hangs
        if (due := self._work.due_s(stage)) is not None:
            return len(due)
        rate = mean_rate(stage) or 0.0
        seconds = stage.duration or (stage.requests or 0) / (rate or 1.0)
        return min(int(rate * seconds), stage.requests or sys.maxsize)

    async def _setup(self, getter: Getter, probed: ProbeResult, profile: Profile) -> Setup:
        options = self._options
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        work, law = self._work, TextLaw()
        if probed.tokenize and (profile.workload.endpoint == "chat" or isinstance(profile.workload, Conversation)):
            law = await learn_text(getter, probed.base_url, probed.model)
        if probed.tokenize and work.samples:
            rate = await learn_rate(getter, probed.base_url, probed.model, work.samples)
            work = work if rate is None else work.with_rate(rate)
        return Setup(
            base_url=probed.base_url,
            model=probed.model,
            endpoint=profile.workload.endpoint,
            headers=headers,
            verify_tls=options.verify_tls,
            seed=options.seed,
            run_start_ns=self._start_ns,
            connect_timeout_s=options.connect_timeout_s,
            stall_timeout_s=options.stall_timeout_s,
            request_timeout_s=options.request_timeout_s,
            save_content=options.save_content,
            save_gaps=options.save_gaps,
            honour_retry_after=options.honour_retry_after,
            text_offset=law.offset,
            text_tokens_per_word=law.tokens_per_word,
            workload=work.for_workers(),
        )

    @contextlib.contextmanager
    def _exporting(self, probed: ProbeResult, profile: Profile) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._exporter is None and self._options.prometheus is not None:
                from harness.export.prometheus import Exporter

                address, port = self._options.prometheus
                self._exporter = stack.enter_context(Exporter(address=address, port=port))
            if self._exporter is not None:
                stack.callback(self._exporter.on_run_end)
                self._exporter.on_run(predicted_wall(probed, profile, self._work), probed.engines or 1)
            yield

    @contextlib.asynccontextmanager
    async def _scraping(self, getter: Getter, probed: ProbeResult) -> AsyncIterator[None]:
        interval_s = self._options.scrape_interval_s
        if interval_s is None or probed.metrics_url is None:
            yield
            return
        self._scraper = ScrapeLoop(
            getter,
            probed.metrics_url,
            model=probed.metrics_model,
            interval_s=interval_s,
            run_start_ns=self._start_ns,
            sink=self._scraped,
        )
        if (unsettled := await self._scraper.settle(timeout_s=SETTLE_S)) is not None:
            self._view.says(unsettled)
        async with self._scraper:
            yield

    def _scraped(self, scrape: Scrape) -> None:
        if self._exporter is not None:
            self._exporter.on_scrape(scrape)
        self._append(lambda writer: writer.add_scrape(scrape.to_row()))

    def _recorded(self, line: bytes) -> None:
        record = Record.from_json(line)
        self._tally.add(record)
        if self._exporter is not None:
            self._exporter.on_record(record)
        self._append(lambda writer: writer.add_record(line))
        if (
            self._fault is None
            and (verdict := self._tally.verdict((now_ns() - self._start_ns) / NS_PER_MS)) is not None
        ):
            self._give_up(verdict)

    def _append(self, write: Callable[[RunWriter], None]) -> None:
        """Write a line unless lines could not be written before."""
        if not self._cannot_write:
            self._write_document(write)

    def _write_document(self, write: Callable[[RunWriter], None]) -> None:
        """A write that fails ends the run in order: called from listeners, where an exception would go unheard."""
        if self._writer is None:
            return
        try:
            write(self._writer)
        except LocalFault as fault:
            self._cannot_write = True
            self._give_up(fault)

    def _give_up(self, fault: HarnessError) -> None:
        """End the run in order, for this reason unless there is one already."""
        self._fault = self._fault or fault
        if self._fleet is not None:
            self._fleet.abort()

    async def _load(self, profile: Profile, setup: Setup) -> None:
        self._fleet = Fleet(self._options.processes, self._options.loop_name, self._recorded)
        flusher = asyncio.ensure_future(self._flush_forever())
        try:
            await self._fleet.start(setup)
            self._before_load = None
            self._first_stage_ns = now_ns()
            await (self._levels(profile) if profile.search is None else self._search(profile))
        finally:
            flusher.cancel()
            await self._fleet.close()

    async def _levels(self, profile: Profile) -> None:
        """The stages of a profile, one after another."""
        for index, stage in enumerate(profile.stages):
            if self._late(profile, stage):
                break
            await self._stage(index, stage)
            following = profile.stages[index + 1] if index + 1 < len(profile.stages) else None
            if self._over:
                break
            failed = self._tally.failed, self._tally.ok + self._tally.failed
            if (why := reason_to_stop(profile, self.stages, failed, following)) is not None:
                self._view.says(f"{why}; the run ends here")
                break

    async def _search(self, profile: Profile) -> None:
        """Stages as the profile's search asks for them, until it has an answer."""
        pattern = profile.stages[0]
        assert profile.search is not None
        assert isinstance(pattern.users, int), "a search begins with a number of users"
        assert pattern.duration is not None, "a search's stage has a duration"
        search = search_of(profile.search, pattern.users, pattern.duration)
        while isinstance(step := search.next(), Ask):
            ramp_up = pattern.ramp_up if pattern.ramp_up is not None else step.ramp_up_s
            stage = pattern.model_copy(update={"users": step.users, "duration": step.duration_s, "ramp_up": ramp_up})
            if self._late(profile, stage):
                return
            before = len(self.stages)
            await self._stage(before, stage)
            if len(self.stages) > before:
                search.feed(probe_of(self.stages[-1], think_s=stage.think, cut=self._over))
            if self._over:
                return
        self.answer = step
        self._write_document(lambda writer: writer.write_summary(self.stages, **self.found()))

    def found(self) -> dict[str, Any]:
        """What ``summary.json`` holds beside the stages."""
        return {} if self.answer is None else {"search": self.answer.to_dict()}

    def _late(self, profile: Profile, following: Stage) -> bool:
        late = out_of_time(profile, (now_ns() - self._first_stage_ns) / NS_PER_S, following)
        if late is not None:
            self._view.says(f"{late}; the run ends here")
        return late is not None

    @property
    def _over(self) -> bool:
        """No further stage may begin."""
        return self._fault is not None or self._interrupts > 0

    @contextlib.contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = [signal.SIGINT, signal.SIGTERM] if os.name == "posix" else []
        for number in signals:
            loop.add_signal_handler(number, self._interrupt)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        """Once drains: no new requests, those in flight may end. Twice cuts. Before the load it ends the run at once."""
        self._interrupts += 1
        if self._before_load is not None:
            self._before_load.cancel()
        elif self._fleet is None:
            return
        elif self._interrupts == 1:
            self._view.says("stopping: no new requests; the streams in flight may end (Ctrl-C again cuts them)")
            self._fleet.drain()
        else:
            self._fleet.abort()

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self._append(lambda writer: writer.flush())

    async def _stage(self, index: int, stage: Stage) -> None:
        assert self._fleet is not None
        assert self._writer is not None
        mark, baseline = self._writer.mark(), None if self._scraper is None else self._scraper.last_good
        asked = stage.users if isinstance(stage.users, int) else None
        self._tally = Tally(users=asked or 3)
        if self._exporter is not None:
            self._exporter.on_stage(index)
        if self._scraper is not None:
            await self._scraper.scrape_now()
        start_ns = now_ns() + int(LEAD_S * NS_PER_S)
        order = order_of(
            stage,
            index,
            start_ns=start_ns,
            seed=self._options.seed,
            grace_s=self._options.grace_s,
            replay_s=self._work.due_s(stage),
        )
        if (dead := self._fleet.dead) is not None:
            self._give_up(LocalFault(dead, KEPT))
        if self._over:  # since the last stage: nothing between here and the orders' leaving gives way to a signal
            return
        ticker = asyncio.ensure_future(self._tick_forever(index, asked, start_ns, stage.duration))
        try:
            outcome = await self._fleet.stage(share(order, self._options.processes))
        finally:
            ticker.cancel()
        end_ns = now_ns()
        if self._scraper is not None:
            await self._scraper.scrape_now()
        if outcome.faults:
            self._give_up(LocalFault(outcome.faults[0], KEPT))
        span = ((start_ns - self._start_ns) / NS_PER_S, (end_ns - self._start_ns) / NS_PER_S)
        self._summarise(index, stage, span, mark, baseline, outcome)

    async def _tick_forever(self, index: int, asked: int | None, start_ns: int, planned_s: float | None) -> None:
        assert self._fleet is not None
        while True:
            tick = Tick(
                stage=index,
                asked=asked,
                in_flight=self._fleet.in_flight(),
                tally=self._tally,
                elapsed_s=max(0.0, (now_ns() - start_ns) / NS_PER_S),
                planned_s=planned_s,
                loop_lag_ms=self._fleet.loop_lag_ms(),
            )
            self._view.tick(tick)
            if self._exporter is not None:
                self._exporter.on_progress(users=asked, in_flight=tick.in_flight, loop_lag_s=tick.loop_lag_ms / 1e3)
            await asyncio.sleep(TICK_S)

    def _summarise(
        self,
        index: int,
        stage: Stage,
        span: tuple[float, float],
        mark: Mark,
        baseline: Scrape | None,
        outcome: StageOutcome,
    ) -> None:
        assert self._writer is not None
        self._append(lambda writer: writer.flush())
        summary = stage_summary(
            index,
            stage,
            span,
            self._writer.records_since(mark),
            outcome,
            self._tally,
            slo_ms=self._slo_ms,
            slo_tiers=self._options.slo_tiers,
            selftest=self._selftest,
            work=self._work,
        )
        if self._scraper is not None:
            # the chat template is a prefix that all prompts share
            unique = self._options.profile.workload.endpoint == "completions" and not self._work.shares_prompts
            scrapes = from_rows(self._writer.scrapes_since(mark), baseline)
            add_server(summary, scrapes, span, self._tally, prompts_unique=unique)
        self.stages.append(summary)
        self._write_document(lambda writer: writer.write_summary(self.stages))
        if self._exporter is not None:
            self._exporter.on_stage_end(self.stages)
        self._view.summarised(summary)

    def _judge(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self._interrupts:
            raise Interrupted("interrupted", f"what was measured is in {self._options.out}")
        if (problem := run_fault(self.stages)) is not None:
            raise RunInvalid(problem, f"the records are in {self._options.out}")
        if self._options.profile.search is not None and (
            self.answer is None or self.answer.probes == len(self.answer.unusable)
        ):
            raise RunInvalid("the search has no answer", f"the records are in {self._options.out}")

    def _description(self, probed: ProbeResult, profile: Profile, ended: datetime | None = None) -> dict[str, Any]:
        return description(self._options, probed, profile, started=self._started, ended=ended, selftest=self._selftest)
