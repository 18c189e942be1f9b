"""A profile's workload -> what every worker can build its own from: rows found and checked once, before anything is sent.

Where rows stand in a file is written to a temporary folder as arrays, which workers map: a file of millions of rows costs
each of them a few bytes a row and is never in memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from pydantic import TypeAdapter

from harness.errors import UsageError
from harness.workload import conversation, dataset
from harness.workload.asked import Endpoint, Workload
from harness.workload.conversation import ConversationWorkload
from harness.workload.dataset import TOKENS_PER_CHARACTER, DatasetWorkload, answer_of, turns_of
from harness.workload.lengths import mean_length, plain
from harness.workload.prefix import Prefixes
from harness.workload.rows import Places, Row, RowFile, places_of
from harness.workload.synthetic import SyntheticWorkload
from harness.workload.text import TextPrompts
from harness.workload.trace import TraceTable, TraceWorkload, due_s, read_trace
from loadprofiles.profile import Profile, Stage
from loadprofiles.workload import Conversation, Dataset, Synthetic, Trace
from loadprofiles.workload import Workload as Spec

#: answers of a file that the server is asked to count, to tell tokens from characters
SAMPLES = 16
_SPEC: TypeAdapter[Spec] = TypeAdapter(Spec)
_PLACES, _LENGTHS = "places.npy", "lengths.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A workload with its files looked through."""

    spec: Spec
    #: temporary files of places and lengths; None where there are none
    folder: str | None = None
    #: that may be run at most
    stages: int = 1
    max_model_len: int | None = None
    table: TraceTable | None = None
    #: texts of the file, for :func:`harness.workload.learn.learn_rate`
    samples: Sequence[str] = ()
    tokens_per_character: float = TOKENS_PER_CHARACTER
    #: what was left out of the files and why
    notes: tuple[str, ...] = field(default=())

    def for_workers(self) -> dict[str, Any]:
        """As JSON, for :func:`build`."""
        return {
            "spec": self.spec.model_dump(mode="json", exclude_none=True),
            "folder": self.folder,
            "stages": self.stages,
            "max_model_len": self.max_model_len,
            "tokens_per_character": self.tokens_per_character,
        }

    def with_rate(self, tokens_per_character: float) -> Prepared:
        return replace(self, tokens_per_character=tokens_per_character)

    def due_s(self, stage: Stage) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
        """When a stage that replays is to ask, seconds from its start; None for any other stage."""
        if not stage.replay or self.table is None or not isinstance(self.spec, Trace):
            return None
        return due_s(self.table, self.spec.speed, stage.duration, stage.requests)

    def mean_rate(self, stage: Stage) -> float | None:
        """Mean arrivals a second of a stage that replays; None for any other."""
        due = self.due_s(stage)
        if due is None:
            return None
        if not len(due):
            raise UsageError(f"{self._file}: no request of the trace is due within the stage")
        span_s = float(due[-1]) if stage.duration is None else stage.duration
        return len(due) / span_s if span_s > 0 else float(len(due))

    @property
    def _file(self) -> str:
        return getattr(self.spec, "file", None) or "the workload"

    @property
    def shares_prompts(self) -> bool:
        """Prompts may have beginnings in common, so that hits of the server's prefix cache are no sign of trouble."""
        return not isinstance(self.spec, Synthetic) or self.spec.shared_prefix is not None

    def mean_lengths(self, stage: Stage) -> tuple[float, float] | None:
        """Mean prompt and output tokens asked; None where only the run will tell."""
        if isinstance(self.spec, Synthetic):
            return mean_length(plain(stage.prompt_tokens)), mean_length(plain(stage.output_tokens))
        if self.table is not None:
            due = self.due_s(stage)
            asked = slice(None if due is None else len(due))
            return float(self.table.prompt_tokens[asked].mean()), float(self.table.output_tokens[asked].mean())
        return None


