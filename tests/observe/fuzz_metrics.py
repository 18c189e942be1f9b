"""Mutate the three real texts for SECONDS: only documented exceptions may come, and what is read must be JSON.

    python tests/observe/fuzz_metrics.py 60 [SEED]

Not collected by pytest. Prints what it did; exits 1 with the input saved beside it when an undocumented exception came.
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from pathlib import Path

from harness.observe.deltas import delta
from harness.observe.snapshot import Snapshot, read
from harness.wire.prom import BadMetrics

TEXTS = [path.read_bytes() for path in sorted((Path(__file__).parent.parent / "data" / "metrics").glob("*.txt"))]
#: bytes that mean something to the grammar, and some that mean nothing
SPICE = [
    b"{",
    b"}",
    b'"',
    b"\\",
    b"=",
    b",",
    b"#",
    b" # {",
    b"\n",
    b"\r\n",
    b"\t",
    b"  ",
    b"NaN",
    b"+Inf",
    b"-1",
    b"1e999",
]
SPICE += [
    b"9" * 400,
    b"_total",
    b"ray_",
    b"vllm:",
    b"\x00",
    b"\xff",
    "\u2028中".encode(),
    b"# TYPE ",
    b"# HELP ",
    b"<html>",
]
SPICE += [b'model_name="other"', b'engine="7"', b"None", b"True", b"0x10", b"1_000", b"__name__", b"le="]


def mutate(rng: random.Random, text: bytes) -> bytes:
    lines = text.split(b"\n")
    start = rng.randrange(len(lines))
    # a slice of the text keeps a case short; the whole one is tried now and then
    body = bytearray(text if rng.random() < 0.02 else b"\n".join(lines[start : start + rng.randrange(1, 40)]) + b"\n")
    for _ in range(rng.randrange(1, 6)):
        at, what = rng.randrange(len(body) + 1), rng.random()
        if what < 0.4:
            body[at:at] = rng.choice(SPICE)
        elif what < 0.6:
            del body[at : at + rng.randrange(1, 30)]
        elif what < 0.75:
            body[at : at + 1] = bytes([rng.randrange(256)])
        elif what < 0.9:
            other = rng.choice(TEXTS)
            cut = rng.randrange(len(other))
            body[at:at] = other[cut : cut + rng.randrange(200)]
        else:
            body = body[:at]
    return bytes(body)


def check(body: bytes, before: Snapshot, model: str | None) -> bool:
    """True where the text was read."""
    try:
        snapshot = read(body, model)
    except BadMetrics:
        return False
    json.dumps(snapshot.contract(), allow_nan=False)
    assert Snapshot.from_row(json.loads(json.dumps(snapshot.to_row(), allow_nan=False))) == snapshot
    delta(before, snapshot)
    return True


def main(seconds: float, seed: int) -> int:
    rng = random.Random(seed)
    before = read(TEXTS[0])
    tried = accepted = 0
    slowest_s = 0.0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        # CPU time: another process may take the core for a while
        started = time.process_time()
        body = mutate(rng, rng.choice(TEXTS))
        try:
            accepted += check(body, before, rng.choice([None, None, "smollm2"]))
        except Exception:  # noqa: BLE001  # what a fuzzer is for
            traceback.print_exc()
            found = Path(f"fuzz_metrics_{seed}_{tried}.txt")
            found.write_bytes(body)
            print(f"undocumented exception after {tried} texts; the text is in {found}")
            return 1
        slowest_s = max(slowest_s, time.process_time() - started)
        tried += 1
    print(
        f"{tried} texts, {accepted} read, {tried - accepted} refused, slowest {slowest_s * 1e3:.0f} ms of CPU, seed {seed}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
