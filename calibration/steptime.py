"""What one engine step costs, as everything that schedules or sizes needs it: one protocol, its linear form, and the form
built from a deployment's physics and factors.

A step is one forward pass: ``decode_seqs`` running sequences that get one token each, ``kv_tokens`` tokens of KV cache
resident for those sequences (summed over them, one replica's count, not a GPU's share), and ``prefill_tokens`` prompt
tokens computed in the same pass, each after ``prefill_context`` tokens of its own prompt on average (None: one prompt that
starts in this step, so half of it). The twin and the operating points take any :class:`StepModel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from calibration.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from calibration.deployment import Deployment
    from calibration.factors import FactorSet
    from calibration.physics import Physics

    Floats = npt.NDArray[np.float64]


class StepModel(Protocol):
    """Seconds of one step. Both methods are pure and agree with each other, element by element."""

    def step_s(
        self, decode_seqs: float, kv_tokens: float, prefill_tokens: float, prefill_context: float | None = None
    ) -> float:
        """Seconds of one step; arguments are >= 0 and need not be whole (averages are welcome)."""
        ...

    def step_s_many(self, decode_seqs: Floats, kv_tokens: Floats, prefill_tokens: Floats) -> Floats:
        """The same for arrays that broadcast against each other; seconds, the broadcast shape."""
        ...


@dataclass(frozen=True, slots=True)
class LinearStep:
    """``base_s + per_sequence_s*B + per_kv_token_s*K + per_prefill_token_s*P``: four coefficients, all in seconds.

    Raises:
        InputError: a coefficient is negative, or the sum can be 0 (a step takes time).
    """

    base_s: float
    per_sequence_s: float
    per_kv_token_s: float
    per_prefill_token_s: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} is {getattr(self, name)}: expected a number of seconds >= 0")
        if not self.base_s > 0:
            raise InputError(f"base_s is {self.base_s}: expected > 0, for no step is free")

    def step_s(
        self, decode_seqs: float, kv_tokens: float, prefill_tokens: float, prefill_context: float | None = None
    ) -> float:
        return (
            self.base_s
            + self.per_sequence_s * decode_seqs
            + self.per_kv_token_s * kv_tokens
            + self.per_prefill_token_s * prefill_tokens
        )

    def step_s_many(self, decode_seqs: Floats, kv_tokens: Floats, prefill_tokens: Floats) -> Floats:
        return _many(self, decode_seqs, kv_tokens, prefill_tokens)


class StepTime(NamedTuple):
    """The physics of one replica, with its factors. Additive, one term a method; no term is ever negative."""

    physics: Physics
    step_overhead_s: float
    expert_read_factor: float
    per_sequence_s: float
    kv_read_factor: float
    prefill_factor: float
    attention_factor: float
    mixed_step_overhead_s: float

    def step_s(
        self, decode_seqs: float, kv_tokens: float, prefill_tokens: float, prefill_context: float | None = None
    ) -> float:
        total = (
            self.step_overhead_s
            + self.experts_s(decode_seqs + prefill_tokens)
            + self.per_sequence_s * decode_seqs
            + self.kv_s(decode_seqs, kv_tokens)
        )
        if prefill_tokens <= 0:
            return total
        before = 0.0 if prefill_context is None else prefill_context - prefill_tokens / 2
        return total + self.mixed_step_overhead_s + self.prompt_chunk_s(prefill_tokens, before)

    def step_s_many(self, decode_seqs: Floats, kv_tokens: Floats, prefill_tokens: Floats) -> Floats:
        return _many(self, decode_seqs, kv_tokens, prefill_tokens)

    def experts_s(self, tokens: float) -> float:
        """Reading the experts that this many tokens choose."""
        if not self.physics.experts:
            return 0.0
        return self.expert_read_factor * self.physics.expert_bytes_hit(tokens) / self.physics.bandwidth_bytes_per_s

    def kv_s(self, decode_seqs: float, kv_tokens: float) -> float:
        """Reading the cache of the running sequences."""
        return self.kv_read_factor * self.physics.kv_bytes(decode_seqs, kv_tokens) / self.physics.bandwidth_bytes_per_s

    def prompt_chunk_s(self, tokens: float, context: float) -> float:
        """Computing ``tokens`` of a prompt of which ``context`` tokens are already in the cache (below 0 where the tokens
        are of several prompts): matrix products, and attention over all that came before."""
        products = self.physics.compute_s_per_token + self.physics.expert_compute_s_per_token
        attention = self.physics.attention_flops(tokens, context + tokens / 2) / self.physics.attention_flops_per_s
        return self.prefill_factor * products * tokens + self.attention_factor * attention


def step_time(physics: Physics, factors: FactorSet) -> StepTime:
    """The step of this deployment under these factors."""
    return StepTime(
        physics=physics,
        step_overhead_s=factors.value("step_overhead"),
        expert_read_factor=factors.value("expert_read_factor"),
        per_sequence_s=factors.value("per_sequence"),
        kv_read_factor=factors.value("kv_read_factor"),
        prefill_factor=factors.value("prefill_factor"),
        attention_factor=factors.value("attention_factor"),
        mixed_step_overhead_s=factors.value("mixed_step_overhead"),
    )


def prior_step_time(deployment: Deployment) -> StepTime:
    """The step as the priors have it.

    Raises:
        Unsupported: the deployment names no device whose rates are known.
    """
    from calibration.priors import physics_of, prior_factors

    physics = physics_of(deployment)
    return step_time(physics, prior_factors(deployment, physics))


def _many(model: StepModel, decode_seqs: Floats, kv_tokens: Floats, prefill_tokens: Floats) -> Floats:
    """One call an element: the same arithmetic as the scalar, to the bit."""
    import numpy as np

    each = np.broadcast(decode_seqs, kv_tokens, prefill_tokens)
    values = [model.step_s(float(b), float(k), float(p)) for b, k, p in each]
    return np.array(values, dtype=np.float64).reshape(each.shape)
