"""Prompts of a file: a line of JSON each with a prompt, or ShareGPT's conversations, of which the first question is asked.

The length of an answer is the profile's, else that of the file's own answer. A file gives text, not tokens: its answers'
tokens are reckoned from their characters at the rate that the server's ``/tokenize`` told of a few of them. Both are in
the record: what was asked and what came.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Literal

from harness.errors import UsageError
from harness.workload.asked import PATHS, Answer, Asked, Endpoint, body_of
from harness.workload.lengths import Draw, drawer
from harness.workload.rows import Row, RowFile, read_rows, start_of
from loadprofiles.workload import Dataset

#: tokens of a character of text where the server does not say: four characters a token, as English has in most tokenizers
TOKENS_PER_CHARACTER = 0.25
HUMAN, MODEL = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")


def turns_of(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Questions and their answers of a row of ShareGPT (``conversations`` of ``from`` and ``value``) or of chat messages
    (``messages`` of ``role`` and ``content``); a last question without an answer has an empty one.

    Raises:
        ValueError: it is neither.
    """
    said = row.get("conversations", row.get("messages"))
    if not isinstance(said, list):
        raise ValueError("expected 'conversations' or 'messages', a list")
    turns: list[tuple[str, str]] = []
    for part in said:
        speaker, text = _spoken(part)
        if speaker in HUMAN:
            turns.append((text, ""))
        elif speaker in MODEL and turns and not turns[-1][1]:
            turns[-1] = (turns[-1][0], text)
    return turns


def _spoken(part: Any) -> tuple[str, str]:
    speaker = part.get("from", part.get("role")) if isinstance(part, dict) else None
    text = part.get("value", part.get("content")) if isinstance(part, dict) else None
    if not isinstance(speaker, str) or not isinstance(text, str):
        raise ValueError("expected 'from' and 'value' (or 'role' and 'content') in every part of a conversation")
    return speaker, text


def format_of(file: Path) -> Literal["sharegpt", "jsonl"]:
    """What a file looks like, by its first row.

    Raises:
        UsageError: it cannot be read, or holds no row.
    """
    for row in read_rows(file):
        said = "conversations" in row.value or ("messages" in row.value and "prompt" not in row.value)
        return "sharegpt" if said else "jsonl"
    raise UsageError(f"{file} is empty", "give ShareGPT-like JSON, or JSONL with a prompt a line")


def prompt_of(row: dict[str, Any], spec: Dataset) -> Any:
    """What is asked of a row: text, token ids or messages; None where the row asks nothing.

    Raises:
        ValueError: it does not say.
    """
    if spec.format == "sharegpt":
        turns = turns_of(row)
        return turns[0][0] if turns and turns[0][0] else None
    prompt = row.get(spec.prompt_field)
    if isinstance(prompt, str):
        return prompt or None
    if isinstance(prompt, list) and prompt and all(isinstance(part, int) for part in prompt):
        if spec.endpoint == "chat":
            raise ValueError(f"{spec.prompt_field}: token ids can only be sent to completions")
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(part, dict) and "role" in part for part in prompt):
        if spec.endpoint == "completions":
            raise ValueError(f"{spec.prompt_field}: messages can only be sent to chat")
        return prompt
    raise ValueError(f"expected {spec.prompt_field!r}: text, token ids or messages, not {_short(prompt)}")


def answer_of(row: dict[str, Any], spec: Dataset) -> str | int | None:
    """The file's answer: its text, or its length in tokens; None where there is none.

    Raises:
        ValueError: it is neither.
    """
    if spec.format == "sharegpt":
        turns = turns_of(row)
        return turns[0][1] or None if turns else None
    if spec.output_field is None:
        return None
    answer = row.get(spec.output_field)
    if isinstance(answer, bool) or not isinstance(answer, str | int | None) or (isinstance(answer, int) and answer < 1):
        raise ValueError(f"expected {spec.output_field!r}: text or a number of tokens, not {_short(answer)}")
    return answer or None


def _short(value: Any) -> str:
    shown = "nothing" if value is None else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def checked_rows(file: Path, spec: Dataset) -> Iterator[Row]:
    """The rows that ask something, up to ``max_rows``.

    Raises:
        UsageError: a row does not say what to ask, or how long an answer of completions is to be; names file and line.
    """
    kept = 0
    for row in read_rows(file):
        try:
            prompt, answer = prompt_of(row.value, spec), answer_of(row.value, spec)
        except ValueError as error:
            raise row.wrong(str(error)) from error
        if prompt is None:
            continue
        if answer is None and spec.output_tokens is None and spec.endpoint == "completions":
            raise row.wrong(
                "no answer to take the length from, and completions ends after 16 tokens when no length is asked",
                "give workload.output_tokens, or endpoint: chat",
            )
        kept += 1
        yield row
        if kept == spec.max_rows:
            return


class DatasetWorkload:
    """Asks the rows of a file, one after another from where the stage begins; round and round.

    Args:
        rows: in the order in which they are asked.
        stages: of the run.
        tokens_per_character: of the file's answers.
    """

    remembers = False

    def __init__(
        self,
        model: str,
        spec: Dataset,
        rows: RowFile,
        *,
        seed: int,
        stages: int,
        tokens_per_character: float = TOKENS_PER_CHARACTER,
    ) -> None:
        if not len(rows):
            raise UsageError(f"{spec.file}: no row asks anything")
        self._model, self._spec, self._rows = model, spec, rows
        self._seed, self._stages, self._rate = seed, stages, tokens_per_character
        self._length: Draw | None = None if spec.output_tokens is None else drawer(spec.output_tokens)
        self._endpoint: Endpoint = spec.endpoint

    def begin(
        self,
        stage: int,
        prompt_tokens: Any,
        output_tokens: Any,
        *,
        replay: bool = False,
        takes_over: bool = False,
    ) -> None:
        """Lengths are the file's."""

    def ask(self, stage: int, number: int, user: int = 0) -> Asked:
        position = (start_of(stage, self._stages, len(self._rows)) + number) % len(self._rows)
        row = self._rows[position]
        prompt = prompt_of(row, self._spec)
        output_tokens = self._output_tokens(row, stage, number)
        if self._endpoint == "chat" and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        known = len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], int) else None
        body = body_of(self._model, self._endpoint, prompt, output_tokens)
        return Asked(PATHS[self._endpoint], body, known, None, output_tokens)

    def _output_tokens(self, row: dict[str, Any], stage: int, number: int) -> int | None:
        if self._length is not None:
            return self._length(Random(f"{self._seed}/{stage}/{number}"))
        answer = answer_of(row, self._spec)
        return max(1, round(len(answer) * self._rate)) if isinstance(answer, str) else answer

    def heard(self, asked: Asked, answer: Answer) -> None:
        """The file is as it is."""
