"""Text that may not end the comment, string or line it stands in, whatever it holds."""

from __future__ import annotations

from textwrap import wrap


def comment(text: str, width: int = 116) -> list[str]:
    """``text`` as lines of a ``#`` comment; what is not printable, a line break above all, becomes a question mark."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return [f"# {line}" for line in wrap(clean, width)] or ["#"]
