"""How true this client is on this machine: measured against our own fixed-rate server, judged, kept, quoted in runs.

The measuring half sends real streams through the very workers a run has (:class:`harness.load.controller.Fleet`) and
summarises them as a stage is summarised; the judging half is pure. A reading is *true* when every figure lies within its
tolerance of what the server did; where it does not and the server itself was late, nothing is known of the client
(*unclear*); else the client is *untrue* there. The load to be trusted is the largest true one below the first untrue one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from harness.clock import NS_PER_S, now_ns, process_cpu_s, wall_time
from harness.errors import LocalFault
from harness.fixed_rate import MODEL
from harness.http_get import Getter
from harness.limits import allow_open_files
from harness.load.controller import Fleet, share
from harness.load.orders import Setup
from harness.load.stages import order_of
from harness.measure.from_records import columns_of
from harness.measure.gaps import merged
from harness.measure.summary import StageReadings, summarise
from harness.measure.window import StageLoad
from harness.record import Record
from loadprofiles.profile import Stage

SCHEMA_VERSION = 1
REQUESTS_PER_STREAM = 3
PROMPT_TOKENS = 16
#: between an order and its start
LEAD_S = 0.25
START_S = 20.0
GRACE_S = 30.0
#: a server whose writes are this late, as a share of the interval between them, is no ruler
SERVER_LATE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the server does, whatever the load."""

    ttft_ms: float = 50.0
    itl_ms: float = 20.0
    output_tokens: int = 100

    @property
    def tokens_per_s(self) -> float:
        """Of one stream, from request to request."""
        return self.output_tokens / (self.ttft_ms + (self.output_tokens - 1) * self.itl_ms) * 1e3


class Verdict(StrEnum):
    TRUE = "true"
    UNTRUE = "untrue"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What this client read at one number of streams. None was not measured."""

    streams: int
    ttft_ms_mean: float | None
    ttft_ms_p99: float | None
    tpot_ms_mean: float | None
    gap_ms_p99: float | None
    tokens_per_s: float | None
    #: requests that did not end well
    failed: int
    #: of all processes of the client
    cpu_s_per_million_tokens: float | None
    loop_lag_ms_p99: float | None
    server_late_ms_mean: float | None
    server_late_ms_p99: float | None


@dataclass(frozen=True, slots=True)
class Criterion:
    """A figure of a reading may be off by this share of the truth."""

    name: str
    unit: str
    tolerance: float
    read: Callable[[Reading], float | None]
    true: Callable[[Reading, Truth], float]


CRITERIA = (
    Criterion("TTFT mean", "ms", 0.02, lambda r: r.ttft_ms_mean, lambda r, t: t.ttft_ms),
    Criterion("TTFT p99", "ms", 0.10, lambda r: r.ttft_ms_p99, lambda r, t: t.ttft_ms),
    Criterion("TPOT mean", "ms", 0.01, lambda r: r.tpot_ms_mean, lambda r, t: t.itl_ms),
    Criterion("gap p99", "ms", 0.10, lambda r: r.gap_ms_p99, lambda r, t: t.itl_ms),
    Criterion("throughput", "tok/s", 0.02, lambda r: r.tokens_per_s, lambda r, t: r.streams * t.tokens_per_s),
)


def judge(reading: Reading, truth: Truth) -> tuple[Verdict, list[str]]:
    """Whether a reading is true, and what is off."""
    off = list(_off(reading, truth))
    if not off:
        return Verdict.TRUE, []
    late = reading.server_late_ms_p99
    if late is None or late > SERVER_LATE * truth.itl_ms:
        shown = "of unknown lateness" if late is None else f"{late:.3g} ms late itself (p99)"
        return Verdict.UNCLEAR, [*off, f"the server was {shown}"]
    return Verdict.UNTRUE, off


def _off(reading: Reading, truth: Truth) -> Iterator[str]:
    if reading.failed:
        yield f"{reading.failed} requests did not end well"
    for criterion in CRITERIA:
        true, measured = criterion.true(reading, truth), criterion.read(reading)
        if measured is None:
            yield f"{criterion.name} was not measured"
        elif abs(measured - true) > criterion.tolerance * true:
            yield (
                f"{criterion.name} {measured:.4g} {criterion.unit} for {true:.4g}"
                f" ({measured / true - 1:+.1%}, {criterion.tolerance:.0%} allowed)"
            )


def trusted(judged: Sequence[tuple[Reading, Verdict]]) -> Reading | None:
    """The largest load that was read truly, with no untrue one below it; None when there is none. An unclear reading
    takes nothing away: it says nothing of this client."""
    best = None
    for reading, verdict in sorted(judged, key=lambda pair: pair[0].streams):
        if verdict is Verdict.UNTRUE:
            break
        if verdict is Verdict.TRUE:
            best = reading
    return best


# --- measuring


async def measure(
    streams: Sequence[int],
    *,
    processes: int,
    loop_name: str = "auto",
    truth: Truth | None = None,
    requests_per_stream: int = REQUESTS_PER_STREAM,
    on_level: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure this client at each number of streams; the document that :func:`keep` keeps.

    Args:
        streams: levels, in order.
        processes: load workers.
        on_level: told each level before it is measured.

    Raises:
        UsageError: too few open files are allowed.
        LocalFault: server or worker do not start.
    """
    truth = truth or Truth()
    allow_open_files(max(streams))
    with _cores() as core:
        async with _server(truth, core) as base_url, Getter() as getter:
            lab = _Lab(base_url, getter, processes, loop_name, truth)
            async with lab:
                await lab.level(1, 1)  # the first of anything is slow: what it reads is thrown away
                readings = []
                for level in streams:
                    on_level(level)
                    readings.append(await lab.level(level, requests_per_stream))
    return document(readings, truth, processes=processes, pinned=core is not None)


