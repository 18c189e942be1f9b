"""A wheel of this checkout, built from a copy so that nothing is left in it, and environments that it is installed in."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("harness", "calibration", "loadprofiles")
#: what the image's recipe copies
SOURCES = ("pyproject.toml", "README.md", "LICENSE", *PACKAGES)


def copy_sources(folder: Path) -> Path:
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def build_wheel(folder: Path) -> Path:
    """``pip wheel . --no-deps``; needs the package registry for the build's own setuptools."""
    source, target = folder / "source", folder / "wheels"
    source.mkdir()
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", target, copy_sources(source))
    (wheel,) = target.glob("*.whl")
    return wheel


def install_beside(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel alone in it; its dependencies are those that these tests run with. Its bin folder."""
    venv.create(folder, with_pip=False)
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        folder / "bin/python",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        wheel,
    )
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = Path(next(path for path in sys.path if path.endswith("site-packages")))
    (packages / "dependencies.pth").write_text(f"{ours}\n")
    return folder / "bin"


NOBODY = 65534


def as_nobody(scripts: Path) -> dict[str, object] | None:
    """How to run an environment's programs as a user without rights, home or a folder to write in; None where that user
    may not read the Python that the environment stands on."""
    environment = {"PATH": f"{scripts}:/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    more: dict[str, object] = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/", "env": environment}
    try:
        run(scripts / "python", "-c", "", **more)
    except (AssertionError, PermissionError):
        return None
    return more


def run(*command: str | Path, **more: object) -> str:
    """What a command says. A failure shows all of it."""
    done = subprocess.run(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **more,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{command}: {done.stdout}"
    return str(done.stdout)