@contextmanager
def prepared(profile: Profile, *, seed: int, max_model_len: int | None) -> Iterator[Prepared]:
    """Look through the workload's files; what it needs of them lasts as long as the context.

    Args:
        profile: resolved.
        max_model_len: tokens a request may hold; None when unknown.

    Raises:
        UsageError: a file cannot be read, or a line of it cannot be asked; names file and line.
    """
    spec = profile.workload
    # a search's one stage is the pattern of all its probes
    stages = len(profile.stages) if profile.search is None else profile.search.max_probes
    if isinstance(spec, Conversation) and any(stage.request_rate is not None for stage in profile.stages):
        raise UsageError(
            f"{profile.name}: a conversation needs users: with a request_rate nobody would wait for the answer",
            "give the stages users in place of request_rate",
        )
    known = Prepared(spec=spec, stages=stages, max_model_len=max_model_len)
    if isinstance(spec, Synthetic) or (isinstance(spec, Conversation) and spec.file is None):
        yield known
        return
    with tempfile.TemporaryDirectory(prefix="vllm-harness-") as folder:
        if isinstance(spec, Trace):
            yield _trace(replace(known, folder=folder), spec, Path(folder))
        else:
            yield _rows(replace(known, folder=folder), seed, Path(folder))


def _trace(known: Prepared, spec: Trace, folder: Path) -> Prepared:
    table = read_trace(Path(spec.file), spec, known.max_model_len)
    np.save(folder / _LENGTHS, np.column_stack([table.prompt_tokens, table.output_tokens]))
    if table.places is not None:
        np.save(folder / _PLACES, table.places)
    notes = tuple(f"{spec.file}: {count} requests left out: {why}" for why, count in table.left_out.items())
    return replace(known, table=table, notes=notes)


def _rows(known: Prepared, seed: int, folder: Path) -> Prepared:
    spec = known.spec
    assert isinstance(spec, Dataset | Conversation)
    assert spec.file is not None
    file = Path(spec.file)
    rows = dataset.checked_rows(file, spec) if isinstance(spec, Dataset) else conversation.checked_rows(file, spec)
    samples: list[str] = []
    places = _collected(rows, spec, samples)
    if not len(places):
        raise UsageError(f"{file}: no row asks anything", "see the README for what a row looks like")
    if spec.order == "shuffled":
        places = places[np.random.default_rng(seed).permutation(len(places))]
    np.save(folder / _PLACES, places)
    return replace(known, samples=tuple(samples))


def _collected(rows: Iterable[Row], spec: Dataset | Conversation, samples: list[str]) -> Places:
    blocks: list[Places] = []
    rows = iter(rows)
    while block := [(row.offset, row.length) for row in _sampled(islice(rows, 65_536), spec, samples)]:
        blocks.append(places_of(block))
    return np.concatenate(blocks) if blocks else places_of([])


def _sampled(rows: Iterable[Row], spec: Dataset | Conversation, samples: list[str]) -> Iterator[Row]:
    """The rows, the text of the first answers kept whose tokens will have to be reckoned."""
    for row in rows:
        if len(samples) < SAMPLES:
            if isinstance(spec, Conversation):
                samples.append(" ".join(answer or question for question, answer in turns_of(row.value))[:8192])
            elif spec.output_tokens is None and isinstance(answer := answer_of(row.value, spec), str):
                samples.append(answer[:8192])
        yield row


def build(known: dict[str, Any], *, model: str, endpoint: Endpoint, seed: int, text: TextPrompts) -> Workload:
    """A worker's own workload from :meth:`Prepared.for_workers`; of nothing, plain synthetic prompts."""
    known = known or Prepared(spec=Synthetic()).for_workers()
    spec: Spec = _SPEC.validate_json(orjson.dumps(known["spec"]))
    folder = None if known["folder"] is None else Path(known["folder"])
    stages, rate = known["stages"], known["tokens_per_character"]
    if isinstance(spec, Synthetic):
        shared = spec.shared_prefix
        made = None if shared is None else Prefixes(shared.tokens, shared.share, shared.prefixes, shared.reuse, seed)
        return SyntheticWorkload(model, endpoint, seed, text, made)
    rows = None
    if folder is not None and spec.file is not None and (folder / _PLACES).is_file():
        rows = RowFile(Path(spec.file), np.load(folder / _PLACES, mmap_mode="r"))
    if isinstance(spec, Trace):
        assert folder is not None
        lengths = np.load(folder / _LENGTHS, mmap_mode="r")
        columns = lengths[:, 0], lengths[:, 1]
        return TraceWorkload(model, spec, *columns, rows, seed=seed, stages=stages, text=text)
    if isinstance(spec, Dataset):
        assert rows is not None
        return DatasetWorkload(model, spec, rows, seed=seed, stages=stages, tokens_per_character=rate)
    return ConversationWorkload(
        model,
        spec,
        rows,
        seed=seed,
        stages=stages,
        max_model_len=known["max_model_len"],
        text=text,
        tokens_per_character=rate,
    )
