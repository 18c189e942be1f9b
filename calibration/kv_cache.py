"""The KV pool, to the block, as vLLM 0.32 builds it: what each layer keeps, how layers share block tables, how many
blocks the memory makes, and what a start refuses.

The rules, from ``v1/kv_cache_interface.py`` (the specs), ``v1/core/kv_cache_utils.py`` (grouping, sizing, the checks),
``platforms/interface.py`` and ``platforms/cpu.py`` (block sizes):

1. Every layer with attention or state has a cache: pages of a fixed size, one page a block.
2. Layers that keep the same are one group with one block table. Several kinds make several groups of equal layer count,
   drawn from one pool: a block is one page for each layer of the widest group.
3. ``num_blocks = memory // bytes_per_block``; one block is never handed out (the null block).
4. A request of full length takes a number of blocks from each group; the pool in tokens is
   ``num_blocks / (their sum) * max_model_len``, which is not the number of slots.

Held against 46 starts of a real server (tests/cli/test_plan.py), and against vLLM itself (tests/vllm/test_pool_real.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from calibration.architecture import Attention, State
from calibration.deployment import Deployment, pipeline_stages
from calibration.errors import InputError, Unsupported
from calibration.vllm_defaults import chunked_groups

CacheKind = Literal["full", "mla", "sliding", "chunked", "state"]


class LayerCache(NamedTuple):
    """What one layer keeps: pages of ``page_bytes``, each for ``block_size`` tokens (or one state).

    ``window`` is the sliding window or chunk in tokens; ``state_blocks`` the pages a request holds of a state.
    """

    kind: CacheKind
    block_size: int
    page_bytes: int
    window: int | None = None
    state_blocks: int = 0

    @property
    def base_kind(self) -> str:
        """MLA is a full attention to the grouping rules."""
        return "full" if self.kind == "mla" else self.kind


class Group(NamedTuple):
    """Layers with one block table. ``layers`` are (position in the model, page bytes)."""

    cache: LayerCache
    layers: tuple[tuple[int, int], ...]

    @property
    def bytes_per_block(self) -> int:
        return sum(page for _, page in self.layers)

    def blocks_at_most(self, tokens: int, in_flight: int) -> int:
        """Blocks a request of ``tokens`` can hold at once in this group, with ``in_flight`` tokens scheduled and not yet
        settled (``max_memory_usage_bytes / page`` of the specs; the +1 of a sliding window, which may start inside a
        block, also where the window exceeds the tokens)."""
        cache = self.cache
        if cache.kind == "state":
            return cache.state_blocks
        if cache.kind == "sliding" and cache.window is not None:
            return _ceil(min(cache.window - 1 + in_flight, tokens), cache.block_size) + 1
        if cache.kind == "chunked" and cache.window is not None:
            return _ceil(min(cache.window + in_flight, tokens), cache.block_size)
        return _ceil(tokens, cache.block_size)


class Pool(NamedTuple):
    """The pool of one engine (one replica; the same on each of its ranks).

    ``size_tokens`` is what vLLM prints and exports as ``kv_cache_size_tokens``; ``block_size`` its ``block_size`` label.
    ``blocks_per_request`` are the blocks of one request of ``max_model_len`` tokens, over all groups.
    """

    num_blocks: int
    block_size: int
    bytes_per_block: int
    groups: tuple[Group, ...]
    max_model_len: int
    max_in_flight_tokens: int

    @property
    def usable_blocks(self) -> int:
        """Blocks requests can hold: all but the null block."""
        return max(0, self.num_blocks - 1)

    @property
    def blocks_per_request(self) -> int:
        return sum(g.blocks_at_most(self.max_model_len, self.max_in_flight_tokens) for g in self.groups)

    @property
    def max_concurrency(self) -> float:
        """Requests of full length the pool holds; a worst case, no limit on users."""
        return self.num_blocks / self.blocks_per_request

    @property
    def size_tokens(self) -> int:
        """In floating point and in this order, as ``get_kv_cache_capacity`` computes it."""
        return int(self.max_concurrency * self.max_model_len)

    @property
    def bytes(self) -> int:
        """Bytes allocated on the widest rank."""
        return self.num_blocks * self.bytes_per_block


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


def kernel_block(deployment: Deployment) -> int:
    """Smallest block the attention kernels take; the pool's blocks are multiples of it.

    CPU: 32, MLA 16 (``CPUAttentionBackend``, ``CPUMLABackend``). CUDA: 16 (FlashAttention, Triton, FlashInfer); MLA
    16 on Hopper with a 16-bit cache (FlashAttention MLA), 64 with FP8 (FlashMLA), 32 on Blackwell (FlashInfer MLA).
    """
    mla = deployment.architecture.is_mla
    if deployment.device == "cpu":
        return 16 if mla else 32
    if not mla or deployment.gpu is None:
        return 16
    major = deployment.gpu.compute_capability.split(".")[0]
    if major == "10":
        return 32
    return 64 if major == "9" and deployment.kv.name.startswith("fp8") else 16


def token_bytes(deployment: Deployment, attention: Attention) -> int:
    """Cache bytes of one token in one layer on one rank: heads over TP, at least one; MLA whole."""
    if attention.latent_dim is not None:
        return deployment.kv.latent_bytes(attention.latent_dim)
    heads = attention.kv_heads_per_gpu(deployment.tp)
    return deployment.kv.token_bytes(heads, attention.head_dim, attention.v_head_dim)


def state_bytes(deployment: Deployment, state: State) -> int:
    """Bytes of one request's recurrent state in one layer on one rank: convolution tail in the activations' dtype,
    recurrent state in ``mamba_ssm_cache_dtype``."""
    conv, recurrent = state.elements(deployment.tp)
    return conv * deployment.dtype_bytes + recurrent * (4 if deployment.mamba_ssm_cache_dtype == "float32" else 2)


def state_blocks(deployment: Deployment, state: State) -> int:
    """Pages of state a request holds. With prefix caching (mode "align": states follow the attention's blocks) two, and
    one more for the checkpoint a Mamba-2 prefill leaves behind; without it one (``MambaSpec.max_memory_usage_bytes``)."""
    if not deployment.enable_prefix_caching:
        return 1
    return 3 if state.kind == "mamba2" else 2


def primary_block_size(deployment: Deployment) -> int:
    """Block size of the full attention layers, tokens: what was asked, else the device's default (CPU 128, MLA 16;
    CUDA 16 or the smallest the kernels take); hybrids raise it until an attention page covers a state page
    (``Platform._align_hybrid_block_size``)."""
    kernel = kernel_block(deployment)
    asked = deployment.block_size
    if deployment.device == "cpu":
        # the reference MLA kernel takes 16 and nothing else, whatever was asked
        size = kernel if deployment.architecture.is_mla else (asked or 128)
    else:
        size = asked or max(16, kernel)
    hybrid = deployment.architecture.attention_layers and deployment.architecture.state_layers
    return _aligned_to_states(deployment, size, kernel) if hybrid else size


def _aligned_to_states(deployment: Deployment, size: int, kernel: int) -> int:
    architecture = deployment.architecture
    step = max(kernel, size, 128 if architecture.is_mla else 0)
    token = token_bytes(deployment, architecture.attention_layers[0])
    state = max(state_bytes(deployment, s) for s in set(architecture.state_layers))
    raised = _ceil(step * _ceil(state, step * token), kernel) * kernel
    return max(size, raised)


def layer_caches(deployment: Deployment) -> list[tuple[int, LayerCache]]:
    """(layer, cache) of every layer that keeps something, in order; a Falcon-H1 layer appears twice."""
    block = primary_block_size(deployment)
    page = _state_page(deployment, block)
    attentions = {a: _attention_cache(deployment, a, block) for a in set(deployment.architecture.attention_layers)}
    states = {s: _state_cache(deployment, s, block, page) for s in set(deployment.architecture.state_layers)}
    found: list[tuple[int, LayerCache]] = []
    for index, layer in enumerate(deployment.architecture.layers):
        if layer.attention is not None:
            found.append((index, attentions[layer.attention]))
        if layer.state is not None:
            found.append((index, states[layer.state]))
    return found


def _attention_cache(deployment: Deployment, attention: Attention, block: int) -> LayerCache:
    token = token_bytes(deployment, attention)
    if attention.kind == "sliding":
        # a window chooses the largest kernel block that fits the primary page (Attention.get_kv_cache_spec)
        kernel = kernel_block(deployment)
        block = max(kernel, block // kernel * kernel)
    return LayerCache(attention.kind, block, block * token, attention.window)


def _state_page(deployment: Deployment, block: int) -> int | None:
    """Bytes a state page is padded to: the attention page, in a hybrid."""
    architecture = deployment.architecture
    if not architecture.attention_layers or not architecture.state_layers:
        return None
    return block * token_bytes(deployment, architecture.attention_layers[0])


def _state_cache(deployment: Deployment, state: State, block: int, padded: int | None) -> LayerCache:
    size = deployment.max_model_len
    if deployment.enable_prefix_caching:
        # without attention nothing aligns the states' block: it is what was asked, or 16 whatever the device's default
        # (``CacheConfig.DEFAULT_BLOCK_SIZE``, taken over by ``MambaModelConfig`` before the platform sets its own)
        size = block if padded is not None else deployment.block_size or 16
    page = padded if padded is not None else state_bytes(deployment, state)
    return LayerCache("state", size, page, state_blocks=state_blocks(deployment, state))


def cache_groups(deployment: Deployment) -> tuple[Group, ...]:
    """Groups of layers with one block table each (``get_kv_cache_groups``); none for a model that keeps nothing."""
    caches = layer_caches(deployment)
    chunked = any(cache.kind == "chunked" for _, cache in caches)
    if not deployment.hybrid_kv_cache_manager or (chunked and not chunked_groups(deployment.version)):
        caches = _promoted(caches)
    if not caches:
        return ()
    if _one_type([cache for _, cache in caches]):
        return (Group(caches[0][1], tuple((index, cache.page_bytes) for index, cache in caches)),)
    return _equal_groups(_unified_pages(caches))


def _promoted(caches: list[tuple[int, LayerCache]]) -> list[tuple[int, LayerCache]]:
    """Without the hybrid manager, windows beside full attention are allocated like it (``unify_hybrid_kv_cache_specs``).

    Raises:
        Unsupported: layers that cannot become one kind, as vLLM refuses.
    """
    full = next((cache for _, cache in caches if cache.base_kind == "full"), None)
    if full is None:
        return caches
    promoted = []
    for index, cache in caches:
        if cache.kind in ("sliding", "chunked"):
            page = cache.page_bytes * full.block_size // cache.block_size
            cache = LayerCache("full", full.block_size, page)
        promoted.append((index, cache))
    if not _one_type([cache for _, cache in promoted]):
        raise Unsupported(
            "the hybrid KV cache manager cannot be disabled for this model: its layers keep unlike caches"
        )
    return promoted


def _one_type(caches: Sequence[LayerCache]) -> bool:
    """Do all layers need the same number of blocks of the same size? Then they share one block table, whatever their
    pages (``UniformTypeKVCacheSpecs.is_uniform_type``)."""
    first = caches[0]
    return all(
        c.base_kind == first.base_kind
        and c.block_size == first.block_size
        and c.window == first.window
        and c.state_blocks == first.state_blocks
        and (c.kind != "state" or c.page_bytes == first.page_bytes)
        for c in caches
    )


def _unified_pages(caches: list[tuple[int, LayerCache]]) -> list[tuple[int, LayerCache]]:
    """One page size for all: smaller attention pages hold more tokens where that divides, else they are padded, as
    state pages are (``unify_kv_cache_spec_page_size``)."""
    largest = max(cache.page_bytes for _, cache in caches)

    def fitted(cache: LayerCache) -> LayerCache:
        if cache.page_bytes == largest:
            return cache
        if cache.kind != "state" and largest % cache.page_bytes == 0:
            ratio = largest // cache.page_bytes
            return cache._replace(page_bytes=largest, block_size=cache.block_size * ratio)
        if cache.kind == "mla":
            raise Unsupported("an MLA page that does not divide the largest page cannot be padded: vLLM refuses it")
        return cache._replace(page_bytes=largest)

    return [(index, fitted(cache)) for index, cache in caches]


def _equal_groups(caches: list[tuple[int, LayerCache]]) -> tuple[Group, ...]:
    """Each kind split into groups of equal size: the rarest kind's number of layers, or the commonest's where that is
    less than half as many again. What is missing in a last group is padding, and wasted
    (``_get_kv_cache_groups_uniform_page_size``)."""
    buckets: dict[LayerCache, list[tuple[int, int]]] = {}
    for index, cache in caches:
        buckets.setdefault(cache, []).append((index, cache.page_bytes))
    counts = [len(layers) for layers in buckets.values()]
    size = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    groups: list[Group] = []
    for cache, layers in buckets.items():
        parts = _ceil(len(layers), size)
        groups += [Group(cache, tuple(layers[part::parts])) for part in range(parts)]
    return tuple(groups)


def stage_bytes_per_block(deployment: Deployment, groups: Sequence[Group]) -> list[int]:
    """Bytes of a block on each pipeline stage: one page for each layer of its widest group."""
    bounds = []
    start = 0
    for layers in pipeline_stages(deployment.architecture.num_layers, deployment.pp):
        bounds.append((start, start + layers))
        start += layers
    return [
        max(sum(page for index, page in group.layers if first <= index < last) for group in groups)
        for first, last in bounds
    ]


class Layout(NamedTuple):
    """How a deployment's caches are laid out, whatever the memory: groups, and bytes of a block on each stage."""

    groups: tuple[Group, ...]
    bytes_per_block: tuple[int, ...]


