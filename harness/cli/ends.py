"""How a command ends: badly with one line on stderr, a second that says what to do, and the documented exit code; and with
that code too when the reader of its output has gone (``| head``)."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from calibration.errors import CalibrationError
from harness.errors import HarnessError


class Outlet(io.FileIO):
    """An output that outlives its reader: what nobody reads any more goes nowhere, and no write fails by that."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            return super().write(data)


@contextlib.contextmanager
def outliving_readers() -> Iterator[None]:
    """Standard output and error as :class:`Outlet` meanwhile, unless someone has put another stream in their place. Every
    way to print (rich, typer, ``write``) ends there, and Python's own flush at exit does not fail."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_outliving(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _outliving(stream: Any) -> Any:
    if stream is None or stream not in (sys.__stdout__, sys.__stderr__):
        return stream
    stream.flush()
    outlet = io.BufferedWriter(Outlet(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(
        outlet, encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering
    )


def fail(message: str, hint: str, code: int) -> NoReturn:
    """One clear line on stderr, a second that says what to do, and the documented exit code."""
    sys.stderr.write(f"vllm-harness: {message}\n" + (f"  {hint}\n" if hint else ""))
    raise SystemExit(code)


def guarded(call: Callable[[], object]) -> None:
    """Call, and turn our errors into one line and an exit code."""
    with outliving_readers():
        try:
            call()
        except HarnessError as error:
            fail(error.message, error.hint, error.exit_code)
        except CalibrationError as error:
            fail(error.message, error.hint, 2)
        except KeyboardInterrupt:
            fail("interrupted", "nothing had been measured yet", 130)
