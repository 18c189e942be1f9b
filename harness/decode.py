"""Stamped bytes of one answer -> the record of its request. Pure: no socket, no clock; stamps are given.

A :class:`StreamDecoder` takes reads as they come or later, in slack time, and keeps numbers, not bytes. ``finish`` says
how the stream ended and gives the one :class:`~harness.record.Record`. All stamps are nanoseconds of one clock.

How an outcome is found (DESIGN section 4), first match wins:

1. HTTP status other than 2xx: failed ``http_<status>``; our own fault: failed ``client``.
2. The stream itself reported an error or finish_reason ``error``: ``server_error_in_stream``; finish_reason ``abort``:
   ``aborted``; bytes that are no event stream of this API: ``protocol``.
3. The answer is complete: ok, whatever became of the connection afterwards (a warning says what).
4. Otherwise by the end: ``truncated``, ``connection``, ``stalled``, ``timeout``, ``protocol``; cancelled is incomplete.

Complete means: every choice seen has a finish_reason; or usage came in a chunk with no choices and no content after it;
or [DONE] came after any usage. Usage that rides on content chunks says nothing about the end.
"""

from __future__ import annotations

from array import array
from typing import Final, NamedTuple

from harness.clock import NS_PER_MS
from harness.outcome import BAD_FINISH, FAILURES, Plan, StreamEnd, Warn, failed_record, ms_after
from harness.record import Failure, Lifecycle, Outcome, Record, State, TokenSource, http_failure
from harness.wire.answer import Answer, Choice
from harness.wire.openai import (
    END,
    UNKNOWN,
    Chunk,
    Endpoint,
    WireError,
    error_message,
    is_error,
    one_line,
    read_event,
    repair,
)
from harness.wire.sse import SseEvent, SseOverflow, SseParser
from harness.wire.template import Template, learn

__all__ = ["Plan", "StreamDecoder", "StreamEnd", "Warn", "error_message", "failed_record"]

#: the fields of an event stream, and the empty name of a comment
_FIELDS: Final = (b"", b"data", b"event", b"id", b"retry")
#: templates tried in vain before a stream is taken to have none
_LEARN_TRIES: Final = 4


class _Verdict(NamedTuple):
    outcome: Outcome
    failure: str | None = None
    message: str | None = None


