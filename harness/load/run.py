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
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from harness.clock import now_ns, wall_time
from harness.errors import Interrupted, RunInvalid, UsageError
from harness.http_get import Getter
from harness.limits import allow_open_files
from harness.load.account import description, predicted_wall
from harness.load.controller import Fleet
from harness.load.course import Course
from harness.load.ending import Ending, Files
from harness.load.options import RampOptions, View
from harness.load.orders import Setup
from harness.load.search import Answer
from harness.load.stages import mean_rate
from harness.measure.health import run_fault
from harness.observe.probe import ProbeResult, probe
from harness.observe.scrape import Scrape, ScrapeLoop
from harness.selftest import kept
from harness.store import RunWriter
from harness.workload.learn import TextLaw, learn_rate, learn_text
from harness.workload.prepare import Prepared, prepared
from loadprofiles.profile import Conversation, Profile, ProfileError, Slo, SloSearch, Stage, resolve

if TYPE_CHECKING:
    from harness.export.prometheus import Exporter

#: well under the second that a kill may cost: a busy machine is late with it
FLUSH_S = 0.2
SETTLE_S = 5.0


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
        self._ending = Ending()
        #: may be cancelled by an interrupt: nothing is in flight yet
        self._before_load: asyncio.Task[Any] | None = None
        self._started = wall_time()
        self._exporter = exporter
        self._files: Files | None = None
        self._course: Course | None = None
        #: what is asked; looked through before anything is sent
        self._work = Prepared(spec=options.profile.workload)
        #: what a selftest said of this machine
        self._selftest: dict[str, Any] | None = None

    @property
    def stages(self) -> list[dict[str, Any]]:
        """Summaries of the stages that ended, as in ``summary.json``."""
        return [] if self._course is None else self._course.stages

    @property
    def answer(self) -> Answer | None:
        """What a profile's search found; None before it has, and without one."""
        return None if self._course is None else self._course.answer

    def found(self) -> dict[str, Any]:
        """What ``summary.json`` holds beside the stages."""
        return {} if self._course is None else self._course.found()

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
                if not self._ending.interrupts:
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
                writer = RunWriter(options.out)
                files = self._files = Files(writer, self._ending)
                try:
                    writer.write_run(self._description(probed, profile))
                    self._view.started(probed, profile, options.out)
                    for note in self._work.notes:
                        self._view.says(note)
                    async with self._scraping(getter, probed) as scraper:
                        await self._load(profile, setup, files, scraper)
                    document = self._description(probed, profile, ended=wall_time())
                    files.write(lambda writer: writer.write_run(document))
                finally:
                    writer.close()

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
    async def _scraping(self, getter: Getter, probed: ProbeResult) -> AsyncIterator[ScrapeLoop | None]:
        interval_s = self._options.scrape_interval_s
        if interval_s is None or probed.metrics_url is None:
            yield None
            return
        scraper = ScrapeLoop(
            getter,
            probed.metrics_url,
            model=probed.metrics_model,
            interval_s=interval_s,
            run_start_ns=self._start_ns,
            sink=self._scraped,
        )
        if (unsettled := await scraper.settle(timeout_s=SETTLE_S)) is not None:
            self._view.says(unsettled)
        async with scraper:
            yield scraper

    def _scraped(self, scrape: Scrape) -> None:
        if self._exporter is not None:
            self._exporter.on_scrape(scrape)
        if self._files is not None:
            self._files.append(lambda writer: writer.add_scrape(scrape.to_row()))

    async def _load(self, profile: Profile, setup: Setup, files: Files, scraper: ScrapeLoop | None) -> None:
        course = self._course = Course(
            self._options,
            profile,
            self._work,
            view=self._view,
            files=files,
            ending=self._ending,
            scraper=scraper,
            exporter=self._exporter,
            run_start_ns=self._start_ns,
            slo_ms=self._slo_ms,
            selftest=self._selftest,
        )
        fleet = self._ending.fleet = Fleet(self._options.processes, self._options.loop_name, course.recorded)
        flusher = asyncio.ensure_future(_flush_forever(files))
        try:
            await fleet.start(setup)
            self._before_load = None
            await course.run()
        finally:
            flusher.cancel()
            await fleet.close()

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
        self._ending.interrupts += 1
        fleet = self._ending.fleet
        if self._before_load is not None:
            self._before_load.cancel()
        elif fleet is None:
            return
        elif self._ending.interrupts == 1:
            self._view.says("stopping: no new requests; the streams in flight may end (Ctrl-C again cuts them)")
            fleet.drain()
        else:
            fleet.abort()

    def _judge(self) -> None:
        if self._ending.fault is not None:
            raise self._ending.fault
        if self._ending.interrupts:
            raise Interrupted("interrupted", f"what was measured is in {self._options.out}")
        if (problem := run_fault(self.stages)) is not None:
            raise RunInvalid(problem, f"the records are in {self._options.out}")
        if self._options.profile.search is not None and (
            self.answer is None or self.answer.probes == len(self.answer.unusable)
        ):
            raise RunInvalid("the search has no answer", f"the records are in {self._options.out}")

    def _description(self, probed: ProbeResult, profile: Profile, ended: datetime | None = None) -> dict[str, Any]:
        return description(self._options, probed, profile, started=self._started, ended=ended, selftest=self._selftest)


async def _flush_forever(files: Files) -> None:
    while True:
        await asyncio.sleep(FLUSH_S)
        files.append(lambda writer: writer.flush())
