"""A run of a million records, made up, to hold reading, comparing and exporting to their bounds.

    python tests/bench/million.py FOLDER [RECORDS]

Writes a run's folder of seven levels whose requests queue for nothing and vary by a few percent, summary included.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from harness.measure.summary import summarise
from harness.measure.window import StageLoad
from harness.observe.probe import ProbeResult
from harness.store import RunWriter, read_run

LEVELS = (16, 32, 64, 128, 256, 512, 1024)
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 128
_LINE = (
    b'{"request_id":"%d-%d","stage":%d,"user":%d,"scheduled_ms":%.6f,"sent_ms":%.6f,"outcome":"ok","failure":null,'
    b'"http_status":200,"message":null,"prompt_tokens":256,"output_tokens":128,"output_tokens_source":"usage",'
    b'"asked_output_tokens":128,"ttft_ms":%.6f,"ttfa_ms":%.6f,"e2e_ms":%.6f,"tpot_ms":%.9f,"stream_end_ms":%.6f,'
    b'"chunks":128,"finish_reason":"length","warnings":[]}\n'
)


def write_stage(writer: RunWriter, index: int, users: int, requests: int, start_ms: float) -> float:
    """A closed loop of ``users``, each sending when its last stream has ended; returns when the last ended, in ms."""
    rng = np.random.default_rng(index)
    rounds = requests // users
    ttft = rng.normal(60 + users / 8, 6, (rounds, users)).clip(5)
    tpot = rng.normal(12 + users / 64, 0.4, (rounds, users)).clip(1)
    e2e = ttft + tpot * (OUTPUT_TOKENS - 1)
    sent = start_ms + np.vstack([np.linspace(0, 50, users), 50 + np.cumsum(e2e + 0.3, axis=0)])[:-1]
    order = np.argsort((sent + e2e).ravel(), kind="stable")
    columns = [column.ravel()[order].tolist() for column in (sent, ttft, e2e, tpot)]
    who = np.tile(np.arange(users), rounds)[order].tolist()
    for number, (user, at, first, last, pace) in enumerate(zip(who, *columns, strict=True)):
        row = (index, number, index, user, at - 0.2, at, first, first, last, pace, last + 0.1)
        writer.add_record(_LINE % row)
    return float((sent + e2e).max())


def write(folder: Path, records: int) -> None:
    """A run of about so many records."""
    writer = RunWriter(folder)
    start_ms, loads = 1000.0, []
    for index, users in enumerate(LEVELS):
        end_ms = write_stage(writer, index, users, records // len(LEVELS), start_ms)
        loads.append(StageLoad(users=users, planned_end_s=end_ms / 1e3))
        start_ms = end_ms + 1000.0
    writer.flush()
    probed = ProbeResult(base_url="http://127.0.0.1:1", model="made-up", max_num_seqs=2048)
    workload = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "endpoint": "completions"}
    profile = {
        "name": "million",
        "workload": workload,
        "stages": [{"users": load.users, "requests": records // len(LEVELS)} for load in loads],
    }
    writer.write_run(
        {
            "deployment": probed.to_dict(),
            "profile": profile,
            "versions": {"vllm-harness": "0", "python": "3"},
            "started": "2026-11-30T12:00:00+00:00",
            "ended": "2026-11-30T14:00:00+00:00",
            "options": {"seed": 0, "slo_ms": {}},
            "selftest": None,
            "host": {"system": "made up", "machine": None, "cores": None},
            "command": ["vllm-harness", "ramp"],
        }
    )
    writer.close()
    found = read_run(folder).requests()
    stages: list[dict[str, Any]] = [
        summarise(i, found[i].trace, load, None, found[i].deltas) for i, load in enumerate(loads)
    ]
    writer.write_summary(stages)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000)
