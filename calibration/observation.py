"""What a stage says to the fit: a load, what it measured of it, how sure that is, and whether it may be fitted."""

from __future__ import annotations

from dataclasses import dataclass

from calibration.errors import InputError
from calibration.queueing import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One stage below the wall. Times in seconds, None where not measured; ``*_log_sd`` are relative standard errors of the
    means (0: not known, then the scatter of the fit stands for them).

    ``running`` is the mean number of sequences that decoded, where the server told it; else Little's law gives it from
    TPOT and TTFT. ``step_s`` is the server's own time of a step, with ``step_running`` sequences decoding in the mean one,
    where it told both. ``held_out``: kept from the fit, to score it.

    Raises:
        InputError: a number that cannot be.
    """

    label: str
    shape: Shape
    users: float
    tpot_s: float
    ttft_s: float | None = None
    running: float | None = None
    tpot_log_sd: float = 0.0
    ttft_log_sd: float = 0.0
    step_s: float | None = None
    step_running: float | None = None
    step_log_sd: float = 0.0
    held_out: bool = False

    def __post_init__(self) -> None:
        for key in ("users", "tpot_s", "ttft_s", "running", "step_s", "step_running"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise InputError(f"{self.label}: {key} = {value!r}, expected more than 0")
        for key in ("tpot_log_sd", "ttft_log_sd", "step_log_sd"):
            if not getattr(self, key) >= 0:
                raise InputError(f"{self.label}: {key} = {getattr(self, key)!r}, expected at least 0")

    @property
    def decoding(self) -> float:
        """Sequences that decoded on average, over all replicas."""
        if self.running is not None:
            return self.running
        decode = self.shape.decode_steps * self.tpot_s
        return self.users * decode / (decode + (self.ttft_s or 0.0) + self.shape.think_s)
