"""A /metrics text is read whole or refused; nothing between."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from harness.wire.prom import MAX_LINE_CHARS, BadMetrics, Sample, parse

TEXTS = Path(__file__).parent.parent / "data" / "metrics"


def values(text: str | bytes) -> dict[str, list[float]]:
    return {name: [s.value for s in samples] for name, samples in parse(text).items()}


def test_a_sample_is_its_name_its_labels_and_its_value() -> None:
    assert parse('vllm:x{model_name="a",engine="0"} 1.5\nup 1\n') == {
        "vllm:x": [Sample({"model_name": "a", "engine": "0"}, 1.5)],
        "up": [Sample({}, 1.0)],
    }


def test_special_values_are_read_as_floats() -> None:
    read = values("a NaN\nb +Inf\nc -Inf\nd 1e-9\ne 12\n")
    assert math.isnan(read["a"][0])
    assert (read["b"], read["c"], read["d"], read["e"]) == ([math.inf], [-math.inf], [1e-9], [12.0])


def test_timestamps_and_exemplars_do_not_touch_the_value() -> None:
    text = (
        "a 5 1735689600000\n"
        'b_bucket{le="1"} 7 # {trace_id="abc"} 0.67 1735689600\n'
        'c_bucket{le="1"} 8 # {trace_id="no value"}\n'
        'd{text="a # {b} in a label"} 9\n'
    )
    assert values(text) == {"a": [5.0], "b_bucket": [7.0], "c_bucket": [8.0], "d": [9.0]}


def test_line_ends_of_windows_are_line_ends() -> None:
    assert values("# TYPE a gauge\r\na 1\r\n\r\nb 2\r\n") == {"a": [1.0], "b": [2.0]}


def test_a_label_value_may_hold_anything() -> None:
    value = 'x}{="\\,\u2028\x0c中'
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    assert parse(f'a{{m="{escaped}"}} 1\n')["a"][0].labels["m"] == value


def test_missing_type_and_help_lines_are_no_fault() -> None:
    assert values('a_total 1\na_bucket{le="+Inf"} 2\na_sum 3\n') == {
        "a_total": [1.0],
        "a_bucket": [2.0],
        "a_sum": [3.0],
    }


def test_a_counter_declared_without_total_is_filed_with_it() -> None:
    assert values("# TYPE a counter\na 4\n") == {"a_total": [4.0]}


def test_comments_blank_lines_and_the_end_mark_are_no_samples() -> None:
    assert values("# a comment\n#\n\n  \n# HELP a what\n# TYPE a gauge\na 1\n# EOF\n") == {"a": [1.0]}


def test_the_end_mark_needs_no_line_feed() -> None:
    assert values("a 1\n# EOF") == {"a": [1.0]}


def test_an_empty_text_has_no_samples() -> None:
    assert parse("") == parse(b"") == parse("\n") == {}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_of_saved_files_are_understood(encoding: str) -> None:
    assert values('a{m="é"} 1\n'.encode(encoding)) == {"a": [1.0]}


def test_a_byte_order_mark_in_a_string_is_passed_over() -> None:
    assert values("\ufeffa 1\n") == {"a": [1.0]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!DOCTYPE html><html><head><title>Sign in\n please</title></head></html>", "HTML.*'Sign in please'"),
        ("  <html>\n", "HTML"),
        ('{"detail":"Not Found"}', 'JSON, not metrics: {"detail":"Not Found"}'),
        ("[]", "JSON"),
        ("Not Found", "line 1 .*'Not Found'"),
        ("404 page not found\n", "line 1"),
        ("a 1\nb one\n", "line 2 .*'b one'"),
        ('a 1\nb{x="1} 1\n', "line 2"),
        ('a{x="1",x="2"} 1\n', "line 1"),
        ("a{ =x} 1\n", "line 1"),
        ('a{ ="x"} 1\n', "line 1"),
        ("# TYPE a\na 1\n", "line 1"),
        ("a\n", "line 1"),
        (f"a {'9' * 400}\n", "line 1"),
        ('a{x="1"} 1\na{x="2"} 1\na{x="1"} 3\n', r'a\{x="1"\} is there twice'),
        (f'a{{x="{"y" * MAX_LINE_CHARS}"}} 1\n', "65,5.. characters"),
    ],
)
def test_what_is_no_metrics_text_is_refused_with_what_it_looks_like(text: str, says: str) -> None:
    with pytest.raises(BadMetrics, match=says):
        parse(text)


@pytest.mark.parametrize(("body", "looks"), [(b"\x1f\x8b\x08\x00\x00", "gzip"), (b"\x00\xff\xfe", "binary")])
def test_bytes_that_are_no_text_are_refused(body: bytes, looks: str) -> None:
    with pytest.raises(BadMetrics) as caught:
        parse(body)
    assert looks in caught.value.hint


def test_a_refused_line_is_shown_short() -> None:
    with pytest.raises(BadMetrics) as caught:
        parse("!" * 5000 + "\n")
    assert len(caught.value.message) < 250


def test_a_text_cut_anywhere_is_refused_or_ends_at_a_line() -> None:
    """A server that dies while it answers must not leave 50 where 5049 was."""
    text = "".join((TEXTS / "vllm_032.txt").read_text().splitlines(keepends=True)[-20:])
    whole = parse(text)
    for cut in range(1, len(text)):
        try:
            got = parse(text[:cut])
        except BadMetrics:
            continue
        assert text[cut - 1] == "\n" or text[:cut].endswith("# EOF")
        assert all(samples == whole[name][: len(samples)] for name, samples in got.items())


def test_only_what_is_asked_for_is_read_and_it_is_the_same() -> None:
    text = (TEXTS / "vllm_032.txt").read_text()
    whole = parse(text)
    keep = {"vllm:num_requests_running", "vllm:num_preemptions_total", "vllm:time_to_first_token_seconds_sum"}
    assert parse(text, keep) == {name: whole[name] for name in keep}


def test_names_not_asked_for_are_passed_over_even_when_malformed() -> None:
    assert parse("a 1\nb one\n", keep={"a"}) == {"a": [Sample({}, 1.0)]}


def test_a_counter_declared_without_total_is_renamed_when_asked_for_too() -> None:
    assert parse("# TYPE a counter\na 4\n", keep={"a"}) == {"a_total": [Sample({}, 4.0)]}


@pytest.mark.parametrize("name", ["vllm_v0", "vllm_v1_09", "vllm_032"])
def test_every_sample_of_a_real_text_is_read(name: str) -> None:
    text = (TEXTS / f"{name}.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert sum(map(len, parse(text).values())) == len(lines)


labels = st.dictionaries(st.sampled_from(["model_name", "engine", "reason"]), st.text(max_size=20), max_size=3)
numbers = st.floats(allow_nan=False)


@given(labels, numbers)
def test_what_prometheus_client_writes_is_read_back(named: dict[str, str], value: float) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("some_gauge", "Help with \\ and\nline.", list(named), registry=registry)
    (gauge.labels(**named) if named else gauge).set(value)
    assert parse(generate_latest(registry))["some_gauge"] == [Sample(named, value)]


@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_counts_and_sums_of_a_histogram_are_read_back(observed: list[float]) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("h", "h", registry=registry)
    counter = Counter("c", "c", registry=registry)
    for value in observed:
        histogram.observe(value)
        counter.inc(value)
    got = parse(generate_latest(registry))
    assert got["h_count"][0].value == len(observed)
    assert got["h_sum"][0].value == got["c_total"][0].value == sum(observed)


def refused_or_read(text: str | bytes) -> bool:
    """True unless an exception that is not documented escapes."""
    with suppress(BadMetrics):
        parse(text)
    return True


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    assert refused_or_read(text)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    assert refused_or_read(body)


def test_a_huge_text_is_read() -> None:
    lines = [f'vllm:num_requests_running{{engine="{i}",model_name="m"}} {i}' for i in range(20_000)]
    samples = parse("\n".join(lines) + "\n", keep={"vllm:num_requests_running"})
    assert sum(s.value for s in samples["vllm:num_requests_running"]) == sum(range(20_000))


def test_json_that_is_only_begun_is_refused_too() -> None:
    with pytest.raises(BadMetrics):
        parse(json.dumps({"a": [1, 2, 3]})[:-3])
