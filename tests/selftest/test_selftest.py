"""What a selftest makes of its readings, what it keeps, and what runs then say."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import orjson
import pytest
from console import Cli, only_document
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from harness.cli.selftest import readings_table
from harness.errors import LocalFault
from harness.selftest import Reading, Truth, Verdict, beyond, document, judge, keep, kept, kept_path, measure, trusted

TRUTH = Truth()


def reading(streams: int = 100, **other: Any) -> Reading:
    """A perfect reading, but for what is given."""
    perfect = Reading(
        streams=streams,
        ttft_ms_mean=50.0,
        ttft_ms_p99=50.0,
        tpot_ms_mean=20.0,
        gap_ms_p99=20.0,
        tokens_per_s=streams * TRUTH.tokens_per_s,
        failed=0,
        cpu_s_per_million_tokens=10.0,
        loop_lag_ms_p99=1.0,
        server_late_ms_mean=0.01,
        server_late_ms_p99=0.1,
    )
    return dataclasses.replace(perfect, **other)


def test_a_stream_of_the_ruler_carries_49_tokens_a_second() -> None:
    assert TRUTH.tokens_per_s == pytest.approx(100 / (0.05 + 99 * 0.02))
    assert round(1000 * TRUTH.tokens_per_s) == 49_261


def test_a_perfect_reading_is_true() -> None:
    assert judge(reading(), TRUTH) == (Verdict.TRUE, [])


@pytest.mark.parametrize(
    ("figure", "within", "off"),
    [
        ("ttft_ms_mean", (49.01, 50.99), (48.9, 51.1)),
        ("ttft_ms_p99", (45.1, 54.9), (44.9, 55.1)),
        ("tpot_ms_mean", (19.81, 20.19), (19.79, 20.21)),
        ("gap_ms_p99", (18.1, 21.9), (17.9, 22.1)),
        ("tokens_per_s", (4828.0, 5024.0), (4827.0, 5025.0)),
    ],
)
def test_each_figure_has_its_tolerance(figure: str, within: tuple[float, float], off: tuple[float, float]) -> None:
    for value in within:
        assert judge(reading(**{figure: value}), TRUTH)[0] is Verdict.TRUE
    for value in off:
        verdict, reasons = judge(reading(**{figure: value}), TRUTH)
        assert verdict is Verdict.UNTRUE
        assert len(reasons) == 1


def test_a_reason_says_what_was_read_and_what_is_true() -> None:
    _, reasons = judge(reading(ttft_ms_mean=253.0), TRUTH)
    assert reasons == ["TTFT mean 253 ms for 50 (+406.0%, 2% allowed)"]


def test_a_late_server_makes_a_wrong_reading_unclear_and_a_right_one_none_the_worse() -> None:
    verdict, reasons = judge(reading(gap_ms_p99=40.0, server_late_ms_p99=1.01), TRUTH)
    assert verdict is Verdict.UNCLEAR
    assert reasons[-1] == "the server was 1.01 ms late itself (p99)"
    assert judge(reading(gap_ms_p99=40.0, server_late_ms_p99=0.99), TRUTH)[0] is Verdict.UNTRUE
    assert judge(reading(server_late_ms_p99=19.0), TRUTH)[0] is Verdict.TRUE


def test_what_was_not_measured_is_never_true() -> None:
    verdict, reasons = judge(reading(tpot_ms_mean=None), TRUTH)
    assert (verdict, reasons) == (Verdict.UNTRUE, ["TPOT mean was not measured"])
    assert judge(reading(tpot_ms_mean=None, server_late_ms_p99=None), TRUTH)[0] is Verdict.UNCLEAR


def test_failed_requests_are_untrue() -> None:
    assert judge(reading(failed=1), TRUTH) == (Verdict.UNTRUE, ["1 requests did not end well"])


def test_trust_ends_below_the_first_untrue_reading() -> None:
    true, untrue, unclear = Verdict.TRUE, Verdict.UNTRUE, Verdict.UNCLEAR
    levels = [reading(n) for n in (1, 10, 100, 1000)]

    def upto(*verdicts: Verdict) -> int | None:
        best = trusted(list(zip(levels, verdicts, strict=True)))
        return best and best.streams

    assert upto(true, true, true, true) == 1000
    assert upto(true, true, untrue, true) == 10
    assert upto(true, unclear, true, untrue) == 100
    assert upto(untrue, true, true, true) is None
    assert upto(unclear, unclear, unclear, unclear) is None


@given(st.lists(st.tuples(st.integers(1, 10_000), st.sampled_from(Verdict)), max_size=8))
def test_nothing_untrue_is_ever_trusted(pairs: list[tuple[int, Verdict]]) -> None:
    judged = [(reading(streams), verdict) for streams, verdict in pairs]
    best = trusted(judged)
    if best is not None:
        assert (best.streams, Verdict.TRUE) in pairs
        assert all(streams >= best.streams for streams, verdict in pairs if verdict is Verdict.UNTRUE)


# --- kept and quoted


def result(*readings: Reading) -> dict[str, Any]:
    return document(readings or [reading(100), reading(1000)], TRUTH, processes=2, pinned=True)


def test_a_result_is_kept_and_quoted() -> None:
    assert kept() is None
    made = result()
    assert keep(made) == kept_path()
    assert kept() == {
        "when": made["when"],
        "processes": 2,
        "streams": 1000,
        "tokens_per_s": pytest.approx(49_261, abs=1),
    }
    keep(result(reading(10), reading(100, failed=3)))
    assert (kept() or {})["streams"] == 10, "the newer one replaces it"


def test_a_result_of_a_machine_with_other_cores_is_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(result())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(97)), raising=False)
    assert kept() is None


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"schema_version": 1}', b'{"schema_version": 9}'])
def test_a_damaged_file_is_named(content: bytes) -> None:
    kept_path().parent.mkdir(parents=True)
    kept_path().write_bytes(content)
    if b"9" in content:
        assert kept() is None, "of another version, which may look like anything"
        return
    with pytest.raises(ValueError, match=kept_path().name):
        kept()


def test_a_place_that_cannot_be_written_is_a_fault_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self")
    with pytest.raises(LocalFault, match=r"/proc/self/vllm-harness/selftest-.*could not be written"):
        keep(result())


def stage(streams: float | None, rate: float | None) -> dict[str, Any]:
    return {"client": {"concurrency_mean": streams}, "output_tokens_per_s": rate}


def test_a_stage_beyond_the_trusted_load_is_told_so() -> None:
    quoted = {"when": "2026-11-30T16:41:16+00:00", "processes": 1, "streams": 1000, "tokens_per_s": 49_000.0}
    assert beyond(quoted, stage(1000, 49_500)) == []
    assert beyond(quoted, stage(1500, 20_000)) == [
        "client: 1,500 streams are beyond what this machine was shown to measure truly"
        " (1,000 streams, 49,000 tok/s; selftest of 2026-11-30)"
    ]
    assert "60,000 tok/s are beyond" in beyond(quoted, stage(200, 60_000))[0]
    assert "1,500 streams and 60,000 tok/s" in beyond(quoted, stage(1500, 60_000))[0]


def test_what_is_not_known_gives_no_reason() -> None:
    assert beyond(None, stage(5000, 1e6)) == []
    assert beyond({"when": "x", "processes": 1, "streams": None, "tokens_per_s": None}, stage(5000, 1e6)) == []
    quoted = {"when": "x", "processes": 1, "streams": 10, "tokens_per_s": 490.0}
    assert beyond(quoted, stage(None, None)) == []


# --- shown


def shown(made: dict[str, Any]) -> list[list[str]]:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  closed with the test's process
    console.print(readings_table(made))
    console.file.close()
    return [line.split() for line in console.export_text().splitlines()]


def test_the_table_has_what_is_true_and_what_was_read() -> None:
    rows = shown(result(reading(100), reading(1000, ttft_ms_mean=253.0, cpu_s_per_million_tokens=None)))
    assert rows[1][:5] == ["true", "50.0", "50.0", "20.0", "20.0"]
    assert rows[2] == ["100", "50.0", "50.0", "20.0", "20.0", "4,926", "100.0%", "10.0", "1.00", "0.10", "true"]
    assert rows[3][:3] == ["1,000", "253", "50.0"]
    assert rows[3][7] == "-", "a figure that was not measured is no 0"
    assert rows[3][-1] == "untrue"


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """measure() returns what is put here as ``result``; what it was asked lies beside."""
    made: dict[str, Any] = {}

    async def measured(streams: Any, **options: Any) -> dict[str, Any]:
        made["streams"], made["processes"] = list(streams), options["processes"]
        answer: dict[str, Any] = made["result"]
        return answer

    monkeypatch.setattr("harness.selftest.measure", measured)
    return made


def test_the_command_prints_one_document_and_keeps_it(cli: Cli, canned: dict[str, Any]) -> None:
    canned["result"] = result()
    done = cli("selftest", "--streams", "1000,100", "--processes", "2", "--json")
    assert (done.code, done.err) == (0, "")
    assert only_document(done.out) == canned["result"]
    assert (canned["streams"], canned["processes"]) == ([100, 1000], 2)
    assert orjson.loads(kept_path().read_bytes()) == canned["result"]


def test_the_command_says_up_to_what_it_can_be_trusted(cli: Cli, canned: dict[str, Any]) -> None:
    canned["result"] = result(reading(100), reading(1000, gap_ms_p99=31.0))
    done = cli("selftest")
    assert done.code == 0
    assert "can be trusted on this machine up to 100 streams, 4,926 tok/s; at 1,000 it is not" in done.out
    assert "1,000 streams: gap p99 31 ms for 20" in done.out
    assert str(kept_path()) in done.err
    assert canned["streams"] == [1, 10, 100, 500, 1000]


def test_a_result_that_says_nothing_replaces_none(cli: Cli, canned: dict[str, Any]) -> None:
    keep(result())
    canned["result"] = result(reading(100, gap_ms_p99=31.0, server_late_ms_p99=9.0))
    done = cli("selftest")
    assert done.code == 4
    assert "no load was read truly" in done.one_message()
    assert (kept() or {})["streams"] == 1000


@pytest.mark.parametrize("streams", ["", "0", "many", "1,-5", "1000000"])
def test_impossible_numbers_of_streams_are_refused(cli: Cli, streams: str) -> None:
    done = cli("selftest", "--streams", streams)
    assert done.code == 2
    assert "--streams: expected whole numbers from 1 to 100000" in done.one_message()


# --- the real thing, small


async def test_ten_real_streams_are_measured_through_real_workers() -> None:
    """Three requests of ten tokens on each of ten streams, about a second. Not whether this machine is true now: whether
    everything is read, and nothing of it before its time."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    told: list[int] = []
    truth = Truth(ttft_ms=50.0, itl_ms=20.0, output_tokens=10)
    made = await measure([10], processes=1, truth=truth, on_level=told.append)
    if before is not None:
        assert os.sched_getaffinity(0) == before, "the cores are given back"
        assert made["server"]["own_core"] is (len(before) > 1)
    (row,) = made["readings"]
    assert told == [10]
    assert (row["streams"], row["failed"]) == (10, 0)
    assert row["ttft_ms_mean"] >= 50.0
    assert row["tpot_ms_mean"] == pytest.approx(20.0, rel=0.5)
    assert 0 < row["tokens_per_s"] <= 1.02 * 10 * truth.tokens_per_s
    assert row["server_late_ms_p99"] >= row["server_late_ms_mean"] * 0.5 > 0
    assert row["cpu_s_per_million_tokens"] > 0
    assert row["verdict"] in ("true", "untrue", "unclear")
