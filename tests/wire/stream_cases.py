"""The 24 streams of tests/data/streams.json: bytes with their times, and the record each must give."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.clock import NS_PER_MS
from harness.decode import Plan, StreamDecoder, StreamEnd, error_message, failed_record
from harness.record import Record, http_failure
from harness.wire.openai import Endpoint

FILE = Path(__file__).parent.parent / "data" / "streams.json"
ENDS = {"close": StreamEnd.EOF, "hold": StreamEnd.STALLED, "reset": StreamEnd.RESET}
#: what a run's clock shows when the request is sent; nothing may depend on it
SENT_NS = 7_000_000_000
PLAN = Plan(request_id="r", stage=0, user=0, scheduled_ns=SENT_NS, asked_output_tokens=None)


@dataclass(frozen=True)
class Case:
    id: str
    endpoint: Endpoint
    status: int
    #: (stamp, bytes) of each write
    writes: tuple[tuple[int, bytes], ...]
    end: StreamEnd
    expect: dict[str, Any]

    @property
    def end_ns(self) -> int:
        return self.writes[-1][0]


def _case(row: dict[str, Any]) -> Case:
    return Case(
        id=row["id"],
        endpoint="chat" if "chat" in row["endpoint"] else "completions",
        status=row["status"],
        writes=tuple((SENT_NS + at * NS_PER_MS, base64.b64decode(data)) for at, data in row["writes_ms_base64"]),
        end=ENDS[row["then"]],
        expect=row["expect"],
    )


CASES = [_case(row) for row in json.loads(FILE.read_text("utf-8"))]


def decode(case: Case, reads: list[tuple[int, bytes]]) -> Record:
    """The record of a case from stamped reads, everything kept."""
    if case.status != 200:
        body = b"".join(data for _, data in reads)
        return failed_record(
            PLAN,
            run_start_ns=0,
            sent_ns=SENT_NS,
            failure=http_failure(case.status),
            http_status=case.status,
            message=error_message(body),
            end_ns=case.end_ns,
        )
    decoder = StreamDecoder(case.endpoint, save_content=True, save_gaps=True)
    for stamp_ns, data in reads:
        decoder.feed(stamp_ns, data)
    return decoder.finish(
        PLAN, run_start_ns=0, sent_ns=SENT_NS, end=case.end, end_ns=case.end_ns, http_status=case.status
    )


def differences(record: Record, expect: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose value is not the expected one -> (expected, found)."""
    found = {name: _found(record, name) for name in expect}
    wrong = {
        name: (expect[name], found[name])
        for name in expect
        if name != "message_contains" and found[name] != expect[name]
    }
    if (part := expect.get("message_contains")) is not None and part not in (record.message or ""):
        wrong["message"] = (part, record.message)
    return wrong


def _found(record: Record, name: str) -> Any:
    value = getattr(record, name, None)
    return list(value) if isinstance(value, tuple) else value
