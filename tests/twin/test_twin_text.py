"""The twin's language."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from harness.twin_text import (
    PIECE_BYTES,
    PIECES,
    STRIDE,
    VOCABULARY,
    WORDS,
    chat_tokens,
    pieces,
    text_of,
    tokenize,
    word_at,
)


@given(st.text(max_size=200))
def test_pieces_joined_are_the_text(text: str) -> None:
    assert "".join(pieces(text)) == text
    assert len(tokenize(text)) == len(pieces(text))


@given(st.lists(st.integers(0, WORDS - 1), max_size=50))
def test_what_the_twin_writes_it_reads_back(tokens: list[int]) -> None:
    assert tokenize(text_of(tokens)) == tokens


@given(st.text(max_size=50))
def test_ids_are_inside_the_vocabulary(text: str) -> None:
    assert all(0 <= token < VOCABULARY for token in tokenize(text))


def test_all_words_are_of_one_length_and_differ() -> None:
    assert {len(piece) for piece in PIECE_BYTES} == {5}
    assert len(set(PIECES)) == WORDS == 10_000


def test_an_answer_meets_every_word_before_one_comes_again() -> None:
    assert len({word_at(17, position) for position in range(WORDS)}) == WORDS
    assert word_at(17, 1) == (17 + STRIDE) % WORDS


def test_a_known_text_has_known_tokens() -> None:
    # pinned: a change would change every count a client has seen
    assert tokenize(" baba babe") == [0, 1]
    assert pieces("Hello there, you") == ["Hell", "o", " ther", "e,", " you"]


def test_a_turn_costs_its_role_and_its_end() -> None:
    one = chat_tokens([("user", " baba")])
    assert len(one) == 1 + 1 + 1 + 1
    assert chat_tokens([("user", " baba")], add_generation_prompt=False) == one[:-1]


def test_a_talk_sent_back_begins_with_what_was_sent_before() -> None:
    first = chat_tokens([("user", " baba")])
    answer = [5, 6, 7]
    second = chat_tokens([("user", " baba"), ("assistant", text_of(answer)), ("user", " more")])
    assert second[: len(first) + len(answer)] == first + answer
