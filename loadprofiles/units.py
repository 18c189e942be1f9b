"""Durations as people write them, and the strict base of every model of a profile."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*(ms|s|m|min|h)?\s*$")


class ProfileError(ValueError):
    """A profile that cannot be run. ``hint`` says what to do, one line."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def seconds(value: object) -> float:
    """``30``, ``"30s"``, ``"500ms"``, ``"5m"`` or ``"1h"`` -> seconds.

    Raises:
        ValueError: it is none of these, or negative.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a duration such as 30s, 5m or 500ms, not {value!r}")
    if isinstance(value, str):
        match = _DURATION.match(value)
        if match is None:
            raise ValueError(f"expected a duration such as 30s, 5m or 500ms, not {value!r}")
        value = float(match[1]) * _UNITS_S[match[2] or "s"]
    if not 0 <= value < float("inf"):
        raise ValueError(f"expected a duration of 0 or more, not {value!r}")
    return float(value)


_DURATION_SCHEMA = {
    "anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": _DURATION.pattern}],
    "description": "seconds, or a number with ms, s, m or h: 30, 30s, 5m, 500ms",
}
Seconds = Annotated[float, BeforeValidator(seconds), WithJsonSchema(_DURATION_SCHEMA)]


class Strict(BaseModel):
    """Frozen; unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
