"""One request on the wire, as the client fills it in and the decoder empties it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from harness.clock import now_ns
from harness.outcome import StreamEnd


@dataclass(slots=True, eq=False)
class Exchange:
    """One request on the wire: when it left, what came back and when, how it ended.

    Stamps are nanoseconds of :func:`harness.clock.now_ns`. ``arrivals`` holds (stamp, body bytes) in order of arrival;
    the decoder takes them out as it likes.
    """

    started_ns: int
    sent_ns: int | None = None
    #: stamp of the latest read, headers included
    last_read_ns: int | None = None
    status: int | None = None
    arrivals: list[tuple[int, bytes]] = field(default_factory=list)
    body_limit: int | None = None
    body_bytes: int = 0
    end: StreamEnd | None = None
    end_ns: int = 0
    message: str | None = None
    #: the connection had carried a request before
    reused: bool = False
    #: the send was repeated on a fresh connection after a stale one dropped
    resent: bool = False
    retry_after: str | None = None
    _deadline: asyncio.Timeout | None = None
    _stop: StreamEnd | None = None

    def stop(self, why: StreamEnd) -> None:
        """End the request from outside (stall, total time, end of stage); the connection is closed."""
        self._stop = self._stop or why
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time())

    def take(self, data: bytes) -> None:
        """File body bytes with the stamp of the read they came in. Called by the reader, for every HTTP chunk."""
        if self.body_limit is None or self.body_bytes < self.body_limit:
            self.arrivals.append((self.last_read_ns or now_ns(), data))
            self.body_bytes += len(data)

    def body(self) -> bytes:
        return b"".join(data for _, data in self.arrivals)

    def _finish(self, end: StreamEnd, message: str | None = None) -> None:
        if self.end is None:
            self.end, self.end_ns, self.message = end, now_ns(), message
