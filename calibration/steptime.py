"""What one engine step costs, as everything that schedules or sizes needs it: one protocol, and its linear form.

A step is one forward pass: ``decode_seqs`` running sequences that get one token each, ``kv_tokens`` tokens of KV cache
resident for those sequences (summed over them, the whole deployment's count, not a GPU's share), and
``prefill_tokens`` prompt tokens computed in the same pass. The twin and the operating points take any
:class:`StepModel`. ``StepTime`` is the one built from a deployment's physics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from calibration.errors import InputError

Floats = npt.NDArray[np.float64]


class StepModel(Protocol):
    """Seconds of one step. Both methods are pure and agree with each other, element by element."""

    def step_s(self, decode_seqs: float, kv_tokens: float, prefill_tokens: float) -> float:
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

    def step_s(self, decode_seqs: float, kv_tokens: float, prefill_tokens: float) -> float:
        return (
            self.base_s
            + self.per_sequence_s * decode_seqs
            + self.per_kv_token_s * kv_tokens
            + self.per_prefill_token_s * prefill_tokens
        )

    def step_s_many(self, decode_seqs: Floats, kv_tokens: Floats, prefill_tokens: Floats) -> Floats:
        total: Floats = (
            self.base_s
            + self.per_sequence_s * np.asarray(decode_seqs, dtype=np.float64)
            + self.per_kv_token_s * np.asarray(kv_tokens, dtype=np.float64)
            + self.per_prefill_token_s * np.asarray(prefill_tokens, dtype=np.float64)
        )
        return total