def layout_of(deployment: Deployment) -> Layout:
    """The layout of a deployment's pool.

    Raises:
        Unsupported: a model that keeps nothing.
    """
    groups = cache_groups(deployment)
    if not groups:
        raise Unsupported(f"{deployment.architecture.name} keeps no cache: there is no pool to size")
    return Layout(groups, tuple(stage_bytes_per_block(deployment, groups)))


def build_pool(deployment: Deployment, memory_bytes: Sequence[int]) -> Pool:
    """The pool that this much memory per rank makes, if vLLM starts with it.

    Args:
        memory_bytes: bytes left for KV on a GPU of each pipeline stage, one number a stage.

    Raises:
        InputError: what vLLM refuses at start (:func:`start_refusal`).
        Unsupported: a model that keeps nothing.
    """
    layout = layout_of(deployment)
    refusal = start_refusal(deployment, memory_bytes, layout)
    if refusal is not None:
        raise refusal
    return pool_of(deployment, memory_bytes, layout)


def pool_of(deployment: Deployment, memory_bytes: Sequence[int], layout: Layout | None = None) -> Pool:
    """The pool as the memory makes it, whether or not vLLM would start with it; no blocks where there is no memory.

    The rank with the fewest blocks decides; ``num_gpu_blocks_override`` decides instead of the memory. ``layout`` is the
    deployment's own, where it is at hand.
    """
    groups, per_stage = layout or layout_of(deployment)
    memory = _memory(deployment, memory_bytes, per_stage)
    # a stage without cached layers of its own limits nothing
    blocks = min(available // size for available, size in zip(memory, per_stage, strict=True) if size)
    return Pool(
        num_blocks=max(0, blocks),
        block_size=min(group.cache.block_size for group in groups),
        bytes_per_block=max(per_stage),
        groups=groups,
        max_model_len=deployment.max_model_len,
        max_in_flight_tokens=deployment.max_in_flight_tokens,
    )


def start_refusal(
    deployment: Deployment, memory_bytes: Sequence[int], layout: Layout | None = None
) -> InputError | None:
    """Why vLLM would not start with this much memory per rank: none left, too little for one request of
    ``max_model_len``, a block size the kernels do not take, more sequences than state blocks. None: it starts."""
    layout = layout or layout_of(deployment)
    groups, per_stage = layout
    for available, size in zip(_memory(deployment, memory_bytes, per_stage), per_stage, strict=True):
        refusal = _too_little(deployment, groups, available, size)
        if refusal is not None:
            return refusal
    pool = pool_of(deployment, memory_bytes, layout)
    return _wrong_block(deployment, groups) or _too_few_state_blocks(deployment, pool)


def _memory(deployment: Deployment, memory_bytes: Sequence[int], per_stage: Sequence[int]) -> list[int]:
    override = deployment.num_gpu_blocks_override
    return list(memory_bytes) if override is None else [override * size for size in per_stage]


def request_blocks(groups: Sequence[Group], tokens: int, in_flight: int) -> int:
    """Blocks a request of this length can hold at once, over all groups."""
    return sum(group.blocks_at_most(tokens, in_flight) for group in groups)


def longest_request(groups: Sequence[Group], blocks: int, in_flight: int, limit: int) -> int:
    """Tokens of the longest request this many blocks hold, at most ``limit``; 0 where not even one token fits."""
    if request_blocks(groups, 1, in_flight) > blocks:
        return 0
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        if request_blocks(groups, middle, in_flight) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _too_little(deployment: Deployment, groups: Sequence[Group], available: int, per_block: int) -> InputError | None:
    """At least one request of full length must fit, beside the null block (``_check_enough_kv_cache_memory``)."""
    usable = available - per_block
    if usable <= 0:
        return InputError(
            f"no memory for the KV cache: {max(0, available):,} bytes are left, expected more than one block of "
            f"{per_block:,}",
            "raise --gpu-memory-utilization, use more GPUs or a smaller format",
        )
    in_flight = deployment.max_in_flight_tokens
    needed = request_blocks(groups, deployment.max_model_len, in_flight) * per_block
    if needed <= usable:
        return None
    fits = longest_request(groups, usable // per_block, in_flight, deployment.max_model_len)
    advice = f"the longest that fits is {fits}" if fits else "not even one token fits"
    return InputError(
        f"max_model_len = {deployment.max_model_len}: one such request takes {needed:,} bytes of KV cache, the pool has "
        f"{usable:,} beside the null block; {advice}",
        "lower --max-model-len or give the pool more memory",
    )


def _wrong_block(deployment: Deployment, groups: Sequence[Group]) -> InputError | None:
    """Every attention block must be a whole number of kernel blocks (``select_common_block_size``)."""
    kernel = kernel_block(deployment)
    for group in groups:
        if group.cache.kind != "state" and group.cache.block_size % kernel:
            return InputError(
                f"block_size = {group.cache.block_size}, expected a multiple of {kernel} on {deployment.device}"
            )
    return None


def _too_few_state_blocks(deployment: Deployment, pool: Pool) -> InputError | None:
    """Decode graphs need a state block for every sequence (``CompilationConfig``, CUDA only)."""
    has_states = any(group.cache.kind == "state" for group in pool.groups)
    graphs = deployment.device == "cuda" and not deployment.enforce_eager
    if not (has_states and graphs and deployment.max_num_seqs > pool.num_blocks):
        return None
    return InputError(
        f"max_num_seqs = {deployment.max_num_seqs}, expected at most the {pool.num_blocks} blocks of the pool: each "
        "sequence needs one for its recurrent state",
        f"pass --max-num-seqs {pool.num_blocks} or less",
    )
