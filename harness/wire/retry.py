"""Retry-After, RFC 9110 section 10.2.3: seconds, or a date. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime


def seconds_of(value: str, now: datetime) -> float:
    """Seconds from ``now`` on that a Retry-After asks for; 0 for a date that is past and for what is neither.

    Args:
        value: of the header.
        now: with a time zone.
    """
    try:
        seconds = float(value)
    except ValueError:
        seconds = _until(value, now)
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _until(date: str, now: datetime) -> float:
    try:
        due = parsedate_to_datetime(date)
    except ValueError:
        return 0.0
    # a date whose zone is "-0000" comes without one, and means UTC
    return ((due if due.tzinfo else due.replace(tzinfo=UTC)) - now).total_seconds()
