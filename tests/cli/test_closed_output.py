"""``| head``: a command whose reader goes ends quietly, with the exit code it would have had."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from console import Done, ended, started

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes that close differ there")
METRICS = next((Path(__file__).parent.parent / "data" / "metrics").glob("*.txt"))
PLAN = ("plan", "--model", "llama-3.1-8b", "--gpu", "h100-sxm")


def unread(*args: str) -> Done:
    """A command whose standard output nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return ended(started(*args, stdout=writing))
    finally:
        os.close(writing)


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("models",),
        (*PLAN, "--json"),
        ("metrics", str(METRICS)),
    ],
    ids=" ".join,
)
def test_a_command_that_nobody_reads_ends_well_and_says_nothing(args: tuple[str, ...]) -> None:
    done = unread(*args)
    assert (done.code, done.err) == (0, "")


def test_an_error_keeps_its_exit_code_though_nobody_reads_it() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = started("metrics", "no-such-file", stdout=writing, stderr=writing)
        assert process.wait(60) == 2
    finally:
        os.close(writing)
