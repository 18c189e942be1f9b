"""Two hundred streams for as long as asked, one request in a hundred failing: nothing lost, memory flat.

    python tests/bench/soak.py MINUTES [--streams 200] [--processes 1] [--rate 0.01]

Runs the real command against the fault server (``flaky``, in a thread) and samples the resident memory of
the controller and of each worker twice a second. Prints growth after the first minute, and every request by what the
server did with it beside what the records say. Exits 1 when a request is unaccounted for or memory grew by more than 5 %.

Growth is of the median over ten seconds at the end against ten seconds after the first minute (or, of a run of under
three minutes, after its first third): a sample alone is noise of the allocator.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent.parent
for room in ("faults", "cli"):
    sys.path.insert(0, str(TESTS / room))

from console import children_of, records_of  # noqa: E402
from fault_thread import FaultThread  # noqa: E402
from server import FaultServer  # noqa: E402

SAMPLE_S = 0.5
SETTLED_S = 60.0
SPAN_S = 10.0
MOST_GROWTH = 0.05
#: what each of flaky's modes must be in the records
MEANT: dict[str, tuple[str, ...]] = {
    "normal": ("ok",),
    "rst": ("connection",),
    "close": ("truncated",),
    "truncated": ("truncated",),
    "chunk_cut": ("truncated",),
    "error_in_stream": ("server_error_in_stream",),
    "abort": ("aborted",),
    "no_json": ("protocol",),
    "garbage": ("protocol",),
    "unavailable": ("http_503",),
    "html_502": ("http_502",),
}


@dataclass
class Memory:
    """Resident bytes over time, by process."""

    samples: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, at_s: float, pid: int) -> None:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        if found := re.search(r"VmRSS:\s+(\d+) kB", status):
            self.samples[name].append((at_s, int(found[1]) * 1024))

    def growth(self, name: str, settled_s: float, load_s: float) -> tuple[float, float, float]:
        """Median bytes when settled and at the end of the load (what comes after it is the summary, which reads every
        record once), and the growth between them as a share."""
        rows = [(at_s, rss) for at_s, rss in self.samples[name] if at_s <= load_s]
        last_s = rows[-1][0]
        early = statistics.median(rss for at_s, rss in rows if settled_s <= at_s <= settled_s + SPAN_S)
        late = statistics.median(rss for at_s, rss in rows if last_s - SPAN_S <= at_s)
        return early, late, late / early - 1


def load(base_url: str, out: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "harness.cli", "ramp", "--base-url", base_url, "--out", str(out), "--quiet"),
            *("--model", "soak", "--users", str(options.streams)),
            *("--duration", f"{options.minutes * 60:g}s", "--output-tokens", "40", "--prompt-tokens", "64"),
            *("--processes", str(options.processes), "--grace", "10s"),
        ]
    )


def watch(process: subprocess.Popen[bytes]) -> Memory:
    """Sample until the run has ended."""
    memory, began = Memory(), time.monotonic()
    while process.poll() is None:
        at_s = time.monotonic() - began
        memory.add("controller", at_s, process.pid)
        for number, pid in enumerate(sorted(children_of(process.pid))):
            memory.add(f"worker {number}", at_s, pid)
        time.sleep(SAMPLE_S)
    return memory


def print_memory(memory: Memory, minutes: float) -> bool:
    """The table of memory; whether it stayed flat."""
    settled_s = SETTLED_S if minutes >= 3 else minutes * 60 / 3
    for name, rows in sorted(memory.samples.items()):
        by_minute = {int(at_s // 60): rss for at_s, rss in rows}
        print(f"{name}, MB by minute: " + " ".join(f"{rss / 1e6:.1f}" for rss in by_minute.values()))
    print(f"resident memory, MB   after {settled_s:.0f} s    at the end    growth")
    flat = True
    for name in sorted(memory.samples):
        early, late, growth = memory.growth(name, settled_s, minutes * 60)
        flat &= growth <= MOST_GROWTH
        print(f"{name:<20} {early / 1e6:>13.1f} {late / 1e6:>13.1f} {growth:>8.1%}")
    return flat


def print_accounts(requests: Counter[str], out: Path) -> bool:
    """The server's counts beside the records; whether they agree."""
    did = {mode.removeprefix("flaky/"): n for mode, n in requests.items() if mode.startswith("flaky/")}
    said: Counter[str] = Counter(record.failure or record.outcome for record in records_of(out))
    cut = said.pop("incomplete", 0)
    print("\nthe server did" + " " * 22 + "the records say")
    agree = True
    for kind in sorted({kind for kinds in MEANT.values() for kind in kinds} | set(said)):
        modes = {mode: did.get(mode, 0) for mode, kinds in MEANT.items() if kind in kinds and mode in did}
        total = sum(modes.values())
        # a stream cut at the end was going to be one of these
        agree &= said[kind] <= total <= said[kind] + cut
        print(f"{total:>8}  {' + '.join(modes) or '-':<26}{said[kind]:>8}  {kind}")
    print(f"{'':>36}{cut:>8}  cut at the end of the stage")
    asked, recorded = sum(did.values()), sum(said.values()) + cut
    print(f"{asked:>8}  requests{'':<18}{recorded:>8}  records")
    return agree and asked == recorded


def main() -> None:
    parser = argparse.ArgumentParser(description="two hundred streams with one failure in a hundred")
    parser.add_argument("minutes", type=float)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.01)
    options = parser.parse_args()
    server = FaultServer(models={"soak": f"flaky:rate={options.rate},ttft=0.05,itl=0.05"})
    with tempfile.TemporaryDirectory() as folder, FaultThread(server) as served:
        out = Path(folder) / "run"
        process = load(served.base_url, out, options)
        memory = watch(process)
        if not out.exists():
            sys.exit(f"the run ended at once with exit code {process.returncode}")
        flat = print_memory(memory, options.minutes)
        whole = print_accounts(server.stats.requests, out)
    print(f"\nexit code of the run {process.returncode}; memory {'flat' if flat else 'GROWS'};", end=" ")
    print("every request accounted for" if whole else "REQUESTS UNACCOUNTED FOR")
    sys.exit(not (flat and whole and process.returncode in (0, 4)))  # 4: this machine was too busy for figures


if __name__ == "__main__":
    main()
