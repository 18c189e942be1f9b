"""The law of the house: who may import whom, and what each room must never see (DESIGN section 3)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("harness", "calibration", "loadprofiles")
SOURCES = sorted(path for room in OURS for path in (ROOT / room).rglob("*.py"))

NETWORK = {"socket", "ssl", "http", "urllib", "aiohttp", "yarl", "requests", "httpx", "socketserver", "selectors"}
CLOCK = {"time"}
CONCURRENCY = {"asyncio", "threading", "multiprocessing", "concurrent", "signal", "uvloop"}

#: path prefix -> top-level modules that may never be imported below it
NEVER: dict[str, set[str]] = {
    "loadprofiles/": NETWORK | CLOCK | CONCURRENCY | {"harness", "calibration"},
    "calibration/": NETWORK | CLOCK | CONCURRENCY | {"harness", "loadprofiles"},
    "harness/wire/": NETWORK | CLOCK | CONCURRENCY,
    "harness/decode.py": NETWORK | CLOCK | CONCURRENCY,
    "harness/record.py": NETWORK | CLOCK | CONCURRENCY,
    "harness/measure/": NETWORK | CLOCK | CONCURRENCY,
    "harness/workload/": NETWORK | CLOCK | CONCURRENCY,
}
#: the only files that may import a module
ONLY: dict[str, tuple[str, ...]] = {
    "time": ("harness/clock.py",),
    "aiohttp": ("harness/client.py", "harness/http_get.py", "harness/twin_server.py", "harness/ui/"),
    "typer": ("harness/cli/",),
}
#: the only rooms that print or exit; a worker's stdout is its line to the controller
MAY_PRINT = ("harness/cli/", "harness/ui/")


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_room_never_imports_what_it_must_not_know(path: Path) -> None:
    name = name_of(path)
    for module in imports_of(path):
        top = module.split(".")[0]
        for prefix, never in NEVER.items():
            assert not (name.startswith(prefix) and top in never), f"{name} imports {module}"
        if top in ONLY:
            assert name.startswith(ONLY[top]), f"{name} imports {module}; only {ONLY[top]} may"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_the_command_line_prints_or_exits(path: Path) -> None:
    name = name_of(path)
    if name.startswith(MAY_PRINT):
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("print", "exit", "quit", "sys.exit", "os._exit"), f"{name}:{node.lineno} {called}"
        if isinstance(node, ast.Raise) and node.exc is not None:
            assert not ast.unparse(node.exc).startswith("SystemExit"), f"{name}:{node.lineno} raises SystemExit"


#: module -> what of it carries a state of its own
OWN_RANDOM_STATE = {
    "np.random": {"default_rng", "Generator", "SeedSequence", "PCG64", "BitGenerator"},
    "numpy.random": {"default_rng", "Generator", "SeedSequence", "PCG64", "BitGenerator"},
    "random": {"Random"},
}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_the_global_random_state_is_never_used(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            allowed = OWN_RANDOM_STATE.get(ast.unparse(node.value))
            assert allowed is None or node.attr in allowed, f"{name_of(path)}:{node.lineno} {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom) and node.module in ("random", "numpy.random"):
            names = {alias.name for alias in node.names}
            assert names <= OWN_RANDOM_STATE[node.module], f"{name_of(path)}:{node.lineno} {names}"


def test_no_room_is_only_a_name() -> None:
    for room in OURS:
        for folder in (path for path in (ROOT / room).rglob("*") if path.is_dir() and path.name != "__pycache__"):
            assert any(folder.iterdir()), f"{name_of(folder)} is empty"
