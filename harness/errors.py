"""Every error the harness raises on purpose, split by whose fault it is; anything else is a bug.

    HarnessError
    ├── UsageError            2    an option, a profile, an input file or a folder of the user's
    ├── GateFailed            3    a comparison or gate missed its tolerance
    ├── RunInvalid            4    the run happened and means nothing: all stages invalid, or no token
    ├── ServerError           5    the server cannot be reached or used
    │   ├── Unreachable            no connection: name, port, TLS
    │   ├── Refused                it answers, but not to us: 401, 403, unknown model, 4xx and 5xx on a probe
    │   └── NotVllm                it answers, but not what an OpenAI-compatible server answers
    ├── LocalFault            1    this machine: disk full, no permission, a dead worker
    └── Interrupted         130    Ctrl-C; what was measured is on disk

The number is the exit code of the command (DESIGN section 7). A message says what happened; ``hint`` says what to do.
Failures of single requests are no exceptions: they are records (:mod:`harness.record`).
"""

from __future__ import annotations


class HarnessError(Exception):
    """Base of all; never raised itself.

    Args:
        message: what happened, one line.
        hint: what the user can do about it, one line.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(HarnessError):
    exit_code = 2


class GateFailed(HarnessError):
    exit_code = 3


class RunInvalid(HarnessError):
    exit_code = 4


class ServerError(HarnessError):
    exit_code = 5


class Unreachable(ServerError):
    pass


class Refused(ServerError):
    pass


class NotVllm(ServerError):
    pass


class LocalFault(HarnessError):
    exit_code = 1


class Interrupted(HarnessError):
    exit_code = 130