class _Lab:
    """The fleet, and one stage after another against the server."""

    def __init__(self, base_url: str, getter: Getter, processes: int, loop_name: str, truth: Truth) -> None:
        self._base_url = base_url
        self._getter = getter
        self._processes = processes
        self._truth = truth
        self._records: list[Record] = []
        self._fleet = Fleet(processes, loop_name, lambda line: self._records.append(Record.from_json(line)))
        self._start_ns = now_ns()
        self._index = 0

    async def __aenter__(self) -> None:
        setup = Setup(base_url=self._base_url, model=MODEL, endpoint="completions", run_start_ns=self._start_ns)
        try:
            await self._fleet.start(setup)
        except BaseException:
            await self._fleet.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self._fleet.close()

    async def level(self, streams: int, requests_per_stream: int) -> Reading:
        stage = Stage(
            users=streams,
            requests=streams * requests_per_stream,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=self._truth.output_tokens,
        )
        self._records.clear()
        await self._late()
        cpu_s, start_ns = process_cpu_s(), now_ns() + int(LEAD_S * NS_PER_S)
        order = order_of(stage, self._index, start_ns=start_ns, seed=0, grace_s=GRACE_S)
        self._index += 1
        outcome = await self._fleet.stage(share(order, self._processes))
        cpu_s = process_cpu_s() - cpu_s + outcome.cpu_s
        if outcome.faults:
            raise LocalFault(outcome.faults[0])
        trace, deltas = columns_of(self._records, "live")
        gaps = merged(outcome.gaps)
        summary = summarise(self._index, trace, StageLoad(users=streams), StageReadings(gaps=gaps), deltas)
        late = await self._late()
        tokens = summary["totals"]["output_tokens"]
        return Reading(
            streams=streams,
            ttft_ms_mean=summary["ttft_ms"]["mean"],
            ttft_ms_p99=summary["ttft_ms"]["p99"],
            tpot_ms_mean=summary["tpot_ms"]["mean"],
            gap_ms_p99=summary["chunk_gap_ms"]["p99"],
            tokens_per_s=summary["output_tokens_per_s"],
            failed=summary["requests"]["failed"] + summary["requests"]["incomplete"],
            cpu_s_per_million_tokens=cpu_s / tokens * 1e6 if tokens else None,
            loop_lag_ms_p99=outcome.loop_lag_ms_p99,
            server_late_ms_mean=late["mean"],
            server_late_ms_p99=late["p99"],
        )

    async def _late(self) -> dict[str, Any]:
        """How late the server was since the last question."""
        answer = await self._getter.get(f"{self._base_url}/late")
        late: dict[str, Any] = orjson.loads(answer.body)
        return late


