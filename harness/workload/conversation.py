"""Conversations: each request is a turn, sent with the turns before it, and with what the server answered to them.

A user's conversations depend on seed, stage, user and their number alone, in any worker; the answers in them are the
server's. A conversation ends with its last turn, with an answer that failed, or when the context is full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from harness.workload.asked import PATHS, Answer, Asked, Endpoint, body_of
from harness.workload.dataset import TOKENS_PER_CHARACTER, turns_of
from harness.workload.lengths import drawer
from harness.workload.rows import Row, RowFile, read_rows, start_of
from harness.workload.text import TextPrompts
from loadprofiles.workload import Conversation

Message = dict[str, str]

#: what a chat template puts around a question and the place of its answer: 8 tokens in ChatML and in Llama 3's, and as
#: many to spare
TURN_TOKENS = 16


@dataclass(slots=True)
class _Turn:
    """A question, the answer to it and what both hold, about."""

    question: str
    answer: str
    tokens: int


@dataclass(slots=True)
class _Talk:
    """A user's conversation as far as it went."""

    number: int
    draw: Random
    turns: int
    #: of a file: questions and answers; None: made up
    script: list[tuple[str, str]] | None = None
    past: list[_Turn] = field(default_factory=list)
    #: tokens of the last request and its answer, as the server counted them
    held: int | None = None
    #: turns asked so far
    asked: int = 0
    #: of the request under way
    question: str = ""
    question_tokens: int = 0
    output_tokens: int | None = None


def checked_rows(file: Path, spec: Conversation) -> Iterator[Row]:
    """The rows of a file that hold a question.

    Raises:
        UsageError: a row is no conversation; names file and line.
    """
    for row in read_rows(file):
        try:
            turns = turns_of(row.value)
        except ValueError as error:
            raise row.wrong(str(error)) from error
        if turns and turns[0][0]:
            yield row


class ConversationWorkload:
    """Users who talk.

    Args:
        rows: conversations of a file in the order in which they are used; None: made up.
        max_model_len: tokens a request may hold; None when unknown.
        tokens_per_character: of a file's text.
    """

    remembers = True

    def __init__(
        self,
        model: str,
        spec: Conversation,
        rows: RowFile | None,
        *,
        seed: int,
        stages: int,
        max_model_len: int | None,
        text: TextPrompts | None = None,
        tokens_per_character: float = TOKENS_PER_CHARACTER,
    ) -> None:
        self._model, self._spec, self._rows = model, spec, rows
        self._seed, self._stages, self._max_model_len = seed, stages, max_model_len
        self._rate = tokens_per_character
        self._turns, self._prompt, self._output = (
            drawer(spec.turns),
            drawer(spec.prompt_tokens),
            drawer(spec.output_tokens),
        )
        self._endpoint: Endpoint = spec.endpoint
        self.text = text or TextPrompts()
        self._system = ""
        if spec.system_tokens:
            self._system = self.text.words_of(self.text.count_within(spec.system_tokens), Random(f"{seed}/system"))
        self._talks: dict[tuple[int, int], _Talk] = {}
        #: stages in which the users of the one before go on with what they were saying
        self._goes_on: set[int] = set()

    def begin(
        self,
        stage: int,
        prompt_tokens: Any,
        output_tokens: Any,
        *,
        replay: bool = False,
        takes_over: bool = False,
    ) -> None:
        """Lengths are the conversation's."""
        self._talks = {key: talk for key, talk in self._talks.items() if key[0] >= stage - 1}
        if takes_over:
            self._goes_on.add(stage)

    def ask(self, stage: int, number: int, user: int = 0) -> Asked:
        """The user's next turn; ``number`` says which conversation of a file a new one is."""
        talk = self._talk(stage, number, user)
        self._next_turn(talk)
        if self._over(talk):
            talk = self._new(stage, number, user, talk.number + 1)
            self._next_turn(talk)
        prompt: Any = self._messages(talk)
        if self._endpoint == "completions":
            prompt = "\n".join(message["content"] for message in prompt)
        words = None
        if talk.script is None and not talk.past and self._spec.history != "none":
            words = talk.question.count(" ") + 1 + (self._system.count(" ") + 1 if self._system else 0)
        body = body_of(self._model, self._endpoint, prompt, talk.output_tokens)
        return Asked(PATHS[self._endpoint], body, None, words, talk.output_tokens)

    def heard(self, asked: Asked, answer: Answer) -> None:
        """What the server said becomes part of the next turn; a failed answer ends the conversation."""
        talk = self._talks.get((answer.stage, answer.user))
        if talk is None:
            return
        if not answer.good:
            talk.asked = talk.turns
            return
        if asked.words is not None and answer.prompt_tokens is not None:
            self.text.learn(asked.words, answer.prompt_tokens)
        if self._spec.history == "none":
            return
        said = answer.text or ""
        tokens = answer.output_tokens or talk.output_tokens or round(len(said) * self._rate)
        if self._spec.history == "made_up":
            said = self.text.words_of(self.text.count_within(tokens), talk.draw)
        talk.past.append(_Turn(talk.question, said, talk.question_tokens + tokens))
        if answer.prompt_tokens is not None:
            talk.held = answer.prompt_tokens + tokens

    def _talk(self, stage: int, number: int, user: int) -> _Talk:
        talk = self._talks.get((stage, user))
        if talk is None and stage in self._goes_on and (talk := self._talks.get((stage - 1, user))) is not None:
            self._talks[stage, user] = talk
        if talk is None:
            return self._new(stage, number, user, 0)
        return self._new(stage, number, user, talk.number + 1) if talk.asked >= talk.turns else talk

    def _new(self, stage: int, number: int, user: int, nth: int) -> _Talk:
        draw = Random(f"{self._seed}/{stage}/{user}/{nth}")
        talk = _Talk(nth, draw, self._turns(draw))
        if self._rows is not None:
            # no two requests have one number, so no two conversations begin at one row until the file is through
            place = start_of(stage, self._stages, len(self._rows)) + number
            talk.script = turns_of(self._rows[place % len(self._rows)])
            talk.turns = min(talk.turns, len(talk.script))
        self._talks[stage, user] = talk
        return talk

    def _next_turn(self, talk: _Talk) -> None:
        if talk.script is None:
            talk.question_tokens = self._prompt(talk.draw)
            talk.question = self.text.words_of(self.text.count_within(talk.question_tokens), talk.draw)
            talk.output_tokens = self._output(talk.draw)
        else:
            question, answer = talk.script[talk.asked]
            talk.question, talk.question_tokens = question, max(1, round(len(question) * self._rate))
            talk.output_tokens = max(1, round(len(answer) * self._rate)) if answer else self._output(talk.draw)
        talk.asked += 1
        most = self._spec.max_history_tokens
        while most is not None and talk.past and sum(turn.tokens for turn in talk.past) > most:
            talk.past.pop(0)
            talk.held = None

    def _over(self, talk: _Talk) -> bool:
        """The context is full: what is left cannot hold this turn and its answer."""
        if self._max_model_len is None or not talk.past:
            return False
        offset = max(0.0, self.text.offset)
        reckoned = sum(turn.tokens + TURN_TOKENS for turn in talk.past) + self._spec.system_tokens + offset
        held = reckoned if talk.held is None else talk.held
        return held + TURN_TOKENS + talk.question_tokens + (talk.output_tokens or 0) > self._max_model_len

    def _messages(self, talk: _Talk) -> list[Message]:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        for turn in talk.past:
            messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        return [*messages, {"role": "user", "content": talk.question}]
