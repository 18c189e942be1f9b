"""The twin's language: a tokenizer both ways, the same in every run and on every machine.

Token ids below :data:`WORDS` are words of four letters with a space before (" kotu"); the twin writes nothing else, and
reading its own output gives the ids back. Any other text is cut into pieces of at most four characters, with the
space before them; their ids follow from a checksum. So counts of `usage`, `/tokenize` and the engine agree, and a
conversation sent back hits the prefix cache where it should.
"""

from __future__ import annotations

import re
from itertools import product
from zlib import crc32

_CONSONANTS, _VOWELS = "bdfghjklmnprstvwzcxq", "aeiou"

#: the words the twin writes, by token id; all of one length in bytes
PIECES = tuple(" " + "".join(letters) for letters in product(_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS))
PIECE_BYTES = tuple(piece.encode() for piece in PIECES)
WORDS = len(PIECES)
#: an answer takes every STRIDE-th word; without a common factor with WORDS it meets each before one comes again
STRIDE = 7_919
VOCABULARY = 32_000
#: what stands for the ends and roles of chat turns
_SPECIAL = {"<|end|>": VOCABULARY, "system": VOCABULARY + 1, "user": VOCABULARY + 2, "assistant": VOCABULARY + 3}
_OTHER_ROLE = VOCABULARY + 4

_ID = {piece: token for token, piece in enumerate(PIECES)}
_PIECE = re.compile(r" ?[^\s]{1,4}|\s")


def pieces(text: str) -> list[str]:
    """``text`` cut into tokens; joined they are the text again."""
    return _PIECE.findall(text)


def tokenize(text: str) -> list[int]:
    """Token ids of ``text``."""
    return [token_id(piece) for piece in _PIECE.findall(text)]


def token_id(piece: str) -> int:
    known = _ID.get(piece)
    return known if known is not None else WORDS + crc32(piece.encode("utf-8", "surrogatepass")) % (VOCABULARY - WORDS)


def chat_tokens(messages: list[tuple[str, str]], add_generation_prompt: bool = True) -> list[int]:
    """Token ids of (role, content) turns: a role and an end token around each, and the assistant's role at the end."""
    tokens: list[int] = []
    for role, content in messages:
        tokens.append(_SPECIAL.get(role, _OTHER_ROLE))
        tokens.extend(tokenize(content))
        tokens.append(_SPECIAL["<|end|>"])
    if add_generation_prompt:
        tokens.append(_SPECIAL["assistant"])
    return tokens


def text_of(tokens: list[int]) -> str:
    """Text of output ids (all below :data:`WORDS`)."""
    return "".join(PIECES[token] for token in tokens)


def word_at(first: int, position: int) -> int:
    """Token id at ``position`` of the answer that begins with word ``first``."""
    return (first + position * STRIDE) % WORDS
