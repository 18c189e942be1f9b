"""Synthetic prompts of known length, unique in every request, so that no prefix cache can answer for the engine; but for a
beginning that they share where one is asked (:mod:`harness.workload.prefix`)."""

from __future__ import annotations

from random import Random
from typing import Any

from harness.workload.asked import PATHS, Answer, Asked, Endpoint, body_of
from harness.workload.lengths import Draw, drawer
from harness.workload.prefix import Prefixes
from harness.workload.text import TextPrompts, token_ids


class SyntheticWorkload:
    """Builds request bodies; the same seed, stage and request number always give the same prompt.

    Args:
        model: the name the server knows.
        endpoint: completions asks with token ids (exact lengths), chat with text.
        seed: of the run.
        text: how text lengths are learned; chat only.
        prefixes: the beginnings that prompts share; None: every prompt is its own.
    """

    remembers = False

    def __init__(
        self,
        model: str,
        endpoint: Endpoint,
        seed: int,
        text: TextPrompts | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self._model = model
        self._endpoint = endpoint
        self._seed = seed
        self._prefixes = prefixes
        self._lengths: dict[int, tuple[Draw, Draw]] = {}
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
        self._lengths[stage] = (drawer(prompt_tokens), drawer(output_tokens))

    def ask(self, stage: int, number: int, user: int = 0) -> Asked:
        """The ``number``-th request of ``stage``, whoever sends it."""
        draw = Random(f"{self._seed}/{stage}/{number}")
        prompt_length, output_length = self._lengths[stage]
        prompt_tokens, output_tokens = prompt_length(draw), output_length(draw)
        path = PATHS[self._endpoint]
        if self._endpoint == "completions":
            ids = self._ids(stage, number, prompt_tokens, draw)
            return Asked(
                path, body_of(self._model, "completions", ids, output_tokens), prompt_tokens, None, output_tokens
            )
        text, words = self._text(stage, number, prompt_tokens, draw)
        messages = [{"role": "user", "content": text}]
        return Asked(path, body_of(self._model, "chat", messages, output_tokens), None, words, output_tokens)

    def heard(self, asked: Asked, answer: Answer) -> None:
        if answer.good and asked.words is not None and answer.prompt_tokens is not None:
            self.text.learn(asked.words, answer.prompt_tokens)

    def _ids(self, stage: int, number: int, prompt_tokens: int, draw: Random) -> list[int]:
        shared = self._prefixes.of(stage, number) if self._prefixes is not None else None
        if shared is None:
            return token_ids(prompt_tokens, draw)
        # a shorter prompt is all prefix but for its last token
        beginning = shared.ids()[: prompt_tokens - 1]
        return beginning + token_ids(prompt_tokens - len(beginning), draw)

    def _text(self, stage: int, number: int, prompt_tokens: int, draw: Random) -> tuple[str, int]:
        shared = self._prefixes.of(stage, number) if self._prefixes is not None else None
        count = self.text.count(prompt_tokens)
        if shared is None:
            return self.text.words_of(count, draw), count
        common = min(self.text.count_within(shared.tokens), count - 1)
        if common < 1:
            return self.text.words_of(count, draw), count
        beginning = shared.words(common, self.text)
        return f"{beginning} {self.text.words_of(count - common, draw)}", count
