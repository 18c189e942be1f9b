"""The event-stream grammar read byte by byte, written to be obvious, as the oracle for the fast parser."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """An event, and the offset of the byte that completed it."""

    completed_at: int
    data: bytes
    type: str
    id: str
    retry_ms: int | None


def lines_of(stream: bytes) -> list[tuple[int, bytes]]:
    """Lines that ended, each with the offset of the byte at which its end was certain."""
    lines: list[tuple[int, bytes]] = []
    line = b""
    for at, byte in enumerate(stream):
        if byte == 0x0A and at > 0 and stream[at - 1] == 0x0D:
            continue  # the second half of CRLF; the line ended at the CR
        if byte in (0x0A, 0x0D):
            lines.append((at, line))
            line = b""
        else:
            line += bytes([byte])
    return lines


def parse(stream: bytes) -> list[Expected]:
    """WHATWG HTML 9.2.6, step by step, over a whole stream."""
    events: list[Expected] = []
    data, event_type, last_id = b"", "", ""
    retry_ms: int | None = None
    for number, (at, raw) in enumerate(lines_of(stream)):
        line = raw[3:] if number == 0 and raw[:3] == b"\xef\xbb\xbf" else raw
        if line == b"":
            if data != b"":
                events.append(Expected(at, data[:-1], event_type or "message", last_id, retry_ms))
            data, event_type = b"", ""
            continue
        if line[:1] == b":":
            continue
        field, value = line, b""
        if b":" in line:
            field, value = line.split(b":", 1)
            if value[:1] == b" ":
                value = value[1:]
        if field == b"event":
            event_type = value.decode("utf-8", "replace")
        elif field == b"data":
            data += value + b"\n"
        elif field == b"id" and b"\x00" not in value:
            last_id = value.decode("utf-8", "replace")
        elif field == b"retry" and value != b"" and all(0x30 <= byte <= 0x39 for byte in value) and len(value) <= 18:
            retry_ms = int(value)
    return events
