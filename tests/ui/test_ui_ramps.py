"""Ramps from the page: confirmed by host and users, the same files as the command's, stopped in order."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ui_client import Client, serving
from ui_process import TWIN, Served, running

from harness.store import read_run
from harness.ui.follow import Follower, Tail, view


@pytest.fixture(scope="module")
def twin() -> Iterator[Served]:
    with running("twin", "--port", "0", *TWIN) as served:
        yield served


def levels(twin: Served, **more: Any) -> dict[str, Any]:
    about = {"base_url": twin.url, "users": [1, 3], "duration_s": 2.0, "prompt_tokens": 32, "output_tokens": 16}
    return about | more


def is_empty(folder: Path) -> bool:
    return not [*folder.iterdir()]


async def ended(results: Path, name: str) -> None:
    for _ in range(400):
        if (results / name / "run.json").is_file() and read_run(results / name).run["ended"] is not None:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{name} did not end")


async def until_answered(folder: Path) -> None:
    """Until the first request of a ramp has ended well."""
    follower = Follower(folder)
    for _ in range(400):
        if follower.look().ok:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"nothing was answered in {folder}")


async def until_there(file: Path) -> None:
    for _ in range(400):
        if is_there(file):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{file} was not written")


def is_there(file: Path) -> bool:
    return file.is_file()


async def start(client: Client, asked: dict[str, Any]) -> str:
    status, ticket = await client.post("/api/ramps/check", asked)
    assert status == 200, ticket
    status, answer = await client.post("/api/ramps/start", {"ticket": ticket["id"]})
    assert status == 200, answer
    return str(answer["run"])


async def test_the_confirmation_names_host_model_and_the_greatest_number_of_users(twin: Served, tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        _, ticket = await client.post("/api/ramps/check", levels(twin))
        assert ticket["host"] == f"127.0.0.1:{twin.port}"
        assert (ticket["model"], ticket["most_users"], ticket["stages"], ticket["about_s"]) == ("twin", 3, 2, 4.0)
        _, ticket = await client.post("/api/ramps/check", {"base_url": twin.url, "profile": "ramp"})
        assert ticket["most_users"] == 128
    assert is_empty(tmp_path)


async def test_nothing_starts_without_a_ticket_nor_twice_with_one(twin: Served, tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        for body in ({"ticket": "guess"}, {"ticket": 7}, {}):
            assert (await client.post("/api/ramps/start", body))[0] == 422
        _, ticket = await client.post("/api/ramps/check", levels(twin))
        _, started = await client.post("/api/ramps/start", {"ticket": ticket["id"]})
        status, answer = await client.post("/api/ramps/start", {"ticket": ticket["id"]})
        assert status == 422
        assert "was used or is too old" in answer["error"]
        await ended(tmp_path, started["run"])


async def test_it_ends_with_the_same_files_as_one_from_the_command_line(twin: Served, tmp_path: Path) -> None:
    async with serving(tmp_path / "page") as client:
        name = await start(client, levels(twin))
        await ended(tmp_path / "page", name)
        status, text = await client.get(f"/api/runs/{name}/events")
        assert status == 200
        # the last thing that a ramp writes
        await until_there(tmp_path / "page" / name / "report.html")
    command = [
        sys.executable,
        "-m",
        "harness.cli",
        "ramp",
        "--base-url",
        twin.url,
        "--users",
        "1,3",
        "--duration",
        "2s",
    ]
    command += ["--prompt-tokens", "32", "--output-tokens", "16", "--out", str(tmp_path / "line"), "--quiet"]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    assert await process.wait() == 0
    from_page, from_line = tmp_path / "page" / name, tmp_path / "line"
    assert sorted(p.name for p in from_page.iterdir()) == sorted(p.name for p in from_line.iterdir())
    one, other = read_run(from_page), read_run(from_line)
    assert one.run["profile"] == other.run["profile"]
    assert [stage["users"] for stage in one.stages] == [1, 3]
    assert json.loads(text.strip().splitlines()[-1].removeprefix("data: "))["going"] is False


async def test_stop_ends_it_in_order_with_its_results(twin: Served, tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        name = await start(client, levels(twin, duration_s=60.0))
        await until_answered(tmp_path / name)
        assert Follower(tmp_path / name).look().going
        _, listed = await client.get("/api/runs")
        assert listed["ours"] == [name]
        assert listed["runs"][0]["state"] == "running"
        assert (await client.post(f"/api/runs/{name}/stop", {}))[0] == 200
        await ended(tmp_path, name)
        assert read_run(tmp_path / name).stages[0]["requests"]["ok"] > 0
        for _ in range(100):
            if not (await client.get("/api/runs"))[1]["ours"]:
                break
            await asyncio.sleep(0.1)
        status, answer = await client.post(f"/api/runs/{name}/stop", {})
        assert status == 422
        assert "has ended" in answer["error"]


async def test_a_ramp_ends_with_the_page_that_started_it(twin: Served, tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        name = await start(client, levels(twin, duration_s=60.0))
        await until_answered(tmp_path / name)
    assert read_run(tmp_path / name).run["ended"] is not None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_url": "http://127.0.0.1:9"}, "127.0.0.1:9"),
        ({"base_url": "file:///etc/passwd"}, "expected http://HOST:PORT"),
        ({"users": []}, "users: list should have at least 1 item"),
        ({"users": [0]}, "users.0: input should be greater than or equal to 1"),
        ({"users": None, "profile": "../../etc/passwd"}, "expected one of"),
        ({"profile": "smoke"}, "expected either profile, a name, or users"),
        ({"model": "another"}, "another"),
        ({"api_key": 7}, "not ***"),
        ({"prompt_tokens": 5000}, "max_model_len"),
    ],
)
async def test_a_ramp_that_cannot_be_is_refused_before_anything_is_sent(
    twin: Served, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    asked = {key: value for key, value in levels(twin, **change).items() if value is not None}
    async with serving(tmp_path) as client:
        status, answer = await client.post("/api/ramps/check", asked)
    assert status == 422
    assert said in answer["error"]


def test_a_tail_leaves_a_line_that_is_still_being_written(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    tail = Tail(file)
    assert [*tail.rows()] == []
    file.write_bytes(b'{"a":1}\n{"a":')
    assert [*tail.rows()] == [{"a": 1}]
    with file.open("ab") as stream:
        stream.write(b"2}\n")
    assert [*tail.rows()] == [{"a": 2}]
    assert [*tail.rows()] == []


def test_a_run_that_was_only_begun_is_shown(tmp_path: Path) -> None:
    from report_runs import run_folder

    folder = run_folder(tmp_path / "run")
    for name in ("summary.json", "requests.jsonl", "scrapes.jsonl"):
        (folder / name).unlink()
    seen = Follower(folder).look()
    assert (seen.ok, seen.ttft_ms, seen.stages) == (0, None, [])
    assert "1 of 6, 2 users" in view(seen)
