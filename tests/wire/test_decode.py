"""From stamped bytes to the record: times, tokens, outcomes, warnings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from splits import byte_by_byte

from harness.decode import Plan, StreamDecoder, StreamEnd, failed_record
from harness.record import Failure, IllegalTransition, Record, http_failure
from harness.wire.openai import Endpoint

MS = 1_000_000
SENT = 5 * MS
PLAN = Plan(request_id="3-17", stage=3, user=4, scheduled_ns=4 * MS, asked_output_tokens=None)
DONE = b"data: [DONE]\n\n"


def sse(obj: Any) -> bytes:
    return b"data: " + orjson.dumps(obj) + b"\n\n"


def text(
    value: str, finish: str | None = None, *, ids: list[int] | None = None, usage: int | None = None, index: int = 0
) -> bytes:
    """A completions chunk; ``usage`` is a completion count riding on it."""
    chunk: dict[str, Any] = {"choices": [{"index": index, "text": value, "finish_reason": finish, "token_ids": ids}]}
    if usage is not None:
        chunk["usage"] = counts(usage)
    return sse(chunk)


def counts(tokens: int | None, prompt: int = 9) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + (tokens or 0)}


def usage(tokens: int | None) -> bytes:
    return sse({"choices": [], "usage": counts(tokens)})


def chat(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return sse({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def run(
    *reads: tuple[float, bytes],
    endpoint: Endpoint = "completions",
    end: StreamEnd = StreamEnd.EOF,
    plan: Plan = PLAN,
    message: str | None = None,
    status: int | None = 200,
    end_ms: float | None = None,
) -> Record:
    """Decode reads given as (milliseconds after sent, bytes)."""
    decoder = StreamDecoder(endpoint, save_content=True, save_gaps=True)
    for at, data in reads:
        decoder.feed(SENT + int(at * MS), data)
    end_ns = SENT + int((end_ms if end_ms is not None else max((at for at, _ in reads), default=0)) * MS)
    return decoder.finish(
        plan, run_start_ns=1 * MS, sent_ns=SENT, end=end, end_ns=end_ns, http_status=status, message=message
    )


# --- identity and times


def test_the_record_carries_the_plan_and_counts_scheduled_and_sent_from_the_run() -> None:
    record = run((10, text("a", "length")), (20, usage(1) + DONE), plan=replace(PLAN, asked_output_tokens=1))
    assert (record.request_id, record.stage, record.user) == ("3-17", 3, 4)
    assert (record.scheduled_ms, record.sent_ms, record.asked_output_tokens) == (3.0, 4.0, 1)
    assert (record.outcome, record.http_status, record.message, record.warnings) == ("ok", 200, None, ())


def test_times_count_from_sent_and_content_alone_moves_them() -> None:
    record = run(
        (1, b": ping\n\n"),
        (2, chat({"role": "assistant", "content": ""})),
        (10, chat({"reasoning": "a"})),
        (30, chat({"content": "b"})),
        (60, chat({"content": "c"})),
        (80, chat({}, "stop")),
        (90, usage(3)),
        (95, DONE),
        endpoint="chat",
        end_ms=100,
    )
    assert (record.ttft_ms, record.ttfa_ms, record.e2e_ms, record.stream_end_ms) == (10.0, 30.0, 60.0, 95.0)
    assert (record.chunks, record.chunk_gaps_ms, record.content) == (3, (20.0, 30.0), "abc")
    assert record.tpot_ms == 25.0


def test_a_tool_call_is_an_answer() -> None:
    record = run(
        (10, chat({"reasoning": "hm"})),
        (20, chat({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]})),
        (30, chat({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}, "tool_calls")),
        endpoint="chat",
    )
    assert (record.ttft_ms, record.ttfa_ms, record.chunks, record.finish_reason) == (10.0, 20.0, 3, "tool_calls")


def test_reasoning_alone_has_no_first_answer() -> None:
    assert run((10, chat({"reasoning": "a"}, "length")), endpoint="chat").ttfa_ms is None


def test_the_end_of_the_stream_is_the_end_given_where_done_never_came() -> None:
    assert run((10, text("a", "length")), end_ms=44).stream_end_ms == 44.0


def test_times_are_none_without_a_send() -> None:
    record = StreamDecoder("chat").finish(
        PLAN, run_start_ns=0, sent_ns=None, end=StreamEnd.CONNECT, end_ns=9, http_status=None, message="refused"
    )
    assert (record.outcome, record.failure, record.message) == ("failed", "connection", "refused")
    assert (record.sent_ms, record.ttft_ms, record.stream_end_ms) == (None, None, None)


# --- tokens


def test_tpot_divides_by_the_tokens_after_the_first_delta() -> None:
    one = run((10, text("a")), (50, text("b", "length")), (60, usage(5)))
    assert one.tpot_ms == 10.0  # nothing known of the first delta: one token
    by_ids = run((10, text("abc", ids=[1, 2, 3])), (50, text("d", "length", ids=[4, 5])), (60, usage(5)))
    assert by_ids.tpot_ms == 20.0
    by_usage = run((10, text("abc", usage=3)), (50, text("d", "length", usage=5)))
    assert by_usage.tpot_ms == 20.0


def test_tokens_held_back_before_the_first_delta_belong_to_it() -> None:
    record = run((5, text("", ids=[1])), (10, text("中", ids=[2])), (50, text("d", "length", ids=[3, 4])))
    assert (record.ttft_ms, record.tpot_ms, record.output_tokens) == (10.0, 20.0, 4)


@pytest.mark.parametrize("tokens", [0, 1])
def test_below_two_tokens_there_is_no_tpot(tokens: int) -> None:
    assert run((10, text("a")), (50, text("b", "length")), (60, usage(tokens))).tpot_ms is None


def test_all_tokens_in_one_delta_have_no_tpot() -> None:
    assert run((10, text("abc", "length", usage=3))).tpot_ms is None


def test_the_last_usage_wins_and_nothing_is_summed() -> None:
    record = run(
        (10, text("a", usage=1)), (20, text("b", usage=4)), (30, text("c", "length", usage=6)), (40, usage(6) + DONE)
    )
    assert (record.output_tokens, record.output_tokens_source, record.prompt_tokens) == (6, "usage", 9)
    later = run((10, usage(3)), (20, text("c", "length", usage=7)))
    assert later.output_tokens == 7


def test_usage_of_several_choices_is_their_sum_until_the_total_comes() -> None:
    chunks = [(10.0, text("a", usage=1)), (20.0, text("b", usage=2, index=1)), (30.0, text("c", "length", usage=4))]
    chunks += [(40.0, text("d", "length", usage=3, index=1))]
    assert run(*chunks).output_tokens == 7
    assert run(*chunks, (50, usage(7) + DONE)).output_tokens == 7
    assert run(*chunks).tpot_ms is None  # of one sequence, and there are two
    assert run(*chunks).content == "ac\nbd"


def test_a_choice_never_counted_makes_the_sum_unknown() -> None:
    record = run((10, text("a", "stop", usage=1)), (20, text("b", "stop", index=1)))
    assert (record.output_tokens, record.output_tokens_source) == (None, None)


def test_without_usage_token_ids_count_and_the_source_says_so() -> None:
    record = run((10, text("a", ids=[1])), (20, text("bc", ids=[2, 3])), (30, text("", "length", ids=[4])), (40, DONE))
    assert (record.output_tokens, record.output_tokens_source, record.warnings) == (4, "token_ids", ("no_usage",))


def test_text_without_its_ids_makes_their_count_unknown() -> None:
    assert run((10, text("a", ids=[1])), (20, text("b", "length"))).output_tokens is None


def test_chunks_are_never_counted_as_tokens() -> None:
    record = run((10, text("a")), (20, text("b")), (30, text("c", "length")), (40, DONE))
    assert (record.chunks, record.output_tokens, record.output_tokens_source, record.tpot_ms) == (3, None, None, None)
    assert record.warnings == ("no_usage",)


def test_usage_without_a_completion_count_counts_nothing() -> None:
    record = run((10, text("a", "length")), (20, usage(None) + DONE))
    assert (record.output_tokens, record.prompt_tokens, record.warnings) == (None, 9, ("no_usage",))


def test_prompt_tokens_are_the_servers_else_what_was_sent_as_ids() -> None:
    asked = replace(PLAN, prompt_tokens=64)
    assert run((10, text("a", "length")), (20, usage(1)), plan=asked).prompt_tokens == 9
    assert run((10, text("a", "length")), plan=asked).prompt_tokens == 64
    assert run((10, chat({"content": "a"}, "stop")), plan=asked, endpoint="chat").prompt_tokens is None


def test_another_number_of_tokens_than_asked_stands_beside_what_was_asked() -> None:
    record = run((10, text("a", "length")), (20, usage(5) + DONE), plan=replace(PLAN, asked_output_tokens=6))
    assert (record.outcome, record.warnings) == ("ok", ())
    assert (record.output_tokens, record.asked_output_tokens) == (5, 6)


def test_usage_that_disagrees_with_the_ids_is_said() -> None:
    record = run((10, text("a", "length", ids=[1, 2])), (20, usage(3) + DONE))
    assert (record.output_tokens, record.warnings) == (3, ("token_counts_differ",))


@pytest.mark.parametrize(
    ("reads", "known"),
    [
        ([text("a", ids=[1]), text("b", "length", ids=[2, 3])], True),
        ([text("a", usage=1), text("b", "length", usage=3)], True),
        ([text("a"), text("b", "length"), usage(2)], True),  # as many tokens as deltas
        ([text("a"), text("b", "length"), usage(3)], False),
        ([text("a", ids=[1]), text("b", "length")], False),
        ([text("", "length"), usage(0)], False),
    ],
)
def test_whether_a_gap_may_be_called_itl(reads: list[bytes], known: bool) -> None:
    decoder = StreamDecoder("completions")
    for read in reads:
        decoder.feed(0, read)
    assert decoder.tokens_per_delta_known is known


# --- outcome


TAIL = text("b", "length")
OK_TABLE: dict[str, tuple[list[bytes], StreamEnd, tuple[str, ...]]] = {
    "finish_usage_done": ([text("a"), TAIL, usage(2), DONE], StreamEnd.EOF, ()),
    "finish_only": ([text("a"), TAIL], StreamEnd.EOF, ("missing_done", "no_usage")),
    "usage_only": ([text("a"), usage(1)], StreamEnd.EOF, ("missing_done",)),
    "done_after_continuous_usage": ([text("a", usage=1), DONE], StreamEnd.EOF, ()),
    "reset_after_finish": ([text("a"), TAIL, usage(2)], StreamEnd.RESET, ("reset_after_finish",)),
    "stalled_after_finish": ([text("a"), TAIL, usage(2)], StreamEnd.STALLED, ("stalled_after_finish",)),
    "timeout_after_finish": ([text("a"), TAIL, usage(2)], StreamEnd.TIMEOUT, ("timeout_after_finish",)),
    "cancelled_after_finish": ([text("a"), TAIL, usage(2)], StreamEnd.CANCELLED, ("cancelled_after_finish",)),
    "framing_broken_after_finish": ([text("a"), TAIL, usage(2)], StreamEnd.PROTOCOL, ("protocol_after_finish",)),
    "reset_after_done": ([text("a"), TAIL, usage(2), DONE], StreamEnd.RESET, ()),
    "no_content": ([text("", "stop"), usage(1), DONE], StreamEnd.EOF, ("no_content",)),
    "cut_done": ([text("a"), TAIL, usage(2), DONE[:-1]], StreamEnd.EOF, ("missing_done", "unfinished_event")),
    "more_after_done": ([text("a"), TAIL, usage(2), DONE, text("c")], StreamEnd.EOF, ("data_after_done",)),
    "foreign_event": ([sse({"type": "ping"}), text("a"), TAIL, usage(2), DONE], StreamEnd.EOF, ("unknown_event",)),
    "bad_utf8": ([TAIL.replace(b"b", b"\xff"), usage(1), DONE], StreamEnd.EOF, ("invalid_utf8",)),
}


@pytest.mark.parametrize("name", OK_TABLE)
def test_a_complete_answer_is_ok_whatever_happens_then(name: str) -> None:
    reads, end, warnings = OK_TABLE[name]
    record = run(*[(10.0 * i, read) for i, read in enumerate(reads, 1)], end=end, message="said by the transport")
    assert (record.outcome, record.failure, record.message) == ("ok", None, None)
    assert sorted(record.warnings) == sorted(warnings)


def test_no_content_has_no_times_of_content() -> None:
    record = run((10, text("", "stop")), (20, usage(1) + DONE))
    assert (record.ttft_ms, record.ttfa_ms, record.e2e_ms, record.tpot_ms, record.chunks) == (None,) * 4 + (0,)


def test_bad_utf8_reads_as_the_replacement_character() -> None:
    assert run((10, TAIL.replace(b"b", b"\xff")), (20, usage(1) + DONE)).content == "\ufffd"


A = text("a")
CONTINUOUS = text("a", usage=1)
FAILED_TABLE: dict[str, tuple[list[bytes], StreamEnd, str, str]] = {
    "eof": ([A], StreamEnd.EOF, "truncated", "ended without finish_reason"),
    "eof_empty": ([], StreamEnd.EOF, "truncated", "ended without"),
    "eof_with_continuous_usage": ([CONTINUOUS], StreamEnd.EOF, "truncated", "ended without"),
    "eof_usage_beside_two_choices": (
        [sse({"choices": [{"index": 0, "text": ""}, {"index": 1, "text": ""}], "usage": counts(0)})],
        StreamEnd.EOF,
        "truncated",
        "ended without",
    ),
    "eof_content_after_usage": ([usage(1), A], StreamEnd.EOF, "truncated", "ended without"),
    "eof_done_without_anything": ([A, DONE], StreamEnd.EOF, "truncated", "ended without"),
    "eof_one_of_two_choices": ([A, text("b", "stop", index=1)], StreamEnd.EOF, "truncated", "ended without"),
    "eof_in_the_finish_chunk": ([A, TAIL[:-1]], StreamEnd.EOF, "truncated", "ended without"),
    "eof_comments_only": ([b": ping\n\n", b": pi"], StreamEnd.EOF, "truncated", "ended without"),
    "eof_in_the_first_event": ([b"da"], StreamEnd.EOF, "truncated", "ended without"),
    "reset": ([A], StreamEnd.RESET, "connection", "lost in the middle"),
    "stalled": ([A], StreamEnd.STALLED, "stalled", "stall timeout"),
    "timeout": ([A], StreamEnd.TIMEOUT, "timeout", "request timeout"),
    "framing": ([A], StreamEnd.PROTOCOL, "protocol", "framing"),
    "client": ([A, TAIL, usage(2), DONE], StreamEnd.CLIENT, "client", "client failed"),
    "error_object": ([A, sse({"error": {"message": "boom"}}), DONE], StreamEnd.EOF, "server_error_in_stream", "boom"),
    "error_then_reset": ([A, sse({"error": "boom"})], StreamEnd.RESET, "server_error_in_stream", "boom"),
    "error_then_cancelled": ([A, sse({"error": "boom"})], StreamEnd.CANCELLED, "server_error_in_stream", "boom"),
    "error_after_finish": ([A, TAIL, sse({"error": "boom"})], StreamEnd.EOF, "server_error_in_stream", "boom"),
    "error_event": ([A, b"event: error\ndata: boom\n\n"], StreamEnd.EOF, "server_error_in_stream", "boom"),
    "error_field": ([A, b'error: {"code":500,"message":"boom"}\n\n'], StreamEnd.EOF, "server_error_in_stream", "boom"),
    "first_error_wins": (
        [sse({"error": "boom"}), sse({"error": "echo"})],
        StreamEnd.EOF,
        "server_error_in_stream",
        "boom",
    ),
    "abort": ([A, text("", "abort"), DONE], StreamEnd.EOF, "aborted", "finish_reason abort"),
    "finish_error": ([A, text("", "error"), DONE], StreamEnd.EOF, "server_error_in_stream", "finish_reason error"),
    "no_json": ([A, b"data: {oops\n\n", TAIL, usage(2), DONE], StreamEnd.EOF, "protocol", "not JSON: '{oops'"),
    "wrong_shape": ([b'data: {"choices":5}\n\n'], StreamEnd.EOF, "protocol", "choices is a number"),
    "html_with_200": ([b"<html><body>Log in</body></html>"], StreamEnd.EOF, "protocol", "no event stream: Log in"),
    "html_lines": ([b"<html>\n<h1>Log in</h1>\n"], StreamEnd.EOF, "protocol", "no event stream: Log in"),
    "json_answer": ([b'{"choices":[{"text":"a"}]}'], StreamEnd.EOF, "protocol", "no event stream: {"),
    "json_error_with_200": ([b'{"error":{"message":"boom"}}'], StreamEnd.EOF, "server_error_in_stream", "boom"),
    "json_error_lines": ([b'{\n"error": {\n"message": "boom"}\n}\n'], StreamEnd.EOF, "server_error_in_stream", "boom"),
}


@pytest.mark.parametrize("name", FAILED_TABLE)
def test_each_way_to_fail_has_its_kind_and_says_why(name: str) -> None:
    reads, end, failure, message = FAILED_TABLE[name]
    for cut_up in (reads, [byte for read in reads for byte in byte_by_byte(read)]):
        record = run(*[(10.0, read) for read in cut_up], end=end)
        assert (record.outcome, record.failure) == ("failed", failure)
        assert message in (record.message or "")


def test_the_transports_words_are_kept_where_the_stream_said_nothing() -> None:
    assert run((10, A), end=StreamEnd.RESET, message="ECONNRESET").message == "ECONNRESET"
    assert run((10, sse({"error": "boom"})), end=StreamEnd.RESET, message="ECONNRESET").message == "boom"


def test_a_message_is_one_line_of_at_most_500_characters() -> None:
    message = run((10, A), end=StreamEnd.RESET, message="a\n" * 2000).message
    assert message is not None
    assert (len(message), message[:5]) == (500, "a a a")


def test_a_cancelled_request_is_incomplete_and_no_failure() -> None:
    record = run((10, A), end=StreamEnd.CANCELLED, message="end of stage")
    assert (record.outcome, record.failure, record.message) == ("incomplete", None, "end of stage")
    assert (record.ttft_ms, record.chunks) == (10.0, 1)


def test_a_discarded_event_is_said_of_a_truncated_stream_too() -> None:
    assert run((10, A), (20, TAIL[:-1])).warnings == ("unfinished_event",)
    assert run((10, A), (20, TAIL[:-1]), end=StreamEnd.RESET).warnings == ()


@pytest.mark.parametrize("status", [400, 503, 302])
def test_a_status_other_than_2xx_is_the_failure(status: int) -> None:
    record = run((10, TAIL + usage(1) + DONE), status=status, message="no")
    assert (record.failure, record.http_status, record.message) == (http_failure(status), status, "no")


def test_an_endless_line_is_a_protocol_failure() -> None:
    decoder = StreamDecoder("chat")
    block = b"x" * (8 * 1024 * 1024)
    for _ in range(9):
        decoder.feed(SENT, block)
    assert decoder.broken
    record = decoder.finish(PLAN, run_start_ns=0, sent_ns=SENT, end=StreamEnd.CANCELLED, end_ns=SENT, http_status=200)
    assert (record.outcome, record.failure) == ("failed", "protocol")


def test_nothing_is_read_after_bytes_that_are_no_stream() -> None:
    record = run((10, A), (20, b"data: oops\n\n" + A), (30, A), (40, A.replace(b'"a"', b'"zz"')))
    assert (record.chunks, record.content) == (1, "a")


def test_what_is_no_longer_read_is_not_called_unfinished() -> None:
    assert run((10, b"data: oops\n\ndata: {"), end=StreamEnd.EOF).warnings == ()
    assert run((10, b"<html><body>Log in</body></html>")).warnings == ()


def test_a_decoder_ends_once() -> None:
    decoder = StreamDecoder("chat")
    decoder.finish(PLAN, run_start_ns=0, sent_ns=0, end=StreamEnd.EOF, end_ns=0, http_status=200)
    with pytest.raises(IllegalTransition):
        decoder.finish(PLAN, run_start_ns=0, sent_ns=0, end=StreamEnd.EOF, end_ns=0, http_status=200)


def test_an_answer_to_what_was_never_sent_is_a_bug() -> None:
    decoder = StreamDecoder("completions")
    decoder.feed(0, TAIL)
    with pytest.raises(IllegalTransition):
        decoder.finish(PLAN, run_start_ns=0, sent_ns=None, end=StreamEnd.EOF, end_ns=0, http_status=200)


def test_a_failed_record_tells_what_is_known() -> None:
    record = failed_record(
        replace(PLAN, asked_output_tokens=8),
        run_start_ns=0,
        sent_ns=SENT,
        failure=Failure.CONNECTION,
        http_status=None,
        message="refused\n",
        end_ns=SENT + 3 * MS,
    )
    assert record == Record(
        request_id="3-17",
        stage=3,
        user=4,
        scheduled_ms=4.0,
        sent_ms=5.0,
        outcome="failed",
        failure="connection",
        message="refused",
        asked_output_tokens=8,
        stream_end_ms=3.0,
    )


# --- while it streams


def test_the_decoder_shows_what_a_sweep_must_know() -> None:
    decoder = StreamDecoder("completions")
    decoder.feed(1, text(""))
    assert (decoder.last_content_ns, decoder.done, decoder.broken) == (None, False, False)
    decoder.feed(2, A)
    decoder.feed(3, b": ping\n\n")
    assert decoder.last_content_ns == 2
    decoder.feed(4, TAIL + DONE)
    assert (decoder.last_content_ns, decoder.done) == (4, True)


def test_gaps_are_handed_on_and_not_kept() -> None:
    decoder = StreamDecoder("completions")
    for stamp in (10, 30, 60):
        decoder.feed(stamp, A)
    stamps, gaps = decoder.drain_gaps()
    assert (stamps.tolist(), gaps.tolist()) == ([30, 60], [20, 30])
    decoder.feed(100, A)
    stamps, gaps = decoder.drain_gaps()
    assert (stamps.tolist(), gaps.tolist()) == ([100], [40])
    assert decoder.drain_gaps()[0].tolist() == []
    record = decoder.finish(PLAN, run_start_ns=0, sent_ns=0, end=StreamEnd.EOF, end_ns=100, http_status=200)
    assert (record.chunk_gaps_ms, record.content) == (None, None)


def test_a_frame_that_changes_now_and_then_is_learned_again() -> None:
    """``created`` as the time of the chunk: other bytes every few tokens, for more changes than there are tries."""
    chunks = [
        sse({"created": i // 4, "choices": [{"index": 0, "text": f"t{i}", "finish_reason": None}]}) for i in range(40)
    ]
    record = run(*[(float(i), chunk) for i, chunk in enumerate(chunks)], (40, TAIL))
    assert (record.chunks, record.content) == (41, "".join(f"t{i}" for i in range(40)) + "b")
    decoder = StreamDecoder("completions")
    for i, chunk in enumerate(chunks):
        decoder.feed(i, chunk)
    assert decoder._template is not None
    assert decoder._template.text(chunks[-1]) == "t39"


@pytest.mark.parametrize("open_event", [b"event: error\n", b"data: x\n", b"dat"])
def test_a_read_that_fits_the_template_goes_on_with_what_is_open(open_event: bytes) -> None:
    whole = run((10, A), (20, A), (30, open_event + A), (40, TAIL))
    assert run((10, A), (20, A), (30, open_event), (30, A), (40, TAIL)) == whole
    assert whole.chunks != 4


STREAM_CHUNKS = st.lists(
    st.one_of(
        st.builds(text, st.text(max_size=3)),
        st.builds(text, st.text("ab", min_size=1, max_size=3), ids=st.lists(st.integers(0, 9), max_size=2)),
        st.builds(text, st.sampled_from(["a", " tok", '"', "\n"]), usage=st.integers(0, 9)),
        st.builds(text, st.sampled_from(["", "a"]), st.sampled_from(["stop", "length", "abort", None])),
        st.builds(usage, st.integers(0, 9)),
        st.builds(text, st.just("b"), index=st.integers(0, 2)),
        st.sampled_from(
            [DONE, b": ping\n\n", sse({"error": "x"}), b"data: oops\n\n", b"data:", b"\n", b"event: error\n"]
        ),
    ),
    max_size=25,
)


@given(STREAM_CHUNKS, st.sampled_from(list(StreamEnd)))
def test_templates_change_no_record(chunks: list[bytes], end: StreamEnd) -> None:
    """Reads cut so that no template can be learned give the same record as reads that are whole events."""
    quick = run(*[(float(i), chunk) for i, chunk in enumerate(chunks)], end=end)
    slow = run(*[(float(i), part) for i, chunk in enumerate(chunks) for part in (chunk[:1], chunk[1:])], end=end)
    assert quick == slow
    assert quick.outcome in ("ok", "failed", "incomplete")
    assert (quick.failure is not None) == (quick.outcome == "failed")
    assert Record.from_json(quick.to_json()) == quick
