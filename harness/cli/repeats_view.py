"""Levels that a run holds more than once, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from harness.measure.repeats import Pooled, RepeatedLevel
    from harness.store import RunData

COLUMNS = (("output_tokens_per_s", "tok/s"), ("ttft_ms", "TTFT ms"), ("tpot_ms", "TPOT ms"))


def levels_repeated(run: RunData) -> list[RepeatedLevel]:
    """Those of a run's folder."""
    from harness.measure.repeats import repeated_levels

    return repeated_levels(run.stages, run.run.get("profile", {}).get("stages", []))


def as_json(levels: Sequence[RepeatedLevel]) -> dict[str, Any]:
    """To be added to a document; empty where nothing was repeated."""
    return {"repeats": [level.to_dict() for level in levels]} if levels else {}


def repeats_table(levels: Sequence[RepeatedLevel]) -> Table:
    """One row a level: each metric with its 90 % interval over the passes, and how far these scatter."""
    from rich.table import Table

    table = Table(
        title="repeated levels, pooled: 90 % interval of the mean, and by how much a pass scatters (+-)",
        title_justify="left",
        box=None,
        header_style="bold",
        pad_edge=False,
    )
    table.add_column("level", no_wrap=True)
    table.add_column("passes", justify="right", no_wrap=True)
    for _, name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for level in levels:
        passes = f"{len(level.stages)} of {len(level.stages) + len(level.left_out)}"
        table.add_row(str(level.load), passes, *(cell(level.metrics[metric]) for metric, _ in COLUMNS))
    return table


def cell(found: Pooled | None) -> str:
    """``41.2 (39.8 to 42.6) +-1.4 %``."""
    from harness.cli.predict_view import significant

    if found is None:
        return "-"
    low, high = significant(found.low), significant(found.high)
    return f"{significant(found.value)} ({low} to {high}) +-{found.spread:.1%}"
