"""``kill -9`` at random moments of a run, and what each folder is worth.

    python tests/bench/kill.py [TIMES] [--seed N]

Every run (twelve users on two workers against the fault server) is killed with all its processes between 0.1 and 4 s
after its first answer. Prints a row a kill; exits 1 when a folder does not read, a line is damaged, or a record is missing
of an answer that the server had finished more than a second before.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent
for room in ("faults", "cli"):
    sys.path.insert(0, str(TESTS / room))

from fault_thread import FaultThread  # noqa: E402
from killing import Killed, kill_whole_run  # noqa: E402

HEAD = ("kill", "after s", "finished", "records", "missing", "older 1 s", "damaged", "cut lines")


def row(number: int, killed: Killed) -> tuple[object, ...]:
    return (
        number,
        f"{killed.after_s:.2f}",
        killed.finished,
        killed.records,
        killed.missing,
        killed.missing_older_than_1_s,
        killed.damaged,
        killed.cut_lines,
    )


def one(after_s: float) -> Killed:
    with tempfile.TemporaryDirectory() as folder, FaultThread(models={"steady": "normal:ttft=0.03,itl=0.01"}) as served:
        return kill_whole_run(served, Path(folder) / "run", after_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="kill -9 at random moments of a run")
    parser.add_argument("times", type=int, nargs="?", default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    print("  ".join(f"{name:>9}" for name in HEAD))
    bad = 0
    for number in range(1, options.times + 1):
        killed = one(rng.uniform(0.1, 4.0))
        bad += bool(killed.damaged or killed.missing_older_than_1_s or killed.records != killed.distinct)
        print("  ".join(f"{cell!s:>9}" for cell in row(number, killed)), flush=True)
    print(f"{options.times} runs killed, {bad} of them lack or damage more than the last second")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
