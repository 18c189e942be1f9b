"""The 24 streams give the right record however their bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from splits import byte_by_byte, cut, cuts
from stream_cases import CASES, Case, decode, differences

by_id = pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])


def test_there_are_24_cases_of_every_outcome() -> None:
    assert len(CASES) == 24
    assert {case.expect.get("failure") for case in CASES} >= {None, "truncated", "stalled", "connection", "http_503"}


@by_id
def test_whole_writes_give_the_expected_record(case: Case) -> None:
    assert differences(decode(case, list(case.writes)), case.expect) == {}


@by_id
def test_byte_by_byte_gives_the_same_record(case: Case) -> None:
    reads = [(stamp, byte) for stamp, data in case.writes for byte in byte_by_byte(data)]
    assert decode(case, reads) == decode(case, list(case.writes))


@given(st.sampled_from(CASES), cuts())
def test_any_cut_within_the_writes_gives_the_same_record(case: Case, at: list[int]) -> None:
    reads = [(stamp, piece) for stamp, data in case.writes for piece in cut(data, at)]
    assert decode(case, reads) == decode(case, list(case.writes))


@given(st.sampled_from(CASES), cuts())
def test_any_cut_across_the_writes_moves_times_only(case: Case, at: list[int]) -> None:
    stream = b"".join(data for _, data in case.writes)
    record = decode(case, [(case.end_ns, piece) for piece in cut(stream, at)])
    timeless = {name: value for name, value in case.expect.items() if not name.endswith("_ms")}
    assert differences(record, timeless) == {}


@by_id
def test_a_read_of_everything_at_once_has_one_time(case: Case) -> None:
    record = decode(case, [(case.end_ns, b"".join(data for _, data in case.writes))])
    assert record.ttft_ms == record.e2e_ms
    assert set(record.chunk_gaps_ms or ()) <= {0.0}
