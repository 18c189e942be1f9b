"""Whose result is this file? Looks at what is in it, never at its name, and hands it to its reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from harness.errors import UsageError
from harness.formats import aiperf, guidellm, vllm_bench
from harness.formats.imported import ImportedRun
from harness.store import RUN

FORMATS = (vllm_bench.FORMAT, guidellm.FORMAT, aiperf.FORMAT)
_KNOWN = "a result of vllm bench serve, guidellm or aiperf"


def read_files(paths: Sequence[Path], format_: str = "auto") -> ImportedRun:
    """One run of all these files, a stage each (of guidellm: each benchmark), in the order given.

    Args:
        paths: files of one tool; of aiperf also its artifact folder.
        format_: ``auto`` or one of :data:`FORMATS`.

    Raises:
        UsageError: a file is missing, is no such result, or they are of several tools.
    """
    runs = [_read(path, format_) for path in paths]
    if len({run.format for run in runs}) > 1:
        raise UsageError(
            f"files of several tools: {', '.join(run.format for run in runs)}", "import one tool's at a time"
        )
    stages = [stage for run in runs for stage in run.stages]
    warnings = dict.fromkeys(text for run in runs for text in run.warnings)
    return replace(runs[0], stages=stages, warnings=tuple(warnings))


def is_result(path: Path) -> bool:
    """Is this no run of ours, but a file, or a folder of aiperf's?"""
    return path.is_file() or (path.is_dir() and not (path / RUN).is_file() and aiperf.companions(path) != (None, None))


def _read(path: Path, format_: str) -> ImportedRun:
    if path.is_dir():
        if aiperf.companions(path) == (None, None):
            raise UsageError(f"{path} is a folder without aiperf's profile_export.jsonl", f"give {_KNOWN}")
        return aiperf.read(path)
    if not path.is_file():
        raise UsageError(f"{path} does not exist", f"give {_KNOWN}")
    found = _first_line_of_aiperf(path)
    if found and format_ in ("auto", aiperf.FORMAT):
        return aiperf.read(path)
    documents = _documents(path)
    kind = _kind(documents[0])
    if kind is None or (format_ != "auto" and kind != format_):
        wanted = _KNOWN if format_ == "auto" else f"a result of {format_}"
        raise UsageError(f"{path} is not {wanted}", f"its keys begin with {_keys(documents[0])}")
    if kind == aiperf.FORMAT:
        return aiperf.read(path)
    if kind == guidellm.FORMAT:
        return guidellm.read(path.name, documents[0])
    for number, document in enumerate(documents, 1):
        if not vllm_bench.is_result(document):
            raise UsageError(f"{path}: result {number} is not one of vllm bench serve")
    return vllm_bench.read([(path.name, document) for document in documents])


def _first_line_of_aiperf(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return aiperf.is_record(orjson.loads(stream.readline(16 * 2**20)))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError:
        return False


def _kind(document: Any) -> str | None:
    if guidellm.is_result(document):
        return guidellm.FORMAT
    if aiperf.is_summary(document):
        return aiperf.FORMAT
    return vllm_bench.FORMAT if vllm_bench.is_result(document) else None


def _keys(document: Any) -> str:
    return ", ".join(list(document)[:5]) if isinstance(document, dict) else type(document).__name__


def _documents(path: Path) -> list[Any]:
    """The JSON document of a file, or those of its lines (``vllm bench serve --append-result``)."""
    raw = path.read_bytes()
    try:
        return [orjson.loads(raw)]
    except orjson.JSONDecodeError as whole:
        documents = []
        for number, line in enumerate(raw.splitlines(), 1):
            if not line.strip():
                continue
            try:
                documents.append(orjson.loads(line))
            except orjson.JSONDecodeError as error:
                where = f"{path}: not JSON: {whole}" if number == 1 else f"{path}:{number}: not JSON: {error}"
                raise UsageError(where, f"give {_KNOWN}") from error
        if not documents:
            raise UsageError(f"{path} is empty", f"give {_KNOWN}") from whole
        return documents
