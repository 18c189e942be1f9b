"""Server-sent events, the whole grammar, without I/O: stamped reads go in, stamped events come out.

Grammar and interpretation follow the WHATWG HTML standard, section 9.2.5 "Parsing an event stream" and 9.2.6
"Interpreting an event stream". Everything works on bytes, so a read may end anywhere: inside a character, between
``data:`` and its value, between the CR and the LF of one line end. A lone CR ends its line at once; if the next read
begins with LF, that LF belongs to it. So an event is never held back for a byte that may not come.

Cost is linear in the bytes fed: an unfinished line grows in one buffer and is copied out once, when it ends.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_BOM: Final = b"\xef\xbb\xbf"
_LF: Final = 0x0A
_COLON: Final = 0x3A

#: how much one unfinished event may hold; beyond it the stream is no event stream of tokens
MAX_EVENT_BYTES: Final = 64 * 1024 * 1024
#: how much of the lines with no known field is kept to say what came instead of events
_IGNORED_KEPT_BYTES: Final = 4096
#: a longer reconnection time is nonsense, and int() of thousands of digits raises
_RETRY_DIGITS: Final = 18


class SseOverflow(ValueError):
    """One event grew beyond ``max_event_bytes``: the parser has dropped it and must not be fed again."""


class SseEvent(NamedTuple):
    """One dispatched event."""

    #: stamp of the read that held the byte which completed the event
    stamp_ns: int
    #: the data lines joined by LF, as sent; not yet known to be UTF-8
    data: bytes
    type: str = "message"
    #: the last event id in force, which an event need not carry itself
    id: str = ""
    #: the reconnection time in force, milliseconds; None until the server set one
    retry_ms: int | None = None


#: what SseEvent(...) does, without a Python frame: it stands on the path of every token
_new_event = tuple.__new__


class Unfinished(NamedTuple):
    """What a stream ended in the middle of. By the standard it is discarded: no event."""

    #: complete data lines of the event that never saw its blank line, joined by LF; None without a data line
    data: bytes | None
    #: the line that never saw its end
    line: bytes


class SseParser:
    """An incremental parser of one stream.

    Args:
        max_event_bytes: bound on the bytes held for one event.
    """

    __slots__ = (
        "_data",
        "_data_bytes",
        "_first_line",
        "_id",
        "_max_event_bytes",
        "_retry_ms",
        "_skip_lf",
        "_tail",
        "_type",
        "idle",
        "ignored",
        "ignored_lines",
    )

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        #: no partial line, no open event, no CR waiting for its LF: the next byte starts an event
        self.idle = True
        self._first_line = True
        self._skip_lf = False
        self._tail = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._type = ""
        self._id = ""
        self._retry_ms: int | None = None
        #: lines whose field the standard does not know (it says: ignore), and the first 4 KiB of them: a body that is
        #: HTML or plain JSON consists of nothing else
        self.ignored_lines = 0
        self.ignored = b""

    def feed(self, stamp_ns: int, data: bytes) -> list[SseEvent]:
        """Take one read and return the events it completed, all stamped ``stamp_ns``.

        Raises:
            SseOverflow: an unfinished event holds more than ``max_event_bytes``.
        """
        lines = data.splitlines()  # of bytes: ends at LF, CR and CRLF only
        # The common read is one event of one JSON line. The general way gives the same and costs twice as much.
        if len(lines) == 2 and self.idle and data.endswith(b"}\n\n") and data.startswith(b"data: "):
            self._first_line = False
            return [_new_event(SseEvent, (stamp_ns, data[6:-2], "message", self._id, self._retry_ms))]
        return self._feed_lines(stamp_ns, data, lines)

    def end(self) -> Unfinished | None:
        """Say what is left when no byte will come any more; None when the stream ended between events."""
        if not self._tail and not self._data:
            return None
        return Unfinished(b"\n".join(self._data) if self._data else None, bytes(self._tail))

    def _feed_lines(self, stamp_ns: int, data: bytes, lines: list[bytes]) -> list[SseEvent]:
        if not lines:
            return []
        if self._skip_lf and data[0] == _LF:
            del lines[0]
        self._skip_lf = data[-1:] == b"\r"
        rest = b"" if self._skip_lf or data[-1] == _LF else lines.pop()
        if self._tail and lines:
            self._tail += lines[0]
            lines[0] = bytes(self._tail)
            self._tail.clear()
        events: list[SseEvent] = []
        for line in lines:
            self._take_line(stamp_ns, line, events)
        self._tail += rest
        self.idle = not (self._tail or self._data or self._type or self._skip_lf)
        self._check_size()
        return events

    def _take_line(self, stamp_ns: int, line: bytes, events: list[SseEvent]) -> None:
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BOM)
        if line.startswith(b"data:"):
            self._add_data(line[6:] if line[5:6] == b" " else line[5:])
        elif not line:
            self._dispatch(stamp_ns, events)
        elif line[0] != _COLON:
            name, _, value = line.partition(b":")
            self._take_field(name, value.removeprefix(b" "), line)

    def _take_field(self, name: bytes, value: bytes, line: bytes) -> None:
        match name:
            case b"data":
                self._add_data(value)
            case b"event":
                self._type = value.decode("utf-8", "replace")
            case b"id":
                if b"\0" not in value:
                    self._id = value.decode("utf-8", "replace")
            case b"retry":
                if value.isdigit() and len(value) <= _RETRY_DIGITS:  # of bytes: ASCII digits only
                    self._retry_ms = int(value)
            case _:
                self.ignored_lines += 1
                room = _IGNORED_KEPT_BYTES - len(self.ignored)
                self.ignored += (line + b"\n")[:room] if room > 0 else b""

    def _add_data(self, value: bytes) -> None:
        self._data.append(value)
        self._data_bytes += len(value) + 1

    def _dispatch(self, stamp_ns: int, events: list[SseEvent]) -> None:
        if self._data:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            events.append(SseEvent(stamp_ns, data, self._type or "message", self._id, self._retry_ms))
            self._data.clear()
            self._data_bytes = 0
        self._type = ""

    def _check_size(self) -> None:
        held = len(self._tail) + self._data_bytes
        if held > self._max_event_bytes:
            self._tail.clear()
            self._data.clear()
            self._data_bytes = 0
            raise SseOverflow(
                f"one event holds {held} bytes and is not finished; at most {self._max_event_bytes} are kept"
            )
