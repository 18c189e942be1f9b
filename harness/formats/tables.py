"""A run's requests as a table: CSV, and Parquet with the extra ``parquet``. A row a request, the columns of
``requests.jsonl``; null is an empty cell or a null, never 0. Rows are streamed: a run may hold millions."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import fields
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from harness.errors import UsageError
from harness.record import OPTIONAL_KEYS, Record
from harness.store import REQUESTS, RunData

#: of the file, made a row group at a time
BLOCK_BYTES = 1 << 24
COLUMNS = tuple(f.name for f in fields(Record) if f.name not in OPTIONAL_KEYS)
_TEXT = {"request_id", "outcome", "failure", "message", "output_tokens_source", "finish_reason", "content"}
_LISTS = {"warnings": "string", "chunk_gaps_ms": "float64"}
_INTEGERS = {
    "stage",
    "user",
    "http_status",
    "prompt_tokens",
    "output_tokens",
    "asked_output_tokens",
    "chunks",
}


def write_csv(run: RunData, stream: IO[str]) -> int:
    """Rows under a header line; ``warnings`` are separated by a space, chunk gaps are left out. Returns the rows."""
    columns = [*COLUMNS, *(["content"] if has_key(run, "content") else [])]
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    values = itemgetter(*columns)
    rows = 0
    for row in run.rows():
        row["warnings"] = " ".join(row["warnings"])
        row.setdefault("content", None)
        writer.writerow(values(row))
        rows += 1
    return rows


def write_parquet(run: RunData, path: Path) -> int:
    """One file, compressed, a row group each :data:`BLOCK_BYTES` of the file. Returns the rows.

    Raises:
        UsageError: pyarrow is not installed; a value is not of its column's kind.
    """
    try:
        import pyarrow as pa
        import pyarrow.json as pj
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UsageError(
            "Parquet needs pyarrow, which is not installed", "pip install 'vllm-harness[parquet]', or --format csv"
        ) from error
    columns = [*COLUMNS, *(key for key in OPTIONAL_KEYS if has_key(run, key))]
    kinds = {"string": pa.string(), "float64": pa.float64()}
    schema = pa.schema([(name, _kind(pa, kinds, name)) for name in columns])
    # a null or an unknown key is dealt with by Arrow's own reader of JSON lines, at a tenth of the time of ours
    reading = pj.ReadOptions(use_threads=False, block_size=2 * BLOCK_BYTES)
    parsing = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
    rows = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for block in _whole_lines(run.folder / REQUESTS):
            try:
                table = pj.read_json(io.BytesIO(block), read_options=reading, parse_options=parsing)
            except pa.ArrowInvalid as error:
                raise UsageError(f"{run.folder / REQUESTS}: not records: {error}") from error
            writer.write_table(table.select(columns))
            rows += len(table)
    return rows


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The file in blocks of whole lines; an unfinished last line is what a kill left of a write."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        while lines := stream.readlines(BLOCK_BYTES):
            if not lines[-1].endswith(b"\n"):
                lines.pop()
            if lines:
                yield b"".join(lines)


def _kind(pa: Any, kinds: dict[str, Any], name: str) -> Any:
    if name in _LISTS:
        return pa.list_(kinds[_LISTS[name]])
    if name in _INTEGERS:
        return pa.int64()
    return kinds["string" if name in _TEXT else "float64"]


def has_key(run: RunData, key: str) -> bool:
    """Whether any record of the run has an optional key. Looks at bytes: such a key is written only with a value."""
    wanted = f'"{key}":'.encode()
    return any(wanted in block for block in _blocks(run.folder / REQUESTS, overlap=len(wanted)))


def _blocks(path: Path, overlap: int, size: int = 1 << 24) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as stream:
        tail = b""
        while block := stream.read(size):
            yield tail + block
            tail = block[-overlap:]
