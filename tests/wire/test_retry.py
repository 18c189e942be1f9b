"""Retry-After: seconds or a date, and nothing that a wait cannot be made of."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from harness.wire.retry import seconds_of

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2", 2.0),
        (" 0.5 ", 0.5),
        ("-3", 0.0),
        ("1000000000000", 1e12),
        ("inf", 0.0),
        ("nan", 0.0),
        ("1e999", 0.0),
        ("Mon, 30 Nov 2026 12:00:07 GMT", 7.0),
        ("Mon, 30 Nov 2026 12:00:07 -0000", 7.0),
        ("Mon, 30 Nov 2026 11:00:00 GMT", 0.0),
        ("soon", 0.0),
        ("", 0.0),
    ],
)
def test_a_retry_after_is_a_wait_in_seconds(value: str, seconds: float) -> None:
    assert seconds_of(value, NOW) == seconds
