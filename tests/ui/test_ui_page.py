"""The page in a real browser, against its server and a twin as processes: what people see, move, share and stop."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import axe
import pytest
import pytest_asyncio
from chromium import Browser, Page, browser, needs_chromium
from report_runs import calibration, run_folder
from test_ui_api import CONFIG, TEN, planned
from ui_process import TWIN, Served, running, start, ui

from harness.calibration_file import write_calibration
from harness.export.charts import figure
from harness.store import read_run

# one browser and one server for all of them: they take seconds to start
pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="module")]

READY = "document.documentElement.dataset.ready === 'yes'"
#: a sizing is shown, and its curves and files
SETTLED = "document.querySelector('#cards').ariaBusy !== 'true' && !!document.querySelector('#cards article, #size-error:not([hidden])')"
TIMED = ("throughput_tokens_per_s", "throughput_tokens_per_s_per_user", "tpot_ms", "ttft_ms")
NUMBERS = "[...document.querySelectorAll('#cards data')].map(d => d.value).join() + document.querySelector('#cards').textContent"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    run_folder(folder / "plain")
    write_calibration(run_folder(folder / "fitted") / "calibration.json", _slower())
    return folder


def _slower() -> Any:
    """A calibration that moves every number."""
    from dataclasses import replace

    known = calibration(8192)
    return replace(known, factors=known.factors.scaled("step_overhead", 1.5))


@pytest.fixture(scope="module")
def server(results: Path) -> Iterator[Served]:
    with running(*ui(results)) as served:
        yield served


@pytest.fixture(scope="module")
def twin() -> Iterator[Served]:
    with running("twin", "--port", "0", *TWIN) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    async with browser() as running_browser:
        yield running_browser


#: what the browser itself says of an answer that refuses, as some tests want one, and of a server that is away
REFUSED_OR_AWAY = (
    "Failed to load resource: the server responded with a status of 422",
    "Failed to load resource: net::ERR_CONNECTION_",
)


@pytest_asyncio.fixture(loop_scope="module")
async def page(chromium: Browser) -> AsyncIterator[Page]:
    """A tab that must have said nothing on the console, and asked nothing off loopback, by the end of its test."""
    opened = await chromium.page()
    yield opened
    assert opened.failures == []
    assert [said for said in opened.console if not said[1].startswith(REFUSED_OR_AWAY)] == []
    assert {urlsplit(url).hostname for url in opened.requests if url.startswith("http")} <= {"127.0.0.1"}
    await opened.close()


async def opened(page: Page, server: Served, hash_: str = "#size") -> None:
    await page.go(server.url + hash_)
    await page.until(READY)
    if hash_.startswith("#size"):
        await page.until(SETTLED)


def link(*deployments: dict[str, Any]) -> str:
    return "#size?" + urlencode([("d", urlencode(one)) for one in deployments])


async def move(page: Page, control: str, value: str) -> None:
    """Set a control as a hand would, and wait until the answer to it is shown."""
    asked = await page.js("Number(document.querySelector('#cards').dataset.answered ?? 0)")
    event = "change" if control == "preset" else "input"
    await page.js(
        f"(() => {{ const c = document.getElementById({control!r}); c.value = {value!r};"
        f" c.dispatchEvent(new Event({event!r}, {{bubbles: true}})); }})()"
    )
    await page.until(f"Number(document.querySelector('#cards').dataset.answered) > {asked} && {SETTLED}")


async def test_it_is_quiet_and_stays_on_loopback(page: Page, server: Served) -> None:
    for view in ("size", "runs", "live"):
        await opened(page, server, f"#{view}")
        assert await page.js(f"!document.getElementById('{view}').hidden")
        assert await page.js("document.querySelector('nav [aria-current]').dataset.view") == view
    await asyncio.sleep(0.5)
    assert page.console == []


SMALL = {"model": "llama-3.1-8b", "gpu": "h100-sxm", "max_model_len": 8192}
CONTROLS = {
    "preset": "llama-70b-2xh100",
    "model": "qwen2.5-72b",
    "weights": "fp8",
    "kv": "fp8",
    "gpu": "l40s",
    "tp": "2",
    "pp": "2",
    "dp": "4",
    "gpu_memory_utilization": "0.85",
    "max_num_seqs": "16",
    "max_model_len": "4",
    "prompt_tokens": "28",
    "output_tokens": "20",
    "slo_ttft_ms": "100",
    "slo_tpot_ms": "10",
    "calibration_run": "fitted",
}


async def restored(page: Page, hash_: str) -> None:
    """Follow a link inside the page, and wait for its answer."""
    asked = await page.js("Number(document.querySelector('#cards').dataset.answered)")
    await page.js(f"location.hash = {hash_!r}")
    await page.until(f"Number(document.querySelector('#cards').dataset.answered) > {asked} && {SETTLED}")


async def test_every_control_changes_the_numbers(page: Page, server: Served) -> None:
    await opened(page, server)
    offered = await page.js(
        "[...document.querySelectorAll('#controls select, #controls input:not([type=file])')].map(c => c.id)"
    )
    # the tick says how a calibration is used, and is tested with one below
    assert sorted(offered) == sorted([*CONTROLS, "transfer"])
    start_of_all = await page.js(NUMBERS)
    for control, value in CONTROLS.items():
        await move(page, control, value)
        assert await page.js(NUMBERS) != start_of_all, control
        assert await page.js("document.querySelector('#size-error').hidden"), control
        held = await page.js("new URLSearchParams(location.hash.split('?')[1]).get('d')")
        assert ("tp=2" if control == "preset" else f"{control}=") in held
        await restored(page, "#size")
        assert await page.js(NUMBERS) == start_of_all


async def test_a_calibration_is_carried_over_only_when_asked(page: Page, server: Served) -> None:
    await opened(page, server, link(SMALL | {"calibration_run": "fitted"}))
    assert "Corrected by a calibration" in await page.js("document.querySelector('#cards').textContent")
    await move(page, "tp", "2")
    assert "is of another deployment" in await page.js("document.querySelector('#size-error').textContent")
    await page.js("document.getElementById('transfer').click()")
    await page.until("document.querySelector('#cards').textContent.includes('Carried over as wide priors')")
    assert "transfer%3D1" in await page.js("location.hash")


async def test_a_dropped_config_json_is_sized(page: Page, server: Served) -> None:
    await opened(page, server)
    await page.js(
        f"""(() => {{ const moved = new DataTransfer();
        moved.items.add(new File([{json.dumps(json.dumps(CONFIG))}], 'mine.json', {{type: 'application/json'}}));
        document.getElementById('controls').dispatchEvent(new DragEvent('drop', {{dataTransfer: moved, bubbles: true, cancelable: true}}));
        }})()"""
    )
    await page.until("document.querySelector('#cards').textContent.includes('mine.json')")
    url = await page.js("location.href")
    await page.go("about:blank")
    await page.go(url)
    await page.until(READY)
    await page.until("document.querySelector('#cards').textContent.includes('mine.json')")


async def test_ten_sizings_equal_plan_json(page: Page, server: Served) -> None:
    await opened(page, server)
    for asked, options in TEN:
        told = planned(options if "utilization" in options else f"{options} --gpu-memory-utilization 0.92")
        await restored(page, link(asked))
        shown = await page.js(
            "Object.fromEntries([...document.querySelectorAll('#cards data[data-key]')]"
            ".map(d => [d.dataset.key, [d.value, d.textContent]]))"
        )
        if not told["fits"]:
            assert await page.js("document.querySelector('.answer').textContent") == "Does not fit"
            continue
        expected = {f"{key}.{end}": told[key][end] for key in TIMED for end in ("value", "low", "high")}
        expected["kv_pool_tokens"] = told["memory"]["cluster"]["kv_pool_tokens"]
        expected["max_context_tokens"] = told["max_context_tokens"]
        for key, value in expected.items():
            assert shown[key] == [repr(value), figure(value)], (options, key)
        users = told["users"][told["users"]["binding"]]
        assert shown["users"] == [repr(users), f"{int(users + 1e-9):,}"]


async def test_a_shared_link_restores_the_state(page: Page, server: Served, chromium: Browser) -> None:
    await opened(page, server)
    for control, value in (
        ("gpu", "a100-80-sxm"),
        ("prompt_tokens", "30"),
        ("slo_tpot_ms", "25"),
        ("max_model_len", "5"),
    ):
        await move(page, control, value)
    await page.js("document.getElementById('add').click()")
    await page.until("document.querySelectorAll('#cards article').length === 2")
    await move(page, "dp", "2")
    controls = "JSON.stringify([...document.querySelectorAll('#controls select, #controls input:not([type=file])')].filter(c => c.id !== 'preset').map(c => [c.id, c.value]))"
    shared, numbers = await page.js("location.href"), await page.js(NUMBERS)
    await page.js("document.querySelectorAll('#deployments button')[0].click()")
    values = await page.js(controls)
    other = await chromium.page()
    await other.go(shared)
    await other.until(READY)
    await other.until("document.querySelectorAll('#cards article').length === 2")
    assert await other.js(NUMBERS) == numbers
    assert await other.js(controls) == values
    await other.close()


async def test_up_to_four_stand_side_by_side(page: Page, server: Served) -> None:
    await opened(page, server)
    for count, gpu in enumerate(("l40s", "a100-80-sxm", "h200-sxm"), 2):
        await page.js("document.getElementById('add').click()")
        await page.until(f"document.querySelectorAll('#cards article').length === {count}")
        await move(page, "gpu", gpu)
    assert await page.js("document.getElementById('add').disabled")
    await page.until(
        "document.querySelectorAll('#curves figure').length === 3 && document.querySelectorAll('#curves polygon').length === 12"
    )
    ids = await page.js("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    await page.js("document.getElementById('remove').click()")
    await page.until("document.querySelectorAll('#cards article').length === 3")


async def test_what_cannot_be_is_said_and_then_forgotten(page: Page, server: Served) -> None:
    await opened(page, server, link({"model": "llama-3.1-8b", "gpu": "h100-sxm", "tp": 3}))
    await page.until("!document.querySelector('#size-error').hidden")
    await move(page, "tp", "1")
    assert await page.js("document.querySelector('#size-error').hidden")
    assert await page.js("document.querySelectorAll('#cards article').length") == 1


async def test_launch_files_can_be_downloaded_and_copied(page: Page, server: Served) -> None:
    await opened(page, server)
    await page.until("document.querySelectorAll('#launch pre').length === 2")
    texts = await page.js("[...document.querySelectorAll('#launch pre')].map(p => p.textContent)")
    assert texts[0].startswith("#!/usr/bin/env bash")
    assert "services:" in texts[1]
    saved = """(async () => { const kept = []; const make = URL.createObjectURL;
        URL.createObjectURL = (blob) => { kept.push(blob.text()); return make(blob); };
        HTMLAnchorElement.prototype.click = function () { kept.push(this.download); };
        [...document.querySelectorAll('#launch button')].filter(b => b.textContent.startsWith('Download')).forEach(b => b.click());
        return Promise.all(kept); })()"""
    assert await page.js(saved) == [texts[0], "run_vllm_cluster.sh", texts[1], "docker-compose.yml"]


async def test_numbers_are_never_those_of_an_older_question(page: Page, server: Served) -> None:
    await opened(page, server)
    await page.js(
        """(() => { const real = window.fetch; let asked = 0; window.shown = [];
        window.fetch = async (path, about) => {
          const answer = await real(path, about);
          // the earlier the question, the later its answer
          if (path === '/api/size') await new Promise(r => setTimeout(r, Math.max(0, 600 - 60 * asked++)));
          return answer; };
        new MutationObserver(() => window.shown.push(document.querySelector('#cards [data-key=users]')?.value))
          .observe(document.getElementById('cards'), {childList: true});
        const slider = document.getElementById('output_tokens');
        for (let i = 10; i < 20; i++) { slider.value = String(i); slider.dispatchEvent(new Event('input', {bubbles: true})); } })()"""
    )
    await asyncio.sleep(1.5)
    await page.until(SETTLED)
    shown = await page.js("window.shown")
    last = await page.js("document.querySelector('#cards [data-key=users]').value")
    assert shown == [last]
    address = await page.js("location.href")
    await page.go("about:blank")
    await page.go(address)
    await page.until(SETTLED)
    assert await page.js("document.querySelector('#cards [data-key=users]').value") == last


async def test_the_keyboard_moves_sliders_and_views(page: Page, server: Served) -> None:
    await opened(page, server)
    before = await page.js(NUMBERS)
    asked = await page.js("document.querySelector('#cards').dataset.answered")
    await page.js("document.getElementById('prompt_tokens').focus()")
    await page.key("ArrowRight")
    await page.until(f"document.querySelector('#cards').dataset.answered !== '{asked}'")
    assert await page.js(NUMBERS) != before
    assert await page.js("document.activeElement.id") == "prompt_tokens"
    await page.js("document.querySelector('nav a[data-view=runs]').focus()")
    await page.key("Enter")
    await page.until("!document.getElementById('runs').hidden && document.querySelector('#runs-list table')")
    await page.key("Tab")
    await page.key("Tab")
    outline = await page.js("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


async def test_no_view_is_wider_than_the_window(page: Page, server: Served) -> None:
    for view in ("#size", "#runs?run=plain", "#live"):
        await opened(page, server, view)
        await asyncio.sleep(0.5)
        for width in (390, 1024, 1600):
            for dark in (False, True):
                await page.look(width, dark=dark)
                assert await page.js("document.documentElement.scrollWidth") <= width, view


async def test_who_wants_no_motion_gets_none(page: Page, server: Served) -> None:
    await page.look(1024, reduced_motion=True)
    await opened(page, server)
    durations = await page.js(
        "[...new Set([...document.querySelectorAll('*')].map(e => getComputedStyle(e).transitionDuration))]"
    )
    assert durations == ["0s"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_axe_finds_no_serious_violation(page: Page, server: Served, dark: bool) -> None:
    script = axe.source()
    await page.look(1024, dark=dark)
    for view in ("#size", "#runs?run=fitted", "#live"):
        await opened(page, server, view)
        await asyncio.sleep(1.0)
        await page.js("(d => { if (d) d.open = true; })(document.querySelector('figure details'))")
        await page.js(f"{script}; 0")
        assert await page.js(axe.VIOLATIONS) == [], view
    await page.js("document.getElementById('confirm').showModal()")
    assert await page.js(axe.VIOLATIONS) == []


async def test_runs_are_listed_opened_and_compared(page: Page, server: Served) -> None:
    await opened(page, server, "#runs")
    await page.until("document.querySelectorAll('#runs-list tbody tr').length >= 2")
    await page.js("document.querySelector('#runs-list a[href*=\"run=plain\"]').click()")
    await page.until("document.querySelector('#run h1')?.textContent.startsWith('6 users can stream at once')")
    assert await page.js("document.querySelectorAll('#run polygon').length") == 0
    # measured points over predicted curves
    await page.js(
        "(() => { const c = document.getElementById('correct'); c.value = 'fitted'; c.dispatchEvent(new Event('change')); })()"
    )
    await page.until("document.querySelectorAll('#run polygon').length === 3")
    await page.js("document.querySelectorAll('#runs-list input').forEach(i => i.click())")
    assert not await page.js("document.getElementById('compare').disabled")
    await page.js("document.getElementById('compare').click()")
    await page.until("document.querySelector('#run h2')?.textContent.includes(' beside ')")


#: what a ramp leaves, whoever started it
FILES = {"run.json", "requests.jsonl", "scrapes.jsonl", "summary.json", "report.html"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def ask_for(page: Page, twin: Served, users: str, seconds: str) -> None:
    """Fill the form of a ramp and ask for its check."""
    for control, value in (
        ("base_url", twin.url),
        ("profile", ""),
        ("users", users),
        ("duration_s", seconds),
        ("ramp-prompt", "32"),
        ("ramp-output", "16"),
    ):
        await page.js(
            f"(() => {{ const c = document.getElementById({control!r}); c.value = {value!r}; c.dispatchEvent(new Event('input')); }})()"
        )
    await page.js("document.getElementById('check').click()")
    await page.until("document.getElementById('confirm').open")


async def left(folder: Path) -> None:
    """Until a ramp has left its files: the report comes after the last reading of the page."""
    for _ in range(200):
        if names(folder) == FILES:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{folder} holds {sorted(names(folder))}")


async def watched(page: Page) -> str:
    state = "document.getElementById('live-state').textContent"
    await page.until(f"{state}.endsWith(' goes on.')", timeout_s=40)
    return str(await page.js(f"{state}.split(' ')[0]"))


async def test_a_ramp_is_confirmed_started_watched_and_ends(
    page: Page, server: Served, twin: Served, results: Path
) -> None:
    await opened(page, server, "#live")
    await ask_for(page, twin, "1, 3", "2")
    said = await page.js("document.getElementById('confirm-text').textContent")
    assert f"up to 3 users at once against 127.0.0.1:{twin.port}" in said
    assert "against 127.0.0.1" in await page.js("document.getElementById('go').textContent")
    before = names(results)
    await page.js("document.getElementById('no').click()")
    await asyncio.sleep(0.5)
    assert names(results) == before
    await ask_for(page, twin, "1, 3", "2")
    await page.js("document.getElementById('go').click()")
    name = await watched(page)
    await page.until("document.querySelectorAll('#live-view figure').length === 4")
    await page.until("document.getElementById('live-state').textContent.includes('has ended')", timeout_s=60)
    assert [stage["users"] for stage in read_run(results / name).stages] == [1, 3]
    await left(results / name)
    await page.js("document.querySelector('#live-state a').click()")
    await page.until("document.querySelector('#run h1')")


async def test_stop_stops_it(page: Page, server: Served, twin: Served, results: Path) -> None:
    await opened(page, server, "#live")
    await ask_for(page, twin, "2", "120")
    await page.js("document.getElementById('go').click()")
    name = await watched(page)
    await page.until("Number(document.querySelector('#live-view dd data').value) > 0", timeout_s=60)
    await page.js("document.getElementById('stop').click()")
    await page.until("document.getElementById('live-state').textContent.includes('has ended')", timeout_s=60)
    assert read_run(results / name).stages[0]["requests"]["ok"] > 0


async def test_a_ramp_of_the_command_line_is_watched_too(
    page: Page, server: Served, twin: Served, results: Path
) -> None:
    command = ["ramp", "--base-url", twin.url, "--users", "2", "--duration", "8s", "--prompt-tokens", "32"]
    command += ["--output-tokens", "16", "--out", str(results / "by-hand"), "--quiet"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "harness.cli", *command)
    for _ in range(200):
        if (results / "by-hand" / "run.json").is_file():
            break
        await asyncio.sleep(0.1)
    await opened(page, server, "#live")
    assert await watched(page) == "by-hand"
    assert await page.js("document.getElementById('stop').hidden")
    await page.until("document.getElementById('live-state').textContent.includes('has ended')", timeout_s=60)
    assert await process.wait() == 0
    assert names(results / "by-hand") == FILES


async def test_it_survives_the_servers_restart(page: Page, results: Path) -> None:
    first = start(*ui(results))
    second: Served | None = None
    try:
        await opened(page, first)
        before = await page.js(NUMBERS)
        first.stop()
        await page.js(
            "(() => { const c = document.getElementById('gpu'); c.value = 'l40s'; c.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )
        await page.until("!document.getElementById('lost').hidden")
        assert await page.js(NUMBERS) == before
        second = start(*ui(results, first.port))
        await page.until("document.getElementById('lost').hidden")
        await page.until("document.querySelector('#cards').textContent.includes('L40S')")
        assert await page.js(NUMBERS) != before
    finally:
        for served in (first, second):
            if served is not None:
                served.stop()
                assert served.process.stdout is not None
                served.process.stdout.close()
