"""Requests of a recorded trace: lengths, shared beginnings where it has hashes, and times.

Mooncake's lines have ``hash_ids``, one for each block of 512 prompt tokens; requests with equal first ids had equal first
blocks (kvcache-ai/Mooncake, FAST25-release/traces). A block's content is made of its id, so that the prompts share what
those of the trace shared. Azure's and BurstGPT's tables have lengths only: every prompt is its own.
"""

from __future__ import annotations

import csv
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.errors import UsageError
from harness.workload.asked import PATHS, Answer, Asked, Endpoint, body_of
from harness.workload.rows import Places, RowFile, places_of, read_rows, start_of
from harness.workload.text import TextPrompts, token_ids
from loadprofiles.workload import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_MS = 1e-3
#: blocks kept made
KEPT_BLOCKS = 4096
#: columns of BurstGPT (HPMLL/BurstGPT, data/BurstGPT_1.csv): seconds, tokens
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


@dataclass(frozen=True, slots=True)
class TraceTable:
    """A trace as columns, ascending in time; shape (n,) each."""

    #: seconds since the first request, of the trace's own time
    at_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    #: where each request's line stands in the file, shape (n, 2); None where it has no hashes
    places: Places | None
    #: requests that could not be asked, and why
    left_out: dict[str, int]


def read_trace(file: Path, spec: Trace, max_model_len: int | None = None) -> TraceTable:
    """Read a trace; a request that could not be asked is left out and counted.

    Args:
        max_model_len: tokens a request may hold; None when unknown.

    Raises:
        UsageError: a line has no time or length, or there is no request; names file and line.
    """
    kept: list[tuple[float, int, int]] = []
    places: list[tuple[int, int]] = []
    left_out: dict[str, int] = {}
    rows = _mooncake(file) if spec.format == "mooncake" else _table(file, spec)
    for at, prompt, output, place in rows:
        why = _impossible(prompt, output, max_model_len)
        if why is not None:
            left_out[why] = left_out.get(why, 0) + 1
            continue
        kept.append((at, prompt, output))
        if place is not None:
            places.append(place)
        if len(kept) == spec.max_rows:
            break
    if not kept:
        raise UsageError(f"{file}: no request that could be asked", "; ".join(left_out) or "the file is empty")
    columns = np.array(kept, dtype=np.float64)
    order = np.argsort(columns[:, 0], kind="stable")
    columns = columns[order]
    return TraceTable(
        at_s=columns[:, 0] - columns[0, 0],
        prompt_tokens=columns[:, 1].astype(np.int64),
        output_tokens=columns[:, 2].astype(np.int64),
        places=places_of(places)[order] if places else None,
        left_out=left_out,
    )


def _impossible(prompt: int, output: int, max_model_len: int | None) -> str | None:
    if output < 1 or prompt < 1:
        return "without tokens (the trace's own failures)"
    if max_model_len is not None and prompt + output > max_model_len:
        return f"longer than the server's max_model_len of {max_model_len}"
    return None


_Found = tuple[float, int, int, tuple[int, int] | None]


def _mooncake(file: Path) -> Iterator[_Found]:
    for row in read_rows(file):
        value = row.value
        try:
            at, prompt, output = (value[key] for key in ("timestamp", "input_length", "output_length"))
            found = (float(at) * _MS, int(prompt), int(output), (row.offset, row.length))
        except KeyError as error:
            raise row.wrong(f"expected timestamp, input_length and output_length: {error} is missing") from error
        except (TypeError, ValueError) as error:
            raise row.wrong(f"expected numbers in timestamp, input_length and output_length: {error}") from error
        hashes = value.get("hash_ids")
        if hashes is not None and not isinstance(hashes, list):
            raise row.wrong(f"expected hash_ids as a list, not {hashes!r}")
        yield found


def _table(file: Path, spec: Trace) -> Iterator[_Found]:
    named = (spec.timestamp_column, spec.prompt_tokens_column, spec.output_tokens_column)
    columns = BURSTGPT if spec.format == "burstgpt" else named
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            header = next(reader, [])
            if missing := [name for name in columns if name not in header]:
                raise UsageError(
                    f"{file}:1: column {missing[0]!r} is missing; there are {', '.join(header) or 'none'}",
                    "name the columns: workload.timestamp_column, prompt_tokens_column, output_tokens_column",
                )
            where = [header.index(name) for name in columns]
            for cells in reader:
                if cells:
                    yield _cells(file, reader.line_num, cells, where, columns)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", "give the path of a file") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{file} is no CSV table: {error}") from error


