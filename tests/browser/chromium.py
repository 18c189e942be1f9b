"""A headless Chromium, driven by the DevTools protocol over its websocket: what the tests of pages need and no more.

``async with browser() as chromium: page = await chromium.page(); await page.go(url)``. Every console message, every
uncaught exception and every request of a page is kept, so that a test can say that there were none.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S = 60.0
ANSWER_S = 120.0

FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
    ),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--force-color-profile=srgb", "--remote-debugging-port=0", "--disable-features=Translate,OptimizationHints"),
)


def installed() -> str | None:
    """The browser's path; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


needs_chromium = pytest.mark.skipif(
    installed() is None, reason="no Chromium is installed (Debian: apt install chromium)"
)


class Page:
    """One tab. ``console`` holds (level, text) of every message, ``failures`` uncaught exceptions, ``requests`` URLs."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session
        self._loaded = asyncio.Event()
        self.console: list[tuple[str, str]] = []
        self.failures: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, session=self._session, **params)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.consoleAPICalled":
            words = [str(a.get("value", a.get("description"))) for a in params["args"]]
            self.console.append((params["type"], " ".join(words)))
        elif method == "Log.entryAdded":
            self.console.append((params["entry"]["level"], params["entry"]["text"]))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.failures.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def close(self) -> None:
        await self._browser.call("Target.closeTarget", targetId=self._target)

    async def go(self, url: str) -> None:
        """Open an address and wait until it is loaded."""
        self._loaded.clear()
        answer = await self.call("Page.navigate", url=url)
        assert not answer.get("errorText"), f"{url}: {answer['errorText']}"
        if answer.get("loaderId"):
            await asyncio.wait_for(self._loaded.wait(), ANSWER_S)

    async def js(self, expression: str) -> Any:
        """The value of an expression, promises awaited; what it throws is an AssertionError."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30.0) -> None:
        """Wait until an expression is true."""
        for _ in range(int(timeout_s / 0.05)):
            if await self.js(f"Boolean({expression})"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true within {timeout_s:g} s: {expression}; {self.failures}")

    async def look(self, width: int, height: int = 900, *, dark: bool = False, reduced_motion: bool = False) -> None:
        """Size of the window, and what the reader prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced_motion else "no-preference"},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, *, full: bool = True) -> bytes:
        """The page as PNG, down to its end where ``full``."""
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=full, format="png")
        return base64.b64decode(answer["data"])

    async def pdf(self) -> bytes:
        answer = await self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(answer["data"])

    async def key(self, key: str) -> None:
        """Press a key: Tab, Enter, ArrowRight, Space ..."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key)
        about: dict[str, Any] = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": codes[key],
        }
        await self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **about)


class Browser:
    """A running browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def listen(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                waiting = self._waiting.pop(data["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(data)
            elif (page := self._pages.get(data.get("sessionId", ""))) is not None:
                page.heard(data["method"], data["params"])

    async def call(self, method: str, *, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        about = {} if session is None else {"sessionId": session}
        await self._socket.send_json({"id": number, "method": method, "params": params, **about})
        answer = await asyncio.wait_for(self._waiting[number], ANSWER_S)
        assert "error" not in answer, f"{method}: {answer.get('error')}"
        result: dict[str, Any] = answer["result"]
        return result

    async def page(self) -> Page:
        """A new tab, its messages and requests listened to."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.call(f"{domain}.enable")
        await page.look(1024)
        return page


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A headless Chromium with a profile of its own, ended with the block."""
    path = installed()
    assert path is not None, "needs_chromium marks tests that call this"
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            path,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        try:
            address = await _address(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as client, client.ws_connect(address, max_msg_size=0) as socket:
                running = Browser(socket)
                listener = asyncio.create_task(running.listen())
                try:
                    yield running
                finally:
                    listener.cancel()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _address(file: Path, process: asyncio.subprocess.Process) -> str:
    for _ in range(int(START_S / 0.05)):
        assert process.returncode is None, f"Chromium ended with {process.returncode}"
        if len(lines := _lines(file)) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium did not open its DevTools port")


def _lines(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []
