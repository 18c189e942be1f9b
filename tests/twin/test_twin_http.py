"""HTTP requests as bytes come: whole, one byte at a time, with what follows."""

from __future__ import annotations

import pytest

from harness.twin_http import BadRequest, Request, RequestParser, response

PLAIN = b'POST /v1/completions?x=1 HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n{"a":1}'
CHUNKED = b'POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n4;ext=1\r\n":1}\r\n0\r\nTrailer: x\r\n\r\n'
EMPTY_CHUNKED = b"POST /tokenize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
GET = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"


def read(data: bytes, size: int) -> list[Request]:
    parser, requests = RequestParser(), []
    for start in range(0, len(data), size):
        parser.feed(data[start : start + size])
        while (request := parser.next(5)) is not None:
            requests.append(request)
    return requests


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_requests_are_the_same_however_they_arrive(size: int) -> None:
    requests = read(PLAIN + CHUNKED + EMPTY_CHUNKED + GET + PLAIN, size)
    assert [(r.method, r.path, r.body) for r in requests] == [
        ("POST", "/v1/completions", b'{"a":1}'),
        ("POST", "/tokenize", b'{"a":1}'),
        ("POST", "/tokenize", b""),
        ("GET", "/metrics", b""),
        ("POST", "/v1/completions", b'{"a":1}'),
    ]
    assert requests[0].headers["content-type"] == "application/json"
    assert requests[0].arrived_ns == 5


def test_half_a_request_is_none() -> None:
    assert read(PLAIN[:-1], 10_000) == []


def test_empty_lines_between_requests_are_skipped() -> None:
    assert len(read(GET + b"\r\n\r\n" + GET, 10_000)) == 2


def test_a_client_may_ask_for_leave_to_send_its_body() -> None:
    parser = RequestParser()
    parser.feed(b"POST / HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
    assert parser.next(0) is None
    assert parser.expects_continue


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: two\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000, 431),
    ],
)
def test_nonsense_is_refused_with_its_status(data: bytes, status: int) -> None:
    with pytest.raises(BadRequest) as refused:
        read(data, 10_000_000)
    assert refused.value.status == status


def test_a_response_says_its_length() -> None:
    assert response(404, b"{}").split(b"\r\n") == [
        b"HTTP/1.1 404 Not Found",
        b"content-type: application/json",
        b"content-length: 2",
        b"",
        b"{}",
    ]
