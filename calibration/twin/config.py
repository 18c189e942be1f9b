"""What an engine is told at start: vLLM's flags by vLLM's names, validated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from calibration.errors import InputError

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding: ``num_speculative_tokens`` drafted for every running sequence in every decode step.

    Attributes:
        acceptance: chance that the draft at a position is accepted, given that all before it were; one a position.
        lookahead_tokens: slots reserved beyond the drafts for a drafter with its own KV cache (EAGLE, MTP: as many
            as drafts; n-gram: 0). vLLM 0.32.0 ``VllmConfig.num_lookahead_tokens``.
    """

    acceptance: tuple[float, ...]
    lookahead_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.acceptance:
            raise InputError("acceptance is empty: expected one probability a draft position")
        for chance in self.acceptance:
            if not 0 <= chance <= 1:
                raise InputError(f"acceptance has {chance}: expected probabilities in [0, 1]")
        if self.lookahead_tokens < 0:
            raise InputError(f"lookahead_tokens is {self.lookahead_tokens}: expected >= 0")

    @property
    def num_speculative_tokens(self) -> int:
        return len(self.acceptance)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine core (one data-parallel rank). Token and block counts are whole numbers.

    Attributes:
        num_gpu_blocks: as vLLM reports it, the null block included; one less can be used.
        watermark: fraction of the blocks kept free when a waiting request is admitted beside running ones.
        async_scheduling: schedule step k + 1 before the output of step k is known (vLLM's default on GPUs).

    Raises:
        InputError: a value no vLLM would start with.
    """

    num_gpu_blocks: int
    block_size: int = 16
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: Policy = "fcfs"
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    async_scheduling: bool = False
    speculation: Speculation | None = field(default=None)

    def __post_init__(self) -> None:
        for name in ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: expected at least 1")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise InputError(f"scheduling_policy is {self.scheduling_policy!r}: expected 'fcfs' or 'priority'")
        if not 0 <= self.watermark < 1:
            raise InputError(f"watermark is {self.watermark}: expected a fraction in [0, 1)")
        self._check_budget()
        self._check_pool()

    def _check_budget(self) -> None:
        drafts = self.speculation.num_speculative_tokens if self.speculation is not None else 0
        if self.max_num_batched_tokens < self.max_num_seqs * (1 + drafts):
            raise InputError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: expected at least max_num_seqs"
                f" ({self.max_num_seqs}) times the tokens of a decode step ({1 + drafts})"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise InputError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: without chunked prefill expected at least"
                f" max_model_len ({self.max_model_len})"
            )

    def _check_pool(self) -> None:
        needed = -(-self.max_model_len // self.block_size)
        if self.usable_blocks < needed:
            raise InputError(
                f"num_gpu_blocks is {self.num_gpu_blocks}: expected at least {needed + 1}, for one request of"
                f" max_model_len {self.max_model_len} takes {needed} blocks of {self.block_size} and one block is null",
                "lower --max-model-len or raise --num-gpu-blocks-override",
            )

    @property
    def usable_blocks(self) -> int:
        """Blocks that can hold tokens: all but the null block (vLLM 0.32.0 block_pool.py, BlockPool.get_usage)."""
        return self.num_gpu_blocks - 1
