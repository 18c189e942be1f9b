"""The event-stream grammar of WHATWG HTML 9.2.5 and 9.2.6, whatever the reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_sse import parse
from splits import byte_by_byte, cut, cuts

from harness.wire.sse import SseEvent, SseOverflow, SseParser


def events_of(reads: list[bytes]) -> list[SseEvent]:
    """Feed reads stamped 0, 1, 2, ..."""
    parser = SseParser()
    return [event for stamp, read in enumerate(reads) for event in parser.feed(stamp, read)]


def plain(events: list[SseEvent]) -> list[tuple[object, ...]]:
    return [tuple(event[1:]) for event in events]


def datas(stream: bytes) -> list[bytes]:
    return [event.data for event in events_of([stream])]


GRAMMAR = {
    "lf": (b"data: a\n\n", [b"a"]),
    "cr": (b"data: a\r\r", [b"a"]),
    "crlf": (b"data: a\r\n\r\n", [b"a"]),
    "lf_then_crlf": (b"data: a\n\r\n", [b"a"]),
    "crlf_then_lf": (b"data: a\r\n\n", [b"a"]),
    "cr_then_crlf": (b"data: a\r\r\n", [b"a"]),
    "two_events": (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
    "mixed_ends": (b"data: a\r\n\r\ndata: b\n\ndata: c\r\rdata: d\r\n\n", [b"a", b"b", b"c", b"d"]),
    "no_space": (b"data:a\n\n", [b"a"]),
    "only_one_space_is_taken": (b"data:  a \n\n", [b" a "]),
    "a_tab_is_no_space": (b"data:\ta\n\n", [b"\ta"]),
    "several_data_lines": (b"data: a\ndata: b\ndata:\ndata: c\n\n", [b"a\nb\n\nc"]),
    "empty_data": (b"data\n\n", [b""]),
    "empty_data_with_colon": (b"data:\n\n", [b""]),
    "two_empty_data_lines": (b"data\ndata\n\n", [b"\n"]),
    "no_blank_line_no_event": (b"data: a\n", []),
    "no_line_end_no_event": (b"data: a", []),
    "event_without_data": (b"event: ping\n\ndata: a\n\n", [b"a"]),
    "comment_only": (b": keep-alive\n\n", []),
    "comment_inside": (b"data: a\n: ping\ndata: b\n\n", [b"a\nb"]),
    "comment_without_text": (b":\n\ndata: a\n\n", [b"a"]),
    "unknown_field": (b"foo: bar\ndata: a\n\n", [b"a"]),
    "field_names_are_exact": (b"Data: a\n data: b\ndata : c\ndata: d\n\n", [b"d"]),
    "colon_in_value": (b"data: a: b:c\n\n", [b"a: b:c"]),
    "blank_lines_between": (b"\n\n\ndata: a\n\n\n\ndata: b\n\n", [b"a", b"b"]),
    "bom_at_the_start": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    "bom_once_only": (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [b"b"]),
    "bom_later_is_a_name": (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),
    "bom_alone_on_its_line": (b"\xef\xbb\xbf\ndata: a\n\n", [b"a"]),
    "utf8": ("data: 中🙂\n\n".encode(), ["中🙂".encode()]),
    "not_utf8_is_kept_as_bytes": (b"data: \xff\xfe\n\n", [b"\xff\xfe"]),
    "only_lf_cr_crlf_end_lines": (
        "data: a\u2028b\u0085c\x0bd\x0ce\x1cf\n\n".encode(),
        ["a\u2028b\u0085c\x0bd\x0ce\x1cf".encode()],
    ),
    "nul_in_data": (b"data: a\0b\n\n", [b"a\0b"]),
    "nothing": (b"", []),
}


@pytest.mark.parametrize("name", GRAMMAR)
def test_the_grammar_whole_and_byte_by_byte_and_with_trailing_data(name: str) -> None:
    stream, expected = GRAMMAR[name]
    assert datas(stream) == expected
    assert [event.data for event in events_of(byte_by_byte(stream))] == expected
    assert [event.data for event in parse(stream)] == expected  # the oracle of the properties agrees
    assert datas(stream + b": trailing") == expected


def test_an_event_carries_its_type_id_and_retry() -> None:
    stream = b"event: error\nid: 7\nretry: 250\ndata: a\n\ndata: b\n\n"
    assert events_of([stream]) == [SseEvent(0, b"a", "error", "7", 250), SseEvent(0, b"b", "message", "7", 250)]


@pytest.mark.parametrize(
    ("line", "retry_ms"),
    [
        (b"retry: 10", 10),
        (b"retry: 007", 7),
        (b"retry: -1", None),
        (b"retry: 1.5", None),
        (b"retry:", None),
        (b"retry: \xc2\xb2", None),
        (b"retry: " + b"9" * 5000, None),
    ],
)
def test_retry_is_ascii_digits_or_ignored(line: bytes, retry_ms: int | None) -> None:
    assert events_of([line + b"\ndata: a\n\n"])[0].retry_ms == retry_ms


def test_an_id_with_nul_is_ignored_and_an_empty_one_resets() -> None:
    stream = b"id: 1\ndata: a\n\nid: 2\0\ndata: b\n\nid\ndata: c\n\n"
    assert [event.id for event in events_of([stream])] == ["1", "1", ""]


def test_an_id_without_data_stays_in_force() -> None:
    assert events_of([b"id: 5\n\ndata: a\n\n"])[0].id == "5"


def test_a_type_without_data_is_forgotten() -> None:
    assert events_of([b"event: error\n\ndata: a\n\n"])[0].type == "message"


def test_an_event_is_stamped_by_the_read_that_completed_it() -> None:
    events = events_of([b"data:", b" a\n", b"\ndata: b\n\ndata: c", b"\n\n"])
    assert [(event.stamp_ns, event.data) for event in events] == [(2, b"a"), (2, b"b"), (3, b"c")]


def test_a_cr_ends_its_line_without_waiting_for_a_lf() -> None:
    events = events_of([b"data: a\r\n\r", b"\n", b"data: b\r", b"\n\r", b"\n"])
    assert [(event.stamp_ns, event.data) for event in events] == [(0, b"a"), (3, b"b")]


def test_a_lf_after_the_cr_of_the_last_read_is_no_second_line() -> None:
    assert [event.data for event in events_of([b"data: a\r", b"", b"\n", b"data: b\r", b"\r"])] == [b"a\nb"]


@pytest.mark.parametrize("open_event", [b"event: error\n", b"data: x\n", b"dat", b"id: 1"])
def test_a_read_that_looks_whole_goes_on_with_what_is_open(open_event: bytes) -> None:
    stream = open_event + b"data: {}\n\n"
    assert plain(events_of([open_event, b"data: {}\n\n"])) == [
        (e.data, e.type, e.id, e.retry_ms) for e in parse(stream)
    ]


def test_a_cut_character_comes_out_whole() -> None:
    stream = "data: 中\n\n".encode()
    for at in range(len(stream)):
        assert [event.data for event in events_of([stream[:at], stream[at:]])] == ["中".encode()]


def test_a_cut_bom_is_still_a_bom() -> None:
    assert [event.data for event in events_of([b"\xef", b"\xbb", b"\xbfdata: a\n\n"])] == [b"a"]


def test_a_line_of_megabytes_costs_no_more_than_its_length() -> None:
    line = b"x" * 4_000_000
    parser = SseParser()
    parser.feed(0, b"data: ")
    for at in range(0, len(line), 100):  # 40,000 reads; quadratic copying would move 80 GB
        assert parser.feed(1, line[at : at + 100]) == []
    assert parser.feed(2, b"\n\n") == [SseEvent(2, line)]


def test_an_event_that_never_ends_overflows() -> None:
    parser = SseParser(max_event_bytes=1000)
    for _ in range(10):
        parser.feed(0, b"x" * 100)
    with pytest.raises(SseOverflow, match="1100 bytes"):
        parser.feed(0, b"x" * 100)


def test_data_lines_without_a_blank_line_overflow() -> None:
    parser = SseParser(max_event_bytes=1000)
    for _ in range(333):
        parser.feed(0, b"data: 12\n")  # 3 bytes held each: two digits and the LF that joins
    parser.feed(0, b"data:\n")
    with pytest.raises(SseOverflow, match="1001 bytes and is not finished; at most 1000"):
        parser.feed(0, b"data:\n")


def test_comments_and_finished_events_never_overflow() -> None:
    parser = SseParser(max_event_bytes=100)
    for _ in range(1000):
        parser.feed(0, b": ping\nfoo: bar\ndata: a\n\n")
    assert parser.ignored_lines == 1000
    assert len(parser.ignored) == 4096


@pytest.mark.parametrize(
    ("stream", "data", "line"),
    [
        (b"data: a\n", b"a", b""),
        (b"data: a", None, b"data: a"),
        (b"data: a\ndata: b\nda", b"a\nb", b"da"),
        (b"<html>", None, b"<html>"),
    ],
)
def test_the_end_tells_what_was_discarded(stream: bytes, data: bytes | None, line: bytes) -> None:
    for reads in ([stream], byte_by_byte(stream)):
        parser = SseParser()
        assert not [event for read in reads for event in parser.feed(0, read)]
        assert parser.end() == (data, line)


@pytest.mark.parametrize("stream", [b"", b"data: a\n\n", b": ping\n", b"data: a\r\n\r", b"event: x\n"])
def test_a_stream_that_ended_between_events_left_nothing(stream: bytes) -> None:
    parser = SseParser()
    parser.feed(0, stream)
    assert parser.end() is None


NAMES = [b"data", b"event", b"id", b"retry", b"foo", b":", b": ", b" "]
ENDS = [b"\n", b"\n\n", b"\r", b"\r\n", b"\r\n\r\n"]
VALUES = [b"12", b"a", b"\0", b"}", b"\xff", b"\x85\x0b", "\ufeff".encode(), "中".encode()]
WHOLE = [b"data: {}\n\n", b'data: {"a":1}\n\n', b"data: [DONE]\n\n", b": ping\n\n"]
PIECES = st.sampled_from([*NAMES, *ENDS, *VALUES, *WHOLE])
STREAMS = st.lists(PIECES, max_size=40).map(b"".join)


@given(STREAMS, cuts())
def test_any_split_gives_the_events_of_the_standard_stamped_by_their_last_byte(stream: bytes, at: list[int]) -> None:
    reads = cut(stream, at)
    ends = [sum(map(len, reads[: i + 1])) for i in range(len(reads))]
    expected = [
        (next(i for i, end in enumerate(ends) if e.completed_at < end), e.data, e.type, e.id, e.retry_ms)
        for e in parse(stream)
    ]
    assert [tuple(event) for event in events_of(reads)] == expected


@given(STREAMS)
def test_byte_by_byte_gives_what_the_whole_gives(stream: bytes) -> None:
    assert plain(events_of(byte_by_byte(stream))) == plain(events_of([stream]))


@given(st.lists(st.lists(PIECES, max_size=6).map(b"".join), max_size=8))
def test_the_fast_way_gives_what_the_general_way_gives(reads: list[bytes]) -> None:
    parser, general = SseParser(), SseParser()
    for stamp, read in enumerate(reads):
        assert parser.feed(stamp, read) == general._feed_lines(stamp, read, read.splitlines())
        assert (parser.idle, parser.end()) == (general.idle, general.end())
