"""Prompts: exact lengths, unique, reproducible; text lengths learned from the server."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from harness.errors import Unreachable
from harness.http_get import Answer
from harness.workload.asked import Answer as Heard
from harness.workload.asked import Asked, sampling
from harness.workload.learn import TextLaw, learn_text
from harness.workload.prefix import Prefixes
from harness.workload.synthetic import SyntheticWorkload
from harness.workload.text import TOKEN_IDS, WORDS, TextPrompts, numbers_below


def ask(workload: SyntheticWorkload, stage: int, number: int, prompt_tokens: Any, output_tokens: Any) -> Asked:
    workload.begin(stage, prompt_tokens, output_tokens)
    return workload.ask(stage, number)


def test_a_prompt_of_token_ids_has_exactly_the_asked_length() -> None:
    asked = ask(SyntheticWorkload("m", "completions", 0), 0, 0, 64, 16)
    body = json.loads(asked.body)
    assert (asked.path, asked.prompt_tokens, asked.words) == ("/v1/completions", 64, None)
    assert len(body["prompt"]) == 64
    assert all(TOKEN_IDS[0] <= token < TOKEN_IDS[1] for token in body["prompt"])


def test_an_answer_is_asked_to_be_exactly_as_long_and_streamed_with_usage() -> None:
    body = json.loads(ask(SyntheticWorkload("m", "completions", 0), 0, 0, 4, 16).body)
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
        return ask(SyntheticWorkload("m", "completions", seed), stage, number, 32, 4).body

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
    asked = ask(workload, 0, 0, 120, 16)
    text = json.loads(asked.body)["messages"][0]["content"]
    assert asked.words == len(text.split()) == 60
    assert set(text.split()) <= set(WORDS)
    assert asked.prompt_tokens is None, "the server's count alone is true"


def test_text_follows_what_the_server_counted() -> None:
    prompts = TextPrompts()
    assert prompts.count(100) == 100
    prompts.learn(100, 131)
    assert prompts.count(100) == 69
    assert len(prompts.words_of(69, Random("x")).split()) == 69


def test_a_workload_learns_from_good_answers_only() -> None:
    workload = SyntheticWorkload("m", "chat", 0)
    asked = ask(workload, 0, 0, 100, 4)
    known: dict[str, Any] = {"stage": 0, "user": 0, "output_tokens": 4, "text": None}
    workload.heard(asked, Heard(good=False, prompt_tokens=131, **known))
    workload.heard(asked, Heard(good=True, prompt_tokens=None, **known))
    assert workload.text.offset == 0
    workload.heard(asked, Heard(good=True, prompt_tokens=131, **known))
    assert workload.text.offset == 31


def test_lengths_are_drawn_by_the_request_itself() -> None:
    spread = {"distribution": "uniform", "low": 10, "high": 20}
    drawn = {}
    for number in range(200):
        asked = ask(SyntheticWorkload("m", "completions", 1), 0, number, spread, {**spread, "high": 30})
        assert asked.prompt_tokens == len(json.loads(asked.body)["prompt"])
        assert json.loads(asked.body)["max_tokens"] == asked.output_tokens
        drawn[number] = (asked.prompt_tokens, asked.output_tokens)
    assert {prompt for prompt, _ in drawn.values()} == set(range(10, 21))
    assert {output for _, output in drawn.values()} == set(range(10, 31))
    again = ask(SyntheticWorkload("m", "completions", 1), 0, 77, spread, {**spread, "high": 30})
    assert (again.prompt_tokens, again.output_tokens) == drawn[77], "in any worker, and whatever was asked before"


def shared(endpoint: Any = "completions", **prefix: Any) -> SyntheticWorkload:
    given = {"tokens": 40, "share": 1.0, "prefixes": 1, "reuse": None, "seed": 3, **prefix}
    text = TextPrompts(offset=10, tokens_per_word=1.0)
    return SyntheticWorkload("m", endpoint, 3, text, Prefixes(**given))


def test_a_shared_prefix_is_part_of_the_prompt_and_the_rest_is_unique() -> None:
    prompts = [json.loads(ask(shared(), 0, number, 64, 4).body)["prompt"] for number in range(20)]
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 1
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 20


def test_the_reuse_of_a_prefix_is_exact() -> None:
    """Of 1,000 requests half share, round 5 prefixes, each replaced after 10 uses: 50 prefixes, 10 uses each."""
    workload = shared(share=0.5, prefixes=5, reuse=10)
    begins: dict[tuple[int, ...], int] = {}
    for number in range(1000):
        prompt = tuple(json.loads(ask(workload, 0, number, 64, 4).body)["prompt"][:40])
        begins[prompt] = begins.get(prompt, 0) + 1
    uses = [count for count in begins.values() if count > 1]
    assert (len(uses), set(uses)) == (50, {10})
    assert len(begins) == 50 + 500


def test_a_stage_begins_with_prefixes_that_no_stage_before_it_had() -> None:
    first, second = (json.loads(ask(shared(), stage, 0, 64, 4).body)["prompt"][:40] for stage in (0, 1))
    assert first != second


def test_a_prompt_shorter_than_the_prefix_is_all_prefix_but_for_its_last_token() -> None:
    long, short = (json.loads(ask(shared(), 0, 0, tokens, 4).body)["prompt"] for tokens in (64, 20))
    assert len(short) == 20
    assert short[:19] == long[:19]
    assert short[19] != long[19]


def test_a_shared_prefix_of_text_is_the_same_words() -> None:
    texts = [json.loads(ask(shared("chat"), 0, n, 90, 4).body)["messages"][0]["content"].split() for n in range(10)]
    assert {len(text) for text in texts} == {80}
    assert len({tuple(text[:40]) for text in texts}) == 1
    assert len({tuple(text[40:]) for text in texts}) == 10


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
