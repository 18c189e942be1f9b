"""The Dockerfile's own commands, run here with its paths put below a folder of this machine: the nearest to a build where
there is no Docker engine. Installs every pinned dependency anew from the package registry (about a minute)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docker"))

from test_image import instructions
from wheel import NOBODY, as_nobody, copy_sources, run

ROOT = Path(__file__).parents[2]
PATHS = ("/src", "/opt/harness", "/wheels")


def interpreter() -> str | None:
    """The Python of the image, to its minor version."""
    base = next(text for name, text in instructions() if name == "FROM")
    found = re.search(r"python:(3\.\d+)", base)
    assert found
    for name in (f"python{found[1]}", *map(str, Path.home().glob(f".pyenv/versions/{found[1]}.*/bin/python"))):
        if (path := shutil.which(name)) is not None:
            told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if told.returncode == 0 and f" {found[1]}." in told.stdout:
                return path
    return None


@pytest.mark.bench
@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can become the image's user")
def test_what_the_recipe_builds_runs_as_the_image_would(tmp_path: Path) -> None:
    python = interpreter()
    if python is None:
        pytest.skip("the image's Python is not installed")
    for part in (tmp_path, *tmp_path.parents[:-2]):
        part.chmod(0o755)
    source = tmp_path / "src"
    source.mkdir()
    copy_sources(source)
    shutil.copy(ROOT / "docker" / "requirements.txt", source)
    # stands for the image's own Python, into which a build may install
    run(python, "-m", "venv", tmp_path / "base")
    stages = "\n".join(f"{name} {text}" for name, text in instructions()).split("FROM ")
    for line in stages[1].splitlines():
        if line.startswith("RUN "):
            command = line.removeprefix("RUN ")
            for path in PATHS:
                command = re.sub(rf"(?<![\w.]){path}\b", str(tmp_path) + path, command)
            path = f"{tmp_path / 'base' / 'bin'}:/usr/bin:/bin"
            run("sh", "-ec", command, cwd=source, env={**os.environ, "PATH": path})
    shutil.rmtree(source)
    scripts = tmp_path / "opt" / "harness" / "bin"
    assert not (scripts / "pip").exists()
    nobody = as_nobody(scripts)
    # a Python below /root is root's alone
    as_user: dict[str, Any] = nobody or {"cwd": "/", "env": {"PATH": f"{scripts}:/usr/bin:/bin"}}
    entrypoint = json.loads(next(text for name, text in instructions() if name == "ENTRYPOINT"))
    default = json.loads(next(text for name, text in instructions() if name == "CMD"))
    assert "Usage: vllm-harness" in run(scripts / entrypoint[0], *entrypoint[1:], *default, **as_user)
    results = tmp_path / "results"
    results.mkdir()
    if nobody is not None:
        os.chown(results, NOBODY, NOBODY)
    twin = subprocess.Popen(
        [scripts / "vllm-harness", "twin", "--port", "0"], stdout=subprocess.PIPE, text=True, **as_user
    )
    try:
        assert twin.stdout is not None
        address = twin.stdout.readline().split()[-1]
        load = ("--users", "1,2", "--requests", "4", "--prompt-tokens", "16", "--output-tokens", "8")
        run(scripts / "vllm-harness", "ramp", "--base-url", address, *load, "--out", results / "first", **as_user)
        health = {**as_user, "env": {**as_user["env"], "HEALTH_URL": f"{address}/health"}}
        assert run(scripts / "python", ROOT / "docker" / "healthcheck.py", **health) == ""
    finally:
        twin.terminate()
        twin.communicate(timeout=10)
    shown = run(scripts / "vllm-harness", "exporter", results / "first", "--once", **as_user)
    assert "vllm_harness_finished_stage_users{" in shown
    print(
        "image recipe:", "as nobody," if nobody else "as root,", run(scripts / "python", "--version", **as_user).strip()
    )
