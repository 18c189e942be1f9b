"""What a run is told, and who watches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from harness.load.tally import Tally
from harness.observe.probe import ProbeResult
from loadprofiles.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RampOptions:
    """Everything a run is told. Seconds unless the name says otherwise."""

    base_url: str
    profile: Profile
    out: Path
    model: str | None = None
    api_key: str | None = None
    metrics_url: str | None = None
    verify_tls: bool = True
    seed: int = 0
    slo_ms: Mapping[str, float] = field(default_factory=dict)
    #: further limits like slo_ms, whose goodput is told beside
    slo_tiers: Sequence[Mapping[str, float]] = ()
    processes: int = 1
    loop_name: str = "auto"
    scrape_interval_s: float | None = 0.5
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 120.0
    request_timeout_s: float = 600.0
    grace_s: float = 30.0
    save_content: bool = False
    save_gaps: bool = False
    honour_retry_after: bool = False
    prometheus: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """What a watcher sees a few times a second."""

    stage: int
    asked: int | None
    in_flight: int
    tally: Tally
    elapsed_s: float
    planned_s: float | None
    loop_lag_ms: float


class View(Protocol):
    """Who watches a run; the command line draws, tests listen."""

    def started(self, probed: ProbeResult, profile: Profile, out: Path) -> None: ...

    def tick(self, tick: Tick) -> None: ...

    def summarised(self, stage: Mapping[str, Any]) -> None: ...

    def says(self, message: str) -> None: ...
