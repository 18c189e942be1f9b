import numpy as np
import pytest

from harness.measure.from_records import by_stage, columns_of, trace_of
from harness.record import Outcome, Record, row_of


def record(**values: object) -> Record:
    fixed = {"request_id": "r", "stage": 0, "user": 3, "scheduled_ms": 1000.0, "sent_ms": 1500.0, "outcome": Outcome.OK}
    return Record(**(fixed | values))  # type: ignore[arg-type]


GOOD = record(
    prompt_tokens=7,
    output_tokens=5,
    ttft_ms=100.0,
    ttfa_ms=200.0,
    e2e_ms=500.0,
    tpot_ms=100.0,
    stream_end_ms=510.0,
    chunks=3,
    chunk_gaps_ms=(100.0, 300.0),
)
REFUSED = record(sent_ms=None, outcome=Outcome.FAILED, failure="connection")
CUT = record(outcome=Outcome.INCOMPLETE, ttft_ms=50.0, e2e_ms=60.0, chunks=2)


def test_milliseconds_become_seconds_and_null_becomes_nan() -> None:
    trace = trace_of(iter([GOOD, REFUSED, CUT]), "live")
    assert trace.source == "live"
    assert trace.user.tolist() == [3, 3, 3]
    for name, expected in {
        "scheduled_s": [1.0, 1.0, 1.0],
        "sent_s": [1.5, np.nan, 1.5],
        "ttft_s": [0.1, np.nan, 0.05],
        "ttfa_s": [0.2, np.nan, np.nan],
        "e2e_s": [0.5, np.nan, 0.06],
        "stream_end_s": [0.51, np.nan, np.nan],
        "tpot_s": [0.1, np.nan, np.nan],
        "prompt_tokens": [7, np.nan, np.nan],
        "output_tokens": [5, np.nan, np.nan],
    }.items():
        np.testing.assert_allclose(getattr(trace, name), expected, err_msg=name)


def test_each_outcome_has_its_column() -> None:
    trace = trace_of([GOOD, REFUSED, CUT], "twin")
    assert trace.ok.tolist() == [True, False, False]
    assert trace.failed.tolist() == [False, True, False]
    assert trace.incomplete.tolist() == [False, False, True]
    assert trace.failure.tolist() == ["", "connection", ""]


def test_saved_gaps_become_the_times_of_deltas() -> None:
    deltas = columns_of([REFUSED, GOOD, CUT], "live")[1]
    assert deltas.chunks.tolist() == [0, 3, 2]
    assert deltas.offsets is not None
    assert deltas.offsets.tolist() == [0, 0, 3, 3]
    assert deltas.times_s == pytest.approx([0.1, 0.2, 0.5])


def test_without_saved_gaps_only_chunks_are_known() -> None:
    deltas = columns_of([CUT], "live")[1]
    assert (deltas.times_s, deltas.offsets, deltas.chunks.tolist()) == (None, None, [2])


def test_no_record_gives_empty_columns() -> None:
    trace, deltas = columns_of([], "live")
    assert len(trace) == len(deltas.chunks) == 0
    assert trace.failed.dtype == bool


def test_a_record_read_from_its_line_gives_the_same_columns() -> None:
    trace = trace_of([Record.from_json(GOOD.to_json()), Record.from_json(CUT.to_json())], "live")
    direct = trace_of([GOOD, CUT], "live")
    np.testing.assert_array_equal(trace.ok, direct.ok)
    np.testing.assert_array_equal(trace.incomplete, direct.incomplete)
    np.testing.assert_array_equal(trace.e2e_s, direct.e2e_s)


def test_rows_are_told_apart_by_stage_and_give_the_columns_of_their_records() -> None:
    other = record(stage=1, asked_output_tokens=9, output_tokens=8)
    rows = [row_of(r.to_json()) for r in (other, GOOD, REFUSED, CUT)]
    stages = by_stage(iter(rows), "imported")
    assert list(stages) == [0, 1]
    assert stages[0].trace.source == "imported"
    trace, deltas = columns_of([GOOD, REFUSED, CUT], "imported")
    for name in ("sent_s", "ttft_s", "tpot_s", "output_tokens", "user", "ok", "failure"):
        np.testing.assert_array_equal(getattr(stages[0].trace, name), getattr(trace, name), err_msg=name)
    np.testing.assert_array_equal(stages[0].deltas.times_s, deltas.times_s)
    assert stages[1].asked_output_tokens.tolist() == [9]
    assert np.isnan(stages[0].asked_output_tokens).all()


def test_a_value_of_another_kind_is_an_error() -> None:
    row = row_of(CUT.to_json()) | {"ttft_ms": "soon"}
    with pytest.raises(ValueError, match="soon"):
        by_stage([row], "live")
