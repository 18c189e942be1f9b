"""What the model refuses. The commands turn these into exit code 2.

CalibrationError
├── InputError         a value that cannot be: names the key, what it is and what was expected
│   └── Unsupported    an architecture, format or combination the model does not know: refused, never guessed
└── NotIdentifiable    the data cannot tell this number; says which stage would
"""

from __future__ import annotations


class CalibrationError(Exception):
    """Base of all; never raised itself. ``hint`` says what to do, one line."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(CalibrationError):
    pass


class Unsupported(InputError):
    pass


class NotIdentifiable(CalibrationError):
    pass
