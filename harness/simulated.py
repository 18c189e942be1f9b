"""A profile on the virtual clock: what a ramp would give against the server that is predicted, by the ramp's own measuring.

Stages come as a ramp orders them (same starts, same arrivals for one seed), run on the engines of the twin one after the
other, and are measured by :mod:`harness.measure` from a trace with source ``twin``. The engines are scraped at intervals of
the virtual clock: their ``/metrics`` text is made and read as a live server's is, so that the server's side of a stage comes
the same way too. Nothing is sent and nothing sleeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from calibration.predict import Load, Predictor
from calibration.queueing import Shape
from calibration.steptime import step_time
from calibration.trace import RequestTrace
from calibration.twin.content import Content
from calibration.twin.counters import Histogram
from calibration.twin.engine import Engine
from calibration.twin.sequence import Sequence as Request
from calibration.twin.simulate import Run, Watch, closed_loop, open_loop
from harness.clock import NS_PER_S
from harness.errors import UsageError
from harness.load.account import load_of
from harness.load.orders import StageOrder
from harness.load.stages import mean_rate, order_of
from harness.measure.gaps import GapHistogram
from harness.measure.summary import StageReadings, summarise
from harness.observe.pool import pool_of
from harness.observe.probe import ProbeResult
from harness.observe.scrape import Scrape
from harness.observe.snapshot import read
from harness.observe.summary import OurTraffic, summarise_server
from harness.record import Failure, Outcome, Record, TokenSource
from harness.store import RunWriter
from harness.twin_metrics import LATENESS_BUCKETS_S, render
from harness.twin_metrics import Scrape as TwinScrape
from harness.workload.lengths import pauser
from loadprofiles.lengths import Lengths, mean_of, quantile_of
from loadprofiles.pauses import mean_pause_s
from loadprofiles.profile import OfContext, Profile, Stage, Synthetic
from loadprofiles.workload import SharedPrefix

#: as a ramp's; a long stage is scraped less often, so that reading does not outweigh simulating
SCRAPE_INTERVAL_S = 0.5
_MOST_SCRAPES = 240
#: between a stage's end and the next one's start
GAP_S = 0.25
#: gaps put into a histogram at once
_GAPS_AT_ONCE = 1_000_000


def shared_prefix_of(profile: Profile) -> SharedPrefix | None:
    """What the prompts of a profile have in common."""
    return profile.workload.shared_prefix if isinstance(profile.workload, Synthetic) else None


def refuse(profile: Profile) -> None:
    """What the virtual clock does not play.

    Raises:
        UsageError: names it.
    """
    workload = profile.workload
    if not isinstance(workload, Synthetic):
        raise UsageError(
            f"{profile.name}: workload.kind {workload.kind} cannot be predicted: expected synthetic lengths",
            "give --users, --prompt-tokens and --output-tokens with the means of that workload",
        )
    if profile.search is not None:
        raise UsageError(f"{profile.name}: a search cannot be predicted: expected fixed levels", "give --users 1,2,4,8")


def shape_of_stage(stage: Stage) -> Shape:
    """The mean request of a resolved stage."""
    prompt, output = _lengths(stage)
    return Shape(prompt_tokens=mean_of(prompt), output_tokens=mean_of(output), think_s=mean_pause_s(stage.think))


def _lengths(stage: Stage) -> tuple[Lengths, Lengths]:
    prompt, output = stage.prompt_tokens, stage.output_tokens
    assert prompt is not None
    assert not isinstance(prompt, OfContext), "a resolved stage has its own prompt length"
    assert output is not None
    return prompt, output


def load_of_stage(stage: Stage) -> Load:
    """A resolved stage as the model knows it: its mean rate, its mean request."""
    rate = mean_rate(stage)
    assert stage.users is None or isinstance(stage.users, int), "a resolved stage has a number of users"
    if rate is None:
        return Load(shape=shape_of_stage(stage), users=stage.users)
    return Load(shape=shape_of_stage(stage), request_rate=rate, max_in_flight=stage.users)


@dataclass
class Simulation:
    """Plays the stages of a profile one after the other.

    Args:
        predictor: of the deployment; it has a twin.
        model: the name in records and metrics.
        seed: of arrivals and lengths, as a ramp's, and of the noise.
        noise: standard deviation of the logarithm of a step's time.
        shared_prefix: beginnings that the profile's prompts have in common.
        overhead_s: from a client to the engine; None: as much as makes the mean time to first token the predicted one.
        writer: takes records and scrapes as they come; the run's and summary's documents are the caller's.

    Raises:
        UsageError: the deployment has no twin.
    """

    predictor: Predictor
    model: str
    seed: int = 0
    noise: float = 0.0
    shared_prefix: SharedPrefix | None = None
    overhead_s: float | None = None
    grace_s: float = 30.0
    slo_ms: Mapping[str, float] = field(default_factory=dict)
    writer: RunWriter | None = None
    #: virtual seconds since the run's start
    now_s: float = GAP_S

    def __post_init__(self) -> None:
        config, predictor = self.predictor.twin, self.predictor
        if config is None:
            raise UsageError(f"there is no twin of this deployment: {predictor.no_twin}", "leave --simulate out")
        self._config = config
        step = step_time(predictor.served.physics, predictor.factors)
        self._engines = [
            Engine(config, step, seed=self.seed * 1_000 + rank, noise=self.noise)
            for rank in range(predictor.served.deployment.dp)
        ]

    def probed(self) -> ProbeResult:
        """What a probe of the predicted server would say."""
        config, snapshot = self._config, read(self._metrics(), self.model)
        pool = pool_of(snapshot, config.max_model_len)
        assert pool is not None
        return ProbeResult(
            base_url="twin",
            model=self.model,
            metrics_model=self.model,
            models=(self.model,),
            max_model_len=config.max_model_len,
            vllm_version=self.predictor.served.deployment.vllm_version,
            version_family=snapshot.version_family,
            engines=len(self._engines),
            pool=pool,
            usable_pool_tokens=config.usable_blocks * config.block_size * len(self._engines),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            speculative_decoding=False,
            notes=("predicted on the virtual clock: nothing was sent",),
        )

    def stage(self, index: int, stage: Stage) -> dict[str, Any]:
        """Play a resolved stage; its summary as in ``summary.json``."""
        start_s = self.now_s
        order = self._order(stage, index)
        load = load_of_stage(stage)
        scrapes: list[Scrape] = [self._scrape(start_s - GAP_S / 2)]
        overhead_s = self.predictor.overhead_s(load) if self.overhead_s is None else self.overhead_s
        run = self._play(stage, order, overhead_s, scrapes)
        trace = run.trace
        cut_s = order.kill_ns / NS_PER_S
        span = (start_s, cut_s if trace.incomplete.any() else _last_moment(trace, start_s))
        for engine in self._engines:
            _abort_all(engine, span[1])
        scrapes.append(self._scrape(span[1] + GAP_S / 2))
        self.now_s = span[1] + GAP_S
        summary = summarise(
            index, trace, load_of(stage, start_s), StageReadings(gaps=_gaps(run, start_s)), None, self.slo_ms
        )
        # as harness.load.account adds them
        summary["totals"] |= {
            "asked_prompt_tokens_mean": load.shape.prompt_tokens,
            "asked_output_tokens_mean": load.shape.output_tokens,
        }
        summary["users"] = stage.users
        summary["repetition"] = stage.repetition
        window = summary["window"]
        summary["server"] = summarise_server(
            scrapes,
            (window["start_s"], window["end_s"]) if window else None,
            span,
            ours=_traffic(trace),
            prompts_unique=self.shared_prefix is None,
        ).to_dict()
        self._write(index, order, trace, scrapes)
        return summary

    def _order(self, stage: Stage, index: int) -> StageOrder:
        """The stage as a ramp would order it; lengths are drawn here."""
        shape = shape_of_stage(stage)
        lengths = {"prompt_tokens": round(shape.prompt_tokens), "output_tokens": max(1, round(shape.output_tokens))}
        fixed = stage.model_copy(update=lengths)
        return order_of(fixed, index, start_ns=round(self.now_s * NS_PER_S), seed=self.seed, grace_s=self.grace_s)

    def _play(self, stage: Stage, order: StageOrder, overhead_s: float, scrapes: list[Scrape]) -> Run:
        start_s, kill_s = order.start_ns / NS_PER_S, order.kill_ns / NS_PER_S
        end_s = kill_s - self.grace_s
        every_s = max(SCRAPE_INTERVAL_S, (stage.duration or 0.0) / _MOST_SCRAPES)
        watch = Watch(every_s, lambda now_s, _: scrapes.append(self._scrape(now_s)), start_s)
        make = _Maker(stage, f"{self.seed}/{order.index}", self.shared_prefix, self._config.block_size)
        if order.open_loop:
            arrivals = [due / NS_PER_S for due in order.due_ns]
            return open_loop(
                self._engines,
                make,
                arrivals,
                end_s,
                overhead_s=overhead_s,
                max_in_flight=order.max_in_flight,
                grace_s=self.grace_s,
                watch=watch,
            )
        return closed_loop(
            self._engines,
            make,
            [start / NS_PER_S for start in order.user_start_ns],
            end_s,
            think_s=_thinks(order.think, f"{self.seed}/{order.index}/think"),
            overhead_s=overhead_s,
            max_requests=order.requests,
            grace_s=self.grace_s,
            watch=watch,
        )

    def _metrics(self) -> bytes:
        return render(
            TwinScrape(
                model_name=self.model,
                engines=[(engine.config, engine.counters) for engine in self._engines],
                lateness=Histogram(LATENESS_BUCKETS_S),
                created_s=0.0,
                cpu_s=0.0,
                http_requests={},
            )
        )

    def _scrape(self, now_s: float) -> Scrape:
        return Scrape(at_s=now_s, duration_s=0.0, snapshot=read(self._metrics(), self.model))

    def _write(self, index: int, order: StageOrder, trace: RequestTrace, scrapes: Sequence[Scrape]) -> None:
        if self.writer is None:
            return
        for scrape in scrapes:
            self.writer.add_scrape(scrape.to_row())
        for record in records_of(index, trace):
            self.writer.add_record(record.to_json())
        self.writer.flush()


def _thinks(think: Any, seed: str) -> float | Callable[[], float]:
    """A think time, or who draws one after another."""
    pause, draws = pauser(think), itertools.count()
    return pause("") if isinstance(think, float) else lambda: pause(f"{seed}/{next(draws)}")


class _Maker:
    """Requests of a stage in the order they are sent: lengths drawn from its distributions, some with a shared prefix."""

    def __init__(self, stage: Stage, seed: str, shared: SharedPrefix | None, block_size: int) -> None:
        self._prompt, self._output = _lengths(stage)
        self._draw = Random(seed)
        self._shared = shared
        self._block_size = block_size
        self._made = 0

    def __call__(self, user: int, nth: int) -> Request:
        prompt, output = self._length(self._prompt), self._length(self._output)
        self._made += 1
        return Request(prompt, output, content=self._content(prompt))

    def _length(self, lengths: Lengths) -> int:
        return quantile_of(lengths, self._draw.random())

    def _content(self, prompt_tokens: int) -> Content | None:
        """Keys of the whole blocks of the prefix, equal for all requests that have it."""
        shared = self._shared
        if shared is None or self._draw.random() >= shared.share:
            return None
        renewed = 0 if shared.reuse is None else self._made // (shared.reuse * shared.prefixes)
        prefix = self._draw.randrange(shared.prefixes) + renewed * shared.prefixes
        blocks = min(shared.tokens, prompt_tokens - 1) // self._block_size
        return Content([hash((prefix, block)) for block in range(blocks)])


def _last_moment(trace: RequestTrace, start_s: float) -> float:
    """When the last request had its last token."""
    ends = (trace.sent_s + trace.e2e_s)[~np.isnan(trace.e2e_s)]
    return max(start_s, float(ends.max())) if len(ends) else start_s


def _abort_all(engine: Engine, now_s: float) -> None:
    """The client of everything still under way leaves; steps under way then end for nobody."""
    while engine.due_s is not None:
        for seq in list(engine.scheduler.running):
            engine.abort(seq, now_s)
        while len(engine.scheduler.waiting):
            engine.abort(engine.scheduler.waiting.head(), now_s)
        engine.advance(max(now_s, engine.due_s))


def _gaps(run: Run, origin_s: float) -> GapHistogram:
    """Gaps between the tokens of decoding sequences, step by step."""
    histogram = GapHistogram(origin_s)
    for series in run.steps:
        rows = (series.decode_seqs > 0) & (series.end_s >= origin_s)
        ends, gaps, counts = series.end_s[rows], series.length_s[rows] * 1e3, series.decode_seqs[rows]
        parts = max(1, -(-int(counts.sum()) // _GAPS_AT_ONCE))
        for end, gap, count in zip(*(np.array_split(c, parts) for c in (ends, gaps, counts)), strict=True):
            histogram.add(np.repeat(end, count), np.repeat(gap, count))
    return histogram


def _traffic(trace: RequestTrace) -> OurTraffic:
    tokens = trace.output_tokens
    return OurTraffic(
        output_tokens=None if np.isnan(tokens).any() else int(tokens.sum()),
        ended=int(trace.ok.sum()),
        cut=int((~trace.ok).sum()),
    )


def records_of(stage: int, trace: RequestTrace) -> Iterator[Record]:
    """The rows of a simulated stage as a ramp writes them, in the order they ended."""
    ends = np.nan_to_num(trace.sent_s + trace.e2e_s, nan=np.inf)
    for row in np.argsort(ends, kind="stable").tolist():
        yield _record(stage, row, trace)


def _record(stage: int, row: int, trace: RequestTrace) -> Record:
    ok, tokens = bool(trace.ok[row]), trace.output_tokens[row]

    def ms(column: Any) -> float | None:
        value = float(column[row])
        return None if np.isnan(value) else value * 1e3

    return Record(
        request_id=f"{stage}-{row}",
        stage=stage,
        user=int(trace.user[row]),
        scheduled_ms=float(trace.scheduled_s[row]) * 1e3,
        sent_ms=ms(trace.sent_s),
        outcome=Outcome.OK if ok else Outcome.INCOMPLETE if trace.incomplete[row] else Outcome.FAILED,
        failure=None if ok or trace.incomplete[row] else str(trace.failure[row] or Failure.CLIENT),
        http_status=200 if ms(trace.ttft_s) is not None else None,
        prompt_tokens=int(trace.prompt_tokens[row]),
        output_tokens=None if np.isnan(tokens) else int(tokens),
        output_tokens_source=None if np.isnan(tokens) else TokenSource.USAGE,
        ttft_ms=ms(trace.ttft_s),
        ttfa_ms=ms(trace.ttfa_s),
        e2e_ms=ms(trace.e2e_s),
        tpot_ms=ms(trace.tpot_s),
        stream_end_ms=ms(trace.stream_end_s),
        chunks=0 if np.isnan(tokens) else int(tokens),
        finish_reason="length" if ok else None,
    )
