"""A soak: many streams for long, one request in a hundred failing; is every request accounted for, does memory stay flat?

    python tests/bench/soak.py [MINUTES] [STREAMS]       (default 20 minutes, 200 streams)

Starts the fault server and the real command line as processes of their own, samples resident memory from /proc, and at
the end holds the server's own counts against the records.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_S = 5.0
#: resident memory is judged from here on: interpreters, pools and histograms have their size by then
WARM_S = 60.0
#: the fault server with a served model for the mode, as a process of its own
SERVER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from server import FaultServer

async def main():
    async with FaultServer(port=int(sys.argv[2]), models={"soak": "flaky:rate=0.01,ttft=0.05,itl=0.03"}):
        await asyncio.Event().wait()

asyncio.run(main())
"""


def rss_bytes(pid: int) -> int | None:
    """Resident memory of a process; None when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * 4096


def children_of(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found


def stats(port: int) -> dict[str, object]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats", timeout=10) as answer:
        document: dict[str, object] = json.load(answer)
        return document


def sample(run: subprocess.Popen[bytes], began: float) -> list[tuple[float, int, int]]:
    """(seconds, bytes of the controller, bytes of its workers) until the run ends."""
    samples = []
    while run.poll() is None:
        parent = rss_bytes(run.pid)
        workers = sum(rss_bytes(child) or 0 for child in children_of(run.pid))
        if parent:
            samples.append((time.monotonic() - began, parent, workers))
        time.sleep(SAMPLE_S)
    return samples


def growth(samples: list[tuple[float, int, int]], column: int) -> tuple[float, float, float]:
    """MB after the first minute, MB at the end, percent between; each the mean of its neighbours."""
    warm = [row[column] for row in samples if row[0] >= WARM_S]
    tenth = max(1, len(warm) // 10)
    first, last = sum(warm[:tenth]) / tenth, sum(warm[-tenth:]) / tenth
    return first / 1e6, last / 1e6, 100 * (last / first - 1)


def main(minutes: float, streams: int) -> None:
    port = 8450
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(ROOT / "tests/faults"), str(port)])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        time.sleep(1.0)
        began = time.monotonic()
        command = [sys.executable, "-m", "harness.cli", "ramp", "--base-url", f"http://127.0.0.1:{port}"]
        command += ["--model", "soak", "--users", str(streams), "--stall-timeout", "5s"]
        command += [
            "--duration",
            f"{60 * minutes:.0f}s",
            "--grace",
            "30s",
            "--output-tokens",
            "100",
            "--out",
            str(out),
            "--quiet",
        ]
        run = subprocess.Popen(command, cwd=ROOT)
        try:
            samples = sample(run, began)
            served = stats(port)
        finally:
            run.kill()
            server.terminate()
        report(out, served, samples, run.returncode)


def report(out: Path, served: dict[str, object], samples: list[tuple[float, int, int]], code: int) -> None:
    outcomes: Counter[str] = Counter()
    tokens = 0
    with (out / "requests.jsonl").open() as lines:
        for line in lines:
            record = json.loads(line)
            outcomes[record["failure"] or record["outcome"]] += 1
            tokens += record["output_tokens"] or 0
    requests = served["requests"]
    assert isinstance(requests, dict)
    print(f"exit code {code}; {sum(outcomes.values())} records, the server counted {requests['flaky']} requests")
    print("records by outcome:", dict(outcomes.most_common()))
    print("the server's modes:", {name: count for name, count in requests.items() if name.startswith("flaky/")})
    print(f"output tokens of good records: {tokens}")
    for name, column in (("controller", 1), ("workers", 2)):
        first, last, percent = growth(samples, column)
        print(f"{name}: {first:.1f} MB after the first minute, {last:.1f} MB at the end, {percent:+.1f} %")
    assert sum(outcomes.values()) == requests["flaky"], "a request is missing or was counted twice"


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 20.0, int(sys.argv[2]) if len(sys.argv) > 2 else 200)
