"""The pictures of docs/: the page and a report at three widths, light and dark, as they look now.

    python tests/browser/screenshots.py RESULTS RUN [FOLDER]

RESULTS is a folder of runs, RUN one of them by name; FOLDER is docs/ unless said.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / room) for room in ("browser", "ui")]

from chromium import Browser, Page, browser  # noqa: E402
from ui_process import running, ui  # noqa: E402

#: width -> height of the window
WINDOWS = {390: 844, 1024: 768, 1600: 1000}
READY = "document.documentElement.dataset.ready === 'yes'"
SIZING = (
    "#size?d=model%3Dllama-3.3-70b%26gpu%3Dh100-sxm%26tp%3D4%26slo_ttft_ms%3D500%26max_model_len%3D8192"
    "&d=model%3Dllama-3.3-70b%26gpu%3Dh200-sxm%26tp%3D4%26slo_ttft_ms%3D500%26max_model_len%3D8192"
)


async def picture(page: Page, *, quality: int = 70) -> bytes:
    """What the window shows, as WebP: a third of a PNG."""
    answer = await page.call("Page.captureScreenshot", format="webp", quality=quality)
    return base64.b64decode(answer["data"])


async def views(chromium: Browser, url: str, name: str, until: str) -> dict[str, bytes]:
    """One address in every window, light and dark."""
    page, found = await chromium.page(), {}
    for width, height in WINDOWS.items():
        for dark in (False, True):
            await page.look(width, height, dark=dark)
            await page.go("about:blank")
            await page.go(url)
            await page.until(until)
            await asyncio.sleep(1.0)
            found[f"{name}-{width}-{'dark' if dark else 'light'}.webp"] = await picture(page)
    await page.close()
    return found


async def pictures(url: str, run: str) -> dict[str, bytes]:
    async with browser() as chromium:
        sized = f"{READY} && document.querySelectorAll('#curves figure').length === 3"
        found = await views(chromium, url + SIZING, "size", sized)
        report = f"{url}api/runs/{run}/report.html"
        return found | await views(chromium, report, "report", "document.querySelector('h1')")


def main() -> None:
    results, run = Path(sys.argv[1]), sys.argv[2]
    folder = Path(sys.argv[3]) if len(sys.argv) > 3 else ROOT / "docs"
    with running(*ui(results)) as served:
        found = asyncio.run(pictures(served.url, run))
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in found.items():
        (folder / name).write_bytes(image)
        print(f"{folder / name}: {len(image) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
