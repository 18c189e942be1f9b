"""Who may ask: this page, on this machine, or whoever has the token; and no error is a stack trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner
from ui_client import LLAMA, serving

from harness.cli.ui import command
from harness.errors import UsageError

TOKEN = "correct horse battery"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost.evil.example:8090",
        "",
        "[::1",
        "10.0.0.1",
    ],
)
async def test_a_foreign_host_is_refused(tmp_path: Path, host: str) -> None:
    async with serving(tmp_path) as client:
        for path in ("/", "/api/runs", "/static/app.js"):
            status, answer = await client.get(path, headers={"Host": host})
            assert status == 421
            assert "is not this server" in answer["error"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9000", "127.0.0.1:1", "[::1]:8090"])
async def test_loopback_by_any_port_is_ours_as_a_forwarded_port_is(tmp_path: Path, host: str) -> None:
    async with serving(tmp_path) as client:
        assert (await client.get("/api/runs", headers={"Host": host}))[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://localhost:3000"])
async def test_a_foreign_origin_is_refused(tmp_path: Path, origin: str) -> None:
    async with serving(tmp_path) as client:
        status, answer = await client.post("/api/size", LLAMA, headers={"Origin": origin})
        assert status == 403
        assert "another site" in answer["error"]
        assert (await client.post("/api/size", LLAMA, headers={"Origin": client.origin}))[0] == 200


async def test_a_fetch_that_the_browser_calls_cross_site_is_refused_and_a_link_to_the_page_is_not(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as client:
        cross = {"Sec-Fetch-Site": "cross-site"}
        assert (await client.get("/api/runs", headers=cross))[0] == 403
        assert (await client.get("/", headers=cross))[0] == 403
        assert (await client.get("/", headers=cross | {"Sec-Fetch-Mode": "navigate"}))[0] == 200


async def test_a_form_of_another_site_cannot_post(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            status, _ = await client.ask("POST", "/api/ramps/start", data="{}", headers={"Content-Type": kind})
            assert status == 415


@pytest.mark.parametrize("path", ["/api/ramps/start", "/api/ramps/check", "/api/runs/x/stop"])
async def test_nothing_starts_or_stops_by_a_get(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path) as client:
        status, _ = await client.get(path)
        assert status in (405, 422)


async def test_every_answer_forbids_what_the_page_does_not_need(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        for path in ("/", "/nowhere", "/api/catalog"):
            async with client._session.get(client.origin + path) as response:
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert "Access-Control-Allow-Origin" not in response.headers


async def test_behind_a_token_nothing_is_told_without_it(tmp_path: Path) -> None:
    async with serving(tmp_path, "0.0.0.0", TOKEN) as client:
        assert (await client.get("/api/runs"))[0] == 401
        assert (await client.get("/static/app.js"))[0] == 401
        assert (await client.get("/api/runs", headers={"Authorization": "Bearer wrong"}))[0] == 401
        assert (await client.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}))[0] == 200
        assert (await client.get("/api/runs", headers={"Host": "evil.example", "Authorization": f"Bearer {TOKEN}"}))[
            0
        ] == 421
        assert (await client.get("/api/runs", headers={"Host": "10.1.2.3:8090", "Authorization": f"Bearer {TOKEN}"}))[
            0
        ] == 200


async def test_the_token_opens_the_page_once_and_is_not_kept_in_the_cookie(tmp_path: Path) -> None:
    async with serving(tmp_path, "0.0.0.0", TOKEN) as client:
        status, page = await client.get("/")
        assert status == 200
        assert 'action="/login"' in page
        assert (await client.ask("POST", "/login", data={"token": "guess"}))[0] == 401
        assert (await client.ask("POST", "/login", data={"token": TOKEN}, follow=False))[0] == 303
        cookies = {cookie.key: cookie for cookie in client._session.cookie_jar}
        cookie = cookies["vllm_harness_ui"]
        assert TOKEN not in cookie.value
        assert cookie["httponly"]
        assert cookie["samesite"] == "Strict"
        assert (await client.get("/api/runs"))[0] == 200


def test_another_address_needs_a_token() -> None:
    with pytest.raises(UsageError, match="starts ramps for whoever finds it"):
        command(host="0.0.0.0")
    with pytest.raises(UsageError, match="at least 8 characters"):
        command(host="0.0.0.0", token="short")


def test_the_help_shows_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.cli.app import app

    monkeypatch.setenv("VLLM_HARNESS_UI_TOKEN", TOKEN)
    said = CliRunner().invoke(app, ["ui", "--help"]).output
    assert "--host" in said
    assert TOKEN not in said
