"""The columns of requests: what measuring reads, whether a live server, the twin or another tool's file wrote them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

Source = Literal["live", "twin", "imported"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """Requests of one stage or run as columns of equal length n.

    Times are seconds. ``scheduled_s`` and ``sent_s`` count from the run's start; the others from the request's own
    ``sent``. NaN means not measured. Token counts are floats so that NaN can say "unknown".
    """

    source: Source
    user: Ints
    scheduled_s: Floats
    sent_s: Floats
    #: first content delta / first non-reasoning one / last content delta / end of the stream
    ttft_s: Floats
    ttfa_s: Floats
    e2e_s: Floats
    stream_end_s: Floats
    tpot_s: Floats
    prompt_tokens: Floats
    output_tokens: Floats
    ok: Bools
    incomplete: Bools
    #: kind of failure by request, "" where there is none; shape (n,), dtype object
    failure: npt.NDArray[np.object_]

    def __post_init__(self) -> None:
        lengths = {name: len(getattr(self, name)) for name in self.__slots__ if name != "source"}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in length: {lengths}")

    def __len__(self) -> int:
        return len(self.sent_s)

    @property
    def failed(self) -> Bools:
        """Requests that ended badly: neither ok nor cut by the end of the stage."""
        return ~self.ok & ~self.incomplete

    def where(self, rows: Bools) -> RequestTrace:
        """The rows of a boolean mask, shape (n,)."""
        return RequestTrace(
            source=self.source, **{name: getattr(self, name)[rows] for name in self.__slots__ if name != "source"}
        )
