"""The twin of a deployment: its pool, its flags and its step time, from the plan, corrected by a calibration's factors."""

from __future__ import annotations

from calibration.deployment import Deployment
from calibration.errors import Unsupported
from calibration.factors import FactorSet
from calibration.kv_cache import Pool
from calibration.priors import prior_factors
from calibration.serving import Serving, serving
from calibration.steptime import StepModel, step_time
from calibration.twin.config import EngineConfig


def twin_of(deployment: Deployment, factors: FactorSet | None = None) -> tuple[EngineConfig, StepModel]:
    """Flags and step time of one engine (one data-parallel replica) of ``deployment``.

    Args:
        factors: of a calibration; without them the priors speak.

    Raises:
        InputError: vLLM would refuse to start with such a pool.
        Unsupported: a deployment the twin's scheduler does not model: several pipeline stages, or a cache that is not one
            group of full attention.
    """
    served = serving(deployment)
    return engine_config(served), step_time(served.physics, factors or prior_factors(deployment, served.physics))


def engine_config(served: Serving) -> EngineConfig:
    """The engine's flags, every default resolved by the plan."""
    deployment, pool = served.deployment, _pool(served)
    if deployment.pp > 1:
        raise Unsupported(f"pp = {deployment.pp}: the twin schedules one pipeline stage", "plan it with tp instead")
    return EngineConfig(
        num_gpu_blocks=pool.num_blocks,
        block_size=pool.block_size,
        max_model_len=deployment.max_model_len,
        max_num_seqs=deployment.max_num_seqs,
        max_num_batched_tokens=deployment.max_num_batched_tokens,
        enable_prefix_caching=deployment.enable_prefix_caching,
        async_scheduling=deployment.concurrent_batches > 1,
    )


def _pool(served: Serving) -> Pool:
    if served.pool is None:
        raise Unsupported("there is no KV pool: the model keeps no cache, or the GPU has no room for one")
    kinds = [group.cache.base_kind for group in served.pool.groups]
    if kinds != ["full"]:
        raise Unsupported(
            f"the KV cache of {served.deployment.architecture.name} has the groups {', '.join(kinds)}: the twin's pool is one"
            " group of full attention",
            "give the pool in blocks and the step time by hand: --num-gpu-blocks-override, --step-ms ...",
        )
    return served.pool
