"""The list of runs, and two of them side by side, as markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from harness.export.charts import NOT_MEASURED, Axis, Chart, Series, datum, draw
from harness.export.markup import Markup, element, join
from harness.export.report_curves import METRICS
from harness.store import RunData
from harness.ui.runs import RunEntry

if TYPE_CHECKING:
    from calibration.gate import Row
    from harness.cli.compare_gate import Compared

Stage = Mapping[str, Any]

_STATES = {"valid": "good", "running": "good", "partly": "warn", "cut": "warn"}


def listing(entries: Sequence[RunEntry]) -> Markup:
    """One row a run; two ticked ones can be compared."""
    if not entries:
        return element("p", "There is no run yet. A ramp writes one, from the page or the command line.", class_="none")
    columns = ("compare", "run", "began", "model", "profile", "stages", "state", "why")
    head = [element("th", name, scope="col", class_="left") for name in columns]
    table = element("table", element("thead", element("tr", head)), element("tbody", [_row(e) for e in entries]))
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label="Runs")


def _row(entry: RunEntry) -> Markup:
    tick = element("input", type="checkbox", name="compare", value=entry.name, aria_label=f"compare {entry.name}")
    link = element("a", entry.name, href=f"#runs?run={quote(entry.name, safe='')}")
    calibrated = element("span", " calibrated", class_="soft") if entry.calibrated else None
    # to the minute: the report has the rest
    texts = (entry.started[:16].replace("T", " "), entry.model, entry.profile)
    return element(
        "tr",
        element("td", tick, class_="left"),
        element("th", link, calibrated, scope="row", class_="left"),
        [element("td", text, class_="left") for text in texts],
        element("td", str(entry.stages)),
        element("td", entry.state, class_=f"left {_STATES.get(entry.state, 'bad')}"),
        element("td", entry.why, class_="text" if entry.why else None),
    )


def side_by_side(a: RunData, b: RunData, found: Compared | None, why: str = "") -> Markup:
    """Two runs: curves above each other, and what ``compare A B`` found between them; None, and why, where it found nothing
    to compare."""
    names = a.folder.name, b.folder.name
    charts = [draw(chart) for chart in _charts(names, (a.stages, b.stages))]
    return join(
        element("h2", f"{names[0]} beside {names[1]}"),
        element("div", charts, class_="charts")
        if charts
        else element("p", "No valid level of users in both.", class_="none"),
        element("p", f"Not compared number by number: {why}.", class_="warn")
        if found is None
        else _differences(found, names),
    )


def _valid(stages: Sequence[Stage]) -> list[Stage]:
    levels = [s for s in stages if s["valid"] and s["request_rate"] is None and s["users"]]
    return sorted(levels, key=lambda stage: int(stage["users"]))


def _value(stage: Stage, metric: str) -> float | None:
    value = stage["output_tokens_per_s"] if metric == "throughput" else stage[f"{metric}_ms"]["mean"]
    return None if value is None else float(value)


def _charts(names: tuple[str, str], both: tuple[Sequence[Stage], Sequence[Stage]]) -> list[Chart]:
    rows = [_valid(stages) for stages in both]
    if not all(rows):
        return []
    charts = []
    for metric in METRICS:
        series = [
            Series(name=name, x=[s["users"] for s in stages], y=[_value(s, metric.key) for s in stages], look=look)
            for look, (name, stages) in enumerate(zip(names, rows, strict=True), 1)
        ]
        axis = Axis(label="users", log=True)
        charts.append(
            Chart(key=f"both-{metric.key}", title=metric.title, x=axis, y=Axis(label=metric.unit), series=series)
        )
    return charts


_VERDICTS = {"worse": "bad", "better": "good", "unclear": "warn", "missing": "warn"}


def _differences(found: Compared, names: tuple[str, str]) -> Markup:
    """Every metric at every load with the interval of its change, the worst first told."""
    columns = ("load", "metric", names[0], names[1], "change", "interval", "verdict")
    head = [element("th", name, scope="col", class_="left" if i < 2 else None) for i, name in enumerate(columns)]
    rows = [_difference(row) for row in found.rows]
    table = element("table", element("thead", element("tr", head)), element("tbody", rows))
    said = [*found.differences, *(f"not in the second run: {load}" for load in found.unmatched), *found.left_out]
    return join(
        element("ul", [element("li", text) for text in said]) if said else None,
        element("div", table, class_="scroll", tabindex=0, role="region", aria_label="Differences"),
    )


#: a change beyond a hundred times is not worth its digits: a handful of requests tells no more
_MOST_CHANGE = 100.0


def _percent(change: float) -> str:
    return f"over +{100 * _MOST_CHANGE:,.0f} %" if change > _MOST_CHANGE else f"{100 * change:+.1f} %"


def _difference(row: Row) -> Markup:
    ends = [None if end is None else _percent(end) for end in (row.low, row.high)]
    interval = f"{ends[0]} to {ends[1]}" if None not in ends else NOT_MEASURED
    return element(
        "tr",
        element("th", str(row.load), scope="row", class_="left"),
        element("td", row.metric, class_="left"),
        element("td", datum(row.a)),
        element("td", datum(row.b)),
        element("td", NOT_MEASURED if row.change is None else _percent(row.change)),
        element("td", interval),
        element("td", row.verdict, class_=_VERDICTS.get(row.verdict)),
    )
