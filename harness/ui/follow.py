"""A run as it goes on, read from the files it grows: the same whether the page started it or a command line did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from harness.errors import UsageError
from harness.export.charts import datum, draw
from harness.export.markup import Markup, element, join
from harness.export.report_curves import over_time
from harness.export.report_sections import levels
from harness.export.timeline import timeline
from harness.store import REQUESTS, SCRAPES, read_run
from harness.ui.runs import is_running

#: of the newest requests, over which the shown latencies are averaged
RECENT = 200
#: characters of one read; what a file has beyond it comes with the next look
CHUNK = 8 << 20
#: keys of a scrape that a drawing needs
_KEPT = ("kv_cache_usage", "kv_cache_usage_max", "running", "waiting", "preemptions", "generation_tokens")


class Tail:
    """New whole lines of a growing file, at each look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """What came since the last look; a line still being written is left for the next one.

        Raises:
            UsageError: a line is no JSON.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            new = stream.read(CHUNK)
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise UsageError(f"{self._path.name}: not JSON: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A run at one moment. Latencies are means of the newest good requests, in ms; None: none yet."""

    going: bool
    stage: int
    stages: Sequence[Mapping[str, Any]]
    planned: Sequence[Mapping[str, Any]]
    ok: int
    failed: int
    ttft_ms: float | None
    tpot_ms: float | None
    scrapes: Sequence[Mapping[str, Any]]


class Follower:
    """Follows one run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._requests = Tail(folder / REQUESTS)
        self._scrapes = Tail(folder / SCRAPES)
        self._recent: list[tuple[float | None, float | None]] = []
        self._rows: list[dict[str, Any]] = []
        self._ok = self._failed = self._stage = 0

    def look(self) -> Seen:
        """The run as it is now.

        Raises:
            UsageError: its files do not read.
        """
        run = read_run(self._folder)
        for record in self._requests.rows():
            self._add(record)
        for row in self._scrapes.rows():
            snapshot = row.get("snapshot")
            kept = None if snapshot is None else {key: snapshot.get(key) for key in _KEPT}
            self._rows.append({"at_ms": row["at_ms"], "snapshot": kept})
        going = is_running(run)
        planned = run.run["profile"]["stages"]
        return Seen(
            going=going,
            stage=max(self._stage, min(len(run.stages), len(planned) - 1)),
            stages=run.stages,
            planned=planned,
            ok=self._ok,
            failed=self._failed,
            ttft_ms=_mean([ttft for ttft, _ in self._recent]),
            tpot_ms=_mean([tpot for _, tpot in self._recent]),
            scrapes=self._rows,
        )

    def _add(self, record: Mapping[str, Any]) -> None:
        self._stage = max(self._stage, record["stage"])
        if record["outcome"] == "ok":
            self._ok += 1
            self._recent = [*self._recent[-RECENT + 1 :], (record["ttft_ms"], record["tpot_ms"])]
        elif record["outcome"] == "failed":
            self._failed += 1


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def view(seen: Seen) -> Markup:
    """The run as the page shows it: numbers of now, drawings over time, and the levels that ended."""
    last: Mapping[str, Any] = next(
        (row["snapshot"] for row in reversed(seen.scrapes) if row["snapshot"] is not None), {}
    )
    line = timeline(seen.scrapes)
    rates = [rate for rate in line.output_tokens_per_s if rate is not None]
    facts = [
        _fact("Stage", _stage(seen)),
        _fact("Requests", join(datum(seen.ok), " ok, ", datum(seen.failed), " failed")),
        _fact("Output", join(datum(rates[-1] if rates else None), " tokens/s")),
        _fact("TTFT, newest requests", join(datum(seen.ttft_ms), " ms")),
        _fact("TPOT, newest requests", join(datum(seen.tpot_ms), " ms")),
        _fact("KV usage", datum(_usage(last), percent=True)),
        _fact("Running, waiting", join(datum(last.get("running")), ", ", datum(last.get("waiting")))),
        _fact("Preemptions", datum(line.preemptions[-1] if line.preemptions else None)),
    ]
    return join(
        element("dl", facts, class_="facts now"),
        element("div", [draw(chart) for chart in over_time(line, seen.stages)], class_="charts"),
        element("h3", "Levels that ended") if seen.stages else None,
        levels(seen.stages) if seen.stages else None,
    )


def _stage(seen: Seen) -> str:
    """Which stage, and what it asks for."""
    if seen.stage >= len(seen.planned):
        return f"{seen.stage + 1}"
    planned = seen.planned[seen.stage]
    rate, users = planned.get("request_rate"), planned.get("users")
    if isinstance(rate, Mapping):
        asked = f"{rate['ramp']['start']:g} to {rate['ramp']['end']:g} requests/s"
    elif rate is not None:
        asked = f"{rate:g} requests/s"
    else:
        asked = "1 user" if users == 1 else f"{users} users"
    return f"{seen.stage + 1} of {max(len(seen.planned), seen.stage + 1)}, {asked}"


def _usage(snapshot: Mapping[str, Any]) -> float | None:
    fullest = snapshot.get("kv_cache_usage_max")
    return snapshot.get("kv_cache_usage") if fullest is None else fullest


def _fact(name: str, said: Markup | str) -> Markup:
    return join(element("dt", name), element("dd", said))
