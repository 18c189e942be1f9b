"""Searching: the ``search`` section of a profile. The profile's one stage is the first probe and the pattern of the others;
the search sets their users."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from loadprofiles.units import Seconds, Strict

Users = Annotated[int, Field(ge=1, le=100_000)]
_Share = Annotated[float, Field(gt=0, lt=1)]


class Slo(Strict):
    """Limits in milliseconds that a good request meets, all of them."""

    ttft: Annotated[float, Field(gt=0)] | None = None
    tpot: Annotated[float, Field(gt=0)] | None = None
    e2e: Annotated[float, Field(gt=0)] | None = None


class _Searching(Strict):
    most: Users = 4096
    """No probe has more users."""
    precision: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    """The search ends when the answer is known to this share of itself, or to one user."""
    confidence: _Share = 0.9
    min_residences: Annotated[float, Field(ge=2, le=1000)] = 8.0
    """A probe lasts at least so many times as long as a request does, whatever the stage's duration says."""
    max_duration: Seconds = 600.0
    """But no longer than this, nor than the stage's duration where that is longer."""


class SloSearch(_Searching):
    """The most users with whom requests meet the limits: doubled until they do not, then halved in between."""

    kind: Literal["slo"]
    slo: Slo = Slo()
    """``--slo`` on the line replaces it."""
    attainment: _Share = 0.9
    """Share of the requests that has to meet the limits."""
    max_repeats: Annotated[int, Field(ge=1, le=100)] = 5
    """A probe that neither passes nor fails with the confidence asked is run again, so many times at most."""
    max_probes: Annotated[int, Field(ge=3, le=1000)] = 40


class KneeSearch(_Searching):
    """Users beyond which an added one brings less than ``slope`` of what the first brings: levels are doubled until
    throughput has bent, then set around the bend until its interval is narrow enough."""

    kind: Literal["knee"]
    slope: _Share = 0.25
    """Of what the first user brings: an added one who brings less is beyond the knee."""
    precision: Annotated[float, Field(gt=0, le=0.5)] = 0.03
    """The search ends when half the interval is within this share of the answer, or half a user."""
    max_probes: Annotated[int, Field(ge=5, le=1000)] = 40


Search = Annotated[SloSearch | KneeSearch, Field(discriminator="kind")]
