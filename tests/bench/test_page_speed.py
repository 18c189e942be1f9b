"""How soon a slider's move shows new numbers: 100 ms at the median, over loopback, on a machine that does nothing else."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / room) for room in ("ui", "browser", "export")]

from chromium import browser, needs_chromium  # noqa: E402
from ui_process import running, ui  # noqa: E402

pytestmark = [pytest.mark.bench, needs_chromium]

#: [until the numbers are on the page, until the next frame has been drawn] of each move, ms
MOVES = """(async () => {
  const slider = document.getElementById('prompt_tokens'), cards = document.getElementById('cards'), took = [];
  const answered = (before) => new Promise((resolve) => {
    const seen = new MutationObserver(() => {
      if (Number(cards.dataset.answered) > before) { seen.disconnect(); resolve(performance.now()); }
    });
    seen.observe(cards, {attributes: true, attributeFilter: ['data-answered']});
  });
  const drawn = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(() => resolve(performance.now()), 0)));
  for (let i = 0; i < 40; i++) {
    const began = performance.now(), shown = answered(Number(cards.dataset.answered));
    slider.value = String(8 + i % 30);
    slider.dispatchEvent(new Event('input', {bubbles: true}));
    const there = await shown;
    took.push([there - began, await drawn() - began]);
    await new Promise(r => setTimeout(r, 400));
  }
  return took; })()"""

SIZINGS = {
    "no limits": "d=model%3Dllama-3.1-8b%26gpu%3Dh100-sxm",
    "both limits": "d=model%3Dllama-3.3-70b%26gpu%3Dh100-sxm%26tp%3D4%26slo_ttft_ms%3D500%26slo_tpot_ms%3D50",
}


@pytest.mark.parametrize("name", SIZINGS)
async def test_a_move_of_a_slider_shows_new_numbers_in_100_ms(tmp_path: Path, name: str) -> None:
    with running(*ui(tmp_path)) as served:
        async with browser() as chromium:
            page = await chromium.page()
            await page.go(f"{served.url}#size?{SIZINGS[name]}")
            await page.until(
                "document.documentElement.dataset.ready === 'yes' && document.querySelector('#cards article')"
            )
            # nobody reads the requests here: to tell them costs as much as to answer them
            await page.call("Network.disable")
            shown, drawn = zip(*await page.js(MOVES), strict=True)
    print(
        f"{name}: shown median {statistics.median(shown):.0f} ms, worst {max(shown):.0f} ms of {len(shown)}; "
        f"drawn median {statistics.median(drawn):.0f} ms"
    )
    assert statistics.median(shown) < 100
