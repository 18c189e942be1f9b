"""How a command ends badly: one line on stderr, a second that says what to do, and the documented exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from calibration.errors import CalibrationError
from harness.errors import HarnessError


def fail(message: str, hint: str, code: int) -> NoReturn:
    """One clear line on stderr, a second that says what to do, and the documented exit code."""
    sys.stderr.write(f"vllm-harness: {message}\n" + (f"  {hint}\n" if hint else ""))
    raise SystemExit(code)


def guarded(call: Callable[[], object]) -> None:
    """Call, and turn our errors into one line and an exit code."""
    try:
        call()
    except HarnessError as error:
        fail(error.message, error.hint, error.exit_code)
    except CalibrationError as error:
        fail(error.message, error.hint, 2)
    except KeyboardInterrupt:
        fail("interrupted", "nothing had been measured yet", 130)
    except BrokenPipeError:
        # the reader of our output has gone (| head): nothing is left to say, and Python must not try at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
