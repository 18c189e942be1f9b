"""Requests in flight, and the decoding of their bytes in the loop's slack time.

Bytes are stamped and filed as they arrive; turning them into tokens costs a few microseconds each and can wait. The
:class:`Hangar` decodes in slices of half a millisecond between the loop's other work, the ended requests first, then
long ones still in flight so that their bytes do not pile up. It also watches the clock for stalled and overlong ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.clock import NS_PER_MS, NS_PER_S, now_ns
from harness.decode import Plan, StreamDecoder, StreamEnd, error_message, failed_record
from harness.exchange import Exchange
from harness.record import Failure, Outcome, Record, http_failure
from harness.workload.asked import Asked

#: warnings of a record: the request was repeated on a fresh connection, since the reused one had gone stale
STALE_CONNECTION = "stale_connection"
#: everything was said, and then the connection closed before its framing was complete
CLOSED_EARLY = "closed_early"

#: decoding that may stand between two looks at the sockets; adds at most this to the lateness of a stamp
SLICE_NS = NS_PER_MS // 2
#: pause between slices: at most a fifth of the core goes into decoding while nothing presses
PAUSE_S = 0.002
#: pause while nothing waits to be decoded
IDLE_S = 0.01
#: ended requests waiting above which slices follow each other without a pause, unless more are in flight: their bytes
#: take ten times the room of their numbers
PRESSING = 200
#: bytes of a stream still in flight above which it is decoded meanwhile
HELD_BYTES = 16_384
#: a loop that was away for longer was suspended (a paused virtual machine, a laptop's lid, SIGSTOP), not just busy
SUSPENDED_NS = NS_PER_S
#: how often stalls and long requests are looked for: a twentieth of the stall timeout, within these bounds
SWEEP_MIN_NS, SWEEP_MAX_NS = 20 * NS_PER_MS, 500 * NS_PER_MS


@dataclass(slots=True, eq=False)
class Flight:
    """A request, its exchange on the wire and the decoder of its answer."""

    plan: Plan
    exchange: Exchange
    decoder: StreamDecoder
    asked: Asked
    taken: int = 0

    def decode(self, until_ns: int | None = None) -> bool:
        """Feed the decoder what has arrived; stop after ``until_ns``. True when nothing is left."""
        arrivals = self.exchange.arrivals
        feed = self.decoder.feed
        while self.taken < len(arrivals):
            # in steps, so that the clock is not read for every chunk
            for stamp_ns, data in arrivals[self.taken : self.taken + 32]:
                feed(stamp_ns, data)
            self.taken = min(self.taken + 32, len(arrivals))
            if until_ns is not None and now_ns() >= until_ns:
                break
        if self.taken >= len(arrivals):
            arrivals.clear()
            self.taken = 0
            self.exchange.body_bytes = 0
            return True
        return False

    def record(self, run_start_ns: int) -> Record:
        """The frozen record, once the exchange has ended and everything is decoded."""
        record = self._outcome(run_start_ns)
        noted = self._notes(record)
        return replace(record, warnings=record.warnings + noted) if noted else record

    def _notes(self, record: Record) -> tuple[str, ...]:
        """What the connection has to add to what the bytes say."""
        exchange = self.exchange
        notes: tuple[str, ...] = (STALE_CONNECTION,) if exchange.resent else ()
        if record.outcome == Outcome.OK and exchange.end is StreamEnd.EOF and exchange.message:
            notes += (CLOSED_EARLY,)
        return notes

    def _outcome(self, run_start_ns: int) -> Record:
        exchange = self.exchange
        end = exchange.end or StreamEnd.CLIENT
        if exchange.status is not None and exchange.status != 200:
            return failed_record(
                self.plan,
                run_start_ns=run_start_ns,
                sent_ns=exchange.sent_ns,
                failure=http_failure(exchange.status),
                http_status=exchange.status,
                message=exchange.message
                or error_message(exchange.body())
                or f"HTTP {exchange.status} with an empty body",
                end_ns=exchange.end_ns,
            )
        if exchange.status is None and end in (StreamEnd.EOF, StreamEnd.RESET, StreamEnd.CONNECT):
            return failed_record(
                self.plan,
                run_start_ns=run_start_ns,
                sent_ns=exchange.sent_ns,
                failure=Failure.CONNECTION,
                http_status=None,
                message=exchange.message or "the connection was closed before any answer",
                end_ns=exchange.end_ns,
            )
        return self.decoder.finish(
            self.plan,
            run_start_ns=run_start_ns,
            sent_ns=exchange.sent_ns,
            end=end,
            end_ns=exchange.end_ns,
            http_status=exchange.status,
            message=exchange.message,
        )


class Hangar:
    """Every flight of a worker, from take-off to its record.

    Args:
        run_start_ns: origin of the records' times.
        stall_timeout_s: no content for so long ends a request as stalled.
        request_timeout_s: so long after the send a request ends as timeout.
        on_record: called with each finished flight and its record, in slack time.
    """

    def __init__(
        self,
        *,
        run_start_ns: int,
        stall_timeout_s: float,
        request_timeout_s: float,
        on_record: Callable[[Flight, Record], None],
    ) -> None:
        self._run_start_ns = run_start_ns
        self._stall_ns = int(stall_timeout_s * NS_PER_S)
        self._total_ns = int(request_timeout_s * NS_PER_S)
        self._sweep_ns = min(SWEEP_MAX_NS, max(SWEEP_MIN_NS, min(self._stall_ns, self._total_ns) // 20))
        self._on_record = on_record
        self.flying: set[Flight] = set()
        #: when this process last came back from a suspension: time in which it could not read is no server's stall
        self._resumed_ns = 0
        self._landed: deque[Flight] = deque()
        #: still flying, with many bytes held
        self._long: deque[Flight] = deque()

    def take_off(self, flight: Flight) -> None:
        self.flying.add(flight)

    def land(self, flight: Flight, *, at_once: bool = False) -> None:
        """The exchange has ended; its record follows in slack time, or now where somebody waits for what it says."""
        self.flying.discard(flight)
        if not at_once:
            self._landed.append(flight)
            return
        if flight.exchange.status in (None, 200):
            flight.decode()
        self._on_record(flight, flight.record(self._run_start_ns))

    @property
    def waiting(self) -> int:
        return len(self._landed)

    def holds(self, stage: int) -> bool:
        """Whether a request of this stage is in flight or waits for its record."""
        return any(flight.plan.stage == stage for flight in (*self.flying, *self._landed))

    async def run(self) -> None:
        """Decode and sweep until cancelled."""
        swept_ns = looked_ns = 0
        while True:
            now = now_ns()
            if looked_ns and now - looked_ns > SUSPENDED_NS:
                self._resumed_ns = now
            looked_ns = now
            if now - swept_ns >= self._sweep_ns:
                self._sweep(now)
                swept_ns = now
            self._slice(now_ns() + SLICE_NS)
            busy = self._landed or self._long
            pressing = len(self._landed) > max(PRESSING, len(self.flying))
            await asyncio.sleep(0 if pressing else PAUSE_S if busy else IDLE_S)

    def flush(self) -> None:
        """Decode all that has landed, now."""
        while self._landed:
            self._finish_first(None)

    def _slice(self, until_ns: int) -> None:
        while self._landed and now_ns() < until_ns:
            self._finish_first(until_ns)
        while self._long and now_ns() < until_ns:
            if self._long[0].decode(until_ns):
                self._long.popleft()

    def _finish_first(self, until_ns: int | None) -> None:
        flight = self._landed[0]
        answered = flight.exchange.status in (None, 200)
        if answered and not flight.decode(until_ns):
            return
        self._landed.popleft()
        self._on_record(flight, flight.record(self._run_start_ns))

    def _sweep(self, now: int) -> None:
        self._long.clear()
        for flight in list(self.flying):
            exchange = flight.exchange
            if exchange.sent_ns is None:
                continue
            if now - max(exchange.sent_ns, self._resumed_ns) > self._total_ns:
                exchange.stop(StreamEnd.TIMEOUT)
            elif now - max(exchange.sent_ns, exchange.last_read_ns or 0, self._resumed_ns) > self._stall_ns:
                exchange.stop(StreamEnd.STALLED)
            elif exchange.status == 200 and now - self._last_content_ns(flight) > self._stall_ns:
                # bytes came, but were they content? Comments and empty deltas do not keep a stream alive
                flight.decode()
                if now - self._last_content_ns(flight) > self._stall_ns:
                    exchange.stop(StreamEnd.STALLED)
            elif exchange.body_bytes > HELD_BYTES and exchange.status == 200:
                self._long.append(flight)

    def _last_content_ns(self, flight: Flight) -> int:
        return max(flight.exchange.sent_ns or 0, flight.decoder.last_content_ns or 0, self._resumed_ns)
