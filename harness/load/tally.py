"""What is known of a stage while it runs, record by record, and when there is no use in going on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from harness.errors import HarnessError, Refused, Unreachable
from harness.record import Failure, Outcome, Record

#: refusals that every further request would meet as well
_REDIRECTS = ("http_301", "http_302", "http_303", "http_307", "http_308")
_HOPELESS = frozenset(
    {"http_400", "http_401", "http_403", "http_404", "http_405", "http_407", "http_413", "http_422", *_REDIRECTS}
)
#: connection failures in a row, and seconds without any success, after which the server counts as gone
GONE_FAILURES = 5
GONE_S = 5.0


@dataclass(slots=True)
class Tally:
    """Counts of one stage so far.

    Args:
        users: of the stage; one user's first refusals are enough to judge by.
    """

    users: int
    ok: int = 0
    incomplete: int = 0
    by_failure: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0
    #: good answers with fewer tokens than asked
    short: int = 0
    #: records that do not say how many tokens came
    output_unknown: int = 0
    ttft_ms_sum: float = 0.0
    ttft_n: int = 0
    tpot_ms_sum: float = 0.0
    tpot_n: int = 0
    _gone_since_ms: float | None = None
    _gone: int = 0
    last_message: str = ""

    @property
    def failed(self) -> int:
        return sum(self.by_failure.values())

    @property
    def ended(self) -> int:
        return self.ok + self.failed + self.incomplete

    def add(self, record: Record) -> None:
        if record.output_tokens is not None:
            self.output_tokens += record.output_tokens
        elif record.chunks:
            self.output_unknown += 1
        if record.outcome == Outcome.OK:
            self._add_ok(record)
        elif record.outcome == Outcome.INCOMPLETE:
            self.incomplete += 1
        else:
            self._add_failed(record)

    def _add_ok(self, record: Record) -> None:
        self.ok += 1
        self._gone, self._gone_since_ms = 0, None
        if record.output_tokens is not None and record.asked_output_tokens is not None:
            self.short += record.output_tokens < record.asked_output_tokens
        if record.ttft_ms is not None:
            self.ttft_ms_sum += record.ttft_ms
            self.ttft_n += 1
        if record.tpot_ms is not None:
            self.tpot_ms_sum += record.tpot_ms
            self.tpot_n += 1

    def _add_failed(self, record: Record) -> None:
        self.by_failure[record.failure or "unknown"] += 1
        self.last_message = record.message or self.last_message
        if record.failure == Failure.CONNECTION:
            self._gone += 1
            if self._gone_since_ms is None:
                # a stream that was lost had been answered until then
                self._gone_since_ms = record.scheduled_ms if record.sent_ms is None else _end_ms(record, record.sent_ms)

    def verdict(self, now_ms: float) -> HarnessError | None:
        """Why going on is useless, or None.

        Args:
            now_ms: milliseconds since the run's start.
        """
        if self.ok == 0 and self.failed >= min(3, self.users):
            kinds = [kind for kind in self.by_failure if kind not in _HOPELESS]
            if not kinds:
                kind = max(self.by_failure, key=lambda k: self.by_failure[k])
                return Refused(f"the server refuses every request ({kind}): {self.last_message}", _HINTS.get(kind, ""))
        if (
            self._gone >= GONE_FAILURES
            and self._gone_since_ms is not None
            and now_ms - self._gone_since_ms > GONE_S * 1e3
        ):
            return Unreachable(
                f"the server stopped answering {(now_ms - self._gone_since_ms) / 1e3:.0f} s ago: {self.last_message}",
                "is it still running? Its own log says why it went",
            )
        return None


def _end_ms(record: Record, sent_ms: float) -> float:
    return sent_ms + (record.stream_end_ms or 0.0)


_HINTS = {
    "http_401": "give a valid key with OPENAI_API_KEY or --api-key",
    "http_403": "the key is not allowed to use this endpoint",
    "http_404": "check --model and --endpoint; vllm-harness probe shows what is served",
    "http_400": "vllm-harness probe shows the model and its length",
    "http_407": "the proxy of HTTP_PROXY wants its user and password in that address, or name the host in NO_PROXY",
    "http_413": "something on the way takes no bodies of this size; a proxy's limit?",
    **dict.fromkeys(_REDIRECTS, "give --base-url the address it redirects to, without /v1/..."),
}
