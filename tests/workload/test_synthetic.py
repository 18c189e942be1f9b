"""Prompts: exact lengths, unique, reproducible; text lengths learned from the server."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from harness.errors import Unreachable
from harness.http_get import Answer
from harness.workload.learn import TextLaw, learn_text
from harness.workload.synthetic import TOKEN_IDS, WORDS, SyntheticWorkload, TextPrompts, numbers_below, sampling


def test_a_prompt_of_token_ids_has_exactly_the_asked_length() -> None:
    asked = SyntheticWorkload("m", "completions", 0).ask(0, 0, 64, 16)
    body = json.loads(asked.body)
    assert (asked.path, asked.prompt_tokens, asked.words) == ("/v1/completions", 64, None)
    assert len(body["prompt"]) == 64
    assert all(TOKEN_IDS[0] <= token < TOKEN_IDS[1] for token in body["prompt"])


def test_an_answer_is_asked_to_be_exactly_as_long_and_streamed_with_usage() -> None:
    body = json.loads(SyntheticWorkload("m", "completions", 0).ask(0, 0, 4, 16).body)
    assert {key: body[key] for key in sampling(16)} == {
        "max_tokens": 16,
        "min_tokens": 16,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_prompts_differ_by_seed_stage_and_number_and_repeat_with_them() -> None:
    def prompt(seed: int, stage: int, number: int) -> bytes:
        return SyntheticWorkload("m", "completions", seed).ask(stage, number, 32, 4).body

    bodies = {prompt(seed, stage, number) for seed in range(3) for stage in range(3) for number in range(20)}
    assert len(bodies) == 180
    assert prompt(2, 1, 7) == prompt(2, 1, 7)


def test_numbers_stay_below_their_bound_and_cover_it() -> None:
    drawn = numbers_below(97, 20_000, Random("x"))
    assert len(drawn) == 20_000
    assert set(drawn) == set(range(97))
    assert max(numbers_below(65_536, 1000, Random("x"))) > 60_000


def test_a_chat_prompt_is_text_of_about_the_asked_length() -> None:
    workload = SyntheticWorkload("m", "chat", 0, TextPrompts(offset=30.0, tokens_per_word=1.5))
    asked = workload.ask(0, 0, 120, 16)
    text = json.loads(asked.body)["messages"][0]["content"]
    assert asked.words == len(text.split()) == 60
    assert set(text.split()) <= set(WORDS)
    assert asked.prompt_tokens is None, "the server's count alone is true"


def test_text_follows_what_the_server_counted() -> None:
    prompts = TextPrompts()
    _, words = prompts.text(100, Random("x"))
    assert words == 100
    prompts.learn(words, 131)
    assert prompts.text(100, Random("x"))[1] == 69


class Server:
    """A /tokenize that counts ``per_word`` tokens a word and ``template`` besides."""

    def __init__(self, per_word: float, template: int, status: int = 200, body: bytes | None = None) -> None:
        self.per_word, self.template, self.status, self.body = per_word, template, status, body

    async def post_json(self, url: str, body: dict[str, Any], *, timeout_s: float | None = None) -> Answer:
        assert url.endswith("/tokenize")
        count = round(self.template + self.per_word * len(body["messages"][0]["content"].split()))
        content = self.body if self.body is not None else json.dumps({"count": count}).encode()
        return Answer(url=url, status=self.status, body=content, headers={}, started_ns=0, ended_ns=1)


async def test_the_law_of_a_tokenizer_is_learned_from_two_lengths() -> None:
    law = await learn_text(Server(1.25, 12), "http://x", "m")  # type: ignore[arg-type]
    assert law == TextLaw(offset=12.0, tokens_per_word=1.25, asked=True)


@pytest.mark.parametrize(
    "server", [Server(1, 0, status=404), Server(1, 0, body=b"data: x"), Server(1, 0, body=b"[]"), Server(0, 5)]
)
async def test_without_a_useful_tokenize_usage_will_have_to_tell(server: Server) -> None:
    assert await learn_text(server, "http://x", "m") == TextLaw()  # type: ignore[arg-type]


async def test_a_server_that_does_not_answer_tokenize_is_no_reason_to_stop() -> None:
    class Silent:
        async def post_json(self, url: str, body: dict[str, Any], *, timeout_s: float | None = None) -> Answer:
            raise Unreachable("no answer")

    assert await learn_text(Silent(), "http://x", "m") == TextLaw()  # type: ignore[arg-type]
