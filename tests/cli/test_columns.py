"""Aligned columns and filled paragraphs."""

from __future__ import annotations

import pytest

from harness.cli.columns import columns, filled, line_width

ROWS = [("", "users", "meaning"), ("pool", "1,131.5", "all streams at their end at once"), ("a", "2", "b")]


def test_columns_are_two_apart_and_numbers_stand_right() -> None:
    assert columns(ROWS, 120, right=(1,)).splitlines() == [
        "        users  meaning",
        "pool  1,131.5  all streams at their end at once",
        "a           2  b",
    ]


def test_the_last_column_wraps_under_itself() -> None:
    lines = columns(ROWS, 39, right=(1,)).splitlines()
    assert lines[1:3] == ["pool  1,131.5  all streams at their end", "               at once"]
    assert max(map(len, lines)) <= 39


def test_a_narrow_screen_leaves_the_last_column_readable() -> None:
    assert columns(ROWS, 10, right=(1,)).splitlines()[1] == "pool  1,131.5  all streams at their end"


def test_a_word_longer_than_the_line_stays_whole() -> None:
    assert filled("one aaaaaaaaaaaa two", 6).splitlines() == ["one", "aaaaaaaaaaaa", "two"]


def test_a_last_column_of_numbers_stands_right() -> None:
    assert columns([("a", "1"), ("b", "10")], 80, right=(1,)).splitlines() == ["a   1", "b  10"]


@pytest.mark.parametrize(("asked", "width"), [("77", 77), ("", 120), ("wide", 120), ("0", 120)])
def test_where_nobody_looks_a_line_is_120_wide(asked: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", asked)
    assert line_width() == width
