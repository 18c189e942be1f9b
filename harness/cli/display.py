"""Printing that outlives its reader: ``| head`` closes our output, and a run must neither end nor fail by that."""

from __future__ import annotations

import os
import sys
from typing import IO, Any

from rich.console import Console


def forget(stream: IO[Any]) -> None:
    """Point a stream whose reader has gone at nothing, so that no later write, nor Python's own at exit, fails."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


class Display(Console):
    """A console that goes quiet when its reader has gone; rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        forget(self.file)

    def print(self, *args: Any, **options: Any) -> None:
        try:
            super().print(*args, **options)
        except BrokenPipeError:  # rich before 13.8 does not ask on_broken_pipe
            self.on_broken_pipe()


def print_document(document: bytes) -> None:
    """Bytes to standard output, unless its reader has gone."""
    try:
        sys.stdout.buffer.write(document)
        sys.stdout.flush()
    except BrokenPipeError:
        forget(sys.stdout)
