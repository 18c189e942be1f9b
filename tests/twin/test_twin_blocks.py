"""The KV pool against a plain one that keeps every block by itself, and its own laws."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.twin.blocks import BlockPool, Chain
from calibration.twin.content import Content, Key, chained_keys


@dataclass
class Block:
    key: Key | None = None
    users: int = 0


@dataclass
class PlainPool:
    """vLLM 0.32.0 BlockPool, block by block: a free queue, keys, reference counts."""

    total: int
    caching: bool
    blocks: list[Block] = field(default_factory=list)
    queue: deque[int] = field(default_factory=deque)
    cached: dict[Key, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.blocks = [Block() for _ in range(self.total)]
        self.queue = deque(range(self.total))

    def lookup(self, content: Content, limit: int) -> list[int]:
        hit: list[int] = []
        while self.caching and len(hit) < limit and (found := self.cached.get(content.key(len(hit)))):
            hit.append(found[0])
        return hit

    def touch(self, hit: list[int]) -> None:
        for index in hit:
            if not self.blocks[index].users:
                self.queue.remove(index)
            self.blocks[index].users += 1

    def take(self, count: int) -> list[int]:
        taken = [self.queue.popleft() for _ in range(count)]
        for index in taken:
            self.forget(index)
            self.blocks[index].users = 1
        return taken

    def forget(self, index: int) -> None:
        key = self.blocks[index].key
        if key is not None:
            self.cached[key].remove(index)
            if not self.cached[key]:
                del self.cached[key]
            self.blocks[index].key = None

    def keep(self, table: list[int], content: Content, full: int) -> None:
        for number in range(full if self.caching else 0):
            block = self.blocks[table[number]]
            if block.key is None:
                block.key = content.key(number)
                self.cached.setdefault(block.key, []).append(table[number])

    def release(self, table: list[int]) -> None:
        first: list[int] = []
        last: list[int] = []
        for index in reversed(table):
            block = self.blocks[index]
            block.users -= 1
            if not block.users:
                (first if block.key is None else last).append(index)
        self.queue.extendleft(reversed(first))
        self.queue.extend(last)


@dataclass(eq=False)
class Running:
    content: Content
    plain: list[int]
    blocks: int
    full: int
    chain: Chain | None = None


class Pair:
    """Both pools, told the same."""

    def __init__(self, total: int, caching: bool) -> None:
        self.pool = BlockPool(total + 1, caching, lambda seq: seq.full)
        self.plain = PlainPool(total, caching)
        self.running: list[Running] = []
        self.known: list[tuple[Content, int]] = []
        self.fresh = 0

    def check(self) -> None:
        assert self.pool.free == len(self.plain.queue)
        used = len({index for seq in self.running for index in seq.plain})
        assert self.pool.free + used == self.pool.total
        assert self.pool.cached_free == sum(self.plain.blocks[i].key is not None for i in self.plain.queue)
        assert 0 <= self.pool.usage <= 1

    def start(self, parent: int, share: int, own: int) -> None:
        keys: list[int] = []
        if self.known:
            source, full = self.known[parent % len(self.known)]
            keys = list(source.keys[: min(share, full)])
        self.fresh += 1
        content = Content([*keys, *(1_000 * self.fresh + i for i in range(40))])
        blocks = len(keys) + own
        hit = self.pool.lookup(content, blocks - 1)
        plain_hit = self.plain.lookup(content, blocks - 1)
        assert hit.blocks == len(plain_hit)
        assert hit.free == sum(not self.plain.blocks[i].users for i in plain_hit)
        if blocks - hit.blocks + hit.free > self.pool.free:
            return
        seq = Running(content, plain_hit, blocks, max(hit.blocks, blocks - 1))
        self.plain.touch(plain_hit)
        seq.plain = plain_hit + self.plain.take(blocks - hit.blocks)
        seq.chain = self.pool.open(content, hit, seq)
        self.pool.take(blocks - hit.blocks)
        self.plain.keep(seq.plain, content, seq.full)
        self.running.append(seq)
        self.known.append((content, seq.full))

    def grow(self, which: int) -> None:
        if not self.running or not self.pool.free:
            return
        seq = self.running[which % len(self.running)]
        if seq.blocks == 40:
            return
        self.pool.take(1)
        seq.plain += self.plain.take(1)
        seq.blocks += 1
        seq.full = seq.blocks - 1
        self.plain.keep(seq.plain, seq.content, seq.full)
        self.known.append((seq.content, seq.full))

    def stop(self, which: int) -> None:
        if self.running:
            seq = self.running.pop(which % len(self.running))
            self.pool.close(seq.chain, seq.blocks)
            self.plain.release(seq.plain)


moves = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 50), st.integers(0, 12), st.integers(1, 6)),
        st.tuples(st.just("grow"), st.integers(0, 50)),
        st.tuples(st.just("stop"), st.integers(0, 50)),
    ),
    max_size=120,
)


@settings(max_examples=150, deadline=None)
@given(total=st.integers(4, 40), caching=st.booleans(), moves=moves)
def test_runs_of_blocks_are_the_blocks_one_by_one(total: int, caching: bool, moves: list[tuple[str, int]]) -> None:
    pair = Pair(total, caching)
    for name, *arguments in moves:
        getattr(pair, name)(*arguments)
        pair.check()
    while pair.running:
        pair.stop(0)
        pair.check()
    assert pair.pool.free == total


def pool_of(blocks: int) -> BlockPool:
    """A pool whose sequences are told by how many of their blocks are full."""
    return BlockPool(blocks + 1, True, lambda full: int(full))


def used_and_left(pool: BlockPool, content: Content, blocks: int, full: int) -> None:
    """A sequence came, took ``blocks`` and went."""
    chain = pool.open(content, pool.lookup(content, full), full)
    pool.take(blocks)
    pool.close(chain, blocks)


def test_the_null_block_is_nobodys() -> None:
    pool = BlockPool(41, True, int)
    assert pool.total == pool.free == 40
    pool.take(10)
    assert pool.usage == pytest.approx(0.25)


def test_cached_blocks_nobody_uses_count_as_free() -> None:
    pool, content = pool_of(10), Content([1, 2, 3])
    used_and_left(pool, content, blocks=4, full=3)
    assert pool.usage == 0
    assert pool.cached_free == 3
    assert pool.lookup(content, 3).blocks == 3


def test_the_tail_of_a_request_is_evicted_first() -> None:
    pool, content = pool_of(4), Content([1, 2, 3, 4])
    used_and_left(pool, content, blocks=4, full=4)
    pool.take(1)
    assert pool.lookup(content, 4).blocks == 3


def test_blocks_without_a_key_are_taken_before_cached_ones() -> None:
    pool, content = pool_of(4), Content([1, 2])
    used_and_left(pool, content, blocks=3, full=2)
    pool.take(2)
    assert pool.lookup(content, 2).blocks == 2


def test_the_content_left_last_stays_longest() -> None:
    pool, first, second = pool_of(4), Content([1, 2]), Content([3, 4])
    used_and_left(pool, first, blocks=2, full=2)
    used_and_left(pool, second, blocks=2, full=2)
    pool.take(2)
    assert (pool.lookup(first, 2).blocks, pool.lookup(second, 2).blocks) == (0, 2)


def test_a_hit_takes_its_blocks_out_of_the_free_queue() -> None:
    pool, content = pool_of(4), Content([1, 2, 3])
    used_and_left(pool, content, blocks=3, full=3)
    hit = pool.lookup(content, 2)
    assert (hit.blocks, hit.free, pool.free) == (2, 2, 4)
    pool.open(content, hit, 2)
    assert pool.free == 2


def test_blocks_of_a_running_request_are_hit_without_leaving_the_queue() -> None:
    pool, content = pool_of(4), Content([1, 2, 3])
    pool.open(content, pool.lookup(content, 3), 3)
    pool.take(3)
    hit = pool.lookup(content, 3)
    assert (hit.blocks, hit.free) == (3, 0)


def test_a_salt_separates_equal_prompts() -> None:
    assert chained_keys(range(32), 16) == chained_keys(range(32), 16)
    assert chained_keys(range(32), 16)[0] != chained_keys(range(32), 16, "tenant")[0]


def test_a_key_depends_on_all_that_comes_before() -> None:
    left, right = chained_keys([1, 2, 3, 4], 2), chained_keys([9, 2, 3, 4], 2)
    assert left[1] != right[1]


def test_only_full_blocks_have_keys() -> None:
    assert len(chained_keys(range(31), 16)) == 1
    assert chained_keys(range(15), 16) == []


def test_content_without_keys_is_shared_with_nobody() -> None:
    mine, other = Content(), Content()
    assert mine.common(mine, 0, 5) == 5
    assert mine.common(other, 0, 5) == 0
