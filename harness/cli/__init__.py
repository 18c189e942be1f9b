"""The command line. One thin module a command: parse, call, print, exit code."""

from __future__ import annotations

import sys

#: commands that must answer at once and so parse their own options: the command tree takes longer to load than they do
QUICK = ("plan",)


def main() -> None:
    """The console script."""
    if sys.argv[1:2] and sys.argv[1] in QUICK:
        from importlib import import_module

        from harness.cli.ends import guarded

        guarded(lambda: import_module(f"harness.cli.{sys.argv[1]}").run(sys.argv[2:]))
        return
    from harness.cli.app import main as tree

    tree()


__all__ = ["QUICK", "main"]
