"""The bytes that all chunks of a stream have in common, so that most need no JSON parser.

A server repeats a chunk token after token with nothing changed but the text, and with ``return_token_ids`` the id. A
template is learned from one chunk that was parsed in full, proved by parsing it again with other contents, and from
then on gives for a read either exactly what the parser would give, or None: then the read goes the long way. On two
cores of an EPYC server that is 0.8 microseconds a token instead of 4 (``tests/bench/bench_decode.py``).
"""

from __future__ import annotations

import re
from typing import Final

from harness.wire.openai import Chunk, Delta, Endpoint, WireError, read_event

#: the same number of digits always is a JSON integer that fits
_ID_DIGITS: Final = 15
#: a list of one id; no string literal can hold this, its quotes would be escaped
_ONE_ID: Final = re.compile(rb'"token_ids": ?\[(\d+)\]')
_PROBE_TEXT: Final = "probe, no token"
_PROBE_ID: Final = b"31415"


class Template:
    """Reads that are one event ``data: {...}`` whose chunk differs from a known one in its text and token id only."""

    __slots__ = ("_head", "_head_bytes", "_middle", "_tail", "_tail_bytes", "choice", "is_answer", "tokens")

    def __init__(self, head: bytes, middle: bytes, tail: bytes, delta: Delta) -> None:
        self._head = head
        self._head_bytes = len(head)
        #: what stands between the text and the token id; empty without ids
        self._middle = middle
        self._tail = tail
        self._tail_bytes = len(tail)
        self.choice = delta.choice
        self.is_answer = delta.is_answer
        #: tokens of each chunk: 1 by its token id, None without ids
        self.tokens = delta.tokens

    def text(self, read: bytes) -> str | None:
        """The text of the chunk that is all of this read, never empty; None when the parser has to look.

        Holds only for a read that begins where an event begins (:attr:`harness.wire.sse.SseParser.idle`).
        """
        if not (read.startswith(self._head) and read.endswith(self._tail)):
            return None
        raw = read[self._head_bytes : -self._tail_bytes]
        if self._middle:
            raw, _, token_id = raw.partition(self._middle)
            if not token_id.isdigit() or token_id[0] == 0x30 or len(token_id) > _ID_DIGITS:
                return None
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            return None
        # a JSON string that needs no unescaping and ends where it seems to, and no line end
        return text if text and text.isprintable() and '"' not in text and "\\" not in text else None


def learn(endpoint: Endpoint, read: bytes, data: bytes, chunk: Chunk) -> Template | None:
    """A template from a read, the data of its one event, and the chunk that was parsed from it; None if it gives none."""
    if len(chunk.deltas) != 1 or chunk.usage is not None or read != b"data: " + data + b"\n\n":
        return None
    delta = chunk.deltas[0]
    literal = b'"' + delta.text.encode("utf-8", "surrogatepass") + b'"'
    if not delta.text or delta.finish_reason is not None or data.count(literal) != 1:
        return None
    text_at = data.index(literal) + 1
    parts = _cut(data, text_at, text_at + len(literal) - 2, with_id=delta.tokens is not None)
    if parts is None or not _proved(endpoint, parts, chunk):
        return None
    head, middle, tail = parts
    return Template(b"data: " + head, middle, tail + b"\n\n", delta)


def _cut(data: bytes, start: int, end: int, *, with_id: bool) -> tuple[bytes, bytes, bytes] | None:
    """What stands before the text, between text and token id, and after it."""
    if not with_id:
        return data[:start], b"", data[end:]
    found = _ONE_ID.search(data, end)
    return None if found is None else (data[:start], data[end : found.start(1)], data[found.end(1) :])


def _proved(endpoint: Endpoint, parts: tuple[bytes, bytes, bytes], chunk: Chunk) -> bool:
    """Whether other contents at the same places are read as the same chunk with another text."""
    head, middle, tail = parts
    probe = head + _PROBE_TEXT.encode() + middle + (_PROBE_ID if middle else b"") + tail
    expected = chunk._replace(deltas=(chunk.deltas[0]._replace(text=_PROBE_TEXT),))
    try:
        return read_event(endpoint, "message", probe) == expected
    except WireError:
        return False
