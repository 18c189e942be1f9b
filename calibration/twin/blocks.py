"""The KV pool: how many blocks are free, what the prefix cache still holds, and in which order it is evicted.

Rules of vLLM 0.32.0 ``v1/core/block_pool.py`` (BlockPool) and ``single_type_kv_cache_manager.py``
(FullAttentionManager), one group of full attention:

* Block 0 is null and never used.
* A full block enters the cache when the step that fills it is scheduled, and keeps its content when it is freed.
* Freed blocks without a key go to the front of the free queue, freed blocks with one to its end, the tail of a request
  first. Allocation takes from the front and evicts what it takes.
* A hit takes its blocks out of the free queue; they must fit beside the new ones.

Single blocks have no identity here. A request's own blocks are a :class:`Chain`; a chain's blocks are used from its
start on and freed from its end on, so at any time the live ones are a prefix of it, and the free ones among them are
a few runs (:class:`_Run`) in the queue. So a step costs by requests, not by blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from calibration.twin.content import Content, Key


class Chain:
    """Blocks ``start .. live`` (exclusive) of one sequence, computed by it, as far as they still exist."""

    __slots__ = ("content", "full_blocks", "kept", "runs", "start", "uses")

    def __init__(self, content: Content, start: int, full_blocks: Callable[[], int]) -> None:
        self.content = content
        self.start = start
        #: how many leading blocks of the sequence are full, while it runs; None once it has let go
        self.full_blocks: Callable[[], int] | None = full_blocks
        #: end of the live blocks after the owner let go
        self.kept = start
        #: ends of the parts that other running requests use
        self.uses: list[int] = []
        #: free runs in the queue, high blocks first
        self.runs: list[_Run] = []

    @property
    def live(self) -> int:
        return self.kept if self.full_blocks is None else max(self.start, self.full_blocks())

    @property
    def used(self) -> int:
        """End of the part that is in use by running requests; blocks from there to ``live`` are free."""
        if self.full_blocks is not None:
            return self.live
        return max(self.uses, default=self.start)


class _Run:
    """Free blocks ``low .. high`` (exclusive) of a chain, side by side in the free queue, the highest first."""

    __slots__ = ("chain", "high", "low")

    def __init__(self, chain: Chain, low: int, high: int) -> None:
        self.chain = chain
        self.low = low
        self.high = high


class Hit:
    """What the cache has of a sequence: ``blocks`` leading blocks, of which ``free`` lie in the free queue."""

    __slots__ = ("blocks", "free", "spans")

    def __init__(self) -> None:
        self.blocks = 0
        self.free = 0
        self.spans: list[tuple[Chain, int]] = []

    def extend(self, chain: Chain, end: int) -> None:
        # a second copy of a prefix, entered in its middle, is taken from its start on: chains are held as prefixes.
        # vLLM would leave those few leading blocks free; it takes equal prompts computed at the same time to get here
        self.free += max(0, end - chain.used)
        self.blocks = end
        self.spans.append((chain, end))


NO_HIT = Hit()


class Table:
    """A running sequence's blocks: parts of others' chains, then its own."""

    __slots__ = ("own", "spans")

    def __init__(self) -> None:
        self.spans: list[tuple[Chain, int]] = []
        self.own: Chain | None = None


class BlockPool:
    """Blocks of one engine.

    Args:
        num_gpu_blocks: blocks with the null block, at least 2.
        enable_prefix_caching: keep the content of freed blocks.
    """

    def __init__(self, num_gpu_blocks: int, enable_prefix_caching: bool) -> None:
        self.total = num_gpu_blocks - 1
        self.caching = enable_prefix_caching
        #: blocks in the free queue, cached ones included
        self.free = self.total
        self._blank = self.total
        self._queue: OrderedDict[int, _Run] = OrderedDict()
        self._chains: dict[Key, list[Chain]] = {}

    @property
    def usage(self) -> float:
        """Fraction of blocks held by running requests, 0..1; cached blocks nobody uses are free."""
        return 1.0 - self.free / self.total

    @property
    def cached_free(self) -> int:
        """Free blocks that still hold content."""
        return self.free - self._blank

    def lookup(self, content: Content, limit: int) -> Hit:
        """The longest run of cached blocks from the start of ``content``, at most ``limit`` blocks."""
        if not self.caching or limit < 1 or not self._chains:
            return NO_HIT
        hit = Hit()
        seen: list[Chain] = []
        while hit.blocks < limit:
            seen.extend(self._chains.get(content.key(hit.blocks), ()))
            for chain in seen:
                if (end := self._reach(chain, content, hit.blocks, limit)) > hit.blocks:
                    hit.extend(chain, end)
                    break
            else:
                break
        return hit

    @staticmethod
    def _reach(chain: Chain, content: Content, block: int, limit: int) -> int:
        end = min(chain.live, limit)
        return block + content.common(chain.content, block, end) if end > block >= chain.start else block

    def take(self, blocks: int) -> None:
        """Allocate from the front of the free queue; the caller has checked that they are there."""
        self.free -= blocks
        blank = min(blocks, self._blank)
        self._blank -= blank
        if left := blocks - blank:
            self._evict(left)

    def _evict(self, blocks: int) -> None:
        while blocks:
            key, run = next(iter(self._queue.items()))
            taken = min(blocks, run.high - run.low)
            run.high -= taken
            run.chain.kept = run.high
            blocks -= taken
            if run.high == run.low:
                del self._queue[key]
                run.chain.runs.remove(run)
            self._forget_if_dead(run.chain)

    def _forget_if_dead(self, chain: Chain) -> None:
        if chain.full_blocks is None and chain.kept == chain.start:
            key = chain.content.key(chain.start)
            siblings = self._chains[key]
            siblings.remove(chain)
            if not siblings:
                del self._chains[key]

    def open(self, table: Table, content: Content, hit: Hit, full_blocks: Callable[[], int]) -> None:
        """Give a sequence its hit, out of the free queue, and a chain of its own behind it."""
        if not self.caching:
            return
        for chain, end in hit.spans:
            self._touch(chain, end)
            chain.uses.append(end)
        self.free -= hit.free
        table.spans = hit.spans
        table.own = Chain(content, hit.blocks, full_blocks)
        self._chains.setdefault(content.key(hit.blocks), []).append(table.own)

    def _touch(self, chain: Chain, end: int) -> None:
        for run in [run for run in chain.runs if run.low < end]:
            run.low = min(run.high, end)
            if run.low == run.high:
                del self._queue[id(run)]
                chain.runs.remove(run)

    def close(self, table: Table, blocks: int) -> None:
        """Take all ``blocks`` of a sequence back: blank ones to the front of the queue, full ones to its end."""
        own = table.own
        if own is None:
            self._blank += blocks
            self.free += blocks
            return
        full = own.live
        self._blank += blocks - full
        self.free += blocks - full
        own.kept, own.full_blocks = full, None
        self._release(own, max(own.used, own.start), full)
        self._forget_if_dead(own)
        for chain, end in reversed(table.spans):
            chain.uses.remove(end)
            self._release(chain, chain.used, end)
        table.spans, table.own = [], None

    def _release(self, chain: Chain, low: int, high: int) -> None:
        if high > low:
            run = _Run(chain, low, high)
            chain.runs.append(run)
            self._queue[id(run)] = run
            self.free += high - low