class StreamDecoder:
    """Decodes one answer.

    Args:
        endpoint: whose chunks these are.
        save_content: keep the generated text (reasoning, content and tool calls as they came) for the record.
        save_gaps: keep every gap for the record, 8 bytes each.
    """

    __slots__ = (
        "_answer",
        "_broken",
        "_endpoint",
        "_events",
        "_failure",
        "_first_tokens",
        "_gap_ends",
        "_gaps",
        "_kept_gaps",
        "_learn_left",
        "_life",
        "_missed_at",
        "_sse",
        "_template",
        "_uncounted",
        "_warnings",
        "chunks",
        "done_ns",
        "first_answer_ns",
        "first_content_ns",
        "last_content_ns",
    )

    def __init__(self, endpoint: Endpoint, *, save_content: bool = False, save_gaps: bool = False) -> None:
        self._endpoint = endpoint
        self._answer = Answer(keep_text=save_content)
        self._sse = SseParser()
        self._life = Lifecycle()
        #: stamps of content deltas: any first one, the first that is no reasoning, the last; and of [DONE]
        self.first_content_ns: int | None = None
        self.first_answer_ns: int | None = None
        self.last_content_ns: int | None = None
        self.done_ns: int | None = None
        #: events with a content delta
        self.chunks = 0
        self._events = 0
        self._uncounted = 0
        self._first_tokens: int | None = None
        self._failure: tuple[str, str] | None = None
        self._broken = False
        self._warnings: dict[str, None] = {}
        self._gap_ends = array("q")
        self._gaps = array("q")
        self._kept_gaps = array("q") if save_gaps else None
        self._template: Template | None = None
        self._learn_left = _LEARN_TRIES
        self._missed_at = 0

    @property
    def done(self) -> bool:
        """[DONE] was seen."""
        return self.done_ns is not None

    @property
    def broken(self) -> bool:
        """The bytes are no event stream of this API; nothing more is read from them."""
        return self._broken

    @property
    def tokens_per_delta_known(self) -> bool:
        """Whether a gap may be called ITL: each content delta came with its token count, or tokens equal deltas."""
        return self.chunks > 0 and (self._uncounted == 0 or self._answer.usage_tokens() == self.chunks)

    def drain_gaps(self) -> tuple[array[int], array[int]]:
        """Gaps between content deltas since the last call: (stamps of the later delta, lengths), nanoseconds."""
        drained = self._gap_ends, self._gaps
        self._gap_ends, self._gaps = array("q"), array("q")
        return drained

    def feed(self, stamp_ns: int, data: bytes) -> None:
        """Take one read of the body with the stamp of its arrival. Bad bytes raise nothing: they become the outcome."""
        template = self._template
        if template is not None and self._sse.idle:
            text = template.text(data)
            if text is not None:
                self._repeat(stamp_ns, template, text)
                return
        if self._broken:
            return
        try:
            events = self._sse.feed(stamp_ns, data)
        except SseOverflow as error:
            self._break(str(error))
            return
        for event in events:
            self._take(event, data if len(events) == 1 else b"")

    def _take(self, event: SseEvent, read: bytes) -> None:
        if self._broken:
            return
        self._events += 1
        if self.done_ns is not None:
            self._warn(Warn.DATA_AFTER_DONE)
            return
        chunk = self._read(event.type, event.data)
        if chunk is None:
            return
        if chunk is END:
            self.done_ns = event.stamp_ns
            self._template = None
        elif chunk is UNKNOWN:
            self._warn(Warn.UNKNOWN_EVENT)
        elif chunk.error is not None:
            self._fail(Failure.SERVER_ERROR_IN_STREAM, chunk.error or "the server reported an error without a message")
        else:
            self._add(event.stamp_ns, chunk)
            self._learn(read, event.data, chunk)

    def _read(self, event_type: str, data: bytes) -> Chunk | None:
        try:
            return read_event(self._endpoint, event_type, data)
        except WireError as error:
            repaired = repair(data)
            if repaired is None:
                self._break(str(error))
                return None
        self._warn(Warn.INVALID_UTF8)
        return self._read(event_type, repaired)

    def _add(self, stamp_ns: int, chunk: Chunk) -> None:
        first: Choice | None = None
        answer = False
        counted = True
        for delta in chunk.deltas:
            choice = self._answer.gain(delta)
            if delta.finish_reason in BAD_FINISH:
                self._fail(*BAD_FINISH[delta.finish_reason])
            if delta.text:
                first = first or choice
                answer = answer or delta.is_answer
                counted = counted and delta.tokens is not None
        if chunk.usage is not None:
            self._answer.add_usage(chunk.usage, chunk.deltas)
            counted = counted or (len(chunk.deltas) == 1 and chunk.usage.completion_tokens is not None)
        if first is not None:
            if self.first_content_ns is None:
                self._first_tokens = first.ids if first.ids is not None else first.usage_tokens
            self._content(stamp_ns, answer, counted)

    def _content(self, stamp_ns: int, is_answer: bool, counted: bool) -> None:
        last = self.last_content_ns
        if last is None:
            self.first_content_ns = stamp_ns
        else:
            self._gap_ends.append(stamp_ns)
            self._gaps.append(stamp_ns - last)
            if self._kept_gaps is not None:
                self._kept_gaps.append(stamp_ns - last)
        self.last_content_ns = stamp_ns
        if is_answer and self.first_answer_ns is None:
            self.first_answer_ns = stamp_ns
        if not counted:
            self._uncounted += 1
        self.chunks += 1
        self._answer.final_usage = False

    def _repeat(self, stamp_ns: int, template: Template, text: str) -> None:
        """What :meth:`_add` does, for a chunk that matched the template."""
        choice = self._answer.choices[template.choice]
        if template.tokens is not None:
            choice.ids = (choice.ids or 0) + template.tokens
        if self._answer.keep_text:
            choice.parts.append(text)
        self._content(stamp_ns, template.is_answer, template.tokens is not None)

    def _learn(self, read: bytes, data: bytes, chunk: Chunk) -> None:
        if not read or not chunk.deltas or not chunk.deltas[0].text:
            return
        if self.chunks - self._missed_at > 1:
            self._learn_left = _LEARN_TRIES  # the template paid until this chunk; the next will too
        self._missed_at = self.chunks
        if self._learn_left:
            self._learn_left -= 1
            self._template = learn(self._endpoint, read, data, chunk) or self._template

    def finish(
        self,
        plan: Plan,
        *,
        run_start_ns: int,
        sent_ns: int | None,
        end: StreamEnd,
        end_ns: int,
        http_status: int | None,
        message: str | None = None,
    ) -> Record:
        """The record of this request. Ends the decoder: a second call is a bug.

        Args:
            run_start_ns: origin of ``scheduled_ms`` and ``sent_ms``.
            sent_ns: stamp of the request's last byte at the socket; None when it was never sent.
            end_ns: stamp of the end; ``stream_end_ms`` counts to [DONE] where it came, else to here.
            message: what the transport said of the end, for a record that is not ok.

        Raises:
            IllegalTransition: finished twice, or an answer to a request that was never sent.
        """
        verdict = self._verdict(end, http_status, message)
        tokens, source = self._output_tokens()
        if verdict.outcome is Outcome.OK:
            self._warn_of_ok(end, tokens, source)
        if end is StreamEnd.EOF and self._cut_event():
            self._warn(Warn.UNFINISHED_EVENT)
        self._advance(sent_ns, verdict.outcome)
        return Record(
            request_id=plan.request_id,
            stage=plan.stage,
            user=plan.user,
            scheduled_ms=(plan.scheduled_ns - run_start_ns) / NS_PER_MS,
            sent_ms=ms_after(run_start_ns, sent_ns),
            outcome=verdict.outcome.value,
            failure=verdict.failure,
            http_status=http_status,
            message=one_line(verdict.message) if verdict.message else None,
            prompt_tokens=self._prompt_tokens_of(plan),
            output_tokens=tokens,
            output_tokens_source=None if source is None else source.value,
            asked_output_tokens=plan.asked_output_tokens,
            ttft_ms=ms_after(sent_ns, self.first_content_ns),
            ttfa_ms=ms_after(sent_ns, self.first_answer_ns),
            e2e_ms=ms_after(sent_ns, self.last_content_ns),
            tpot_ms=self._tpot_ms(tokens),
            stream_end_ms=ms_after(sent_ns, end_ns if self.done_ns is None else self.done_ns),
            chunks=self.chunks,
            finish_reason=self._answer.finish_reason(),
            warnings=tuple(str(warning) for warning in self._warnings),
            content=self._answer.text() if self._answer.keep_text else None,
            chunk_gaps_ms=None if self._kept_gaps is None else tuple(gap / NS_PER_MS for gap in self._kept_gaps),
        )

    def _advance(self, sent_ns: int | None, outcome: Outcome) -> None:
        if sent_ns is not None:
            self._life.to(State.SENT)
            if self._events:
                self._life.to(State.STREAMING)
        self._life.to(State(outcome.value))

    def _verdict(self, end: StreamEnd, http_status: int | None, message: str | None) -> _Verdict:
        """The rules in the head of this file, in their order."""
        if http_status is not None and not 200 <= http_status < 300:
            return _Verdict(Outcome.FAILED, http_failure(http_status), message)
        if end is StreamEnd.CLIENT:
            return _Verdict(Outcome.FAILED, Failure.CLIENT.value, message or FAILURES[end][1])
        if self._failure is not None:
            return _Verdict(Outcome.FAILED, str(self._failure[0]), self._failure[1])
        if self._answer.complete(done=self.done):
            return _Verdict(Outcome.OK)
        if end is StreamEnd.CANCELLED:
            return _Verdict(Outcome.INCOMPLETE, None, message)
        if end is StreamEnd.EOF and (foreign := self._foreign_body()):
            return foreign
        failure, usual = FAILURES[end]
        return _Verdict(Outcome.FAILED, failure.value, message or usual)

    def _foreign_body(self) -> _Verdict | None:
        """An answer 200 that holds no event but something else: an error object, a page, a whole JSON answer."""
        error = self._sse.ignored.partition(b"error:")  # the field llama.cpp's server reports errors in
        if error[1] and not error[0]:
            return _Verdict(Outcome.FAILED, Failure.SERVER_ERROR_IN_STREAM.value, error_message(error[2]))
        left = self._sse.end()
        body = self._sse.ignored + (left.line if left is not None else b"")
        if self._events or not body or _is_field(body):
            return None
        text = error_message(body)
        if is_error(body):
            return _Verdict(Outcome.FAILED, Failure.SERVER_ERROR_IN_STREAM.value, text)
        return _Verdict(Outcome.FAILED, Failure.PROTOCOL.value, f"the answer is no event stream: {text}")

    def _cut_event(self) -> bool:
        left = self._sse.end()
        return left is not None and not self._broken and (left.data is not None or _is_field(left.line))

    def _warn_of_ok(self, end: StreamEnd, tokens: int | None, source: TokenSource | None) -> None:
        if not self.done:
            self._warn(Warn.MISSING_DONE if end is StreamEnd.EOF else f"{end.value}_after_finish")
        if not self.chunks:
            self._warn(Warn.NO_CONTENT)
        if source is not TokenSource.USAGE:
            self._warn(Warn.NO_USAGE)
        elif (ids := self._answer.id_tokens()) is not None and ids != tokens:
            self._warn(Warn.TOKEN_COUNTS_DIFFER)

    def _output_tokens(self) -> tuple[int | None, TokenSource | None]:
        tokens = self._answer.usage_tokens()
        if tokens is not None:
            return tokens, TokenSource.USAGE
        ids = self._answer.id_tokens()
        return ids, None if ids is None else TokenSource.TOKEN_IDS

    def _prompt_tokens_of(self, plan: Plan) -> int | None:
        """The server's count; without one, what was sent where that is exact: token ids on the completions endpoint."""
        if self._answer.prompt_tokens is None and self._endpoint == "completions":
            return plan.prompt_tokens
        return self._answer.prompt_tokens

    def _tpot_ms(self, tokens: int | None) -> float | None:
        """(e2e - ttft) / (output_tokens - tokens_in_first_delta); None below one token, and for several choices at once."""
        if (
            tokens is None
            or self.first_content_ns is None
            or self.last_content_ns is None
            or len(self._answer.choices) != 1
        ):
            return None
        later = tokens - max(1, self._first_tokens or 1)
        return (self.last_content_ns - self.first_content_ns) / later / NS_PER_MS if later >= 1 else None

    def _warn(self, warning: str) -> None:
        self._warnings[warning] = None

    def _fail(self, failure: str, message: str) -> None:
        if self._failure is None:
            self._failure = (failure, message)

    def _break(self, message: str) -> None:
        self._fail(Failure.PROTOCOL, message)
        self._broken = True
        self._template = None


def _is_field(line: bytes) -> bool:
    """Whether a line can be of an event stream: a comment, a known field, or the beginning of one."""
    name = line.partition(b":")[0]
    return name in _FIELDS or (b":" not in line and any(field.startswith(name) for field in _FIELDS))
