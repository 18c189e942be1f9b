"""Ways to cut a stream into reads, for every parser test that must not care."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    """The reads between the given offsets; offsets outside the stream and doubles give empty reads, which are legal."""
    edges = [0, *sorted(min(max(c, 0), len(stream)) for c in cuts), len(stream)]
    return [stream[a:b] for a, b in pairwise(edges)]


def byte_by_byte(stream: bytes) -> list[bytes]:
    return [stream[i : i + 1] for i in range(len(stream))]


def cuts(most: int = 12, up_to: int = 400) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, up_to), max_size=most)
