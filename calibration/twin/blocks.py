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

One thing differs: of two copies of one block vLLM hits the older, this pool the one in the chain that reaches further.
It takes two sequences that computed equal blocks each for itself, such as a prompt that was sent before another request
put out the same text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from calibration.twin.content import Content, Key


class Chain:
    """Blocks from ``start`` on of one sequence, computed by it, as far as they still exist."""

    __slots__ = ("content", "kept", "listed", "owner", "parents", "runs", "start", "uses")

    def __init__(self, content: Content, owner: Any, hit: Hit) -> None:
        self.content = content
        self.start = hit.blocks
        #: the sequence while it runs; None once it has let go
        self.owner = owner
        #: parts of others' chains that the owner uses before its own
        self.parents = hit.spans
        #: end of the live blocks once the owner has let go
        self.kept = hit.blocks
        #: ends of the parts that other running requests use
        self.uses: tuple[int, ...] = ()
        #: whether a lookup can find it
        self.listed = False
        #: free runs in the queue, high blocks first
        self.runs: tuple[_Run, ...] = ()


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
        self.spans: tuple[tuple[Chain, int], ...] = ()


NO_HIT = Hit()


class BlockPool:
    """Blocks of one engine.

    Args:
        num_gpu_blocks: blocks with the null block, at least 2.
        enable_prefix_caching: keep the content of freed blocks.
        full_blocks: leading blocks of a running owner (as given to :meth:`open`) that are full.
    """

    def __init__(self, num_gpu_blocks: int, enable_prefix_caching: bool, full_blocks: Callable[[Any], int]) -> None:
        self.total = num_gpu_blocks - 1
        self.caching = enable_prefix_caching
        #: blocks in the free queue, cached ones included
        self.free = self.total
        self._full_blocks = full_blocks
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

    # ------------------------------------------------------------------ the prefix cache

    def lookup(self, content: Content, limit: int) -> Hit:
        """The longest run of cached blocks from the start of ``content``, at most ``limit`` blocks."""
        if not self.caching or limit < 1 or content.key(0) not in self._chains:
            return NO_HIT
        hit = Hit()
        while hit.blocks < limit:
            best, end = None, hit.blocks
            for chain in self._chains.get(content.key(hit.blocks), ()):
                if (reach := self._reach(chain, content, limit)) > end:
                    best, end = chain, reach
            if best is None:
                break
            hit.free += end - min(end, self._used(best))
            hit.blocks = end
            hit.spans += ((best, end),)
        return hit

    def _reach(self, chain: Chain, content: Content, limit: int) -> int:
        return chain.start + content.common(chain.content, chain.start, min(self._live(chain), limit))

    def _live(self, chain: Chain) -> int:
        """End of the blocks that exist."""
        return chain.kept if chain.owner is None else max(chain.start, self._full_blocks(chain.owner))

    def _used(self, chain: Chain) -> int:
        """End of the part in use by running requests; blocks from there to ``_live`` are free."""
        return max(chain.uses, default=chain.start) if chain.owner is None else self._live(chain)

    # ------------------------------------------------------------------ allocation

    def take(self, blocks: int) -> None:
        """Allocate from the front of the free queue; the caller has checked that they are there."""
        self.free -= blocks
        self._blank -= blocks
        if self._blank < 0:
            missing, self._blank = -self._blank, 0
            self._evict(missing)

    def _evict(self, blocks: int) -> None:
        queue = self._queue
        while blocks:
            run = next(iter(queue.values()))
            size = run.high - run.low
            if blocks < size:
                run.high -= blocks
                run.chain.kept = run.high
                return
            blocks -= size
            run.chain.kept = run.low
            self._drop_run(run)
            self._forget_if_dead(run.chain)

    def _drop_run(self, run: _Run) -> None:
        del self._queue[id(run)]
        chain = run.chain
        chain.runs = () if len(chain.runs) == 1 else tuple(other for other in chain.runs if other is not run)

    def _forget_if_dead(self, chain: Chain) -> None:
        """Lookups need not find a chain of which nothing is left."""
        if chain.listed and chain.kept == chain.start:
            chain.listed = False
            key = chain.content.key(chain.start)
            siblings = self._chains[key]
            siblings.remove(chain)
            if not siblings:
                del self._chains[key]

    # ------------------------------------------------------------------ sequences

    def open(self, content: Content, hit: Hit, owner: Any) -> Chain | None:
        """Give a sequence its hit, out of the free queue; the chain of its own blocks behind it. None without caching,
        where blocks have no content to keep."""
        if not self.caching:
            return None
        for chain, end in hit.spans:
            if chain.runs:
                self._touch(chain, end)
            chain.uses += (end,)
        self.free -= hit.free
        own = Chain(content, owner, hit)
        if content.keys:
            self._list(own)
        return own

    def _list(self, chain: Chain) -> None:
        if not chain.listed:
            chain.listed = True
            self._chains.setdefault(chain.content.key(chain.start), []).append(chain)

    def _touch(self, chain: Chain, end: int) -> None:
        for run in chain.runs:
            if run.low < end:
                run.low = min(run.high, end)
                if run.low == run.high:
                    self._drop_run(run)

    def close(self, own: Chain | None, blocks: int, again: bool = False) -> None:
        """Take all ``blocks`` of a sequence back: blank ones to the front of the queue, full ones to its end.

        Args:
            again: the sequence will come back: it may look for content that is only its own.
        """
        if own is None:
            self._blank += blocks
            self.free += blocks
            return
        full = self._live(own)
        self._blank += blocks - full
        self.free += blocks - full
        own.kept, own.owner = full, None
        self._release(own, full)
        if again:
            self._list(own)
        self._forget_if_dead(own)
        for chain, end in reversed(own.parents):
            uses = list(chain.uses)
            uses.remove(end)
            chain.uses = tuple(uses)
            self._release(chain, end)
        own.parents = ()

    def _release(self, chain: Chain, high: int) -> None:
        """Blocks up to ``high`` have one user less."""
        low = self._used(chain)
        if high > low:
            run = _Run(chain, low, high)
            chain.runs += (run,)
            self._queue[id(run)] = run
            self.free += high - low
