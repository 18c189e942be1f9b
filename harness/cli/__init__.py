"""The command line. One thin module a command: parse, call, print, exit code."""

from __future__ import annotations

from harness.cli.app import main

__all__ = ["main"]
