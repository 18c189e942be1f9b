"""The list of runs, and two of them side by side, as markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from harness.export.charts import Axis, Chart, Series, datum, draw
from harness.export.markup import Markup, element, join
from harness.export.report_curves import METRICS
from harness.export.report_sections import level_name
from harness.store import RunData
from harness.ui.runs import RunEntry

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


def side_by_side(a: RunData, b: RunData) -> Markup:
    """Two runs over the same levels: curves above each other, and a table of both."""
    names = a.folder.name, b.folder.name
    charts = [draw(chart) for chart in _charts(names, (a.stages, b.stages))]
    return join(
        element("h2", f"{names[0]} beside {names[1]}"),
        element("div", charts, class_="charts")
        if charts
        else element("p", "No valid level of users in both.", class_="none"),
        _table(names, (a.stages, b.stages)),
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


def _table(names: tuple[str, str], both: tuple[Sequence[Stage], Sequence[Stage]]) -> Markup:
    found = [{level_name(stage): stage for stage in stages} for stages in both]
    levels = [*found[0], *(level for level in found[1] if level not in found[0])]
    head = [element("th", "users", scope="col")]
    head += [
        element("th", f"{metric.title}, {metric.unit}: {name}", scope="col") for metric in METRICS for name in names
    ]
    rows = []
    for level in levels:
        cells = []
        for metric in METRICS:
            for stages in found:
                stage = stages.get(level)
                value = None if stage is None or not stage["valid"] else _value(stage, metric.key)
                cells.append(element("td", datum(value)))
        rows.append(element("tr", element("th", level, scope="row"), cells))
    table = element("table", element("thead", element("tr", head)), element("tbody", rows))
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label="Both runs")
