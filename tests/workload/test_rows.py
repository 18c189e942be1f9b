"""Rows of JSON files: found without holding the file, read again by place, refused by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.workload import rows
from harness.workload.rows import RowFile, places_of, read_rows, start_of

OBJECTS = st.dictionaries(
    st.text(max_size=8), st.text(max_size=40) | st.integers() | st.lists(st.text(max_size=9), max_size=4), max_size=4
)


@given(st.lists(OBJECTS, min_size=1, max_size=20), st.sampled_from([None, 0, 2]), st.booleans(), st.integers(16, 300))
def test_every_object_of_an_array_is_found_wherever_the_reads_are_cut(
    tmp_path_factory: pytest.TempPathFactory,
    objects: list[dict[str, Any]],
    indent: int | None,
    ascii_: bool,
    window: int,
) -> None:
    file = tmp_path_factory.mktemp("rows") / "x.json"
    file.write_text(json.dumps(objects, indent=indent, ensure_ascii=ascii_), encoding="utf-8", errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "WINDOW", window)
        try:
            found = list(read_rows(file))
        except UsageError:
            # lone surrogates are no UTF-8, and orjson says so
            assert any(0xD800 <= ord(char) <= 0xDFFF for char in json.dumps(objects, ensure_ascii=False))
            return
    assert [row.value for row in found] == objects
    again = RowFile(file, places_of([(row.offset, row.length) for row in found]))
    assert [again[i] for i in range(len(again))] == objects
    again.close()


def test_lines_and_arrays_are_told_apart_and_numbered(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('{"a": 1}\n\n{"a": 2}\n', encoding="utf-8")
    (tmp_path / "array").write_text('[\n  {\n    "a": 1\n  },\n  {"a": 2}\n]\n', encoding="utf-8")
    assert [(row.line, row.value) for row in read_rows(tmp_path / "lines")] == [(1, {"a": 1}), (3, {"a": 2})]
    assert [(row.line, row.value) for row in read_rows(tmp_path / "array")] == [(2, {"a": 1}), (5, {"a": 2})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": \n', r"x:2: not JSON"),
        ('{"a": 1}\n3\n', r"x:2: expected a JSON object, not int"),
        ('[{"a": 1},\n{"b": }]', r"x:2: not JSON"),
        ('[{"a": 1},\n"text"]', r"x:2: expected a JSON object, not str"),
        ('[{"a": 1},\n{"b": 2}', r"x:2: not JSON: the array does not end"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        list(read_rows(tmp_path / "x"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere cannot be read: No such file"):
        list(read_rows(tmp_path / "nowhere"))


def test_stages_begin_at_different_rows() -> None:
    assert [start_of(stage, 4, 100) for stage in range(4)] == [0, 25, 50, 75]
    assert places_of([]).shape == (0, 2)
    assert places_of([(1, 2)]).dtype == np.int64
