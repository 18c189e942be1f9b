"""How commands print: tables and sentences by rich, documents as bytes. That a reader may go is seen to below all of it
(:class:`harness.cli.ends.Outlet`)."""

from __future__ import annotations

import sys

from rich.console import Console


class Display(Console):
    """Standard output, or standard error with ``stderr=True``, as every command's tables use it."""


def print_document(document: bytes) -> None:
    """Bytes to standard output."""
    sys.stdout.buffer.write(document)
    sys.stdout.flush()
