"""A run's folder: the only writer of results/, and its reader.

``run.json`` stands from the first second; ``requests.jsonl`` and ``scrapes.jsonl`` grow a line at a time and are handed
to the operating system at least each second; ``summary.json`` is replaced whole after every stage. Killed at any moment,
the folder reads, short of at most the last second.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from harness.errors import LocalFault, UsageError
from harness.measure.from_records import Requests, by_stage
from harness.record import Record, row_of

SCHEMA_VERSION = 1
RUN, REQUESTS, SCRAPES, SUMMARY = "run.json", "requests.jsonl", "scrapes.jsonl", "summary.json"


class Mark(NamedTuple):
    """A position in a run's growing files, bytes."""

    requests: int
    scrapes: int


def _local_fault(error: OSError, path: Path) -> LocalFault:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LocalFault(f"the disk is full: {path} could not be written", "what was written before it is kept")
    return LocalFault(f"{path} could not be written: {error.strerror or error}")


class RunWriter:
    """Writes one run. Every failure to write is a :class:`LocalFault` that names the file.

    Args:
        folder: where; made if missing.

    Raises:
        UsageError: it holds another run, is a file, or may not be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held = [name for name in (RUN, REQUESTS, SUMMARY) if (folder / name).exists()]
            if held:
                raise UsageError(
                    f"{folder} holds another run ({held[0]})", "give --out another folder; nothing was overwritten"
                )
            self._requests: IO[bytes] = (folder / REQUESTS).open("xb", buffering=1 << 20)
            self._scrapes: IO[bytes] = (folder / SCRAPES).open("xb", buffering=1 << 16)
        except FileExistsError as error:
            raise UsageError(
                f"{folder} cannot be a run's folder: {error.strerror}", "give --out another folder"
            ) from error
        except NotADirectoryError as error:
            raise UsageError(f"{folder} lies below a file", "give --out another folder") from error
        except PermissionError as error:
            raise UsageError(f"no permission to write to {folder}", "give --out a folder you may write to") from error
        except OSError as error:
            raise _local_fault(error, folder) from error

    def write_run(self, run: dict[str, Any]) -> None:
        self._replace(RUN, {"schema_version": SCHEMA_VERSION, **run})

    def write_summary(self, stages: list[dict[str, Any]], **more: Any) -> None:
        self._replace(SUMMARY, {"schema_version": SCHEMA_VERSION, "stages": stages, **more})

    def add_record(self, line: bytes) -> None:
        """Append one record, a JSON line with its newline."""
        self._append(self._requests, REQUESTS, line)

    def add_scrape(self, row: dict[str, Any]) -> None:
        self._append(self._scrapes, SCRAPES, orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))

    def mark(self) -> Mark:
        """Where both files stand, for :meth:`records_since` and :meth:`scrapes_since`."""
        self.flush()
        return Mark(*((self.folder / name).stat().st_size for name in (REQUESTS, SCRAPES)))

    def records_since(self, mark: Mark) -> Iterator[Record]:
        """The records flushed after a mark, read back from the file: a stage's records are never all in memory."""
        return (Record.from_json(line) for line in self._lines_since(REQUESTS, mark.requests))

    def scrapes_since(self, mark: Mark) -> Iterator[dict[str, Any]]:
        """The rows of the scrapes flushed after a mark, read back."""
        return (orjson.loads(line) for line in self._lines_since(SCRAPES, mark.scrapes))

    def _lines_since(self, name: str, offset: int) -> Iterator[bytes]:
        with (self.folder / name).open("rb") as stream:
            stream.seek(offset)
            for line in stream:
                if line.endswith(b"\n"):
                    yield line

    def flush(self) -> None:
        """Hand everything to the operating system; called at least each second."""
        for stream, name in ((self._requests, REQUESTS), (self._scrapes, SCRAPES)):
            try:
                stream.flush()
            except OSError as error:
                raise _local_fault(error, self.folder / name) from error

    def close(self) -> None:
        try:
            self.flush()
        finally:
            for stream in (self._requests, self._scrapes):
                # what could not be flushed has been said above; closing tries again and would say it twice
                with contextlib.suppress(OSError):
                    stream.close()

    def _append(self, stream: IO[bytes], name: str, line: bytes) -> None:
        try:
            stream.write(line)
        except OSError as error:
            raise _local_fault(error, self.folder / name) from error

    def _replace(self, name: str, document: dict[str, Any]) -> None:
        path, draft = self.folder / name, self.folder / f".{name}.draft"
        try:
            with draft.open("wb") as stream:
                stream.write(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
                stream.flush()
                os.fsync(stream.fileno())
            draft.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise _local_fault(error, path) from error


@dataclass(frozen=True, slots=True)
class RunData:
    """A run read back. Records and scrapes are streamed, since they may be millions."""

    folder: Path
    run: dict[str, Any]
    stages: list[dict[str, Any]]

    def records(self) -> Iterator[Record]:
        """Every record, in the order they ended. A last line cut by a kill is left out.

        Raises:
            UsageError: a line is not a record; names file and line.
        """
        path = self.folder / REQUESTS
        for number, line in _lines(path):
            try:
                yield Record.from_json(line)
            except (ValueError, TypeError) as error:
                raise UsageError(f"{path}:{number}: not a record: {error}") from error

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every record as the dictionary of its line, in a third of the time of :meth:`records`.

        Raises:
            UsageError: a line is not a record; names file and line.
        """
        path = self.folder / REQUESTS
        for number, line in _lines(path):
            try:
                yield row_of(line)
            except ValueError as error:
                raise UsageError(f"{path}:{number}: not a record: {error}") from error

    def requests(self) -> dict[int, Requests]:
        """The columns of each stage's requests, by stage number: what to measure from, in one pass over the file.

        Raises:
            UsageError: a line is not a record, or a value in it is not of its kind.
        """
        try:
            return by_stage(self.rows(), "imported" if self.run.get("source") == "imported" else "live")
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{self.folder / REQUESTS}: a value of a record is not of its kind: {error}") from error

    def scrapes(self) -> Iterator[dict[str, Any]]:
        path = self.folder / SCRAPES
        for number, line in _lines(path):
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise UsageError(f"{path}:{number}: not JSON: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole lines with their numbers; an unfinished last one is what a kill left of a write."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.endswith(b"\n"):
                yield number, line


def read_run(folder: Path) -> RunData:
    """Read a run's folder strictly. A run killed before its first stage ended has no stages.

    Raises:
        UsageError: there is no run there, its schema is of another version, or a file does not read.
    """
    if not (folder / RUN).is_file():
        raise UsageError(f"{folder} holds no run ({RUN} is missing)", "give the folder that ramp wrote")
    run = _document(folder / RUN)
    summary = _document(folder / SUMMARY) if (folder / SUMMARY).is_file() else {"stages": []}
    stages = summary.get("stages")
    if not isinstance(stages, list):
        raise UsageError(f"{folder / SUMMARY}: stages: expected a list")
    return RunData(folder, run, stages)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = orjson.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        found = document.get("schema_version") if isinstance(document, dict) else None
        raise UsageError(f"{path}: schema_version {found!r}, this version reads {SCHEMA_VERSION}")
    return document
