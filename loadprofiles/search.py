"""Searching: the ``search`` section of a profile. The profile's one stage is the first probe and the pattern of the others;
the search sets their users."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loadprofiles.units import Strict

Users = Annotated[int, Field(ge=1, le=100_000)]
_Share = Annotated[float, Field(gt=0, lt=1)]


class Slo(Strict):
    """Limits in milliseconds that a good request meets, all of them."""

    ttft: Annotated[float, Field(gt=0)] | None = None
    tpot: Annotated[float, Field(gt=0)] | None = None
    e2e: Annotated[float, Field(gt=0)] | None = None


class SloSearch(Strict):
    """The most users with whom requests meet the limits: doubled until they do not, then halved in between."""

    kind: Literal["slo"]
    slo: Slo = Slo()
    """``--slo`` on the line replaces it."""
    attainment: _Share = 0.9
    """Share of the requests that has to meet the limits."""
    most: Users = 4096
    precision: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    """The search ends when the answer is known to this share of itself, or to one user."""
    confidence: _Share = 0.9
    """With which a probe passes or fails; one that does neither is run again, up to ``max_repeats`` times."""
    max_repeats: Annotated[int, Field(ge=1, le=100)] = 5
    max_probes: Annotated[int, Field(ge=3, le=1000)] = 40


class KneeSearch(Strict):
    """Users beyond which an added one brings less than ``slope`` of what the first brings: levels are doubled until
    throughput has bent, then set around the bend until its interval is narrow enough."""

    kind: Literal["knee"]
    slope: _Share = 0.25
    most: Users = 4096
    precision: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    """The search ends when half the interval is within this share of the answer, or one user."""
    confidence: _Share = 0.9
    max_probes: Annotated[int, Field(ge=5, le=1000)] = 30


Search = Annotated[SloSearch | KneeSearch, Field(discriminator="kind")]
