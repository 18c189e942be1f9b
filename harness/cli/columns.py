"""Words and columns as plain lines: what ``plan`` prints. Loading rich would take a fifth of the time a plan may take."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

#: width where nobody looks at a screen
PLAIN_WIDTH = 120
#: a last column is never squeezed below this
_LEAST = 24


def line_width() -> int:
    """Characters of a line: COLUMNS, the terminal's own, or ``PLAIN_WIDTH``."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else PLAIN_WIDTH


def filled(text: str, width: int) -> str:
    """A paragraph in lines of at most ``width``."""
    return "\n".join(_wrapped(text, width))


def columns(rows: Sequence[Sequence[str]], width: int, right: Sequence[int] = ()) -> str:
    """Rows as aligned columns two apart. The columns at ``right`` are set to the right; the last one wraps."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    room = max(_LEAST, width - sum(widths[:-1]) - 2 * (len(widths) - 1))
    indent = " " * (sum(widths[:-1]) + 2 * (len(widths) - 1))
    lines = []
    for row in rows:
        head = [
            cell.rjust(size) if i in right else cell.ljust(size)
            for i, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        last = row[-1].rjust(widths[-1]) if len(row) - 1 in right else row[-1]
        first, *more = _wrapped(last, room)
        lines += ["  ".join([*head[:-1], first]).rstrip(), *(indent + line for line in more)]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    if len(text) <= width:
        return [text]
    lines, line = [], ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]
