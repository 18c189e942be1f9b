"""The first correction factor: what a server's own KV pool says of the memory model.

Weights and pool are known to the byte; what a runtime takes beside them (activations, communication, CUDA graphs) is a
prior. A server that shows its pool has measured it:

    memory_overhead = (usable memory - weights - its blocks) / (predicted overhead)

    correct_memory(deployment, ShownPool(num_blocks=...))  ->  MemoryCorrection, with the corrected deployment
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from calibration.deployment import Deployment
from calibration.errors import InputError
from calibration.kv_cache import Pool, layout_of
from calibration.memory import MemoryPlan, is_given, plan_memory

#: name of the factor
FACTOR = "memory_overhead"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPool:
    """The pool of one engine as its server shows it, the null block included. ``is_given``: its size was asked for, by
    ``num_gpu_blocks_override`` or ``kv_cache_memory_bytes``, and says nothing of the memory beside it."""

    num_blocks: int
    block_size: int | None = None
    size_tokens: int | None = None
    is_given: bool = False


@dataclass(frozen=True, slots=True)
class MemoryCorrection:
    """The pool predicted beside the server's, and what follows for the overhead on the GPU with the least room.

    ``predicted`` is None where nothing was left for a pool. The overhead's figures are None where the pool's size was
    given, or there is no GPU to reckon with; ``deployment`` has the server's pool in either case. The pool is known in
    whole blocks: the true overhead may be up to ``block_bytes`` less than ``measured_bytes``.
    """

    deployment: Deployment
    predicted: Pool | None
    shown: Pool
    prior_bytes: int | None
    measured_bytes: int | None

    @property
    def block_bytes(self) -> int:
        return self.shown.bytes_per_block

    @property
    def difference_bytes(self) -> int | None:
        """What the prior lacks: above 0 where the server has less room for KV than predicted."""
        if self.prior_bytes is None or self.measured_bytes is None:
            return None
        return self.measured_bytes - self.prior_bytes

    @property
    def ratio(self) -> float | None:
        """The correction factor of the overhead: 1 where the prior holds."""
        if self.prior_bytes is None or self.measured_bytes is None:
            return None
        return self.measured_bytes / self.prior_bytes

    @property
    def pool_error(self) -> float | None:
        """Predicted over the server's pool, less one."""
        return None if self.predicted is None else self.predicted.num_blocks / self.shown.num_blocks - 1

    def to_json(self) -> dict[str, Any]:
        """Plain values: the factor with its ends, in the form of the others (:meth:`FactorSet.to_json`)."""
        ratio, measured, prior = self.ratio, self.measured_bytes, self.prior_bytes
        low = None if measured is None or prior is None else (measured - self.block_bytes) / prior
        return {
            "factor": FACTOR,
            "value": ratio,
            "low": low,
            "high": ratio,
            "unit": "",
            "prior_bytes": prior,
            "measured_bytes": measured,
            "difference_bytes": self.difference_bytes,
            "predicted": None if self.predicted is None else _pool_json(self.predicted),
            "server": _pool_json(self.shown),
            "pool_error": self.pool_error,
        }


def _pool_json(pool: Pool) -> dict[str, int]:
    return {
        "num_blocks": pool.num_blocks,
        "block_size": pool.block_size,
        "kv_pool_tokens": pool.size_tokens,
        "kv_pool_bytes": pool.bytes,
    }


def correct_memory(deployment: Deployment, shown: ShownPool) -> MemoryCorrection:
    """Hold the pool a deployment is predicted to have against the one its server shows.

    Args:
        deployment: as the server runs it; its own pool is predicted, from weights and overhead, or given.

    Raises:
        InputError: the server's pool cannot be this deployment's: weights and pool exceed what vLLM may use, blocks of
            another size, or tokens that so many blocks do not make.
        Unsupported: a model that keeps no cache.
    """
    if shown.num_blocks < 1:
        raise InputError(f"num_blocks = {shown.num_blocks}, expected at least 1")
    prior = plan_memory(deployment)
    taken = plan_memory(replace(deployment, num_gpu_blocks_override=shown.num_blocks))
    pool = taken.pool
    assert pool is not None
    _check_same(pool, shown)
    if shown.is_given or is_given(deployment) or deployment.gpu is None:
        return MemoryCorrection(taken.deployment, prior.pool, pool, None, None)
    difference = _difference(prior, shown.num_blocks)
    overhead = prior.tightest.overhead
    assert overhead is not None
    measured = overhead.total_bytes + difference
    if measured < 0:
        raise InputError(
            f"the server's pool of {pool.bytes / 1e9:.1f} GB and {prior.tightest.weights.total_bytes / 1e9:.1f} GB of "
            f"weights exceed the {(prior.tightest.budget_bytes or 0) / 1e9:.1f} GB that vLLM may use of each GPU",
            "expected the GPU, --tp, --pp, --weights and --gpu-memory-utilization that the server runs with",
        )
    corrected = replace(deployment, overhead_correction_bytes=(deployment.overhead_correction_bytes or 0) + difference)
    return MemoryCorrection(corrected, prior.pool, pool, overhead.total_bytes, measured)


def _check_same(pool: Pool, shown: ShownPool) -> None:
    if shown.block_size is not None and shown.block_size != pool.block_size:
        raise InputError(
            f"block_size = {shown.block_size} on the server, {pool.block_size} as planned",
            "expected the model and the flags that the server runs with",
        )
    tokens = shown.size_tokens
    if tokens is not None and abs(tokens - pool.size_tokens) > max(pool.block_size, pool.size_tokens // 100):
        raise InputError(
            f"the server makes {tokens:,} tokens of its {pool.num_blocks:,} blocks, this model {pool.size_tokens:,}",
            "expected the model and the flags that the server runs with",
        )


def _difference(prior: MemoryPlan, blocks: int) -> int:
    """Bytes by which the overhead of every GPU must grow, so that the tightest one has room for exactly these blocks."""
    per_block = layout_of(prior.deployment).bytes_per_block
    return min(stage.kv_bytes - blocks * size for stage, size in zip(prior.stages, per_block, strict=True) if size)
