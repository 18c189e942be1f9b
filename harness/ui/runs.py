"""The runs in results/: a list, and one by its name. A name is only ever looked up in that list, never joined to a path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibration.calibration_file import Calibration
from harness.calibration_file import NAME as CALIBRATION
from harness.calibration_file import read_calibration
from harness.clock import wall_time
from harness.errors import HarnessError, UsageError
from harness.store import REQUESTS, RUN, SCRAPES, SUMMARY, RunData, read_run

FILES = (RUN, SUMMARY, REQUESTS, SCRAPES, CALIBRATION)
#: a run that did not end and whose files last grew longer ago than this was cut
QUIET_S = 15.0
#: folders below results/ that are looked into: results/RUN and results/reference/RUN
DEPTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """A run as listed. ``state``: valid, partly (some stages invalid), invalid, running, cut or unreadable, and ``why``."""

    name: str
    started: str
    model: str
    profile: str
    stages: int
    state: str
    why: str
    calibrated: bool


class Results:
    """The folder of runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[tuple[str, int], RunEntry] = {}

    def folders(self) -> dict[str, Path]:
        """Name -> folder of every run below the root; what leads outside it is none."""
        return {path.relative_to(self.root).as_posix(): path for path in self._walk(self.root, DEPTH)}

    def _walk(self, folder: Path, depth: int) -> Iterator[Path]:
        if depth == 0 or not folder.is_dir():
            return
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") or not path.is_dir() or not self._inside(path):
                continue
            if (path / RUN).is_file():
                if all(self._inside(path / name) for name in FILES):
                    yield path
            else:
                yield from self._walk(path, depth - 1)

    def _inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.root.resolve())

    def folder(self, name: str) -> Path:
        """The folder of a run.

        Raises:
            UsageError: no such run.
        """
        found = self.folders().get(name)
        if found is None:
            raise UsageError(f"there is no run {name[:200]!r} in {self.root.name}/", "the list shows those there are")
        return found

    def run(self, name: str) -> RunData:
        return read_run(self.folder(name))

    def calibration(self, name: str) -> Calibration:
        """The calibration of a run.

        Raises:
            UsageError: no such run, or it holds none that reads.
        """
        return read_calibration(self.folder(name))

    def entries(self) -> list[RunEntry]:
        """Every run, newest first."""
        found = [self._entry(name, path) for name, path in self.folders().items()]
        return sorted(found, key=lambda entry: (entry.started, entry.name), reverse=True)

    def _entry(self, name: str, path: Path) -> RunEntry:
        changed = max((path / file).stat().st_mtime_ns for file in (RUN, SUMMARY) if (path / file).exists())
        key = (name, changed)
        known = self._known.get(key)
        if known is None or known.state == "running":
            known = self._known[key] = _read(name, path)
        return known


def is_running(run: RunData) -> bool:
    """Has it not ended, and do its files still grow?"""
    # an imported or predicted run has no end of its own
    if run.run.get("ended", "") is not None:
        return False
    newest = max((run.folder / name).stat().st_mtime for name in FILES if (run.folder / name).exists())
    return wall_time().timestamp() - newest < QUIET_S


def _read(name: str, path: Path) -> RunEntry:
    calibrated = (path / CALIBRATION).is_file()
    try:
        run = read_run(path)
        state, why = _state(run)
        document: dict[str, Any] = run.run
        return RunEntry(
            name=name,
            started=str(document.get("started") or ""),
            model=str(document["deployment"]["model"]),
            profile=str(document["profile"].get("name") or ""),
            stages=len(run.stages),
            state=state,
            why=why,
            calibrated=calibrated,
        )
    except HarnessError as error:
        why = error.message
    except (KeyError, TypeError, OSError) as error:
        why = f"it is not what a ramp writes: {type(error).__name__}: {error}"
    return RunEntry(
        name=name, started="", model="", profile="", stages=0, state="unreadable", why=why, calibrated=calibrated
    )


def _state(run: RunData) -> tuple[str, str]:
    if is_running(run):
        return "running", ""
    bad = [stage for stage in run.stages if not stage["valid"]]
    why = "; ".join(f"stage {stage['index'] + 1}: {', '.join(stage['reasons'])}" for stage in bad)
    if run.run.get("ended", "") is None:
        return "cut", "; ".join(["it did not end in order", *([why] if why else [])])
    if not run.stages:
        return "invalid", "no stage ended"
    if not bad:
        return "valid", ""
    return ("invalid" if len(bad) == len(run.stages) else "partly"), why
