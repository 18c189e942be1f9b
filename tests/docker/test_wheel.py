"""The package as it is installed: everything that is in the rooms is in the wheel, and every command works from there."""

from __future__ import annotations

import json
import os
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from wheel import PACKAGES, ROOT, as_nobody, build_wheel, install_beside, run

from harness.cli.app import COMMANDS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel, readable to everybody."""
    folder = tmp_path_factory.mktemp("installed")
    for part in (folder, *folder.parents[:-2]):
        part.chmod(0o755)
    return install_beside(wheel, folder / "venv")


def files_of(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_file_of_the_rooms_is_in_the_wheel_and_no_other(wheel: Path) -> None:
    here = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in files_of(wheel) if ".dist-info/" not in name}
    assert sorted(here - packed) == []
    assert sorted(packed - here) == []


def test_it_says_what_it_is_and_brings_its_licence(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = f"vllm_harness-{project['version']}.dist-info"
    names = files_of(wheel)
    assert f"{info}/licenses/LICENSE" in names
    metadata = zipfile.ZipFile(wheel).read(f"{info}/METADATA").decode()
    assert f"Requires-Python: {project['requires-python']}" in metadata
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    # of any system and any Python 3
    assert wheel.name.endswith("-py3-none-any.whl")


def test_it_runs_from_where_it_is_installed_and_not_from_here(scripts: Path, tmp_path: Path) -> None:
    code = (
        "import harness, calibration, loadprofiles; print(*(m.__file__ for m in (harness, calibration, loadprofiles)))"
    )
    where = run(scripts / "python", "-c", code, cwd=tmp_path).split()
    assert len(where) == 3
    assert all(Path(path).is_relative_to(scripts.parent) for path in where)


def test_every_command_explains_itself(scripts: Path, tmp_path: Path) -> None:
    overview = run(scripts / "vllm-harness", "--help", cwd=tmp_path)
    assert [name for name in COMMANDS if f"  {name} " not in overview] == []
    # one process for all: what an installation can lack is a module or a file
    code = (
        "import sys; from harness.cli.app import COMMANDS, app; import typer\n"
        "for name in COMMANDS:\n"
        "    try: app([name, '--help'], prog_name='vllm-harness')\n"
        "    except SystemExit as end: assert not end.code, name\n"
    )
    said = run(scripts / "python", "-c", code, cwd=tmp_path, env={**os.environ, "COLUMNS": "200"})
    assert len(re.findall(r"(?im)^\s*usage: ", said)) >= len(COMMANDS)


def test_profiles_and_catalog_came_along(scripts: Path, tmp_path: Path) -> None:
    for command, folder in (("profiles", "loadprofiles"), ("models", None), ("gpus", None)):
        listed = run(scripts / "vllm-harness", command, cwd=tmp_path, env={**os.environ, "COLUMNS": "200"})
        for path in (ROOT / folder).glob("*.yaml") if folder else ():
            assert path.stem in listed
        assert len(listed.splitlines()) > 4
    plan = run(scripts / "vllm-harness", "plan", "--model", "llama-3.1-8b", "--gpu", "h100-sxm", "--json", cwd=tmp_path)
    assert json.loads(plan)["fits"] is True


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can become somebody else")
def test_it_needs_no_rights_and_no_home(scripts: Path) -> None:
    """As the image runs it: another user, whose home it cannot write, in a folder it cannot write."""
    if (nobody := as_nobody(scripts)) is None:
        pytest.skip("only root may read this Python")
    assert "Usage: vllm-harness" in run(scripts / "vllm-harness", "--help", **nobody)
    plan = ("plan", "--model", "llama-3.1-8b", "--gpu", "h100-sxm", "--json")
    assert json.loads(run(scripts / "vllm-harness", *plan, **nobody))["fits"] is True