@contextlib.contextmanager
def _cores() -> Iterator[int | None]:
    """A core for the server, which this process and its workers keep off meanwhile; None where there is only one."""
    if not hasattr(os, "sched_getaffinity") or len(mine := sorted(os.sched_getaffinity(0))) < 2:
        yield None
        return
    os.sched_setaffinity(0, mine[1:])
    try:
        yield mine[0]
    finally:
        os.sched_setaffinity(0, mine)


@contextlib.asynccontextmanager
async def _server(truth: Truth, core: int | None) -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "harness.fixed_rate", str(truth.ttft_ms), str(truth.itl_ms)),
        *([] if core is None else [str(core)]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=os.name == "posix",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = await asyncio.wait_for(process.stdout.readline(), START_S)
        if not port:
            raise LocalFault("the fixed-rate server ended at once", "its own message stands above")
        yield f"http://127.0.0.1:{int(port)}"
    except TimeoutError:
        raise LocalFault(f"the fixed-rate server did not start within {START_S:g} s") from None
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 5.0)
        except TimeoutError:
            process.kill()
            await process.wait()


# --- what is kept


def document(readings: Sequence[Reading], truth: Truth, *, processes: int, pinned: bool) -> dict[str, Any]:
    """Readings, verdicts and the load to be trusted, as they are kept and printed as JSON."""
    judged = [(reading, *judge(reading, truth)) for reading in readings]
    best = trusted([(reading, verdict) for reading, verdict, _ in judged])
    return {
        "schema_version": SCHEMA_VERSION,
        "host": platform.node(),
        "cores": core_count(),
        "when": wall_time().isoformat(timespec="seconds"),
        "versions": {"vllm-harness": version("vllm-harness"), "python": platform.python_version()},
        "processes": processes,
        "server": {**asdict(truth), "own_core": pinned},
        "readings": [
            {**asdict(reading), "verdict": verdict.value, "reasons": reasons} for reading, verdict, reasons in judged
        ],
        "trusted": best and {"streams": best.streams, "tokens_per_s": best.tokens_per_s},
    }


def core_count() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def kept_path() -> Path:
    """Where this user's result for this host is: below XDG_CACHE_HOME, else ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME")
    host = "".join(c if c.isalnum() or c in "-_." else "-" for c in platform.node()) or "unnamed"
    return (Path(cache) if cache else Path.home() / ".cache") / "vllm-harness" / f"selftest-{host}.json"


def keep(result: Mapping[str, Any]) -> Path:
    """Keep a result for later runs on this host; replaces the one before. Raises LocalFault."""
    path = kept_path()
    draft = path.with_suffix(".draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        draft.replace(path)
    except OSError as error:
        raise LocalFault(f"{path} could not be written: {error.strerror or error}") from error
    return path


def kept() -> dict[str, Any] | None:
    """What a selftest on this host said: ``{when, processes, streams, tokens_per_s}``, the last two null where nothing
    could be trusted. None when there was no selftest, or one of another version or another number of cores.

    Raises:
        ValueError: the file does not read; names it.
    """
    path = kept_path()
    try:
        result = orjson.loads(path.read_bytes())
        if result["schema_version"] != SCHEMA_VERSION or result["cores"] != core_count():
            return None
        best = result["trusted"] or {}
        return {
            "when": result["when"],
            "processes": result["processes"],
            "streams": best.get("streams"),
            "tokens_per_s": best.get("tokens_per_s"),
        }
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not read ({error}): vllm-harness selftest makes it anew") from error


def beyond(quoted: Mapping[str, Any] | None, stage: Mapping[str, Any]) -> list[str]:
    """The reason to give where a stage asked more of this client than it was shown to measure truly; none is empty.

    Args:
        quoted: of :func:`kept`; None gives no reason, for nothing is known.
        stage: as in ``summary.json``.
    """
    if quoted is None or quoted["streams"] is None:
        return []
    streams, rate = stage["client"]["concurrency_mean"], stage["output_tokens_per_s"]
    more = []
    if streams is not None and streams > quoted["streams"] * 1.02:
        more.append(f"{streams:,.0f} streams")
    if rate is not None and rate > quoted["tokens_per_s"] * 1.02:
        more.append(f"{rate:,.0f} tok/s")
    if not more:
        return []
    return [
        f"client: {' and '.join(more)} are beyond what this machine was shown to measure truly"
        f" ({quoted['streams']:,} streams, {quoted['tokens_per_s']:,.0f} tok/s; selftest of {quoted['when'][:10]})"
    ]