def _cells(file: Path, line: int, cells: Sequence[str], where: Sequence[int], columns: Sequence[str]) -> _Found:
    name = columns[0]
    try:
        at = _seconds(cells[where[0]])
        name = columns[1]
        prompt = int(float(cells[where[1]]))
        name = columns[2]
        return at, prompt, int(float(cells[where[2]])), None
    except IndexError as error:
        raise UsageError(f"{file}:{line}: {len(cells)} cells, {name!r} is missing") from error
    except ValueError as error:
        raise UsageError(f"{file}:{line}: {name}: {error}") from error


def _seconds(text: str) -> float:
    """A number of seconds, or a date and time (read as UTC where it names no zone)."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def due_s(table: TraceTable, speed: float, duration_s: float | None, requests: int | None) -> Floats:
    """When the requests of a replay are due, seconds from the stage's start."""
    times = table.at_s / speed
    if duration_s is not None:
        times = times[times < duration_s]
    return times[:requests]


class TraceWorkload:
    """Asks the requests of a trace in its order; round and round where a stage asks for more.

    Args:
        prompt_tokens, output_tokens: of each request.
        rows: the lines of the trace, for their hashes; None where it has none.
    """

    remembers = False

    def __init__(
        self,
        model: str,
        spec: Trace,
        prompt_tokens: Ints,
        output_tokens: Ints,
        rows: RowFile | None,
        *,
        seed: int,
        stages: int,
        text: TextPrompts | None = None,
    ) -> None:
        self._model, self._spec, self._rows = model, spec, rows
        self._prompt_tokens, self._output_tokens = prompt_tokens, output_tokens
        self._seed, self._stages = seed, stages
        self._replayed: set[int] = set()
        self._endpoint: Endpoint = spec.endpoint
        self._blocks: OrderedDict[tuple[int, int], list[int]] = OrderedDict()
        self.text = text or TextPrompts()

    def begin(
        self,
        stage: int,
        prompt_tokens: Any,
        output_tokens: Any,
        *,
        replay: bool = False,
        takes_over: bool = False,
    ) -> None:
        """Lengths are the trace's."""
        if replay:
            self._replayed.add(stage)

    def ask(self, stage: int, number: int, user: int = 0) -> Asked:
        n = len(self._prompt_tokens)
        # times begin with the first request, so does a replay
        start = 0 if stage in self._replayed else start_of(stage, self._stages, n)
        position = (start + number) % n
        prompt_tokens, output_tokens = int(self._prompt_tokens[position]), int(self._output_tokens[position])
        hashes = self._rows[position].get("hash_ids") if self._rows is not None else None
        # once round, the same request is asked again: it may come from the cache, as nothing new is known to ask
        draw = Random(f"{self._seed}/{stage}/{number}")
        path = PATHS[self._endpoint]
        if self._endpoint == "completions":
            ids = self._ids(stage, hashes or (), prompt_tokens, draw)
            return Asked(
                path, body_of(self._model, "completions", ids, output_tokens), prompt_tokens, None, output_tokens
            )
        text, words = self._text(stage, hashes or (), prompt_tokens, draw)
        messages = [{"role": "user", "content": text}]
        return Asked(path, body_of(self._model, "chat", messages, output_tokens), None, words, output_tokens)

    def _ids(self, stage: int, hashes: Sequence[int], prompt_tokens: int, draw: Random) -> list[int]:
        ids: list[int] = []
        for key in hashes[: -(-prompt_tokens // self._spec.hash_block_tokens)]:
            ids += self._block(stage, key)
        del ids[prompt_tokens:]
        return ids + token_ids(prompt_tokens - len(ids), draw) if len(ids) < prompt_tokens else ids

    def _block(self, stage: int, key: int) -> list[int]:
        known = self._blocks.get((stage, key))
        if known is None:
            known = token_ids(self._spec.hash_block_tokens, Random(f"{self._seed}/{stage}/block/{key}"))
            self._blocks[stage, key] = known
            if len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return known

    def _text(self, stage: int, hashes: Sequence[int], prompt_tokens: int, draw: Random) -> tuple[str, int]:
        count = self.text.count(prompt_tokens)
        per_block = self.text.count_within(self._spec.hash_block_tokens)
        parts, left = [], count
        for key in hashes:
            if left < per_block:
                break
            parts.append(self.text.words_of(per_block, Random(f"{self._seed}/{stage}/block/{key}")))
            left -= per_block
        if left:
            parts.append(self.text.words_of(left, draw))
        return " ".join(parts), count

    def heard(self, asked: Asked, answer: Answer) -> None:
        if answer.good and asked.words is not None and answer.prompt_tokens is not None:
            self.text.learn(asked.words, answer.prompt_tokens)
