"""The part of a report that pools the passes of a level that was held more than once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.export.charts import datum
from harness.export.markup import Markup, element, join
from harness.export.report_curves import REPEATED
from harness.export.report_sections import headed
from harness.measure.repeats import Pooled, repeated_levels

if TYPE_CHECKING:
    from harness.store import RunData

_COLUMNS = (("output_tokens_per_s", "tokens/s"), ("ttft_ms", "TTFT ms"), ("tpot_ms", "TPOT ms"))


def repeats(run: RunData) -> Markup | None:
    """A row a repeated level: each metric with the ends of its 90 % interval, and how far the passes scatter."""
    levels = repeated_levels(run.stages, run.run.get("profile", {}).get("stages", []))
    if not levels:
        return None
    columns = ["level", "passes"]
    for _, name in _COLUMNS:
        columns += [name, "low", "high", "scatter"]
    rows = []
    for level in levels:
        cells = [element("td", f"{len(level.stages)} of {len(level.stages) + len(level.left_out)}")]
        for metric, _ in _COLUMNS:
            cells += _cells(level.metrics[metric])
        rows.append(element("tr", element("th", str(level.load), scope="row"), cells))
    return join(
        element("h3", "Repeated levels, pooled"),
        headed(columns, rows, "Repeated levels"),
        element("p", f"{REPEATED} Scatter is of a single pass.", class_="note"),
    )


def _cells(found: Pooled | None) -> list[Markup]:
    values = (None,) * 3 if found is None else (found.value, found.low, found.high)
    spread = None if found is None else found.spread
    return [*(element("td", datum(value)) for value in values), element("td", datum(spread, percent=True))]
