"""What a run looks like in a terminal: a line while a stage runs, a row of the table when it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.load.options import Tick
from harness.observe.probe import ProbeResult
from loadprofiles.profile import Profile

REFRESH_PER_S = 2


def number(value: float | None, digits: int = 0) -> str:
    """A number for a table; a dash where nothing was measured."""
    return "-" if value is None else f"{value:,.{digits}f}"


def significant(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def _at(stats: Mapping[str, Any] | None, key: str) -> float | None:
    return None if not stats else stats.get(key)


def level_of(stage: Mapping[str, Any]) -> str:
    if stage["request_rate"] is not None:
        cap = "" if stage["users"] is None else f" (<= {stage['users']})"
        return f"{stage['request_rate']:g}/s{cap}"
    return str(stage["users"])


def stage_table(stages: Sequence[Mapping[str, Any]]) -> Table:
    """Summaries as the table a run prints; one row a stage."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in (
        "users",
        "ok",
        "failed",
        "tok/s",
        "tok/s/user",
        "TTFT ms",
        "p99",
        "TPOT ms",
        "p99",
        "KV max",
        "waiting",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("preempted", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for stage in stages:
        server, requests = stage.get("server") or {}, stage["requests"]
        usage = server.get("kv_cache_usage_max")
        table.add_row(
            level_of(stage),
            number(requests["ok"]),
            number(requests["failed"]),
            significant(stage["output_tokens_per_s"]),
            significant(stage["output_tokens_per_s_per_user"]),
            significant(_at(stage["ttft_ms"], "mean")),
            significant(_at(stage["ttft_ms"], "p99")),
            significant(_at(stage["tpot_ms"], "mean")),
            significant(_at(stage["tpot_ms"], "p99")),
            "-" if usage is None else f"{100 * usage:.0f} %",
            number(server.get("waiting_mean"), 1),
            number(server.get("preemptions")),
            _mark(stage),
        )
    return table


def _mark(stage: Mapping[str, Any]) -> Text:
    if not stage["valid"]:
        return Text("invalid", style="bold red")
    window = stage["window"]
    return Text("" if window and window["steady"] else "not steady", style="yellow")


class LiveView:
    """Draws on stderr, so that stdout stays free; updates the line a few times a second while stderr is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._profile: Profile | None = None
        self._stages: list[Mapping[str, Any]] = []

    def started(self, probed: ProbeResult, profile: Profile, out: Path) -> None:
        self._profile = profile
        version = f"vLLM {probed.vllm_version}" if probed.vllm_version else "an OpenAI-compatible server"
        self._console.print(
            f"{profile.name}: {len(profile.stages)} stages against {probed.model} on {version} -> {out}"
        )
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=REFRESH_PER_S, transient=True)
            self._live.start()

    def tick(self, tick: Tick) -> None:
        if self._live is not None:
            self._live.update(self._running(tick))

    def _running(self, tick: Tick) -> RenderableType:
        tally, count = tick.tally, len(self._profile.stages) if self._profile else 0
        asked = "" if tick.asked is None else f"/{tick.asked}"
        ttft = tally.ttft_ms_sum / tally.ttft_n if tally.ttft_n else None
        tpot = tally.tpot_ms_sum / tally.tpot_n if tally.tpot_n else None
        line = Text.assemble(
            (f"stage {tick.stage + 1}/{count}  ", "bold"),
            f"in flight {tick.in_flight}{asked}  ok {tally.ok}  failed {tally.failed}  ",
            f"TTFT {significant(ttft)} ms  TPOT {significant(tpot)} ms  {tick.elapsed_s:.0f} s",
        )
        parts: list[RenderableType] = [stage_table(self._stages)] if self._stages else []
        parts.append(line)
        if tick.planned_s:
            parts.append(ProgressBar(total=tick.planned_s, completed=min(tick.elapsed_s, tick.planned_s), width=60))
        return Group(*parts)

    def summarised(self, stage: Mapping[str, Any]) -> None:
        self._stages.append(stage)
        if self._live is None:
            self._console.print(
                f"stage {stage['index'] + 1}: {level_of(stage)} users, {stage['requests']['ok']} ok,"
                f" {stage['requests']['failed']} failed, {significant(stage['output_tokens_per_s'])} tok/s"
            )

    def says(self, message: str) -> None:
        self._console.print(message, style="yellow")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class QuietView:
    """Says nothing."""

    def started(self, probed: ProbeResult, profile: Profile, out: Path) -> None:
        """Nothing."""

    def tick(self, tick: Tick) -> None:
        """Nothing."""

    def summarised(self, stage: Mapping[str, Any]) -> None:
        """Nothing."""

    def says(self, message: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
