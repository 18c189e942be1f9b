"""From a deployment to what serves: its physics, its pool, its factors, as the operating points need them."""

from __future__ import annotations

from typing import NamedTuple

from calibration.deployment import Deployment
from calibration.factors import FactorSet
from calibration.kv_cache import Pool
from calibration.kv_users import users_full, users_staggered
from calibration.memory import plan_memory
from calibration.physics import Physics
from calibration.priors import physics_of
from calibration.queueing import Server, Shape
from calibration.steptime import step_time


class Serving(NamedTuple):
    """A deployment with what follows from it before any factor: amounts of a step, and the pool of one replica (None: the
    model keeps no cache, or there is no room for one)."""

    deployment: Deployment
    physics: Physics
    pool: Pool | None

    def server(self, factors: FactorSet, shape: Shape) -> Server:
        """What serves requests of this shape, under these factors."""
        deployment = self.deployment
        return Server(
            step=step_time(self.physics, factors),
            request_overhead_s=factors.value("request_overhead"),
            request_token_s=factors.value("request_token"),
            wait_steps=factors.value("wait_steps"),
            prompt_factor=factors.value("prompt_factor"),
            ahead_factor=factors.value("ahead_factor"),
            steps_in_flight=max(1, deployment.concurrent_batches - deployment.pp + 1),
            max_num_batched_tokens=deployment.max_num_batched_tokens,
            max_num_seqs=deployment.max_num_seqs,
            max_running=None if self.pool is None else users_staggered(self.pool, *_whole(shape)),
            replicas=deployment.dp,
            micro_batches=deployment.pp,
        )

    def wall(self, shape: Shape) -> tuple[float, float] | None:
        """Users of all replicas at which the pool is full: with all at their end, and on average; None without a pool."""
        if self.pool is None:
            return None
        lengths = _whole(shape)
        return self.deployment.dp * users_full(self.pool, *lengths), self.deployment.dp * users_staggered(
            self.pool, *lengths
        )


def serving(deployment: Deployment) -> Serving:
    """The deployment as a server, its pool as the memory plan has it.

    Raises:
        InputError: vLLM would refuse to start with a given pool.
        Unsupported: no device is known, or no cache can be sized.
    """
    return Serving(deployment, physics_of(deployment), plan_memory(deployment).pool)


def _whole(shape: Shape) -> tuple[int, int]:
    return max(1, round(shape.prompt_tokens)), max(1, round(shape.output_tokens))
