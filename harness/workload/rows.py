"""The rows of a file of JSON objects, one a line or all in one array, without ever holding more than a few of them.

A run looks at every row once beforehand (to refuse a bad one by file and line before anything is sent) and notes where each
stands; a worker then reads the one it needs, when it needs it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import orjson

from harness.errors import UsageError

Places = npt.NDArray[np.int64]
#: bytes read at a time; a row longer than this is read in more pieces
WINDOW = 1 << 20
_SPACE = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a file, and where it stands."""

    file: Path
    line: int
    offset: int
    length: int
    value: dict[str, Any]

    def wrong(self, what: str, hint: str = "") -> UsageError:
        """The error that names file and line."""
        return UsageError(f"{self.file}:{self.line}: {what}", hint)


def read_rows(file: Path) -> Iterator[Row]:
    """Every object of a file, in order; blank lines are skipped.

    Raises:
        UsageError: the file cannot be read, or a line is no JSON object; names file and line.
    """
    try:
        with file.open("rb") as stream:
            first = stream.read(64).lstrip(b"\xef\xbb\xbf" + _SPACE)[:1]
            stream.seek(0)
            yield from _array(file, stream) if first == b"[" else _lines(file, stream)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", "give the path of a file") from error


def _lines(file: Path, stream: IO[bytes]) -> Iterator[Row]:
    offset = 0
    for number, line in enumerate(stream, 1):
        if line.strip(_SPACE):
            yield _row(file, number, offset, line)
        offset += len(line)


def _row(file: Path, line: int, offset: int, raw: bytes) -> Row:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{file}:{line}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{file}:{line}: expected a JSON object, not {type(value).__name__}")
    return Row(file, line, offset, len(raw), value)


def _array(file: Path, stream: IO[bytes]) -> Iterator[Row]:
    """The objects of one big array. Where each ends is found by the standard library's decoder on the bytes read as
    Latin-1, which has a character for every byte and so shifts nothing."""
    decoder = json.JSONDecoder()
    window = stream.read(WINDOW).decode("latin-1")
    start = at = window.index("[") + 1
    base, line = 0, 1 + window.count("\n", 0, start)
    while True:
        at = _after(window, at, " \t\r\n,")
        if at < len(window) and window[at] == "]":
            return
        line += window.count("\n", start, at)
        try:
            if at >= len(window):
                raise json.JSONDecodeError("the array does not end", window, at)
            _, end = decoder.raw_decode(window, at)
        except json.JSONDecodeError as error:
            more = stream.read(max(WINDOW, len(window) - at))
            if not more:
                where = line + window.count("\n", at, error.pos)
                raise UsageError(f"{file}:{where}: not JSON: {error.msg}") from error
            base, window, start, at = base + at, window[at:] + more.decode("latin-1"), 0, 0
            continue
        yield _row(file, line, base + at, window[at:end].encode("latin-1"))
        line += window.count("\n", at, end)
        start = at = end


def _after(text: str, at: int, skipped: str) -> int:
    while at < len(text) and text[at] in skipped:
        at += 1
    return at


class RowFile:
    """The rows at known places of a file, read one at a time.

    Args:
        file: as it was when the places were noted.
        places: offset and length in bytes of each row, shape (n, 2).
    """

    def __init__(self, file: Path, places: Places) -> None:
        self._places = places
        self._descriptor = os.open(file, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, position: int) -> dict[str, Any]:
        offset, length = self._places[position].tolist()
        value: dict[str, Any] = orjson.loads(os.pread(self._descriptor, length, offset))
        return value

    def close(self) -> None:
        os.close(self._descriptor)


def places_of(rows: list[tuple[int, int]]) -> Places:
    """Offsets and lengths as one array, 16 bytes a row."""
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def start_of(stage: int, stages: int, rows: int) -> int:
    """The row that a stage begins at: stages spread evenly over the file, so that one does not ask again what the one
    before has left in the server's cache."""
    return stage * rows // max(1, stages)
