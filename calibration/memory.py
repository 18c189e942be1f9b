"""Memory of a deployment, GPU by GPU: weights + overhead + KV pool, and whether it fits."""

from __future__ import annotations

from typing import NamedTuple

from calibration.deployment import Deployment
from calibration.errors import CalibrationError, InputError
from calibration.kv_cache import Layout, Pool, build_pool, layout_of, pool_of, start_refusal, token_bytes
from calibration.overhead import Overhead, overhead_by_stage
from calibration.weights import StageWeights, weights_by_stage


class StageMemory(NamedTuple):
    """One GPU of a pipeline stage. ``kv_bytes`` is what is left for KV, negative where weights and overhead alone exceed
    the budget; None without a GPU and a given pool."""

    budget_bytes: int | None
    weights: StageWeights
    overhead: Overhead | None
    kv_bytes: int


class MemoryParts(NamedTuple):
    """Bytes of one GPU. ``unused``: vLLM might take them, but the pool was given smaller; ``others``: never vLLM's."""

    weights: int
    overhead: int
    pool: int
    unused: int
    others: int


class MemoryPlan(NamedTuple):
    """The memory of every stage and the pool it makes.

    ``fits`` is whether vLLM starts; ``reason`` says why not. ``pool`` is None where the model keeps no cache or nothing
    is left for one.
    """

    deployment: Deployment
    stages: tuple[StageMemory, ...]
    pool: Pool | None
    fits: bool
    reason: str
    #: the pool with the overhead at the ends of its range, fewest and most blocks; None where it was given
    blocks_range: tuple[int, int] | None

    @property
    def tightest(self) -> StageMemory:
        """The stage with the least memory for KV."""
        return min(self.stages, key=lambda stage: stage.kv_bytes)

    @property
    def pool_is_given(self) -> bool:
        return is_given(self.deployment)

    @property
    def pool_bytes(self) -> int:
        """Bytes left for KV on the tightest GPU; with a block count given, those of the blocks."""
        if self.deployment.num_gpu_blocks_override is not None and self.pool is not None:
            return self.pool.bytes
        return max(0, self.tightest.kv_bytes)

    @property
    def parts(self) -> MemoryParts | None:
        """What the memory of the tightest GPU goes to; None where no GPU is planned."""
        stage, gpu = self.tightest, self.deployment.gpu
        if gpu is None or stage.overhead is None or stage.budget_bytes is None:
            return None
        taken = stage.weights.total_bytes + stage.overhead.total_bytes + self.pool_bytes
        others = max(0, gpu.usable_bytes - max(stage.budget_bytes, taken))
        unused = max(0, gpu.usable_bytes - others - taken)
        return MemoryParts(stage.weights.total_bytes, stage.overhead.total_bytes, self.pool_bytes, unused, others)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of one token over the whole model, each head counted once: nominal, every layer holding it."""
        return kv_bytes_per_token(self.deployment)

    @property
    def kv_bytes_per_token_per_gpu(self) -> int:
        """KV bytes of one token on the GPU of the widest stage: heads over TP, copies where ranks outnumber them."""
        return max(kv_bytes_per_token_by_stage(self.deployment))


def is_given(deployment: Deployment) -> bool:
    """Is the pool's size given, rather than left over by weights and overhead?"""
    return deployment.kv_cache_memory_bytes is not None or deployment.num_gpu_blocks_override is not None


def kv_bytes_per_token(deployment: Deployment) -> int:
    """KV bytes of one token, each head counted once, whatever the ranks copy."""
    total = 0
    for attention in deployment.architecture.attention_layers:
        if attention.latent_dim is not None:
            total += deployment.kv.latent_bytes(attention.latent_dim)
        else:
            total += deployment.kv.token_bytes(attention.kv_heads, attention.head_dim, attention.v_head_dim)
    return total


def kv_bytes_per_token_by_stage(deployment: Deployment) -> list[int]:
    """KV bytes of one token on a GPU of each pipeline stage."""
    sizes: list[int] = []
    start = 0
    for stage in weights_by_stage(deployment):
        layers = deployment.architecture.layers[start : start + stage.layers]
        sizes.append(sum(token_bytes(deployment, layer.attention) for layer in layers if layer.attention is not None))
        start += stage.layers
    return sizes


def plan_memory(deployment: Deployment) -> MemoryPlan:
    """The memory plan of a deployment.

    Raises:
        InputError: the pool was given and vLLM would refuse to start with it.
        Unsupported: the model keeps no cache.
    """
    stages = _stages(deployment)
    memory = [stage.kv_bytes for stage in stages]
    if is_given(deployment):
        return MemoryPlan(deployment, tuple(stages), build_pool(deployment, memory), True, "", None)
    layout = layout_of(deployment)
    refusal = start_refusal(deployment, memory, layout)
    pool = pool_of(deployment, memory, layout)
    return MemoryPlan(
        deployment=deployment,
        stages=tuple(stages),
        pool=pool if pool.num_blocks > 0 else None,
        fits=refusal is None,
        reason="" if refusal is None else _why(deployment, stages, refusal),
        blocks_range=_range(deployment, stages, layout),
    )


def _stages(deployment: Deployment) -> list[StageMemory]:
    given = deployment.kv_cache_memory_bytes
    weights = weights_by_stage(deployment)
    if deployment.gpu is None:
        return [StageMemory(None, stage, None, given or 0) for stage in weights]
    budget = int(deployment.gpu_memory_utilization * deployment.gpu.usable_bytes)
    return [
        StageMemory(
            budget, stage, spent, given if given is not None else budget - stage.total_bytes - spent.total_bytes
        )
        for stage, spent in zip(weights, overhead_by_stage(deployment), strict=True)
    ]


def _range(deployment: Deployment, stages: list[StageMemory], layout: Layout) -> tuple[int, int]:
    """Blocks with the overhead at the high and the low end of its range."""
    ends = []
    for pick in ("high_bytes", "low_bytes"):
        memory = [
            stage.kv_bytes + (stage.overhead.total_bytes - getattr(stage.overhead, pick)) if stage.overhead else 0
            for stage in stages
        ]
        ends.append(pool_of(deployment, memory, layout).num_blocks)
    return ends[0], ends[1]


def _why(deployment: Deployment, stages: list[StageMemory], refusal: CalibrationError) -> str:
    """One sentence: what does not fit, in bytes."""
    tightest = min(stages, key=lambda stage: stage.kv_bytes)
    budget = tightest.budget_bytes
    if budget is None or tightest.overhead is None:
        raise InputError(refusal.message, refusal.hint)
    if tightest.weights.total_bytes > budget:
        return (
            f"the weights alone need {tightest.weights.total_bytes / 1e9:.1f} GB on each GPU, and vLLM may use "
            f"{budget / 1e9:.1f} GB of it"
        )
    if tightest.kv_bytes <= 0:
        return (
            f"weights ({tightest.weights.total_bytes / 1e9:.1f} GB) and overhead "
            f"({tightest.overhead.total_bytes / 1e9:.1f} GB) on each GPU leave nothing of {budget / 1e9:.1f} GB for KV"
        )
    return refusal.message
