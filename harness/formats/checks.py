"""The other tool's own numbers beside ours from the same requests: does the import mean what the tool meant?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.measure.from_records import Requests
from harness.measure.stats import describe
from harness.measure.tokens import first_delta_tokens
from harness.measure.window import spans

_MS = 1000.0
#: two means of the same numbers differ by rounding only
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Printed:
    """A number that the tool printed.

    ``ours`` is where ours stands (``ttft_ms.mean``); ``within`` is how far ours may lie from it, relative: 0 where the
    definitions are one, more where they are known to differ, and then ``why`` says how.
    """

    theirs: str
    value: float
    ours: str
    within: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A printed number and ours; ``value`` is None where nothing of ours can be compared."""

    stage: int
    printed: Printed
    value: float | None

    @property
    def agrees(self) -> bool | None:
        if self.value is None:
            return None
        scale = max(abs(self.printed.value), abs(self.value), 1e-12)
        return abs(self.value - self.printed.value) <= max(TOLERANCE, self.printed.within) * scale

    def to_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "theirs": self.printed.theirs,
            "printed": self.printed.value,
            "ours": self.printed.ours,
            "value": self.value,
            "agrees": self.agrees,
            "why": self.printed.why,
        }


def check(stage: int, printed: Sequence[Printed], requests: Requests) -> list[Check]:
    """Every printed number beside ours over all good requests of the stage."""
    whole = whole_run(requests)
    return [Check(stage, number, _at(whole, number.ours)) for number in printed]


def _at(document: Mapping[str, Any], path: str) -> float | None:
    value: Any = document
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


def whole_run(requests: Requests) -> dict[str, Any]:
    """Our numbers over every good request, fill and drain included: what other tools call their result.

    Keys as in ``summary.json`` where there is one of the name, and besides: ``stream_end_ms``;
    ``e2e_ms_per_token`` (time to the last content over all output tokens, weighted by them: guidellm's "TPOT");
    ``output_tokens``, ``prompt_tokens``, ``ok``, ``duration_s`` (first send to last content).
    """
    trace, ok = requests.trace, requests.trace.ok
    starts, ends = spans(trace)
    duration_s = float(ends.max() - starts.min()) if len(starts) else np.nan
    tokens = trace.output_tokens[ok]
    paced = ok & ~np.isnan(trace.tpot_s)
    later = (trace.output_tokens - first_delta_tokens(trace))[paced].sum()
    total = float(np.nansum(tokens))
    numbers = {
        "tpot_ms_token_weighted": float((trace.e2e_s - trace.ttft_s)[paced].sum() * _MS / later) if later else None,
        "e2e_ms_per_token": float(np.nansum(trace.e2e_s[ok]) * _MS / total) if total else None,
        "output_tokens": total,
        "prompt_tokens": float(np.nansum(trace.prompt_tokens[ok])),
        "output_tokens_per_s": total / duration_s if duration_s > 0 else None,
        "requests_per_s": float(ok.sum()) / duration_s if duration_s > 0 else None,
        "duration_s": duration_s,
        "ok": int(ok.sum()),
        "failed": int(trace.failed.sum()),
    }
    columns = ("ttft", "ttfa", "tpot", "e2e", "stream_end")
    return {f"{name}_ms": describe(getattr(trace, f"{name}_s")[ok] * _MS) for name in columns} | {
        "chunk_gap_ms": _gaps(requests),
        **numbers,
    }


def _gaps(requests: Requests) -> Mapping[str, Any]:
    deltas = requests.deltas
    if deltas.times_s is None or deltas.offsets is None:
        return describe(np.empty(0))
    owner = np.repeat(np.arange(len(requests.trace)), np.diff(deltas.offsets))
    same = (owner[1:] == owner[:-1]) & requests.trace.ok[owner[1:]]
    return describe(np.diff(deltas.times_s)[same] * _MS)
