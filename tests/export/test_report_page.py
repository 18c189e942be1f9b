"""The report in a real browser: quiet, whole, true to the run, readable at any width and by any reader."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from chromium import Browser, Page, browser, needs_chromium
from report_runs import calibration, hostile_folder, run_folder

from harness.cli.report import compared
from harness.export.report import report_html, write_report
from harness.store import read_run

# one browser for all of them: it takes seconds to start
pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def page(chromium: Browser) -> Page:
    return await chromium.page()


def report(folder: Path, *, corrected: bool = True) -> str:
    run = read_run(folder)
    write_report(folder / "report.html", report_html(run, compared(run), calibration() if corrected else None))
    return (folder / "report.html").as_uri()


async def test_it_opens_without_a_word_on_the_console_and_shows_the_summary(page: Page, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    url = report(folder)
    await page.go(url)
    assert page.console == []
    assert page.failures == []
    assert set(page.requests) <= {url, "data:,"}
    rows = await page.js(
        "[...document.querySelector('section table tbody').rows].map(r => [...r.querySelectorAll('data')].map(d => Number(d.value)))"
    )
    for row, stage in zip(rows, read_run(folder).stages, strict=True):
        server = stage["server"]
        assert row == [
            stage["requests"]["ok"],
            stage["requests"]["failed"],
            stage["output_tokens_per_s"],
            stage["output_tokens_per_s_per_user"],
            *(stage[key][of] for key in ("ttft_ms", "tpot_ms") for of in ("mean", "p99")),
            server["kv_cache_usage_max"],
            server["waiting_mean"],
            server["preemptions"],
        ]


@pytest.mark.parametrize("width", [390, 1024, 1600])
async def test_nothing_is_wider_than_the_window(page: Page, tmp_path: Path, width: int) -> None:
    url = report(run_folder(tmp_path / "run"))
    for dark in (False, True):
        await page.look(width, dark=dark)
        await page.go(url)
        assert await page.js("document.documentElement.scrollWidth") <= width
        ground = await page.js("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(18, 22, 27)" if dark else "rgb(255, 255, 255)")
        assert await page.js("getComputedStyle(document.querySelector('figure text')).fill") != ground


async def test_the_keyboard_reaches_every_table_of_values(page: Page, tmp_path: Path) -> None:
    await page.go(report(run_folder(tmp_path / "run")))
    await page.key("Tab")
    assert await page.js("document.activeElement.textContent") == "Skip to the report"
    stops = await page.js("document.querySelectorAll('summary').length")
    for _ in range(60):
        await page.key("Tab")
        if await page.js("document.activeElement.tagName") == "SUMMARY":
            break
    await page.key("Enter")
    assert await page.js("document.activeElement.parentElement.open")
    assert stops == 7


async def test_it_prints(page: Page, tmp_path: Path) -> None:
    await page.go(report(run_folder(tmp_path / "run")))
    printed = await page.pdf()
    assert printed.startswith(b"%PDF-")
    assert 1 <= printed.count(b"/Type /Page\n") <= 8


async def test_hostile_texts_do_nothing(page: Page, tmp_path: Path) -> None:
    await page.go(report(hostile_folder(tmp_path / "run"), corrected=False))
    assert await page.js("document.title") != "owned"
    assert page.failures == []
    assert page.console == []
    assert await page.js("document.querySelectorAll('script, main img').length") == 0
