"""What the prefix cache can see of a sequence: one key a full block, equal keys for equal prefixes.

vLLM hashes the tokens of each full block together with the hash of the block before (vLLM 0.32.0
``v1/core/kv_cache_utils.py``, ``hash_block_tokens``), so two blocks have one key if and only if everything up to their
end is equal. A :class:`Content` holds such chained keys for the part that may be shared, and counts on from there with
keys nobody else has.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

Key = int | tuple[int, int]


class Content:
    """Block keys of one sequence, prompt and output together.

    Args:
        keys: chained keys of the leading full blocks that other sequences may share; may be empty.

    Blocks beyond ``keys`` belong to this object alone: a request that was preempted finds them again, others do not.
    """

    __slots__ = ("keys",)

    def __init__(self, keys: Sequence[int] = ()) -> None:
        self.keys = keys

    def key(self, block: int) -> Key:
        """The key of block ``block`` (0 is the first)."""
        return self.keys[block] if block < len(self.keys) else (id(self), block)

    def common(self, other: Content, first: int, end: int) -> int:
        """Blocks from ``first`` on, up to ``end`` (exclusive), that both have with equal keys."""
        if other is self:
            return max(0, end - first)
        mine, theirs = self.keys, other.keys
        limit = min(end, len(mine), len(theirs))
        if mine is theirs:
            return max(0, limit - first)
        block = first
        while block < limit and mine[block] == theirs[block]:
            block += 1
        return block - first


def chained_keys(tokens: Sequence[int], block_size: int, salt: str = "") -> list[int]:
    """Keys of the full blocks of ``tokens`` (ids below 2**63), each chained to the one before; ``salt`` separates tenants."""
    data, size = array("q", tokens).tobytes(), 8 * block_size
    parent, keys = salt.encode(), []
    for end in range(size, len(data) + 1, size):
        parent = blake2b(parent + data[end - size : end], digest_size=8).digest()
        keys.append(int.from_bytes(parent, "big"))
    return keys
