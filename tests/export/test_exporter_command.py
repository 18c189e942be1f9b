"""`vllm-harness exporter`: what is known of a finished run or a calibration, under names that no live run has."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest
from console import Cli, ended, started
from finished_runs import REFERENCE, calibrated, calibrated_run
from prometheus_client.parser import text_string_to_metric_families

from calibration.factors import FACTORS
from harness.calibration_file import write_calibration
from harness.export.prometheus import _GAUGES, Exporter
from harness.export.prometheus_names import MEASURED_LIMITS, PREDICTED_LIMITS

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
PREFIX = "vllm_harness_"


def series_of(text: str) -> Series:
    return {
        (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def by(label: str, name: str, series: Series) -> dict[str, float]:
    """Label value -> value of a gauge with one label."""
    return {dict(labels)[label]: value for (found, labels), value in series.items() if found == name}


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    write_calibration(path, calibrated())
    return path


def test_a_run_shows_what_was_predicted_and_what_was_measured(cli: Cli) -> None:
    series = series_of(cli("exporter", REFERENCE, "--once").out)
    assert by("limit", "predicted_users", series) == pytest.approx({"kv_full": 6.67, "kv_staggered": 9.80}, abs=0.01)
    measured = by("limit", "measured_users", series)
    assert (measured["wall"], measured["wall_shown"]) == (6.0, 8.0)
    assert set(measured) <= set(MEASURED_LIMITS)


def test_its_stages_are_those_of_the_summary_in_base_units(cli: Cli) -> None:
    series = series_of(cli("exporter", REFERENCE, "--once").out)
    stages = json.loads((REFERENCE / "summary.json").read_text())["stages"]
    for stage in stages:
        index = (("stage", str(stage["index"])),)
        at = {name: series[(f"finished_stage_{name}", index)] for name in ("users", "valid", "preemptions")}
        assert at == {"users": stage["users"], "valid": stage["valid"], "preemptions": stage["server"]["preemptions"]}
        assert series[("finished_stage_tpot_mean_seconds", index)] == stage["tpot_ms"]["mean"] / 1e3
        p99 = series[("finished_stage_ttft_seconds", (("quantile", "0.99"), *index))]
        assert p99 == stage["ttft_ms"]["p99"] / 1e3
        ok = series[("finished_stage_requests", (("outcome", "ok"), *index))]
        assert ok == stage["requests"]["ok"]
    assert len(by("stage", "finished_stage_users", series)) == len(stages) == 6


def test_what_was_not_measured_is_no_series(cli: Cli) -> None:
    series = series_of(cli("exporter", REFERENCE, "--once").out)
    names = {name for name, _ in series}
    # no limits were asked for, and the stages had users
    assert "finished_stage_goodput_requests_per_second" not in names
    assert "finished_stage_request_rate_per_second" not in names
    assert "correction_factor" not in names


def test_it_says_when_the_run_was(cli: Cli) -> None:
    series = series_of(cli("exporter", REFERENCE, "--once").out)
    # 2026-11-30T16:23:14 UTC
    assert series[("finished_run_timestamp_seconds", ())] == 1796055794.0


def test_no_name_is_that_of_a_live_run_but_the_three_that_tell_of_a_deployment(cli: Cli, tmp_path: Path) -> None:
    text = cli("exporter", calibrated_run(tmp_path / "run"), "--once").out
    with Exporter(port=0) as exporter:
        live = {family.name for family in exporter.registry.collect()} | set(_GAUGES)
    finished = {family.name: family.type for family in text_string_to_metric_families(text)}
    shared = {f"{PREFIX}{name}" for name in ("predicted_users", "measured_users", "correction_factor")}
    assert shared <= set(finished)
    assert all(name.startswith(f"{PREFIX}finished_") for name in set(finished) - shared)
    assert not live & set(finished)
    # a rate is asked of counters and histograms
    assert set(finished.values()) == {"gauge"}


def test_every_label_has_a_fixed_few_values(cli: Cli, tmp_path: Path) -> None:
    series = series_of(cli("exporter", calibrated_run(tmp_path / "run"), "--once").out)
    found: dict[str, set[str]] = {}
    for _, labels in series:
        for label, value in labels:
            found.setdefault(label, set()).add(value)
    assert found.pop("limit") <= {*PREDICTED_LIMITS, *MEASURED_LIMITS}
    assert found.pop("factor") <= set(FACTORS)
    assert found == {
        "stage": {"0", "1", "2", "3", "4", "5"},
        "quantile": {"0.5", "0.9", "0.95", "0.99"},
        "outcome": {"ok", "failed", "incomplete"},
        "bound": {"low", "high"},
    }


def test_a_calibration_shows_the_factors_it_identified_with_their_intervals(cli: Cli, calibration: Path) -> None:
    series = series_of(cli("exporter", calibration, "--once").out)
    assert by("factor", "correction_factor", series) == {"step_overhead": 0.005, "kv_read_factor": 1.25}
    for name, value in by("factor", "correction_factor", series).items():
        low, high = (
            series[("finished_correction_factor_interval", (("bound", end), ("factor", name)))]
            for end in ("low", "high")
        )
        assert low < value < high
    assert series[("finished_calibration_timestamp_seconds", ())] == 1796061600.0


def test_a_calibration_predicts_for_its_longest_requests_or_those_asked_for(cli: Cli, calibration: Path) -> None:
    longest, same, short = (
        by("limit", "predicted_users", series_of(cli("exporter", calibration, "--once", *lengths).out))
        for lengths in (
            (),
            ("--prompt-tokens", "2048", "--output-tokens", "256"),
            ("--prompt-tokens", "256", "--output-tokens", "128"),
        )
    )
    assert longest == same
    assert longest["kv_full"] < short["kv_full"]
    assert set(longest) <= set(PREDICTED_LIMITS)


def test_in_a_folder_with_both_the_pool_that_the_server_showed_counts(cli: Cli, tmp_path: Path) -> None:
    series = series_of(cli("exporter", calibrated_run(tmp_path / "run"), "--once").out)
    predicted = by("limit", "predicted_users", series)
    assert predicted["kv_full"] == pytest.approx(6.67, abs=0.01)
    # only the calibration tells it
    assert predicted["max_num_seqs"] == 1024.0


def test_it_says_where_it_serves_and_ends_at_once_on_a_signal() -> None:
    process = started("exporter", REFERENCE, "--port", "0")
    assert process.stdout is not None
    found = re.fullmatch(r"exporter: serving \S+ at (http://127\.0\.0\.1:\d+/metrics)\n", process.stdout.readline())
    assert found
    with build_opener(ProxyHandler({})).open(found[1], timeout=5) as answer:
        assert b"vllm_harness_measured_users" in answer.read()
    process.send_signal(signal.SIGTERM)
    assert ended(process).code == 0


def test_a_port_in_use_is_a_usage_error(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        done = cli("exporter", REFERENCE, "--port", str(held.getsockname()[1]))
    assert (done.code, done.out) == (2, "")
    assert "is in use" in done.one_message()


def test_what_cannot_be_exported_is_refused_in_one_line(cli: Cli, calibration: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(REFERENCE / "run.json", begun)
    for arguments, says in (
        ((empty,), "holds no run"),
        ((tmp_path / "none.json",), "is not there"),
        ((begun,), "no finished stage"),
        ((REFERENCE, "--prompt-tokens", "8"), "belong to a calibration"),
        ((calibration, "--plan", "plan.json"), "--plan belongs to a run"),
        ((calibration, "--prompt-tokens", "8"), "expected both --prompt-tokens and --output-tokens"),
        ((REFERENCE, "--port", "70000"), "--port: expected 0 to 65535, not 70000"),
    ):
        done = cli("exporter", *arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert says in done.one_message()


def test_without_users_a_run_shows_its_stages_and_no_limit(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(REFERENCE, run)
    summary = json.loads((run / "summary.json").read_text())
    for stage in summary["stages"]:
        stage |= {"users": None, "request_rate": 2.5}
    (run / "summary.json").write_text(json.dumps(summary))
    series = series_of(cli("exporter", run, "--once").out)
    assert by("stage", "finished_stage_request_rate_per_second", series)["0"] == 2.5
    assert by("limit", "measured_users", series) == {}
    assert "finished_stage_users" not in {name for name, _ in series}
