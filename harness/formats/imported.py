"""A run that another tool made: what a reader of its file hands on, and the folder that is made of it.

One measuring code serves both (:mod:`harness.measure`): a reader only says what each request was, in our words
(``requests.jsonl`` of DESIGN section 7), and what the tool itself printed; the numbers of ``summary.json`` are measured
from the requests as those of a live run are. Where a file holds no requests, the printed numbers are carried over and
the rest is null.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from heapq import heappop, heappush
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from harness.clock import wall_time
from harness.errors import HarnessError
from harness.formats.checks import Check, Printed, check
from harness.measure.from_records import Requests, by_stage, columns_of
from harness.measure.summary import summarise
from harness.measure.tokens import count_tokens, spread_evenly
from harness.measure.window import StageLoad, Window, find_window, spans
from harness.observe.probe import ProbeResult
from harness.record import Record
from harness.store import REQUESTS, SCRAPES, RunData, RunWriter

Row = dict[str, Any]
WindowRule = Literal["whole", "steady"]

_BLANK: Row = orjson.loads(
    Record(request_id="", stage=0, user=0, scheduled_ms=0.0, sent_ms=None, outcome="ok").to_json()
)
#: what a live run notes of itself
_OPTIONS = ("seed", "processes", "scrape_interval_s", "stall_timeout_s", "request_timeout_s", "grace_s")
#: of a whole run that its steady part has to be, for its numbers to pass for a level's
STEADY_SHARE = 0.75
#: room for the rounding of sums at the end of a whole run, seconds
_ROOM_S = 1e-6


def row_with(known: Row) -> Row:
    """A row of ``requests.jsonl`` of which ``known`` is known; every other key is null."""
    return {**_BLANK, **known}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedStage:
    """One level as its file has it. Exactly as in a profile: ``users``, or ``request_rate`` with ``users`` its cap."""

    file: str
    users: int | None
    request_rate: float | None
    #: rows of ``requests.jsonl``; None where the file holds no requests
    rows: Iterable[Row] | None
    #: what the tool says of all its requests
    printed: Sequence[Printed] = ()
    #: keys of ``summary.json`` as the tool printed them: all there is where ``rows`` is None
    aggregates: Mapping[str, Any] = field(default_factory=dict)
    #: what cannot be mapped, and what that means for the numbers
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedRun:
    """Everything taken from the files of one tool."""

    format: str
    tool_version: str | None
    model: str
    base_url: str
    endpoint: Literal["completions", "chat"]
    started: str | None
    stages: Sequence[ImportedStage]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Imported:
    """What became of it."""

    stages: list[dict[str, Any]]
    checks: list[Check]
    warnings: list[str]


def write_folder(run: ImportedRun, out: Path, window: WindowRule = "whole") -> Imported:
    """Make a run's folder of it.

    Args:
        window: ``whole``: every request counts, fill and drain included, as the tools themselves count; ``steady``: the
            rule of :mod:`harness.measure.window`, as in a live run.

    Raises:
        UsageError: ``out`` holds a run or cannot be written; a file does not read. Nothing is left behind then.
    """
    made = not out.exists()
    writer = RunWriter(out)
    try:
        found, description = _read(run, window, writer.add_record)
        writer.write_run(description)
        writer.write_summary(found.stages)
        return found
    except HarnessError:
        writer.close()
        for name in (REQUESTS, SCRAPES):
            (out / name).unlink(missing_ok=True)
        if made:
            with contextlib.suppress(OSError):
                out.rmdir()
        raise
    finally:
        writer.close()


def as_run(run: ImportedRun, path: Path, window: WindowRule = "steady") -> RunData:
    """The run as if its folder had been made and read, with ``path`` in place of the folder; its requests are not kept.

    Raises:
        UsageError: a file does not read.
    """
    made, description = _read(run, window, None)
    return RunData(path, description, made.stages)


def _read(
    run: ImportedRun, window: WindowRule, keep: Callable[[bytes], None] | None
) -> tuple[Imported, dict[str, Any]]:
    """What became of a run, and its ``run.json``; every line of ``requests.jsonl`` goes to ``keep``."""
    stages: list[dict[str, Any]] = []
    checks: list[Check] = []
    warnings = list(run.warnings)
    if run.started is None:
        warnings.append("the file does not say when the run was: run.json has the time of the import")
    for index, stage in enumerate(run.stages):
        requests = None
        if stage.rows is not None:
            requests = by_stage(_kept(stage.rows, index, keep), "imported").get(index)
        if requests is None:
            stages.append(_carried_over(index, stage))
        else:
            found = check(index, stage.printed, requests)
            checks += found
            stages.append(_measured(index, stage, requests, window))
            warnings += [_differs(one, run.format) for one in found if one.agrees is False]
        warnings += [text for text in stage.warnings if text not in warnings]
    return Imported(stages, checks, warnings), _description(run, stages, checks, warnings)


def _kept(rows: Iterable[Row], index: int, keep: Callable[[bytes], None] | None) -> Iterator[Row]:
    for number, row in enumerate(rows):
        row["stage"] = index
        row["request_id"] = row["request_id"] or f"{index}-{number}"
        if keep is not None:
            keep(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
        yield row


def _differs(found: Check, tool: str) -> str:
    printed = found.printed
    return (
        f"stage {found.stage}: {tool} printed {printed.theirs} {printed.value:.6g}, its requests give {found.value:.6g}"
    )


def _load(stage: ImportedStage) -> StageLoad:
    if stage.request_rate is not None:
        return StageLoad(request_rate=stage.request_rate)
    return StageLoad(users=stage.users)


def _measured(index: int, stage: ImportedStage, requests: Requests, rule: WindowRule) -> dict[str, Any]:
    load = _load(stage)
    window = _whole(requests, load) if rule == "whole" else None
    summary = summarise(index, requests.trace, load, None, requests.deltas, window=window)
    summary["users"] = stage.users
    concurrency = summary["client"]["concurrency_mean"]
    if load.users is not None and concurrency is not None and concurrency < 0.9 * load.users:
        summary["reasons"].append(
            f"{concurrency:.3g} of {load.users} streams were in flight on average: read it as a level of that many"
        )
    return summary


def _whole(requests: Requests, load: StageLoad) -> Window | None:
    """All requests, from the first send to the last end. It counts as steady where the rule of a live run finds a steady
    window that is nearly all of it: then fill and drain weigh little, and the numbers are those of a level."""
    trace = requests.trace
    starts, ends = spans(trace)
    if not len(starts):
        return None
    start_s, end_s = float(starts.min()), float(ends.max())
    found = find_window(trace, load, spread_evenly(trace, count_tokens(trace, requests.deltas)))
    reasons = () if found is None else found.reasons
    share = 0.0 if found is None else found.length_s / (end_s - start_s)
    if not reasons and share < STEADY_SHARE:
        reasons = (
            f"not steady: imported whole, and {1 - share:.0%} of it is fill and drain (--window steady leaves them out)",
        )
    return Window(start_s=start_s, end_s=end_s + _ROOM_S, steady=not reasons, reasons=reasons)


def _carried_over(index: int, stage: ImportedStage) -> dict[str, Any]:
    """A stage of which only the printed numbers are known: those, and null for the rest."""
    trace, _ = columns_of([], "imported")
    blank = summarise(index, trace, _load(stage))
    filled = {
        key: {**blank[key], **value} if isinstance(blank.get(key), dict) and isinstance(value, Mapping) else value
        for key, value in stage.aggregates.items()
    }
    ok = filled.get("requests", {}).get("ok") or 0
    reasons = ["imported without requests: the numbers are those the other tool printed, of its whole run"]
    return {**blank, **filled, "users": stage.users, "valid": ok > 0, "reasons": reasons, "carried_over": True}


def _description(
    run: ImportedRun, stages: Sequence[Mapping[str, Any]], checks: Sequence[Check], warnings: Sequence[str]
) -> dict[str, Any]:
    at = wall_time()
    began = at if run.started is None else datetime.fromisoformat(run.started)
    took_s = sum(stage["totals"]["duration_s"] or 0.0 for stage in stages)
    notes = (f"imported from a result of {run.format}: nothing was asked of the server itself",)
    workload: Row = {"kind": "synthetic", "endpoint": run.endpoint}
    means = [(stage["totals"]["prompt_tokens_mean"], stage["totals"]["output_tokens_mean"]) for stage in stages]
    if means and None not in means[0]:
        workload |= {"prompt_tokens": max(1, round(means[0][0])), "output_tokens": max(1, round(means[0][1]))}
    levels = [
        {key: value for key, value in (("users", stage["users"]), ("request_rate", stage["request_rate"])) if value}
        | {"requests": max(1, sum(stage["requests"][kind] for kind in ("ok", "failed", "incomplete")))}
        for stage in stages
    ]
    return {
        "source": "imported",
        "versions": {"vllm-harness": version("vllm-harness"), "python": platform.python_version()},
        "started": began.isoformat(timespec="seconds"),
        "ended": (began + timedelta(seconds=took_s)).isoformat(timespec="seconds"),
        "imported": {
            "format": run.format,
            "tool_version": run.tool_version,
            "files": [stage.file for stage in run.stages],
            "at": at.isoformat(timespec="seconds"),
            "checks": [one.to_dict() for one in checks],
        },
        "warnings": list(warnings),
        "deployment": ProbeResult(base_url=run.base_url, model=run.model, notes=notes).to_dict(),
        "profile": {"name": f"imported-{run.format}", "workload": workload, "stages": levels},
        "options": {"slo_ms": {}, **dict.fromkeys(_OPTIONS)},
        "selftest": None,
        # of the machine that ran the other tool nothing is known
        "host": {"system": "not known (imported)", "machine": None, "cores": None},
        "command": ["vllm-harness", "export", *(word for stage in run.stages for word in ("--from", stage.file))],
    }


def slots(start_s: Sequence[float], end_s: Sequence[float]) -> list[int]:
    """A user number for each request of a tool that has no users: the lowest place free when it began.

    Args:
        start_s, end_s: of each request, in any order; of one length.
    """
    order = np.argsort(np.asarray(start_s), kind="stable").tolist()
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    user = [0] * len(order)
    for request in order:
        while busy and busy[0][0] <= start_s[request]:
            heappush(free, heappop(busy)[1])
        place = heappop(free) if free else len(busy)
        user[request] = place
        heappush(busy, (end_s[request], place))
    return user
