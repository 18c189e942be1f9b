"""``compare A B`` of two calibrations: the factors side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calibration.compare_factors import Moved


def compare_factors(a: Path, b: Path, *, json: bool) -> None:
    """Print which factors moved.

    Raises:
        UsageError: a file does not read.
    """
    from calibration import compare_factors as pure
    from harness.calibration_file import read_calibration

    rows, differences = pure.compare_factors(read_calibration(a), read_calibration(b))
    if json:
        import orjson

        from harness.cli.display import print_document

        content = {
            "a": str(a),
            "b": str(b),
            "false_alarm_rate": pure.ALPHA,
            "differences": differences,
            "factors": [row._asdict() for row in rows],
        }
        print_document(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        return
    _show(rows, differences, a, b)


def _show(rows: list[Moved], differences: list[str], a: Path, b: Path) -> None:
    from rich.table import Table

    from harness.cli.display import Display

    out = Display(width=None if sys.stdout.isatty() else 120, highlight=False)
    out.print(f"A  {a}\nB  {b}", markup=False, soft_wrap=True)
    for difference in differences:
        out.print(f"note: {difference}", style="yellow", markup=False, soft_wrap=True)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("factor", no_wrap=True)
    for name in ("A", "B", "B / A", "90 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for row in rows:
        unit = f" {row.unit}" if row.unit else ""
        table.add_row(
            row.name,
            f"{row.a:.4g}{unit}",
            f"{row.b:.4g}{unit}",
            f"{row.ratio:.3f}",
            f"{row.low:.3f} to {row.high:.3f}",
            row.verdict,
            style="bold red" if row.verdict == "moved" else "",
        )
    out.print("", table, sep="\n")
