"""The report: its values are those of the run, its answer is the comparison's, and it is safe to open."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest
from report_runs import HOSTILE, calibration, hostile_folder, run_folder, scrape, scrapes

from harness.cli.report import compared, write
from harness.errors import LocalFault, UsageError
from harness.export.report import Compared, report_html, write_report
from harness.export.report_sections import answer, without_user
from harness.export.timeline import timeline
from harness.measure.repeats import repeated_levels
from harness.store import read_run


class Seen(HTMLParser):
    """Every tag with its attributes, every exact value, and whether elements are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.values: list[float] = []
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link"):
            self.open.append(tag)
        if tag == "data":
            self.values.append(float(dict(attrs)["value"] or "nan"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(folder: Path, **more: Any) -> str:
    run = read_run(folder)
    return report_html(run, compared(run), **more)


def test_the_answer_is_one_sentence_with_the_prediction_beside_it(tmp_path: Path) -> None:
    run = read_run(run_folder(tmp_path / "run"))
    said = answer(run.stages, compared(run).comparison, "")
    assert said == (
        "6 users can stream at once before the KV pool is full: 8 users meant 4 preemptions;"
        " the first limit was predicted between 6.67 and 9.80 users."
    )


def test_every_number_of_every_stage_is_there_exactly(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    shown = set(Seen(page_of(folder)).values)
    for stage in read_run(folder).stages:
        for key in ("output_tokens_per_s", "output_tokens_per_s_per_user"):
            assert stage[key] in shown
        for stats in (stage["ttft_ms"], stage["tpot_ms"]):
            assert {stats["mean"], stats["p99"]} <= shown
        assert {stage["client"]["loop_lag_ms_p99"], stage["client"]["concurrency_mean"]} <= shown
        assert {stage["server"]["kv_cache_usage_max"], stage["server"]["preemptions"]} <= shown


def repeated_folder(folder: Path) -> Path:
    """The reference run with a second pass, a tenth faster."""
    run_folder(folder)
    summary, run = (orjson.loads((folder / name).read_bytes()) for name in ("summary.json", "run.json"))
    stages = summary["stages"]
    for stage in list(stages):
        again = orjson.loads(orjson.dumps(stage)) | {"index": len(stages)}
        again["output_tokens_per_s"] = 1.1 * stage["output_tokens_per_s"]
        stages.append(again)
    run["profile"]["stages"] *= 2
    (folder / "summary.json").write_bytes(orjson.dumps(summary))
    (folder / "run.json").write_bytes(orjson.dumps(run))
    return folder


def test_repeated_levels_are_pooled_in_a_table_and_on_the_curves(tmp_path: Path) -> None:
    folder = repeated_folder(tmp_path / "run")
    page = page_of(folder)
    seen = Seen(page)
    run = read_run(folder)
    levels = repeated_levels(run.stages, run.run["profile"]["stages"])
    assert [level.load.users for level in levels] == [stage["users"] for stage in run.stages[: len(levels)]]
    assert "Repeated levels, pooled" in page
    for level in levels:
        for metric in ("output_tokens_per_s", "ttft_ms", "tpot_ms"):
            found = level.metrics[metric]
            assert found is not None
            assert {found.value, found.low, found.high, found.spread} <= set(seen.values)
        rate = level.metrics["output_tokens_per_s"]
        assert rate is not None
        first, second = (run.stages[index]["output_tokens_per_s"] for index in level.stages)
        assert rate.low < first < rate.value < second < rate.high
    assert "the geometric mean of its passes" in page


def test_a_run_that_repeats_nothing_has_no_such_table(tmp_path: Path) -> None:
    assert "Repeated levels" not in page_of(run_folder(tmp_path / "run"))


def test_every_reason_is_told(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    page = page_of(folder)
    for stage in read_run(folder).stages:
        for reason in stage["reasons"]:
            assert reason in page


def test_it_is_one_file_that_fetches_and_runs_nothing(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path / "run"), calibration=calibration())
    seen = Seen(page)
    assert len(page) < 1_000_000
    assert not {"script", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in seen.tags}
    for tag, attributes in seen.tags:
        assert not [key for key in attributes if key.startswith("on") or key == "style"]
        for key in ("src", "href"):
            assert attributes.get(key, "#").startswith(("#", "data:,")), (tag, attributes)
    assert "url(" not in page
    assert "default-src &#x27;none&#x27;" in page


def test_hostile_names_and_messages_stay_text(tmp_path: Path) -> None:
    run = read_run(hostile_folder(tmp_path / "run"))
    page = report_html(run, Compared(why=HOSTILE, sentences=[f"requests {HOSTILE}"]))
    tags = [tag for tag, _ in Seen(page).tags]
    assert "script" not in tags
    assert "img" not in tags
    assert "&lt;script&gt;" in page


def test_ids_are_unique_and_every_drawing_has_title_and_description(tmp_path: Path) -> None:
    seen = Seen(page_of(run_folder(tmp_path / "run"), calibration=calibration()))
    ids = [attributes["id"] for _, attributes in seen.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    drawings = [a for tag, a in seen.tags if tag == "svg" and a.get("aria-hidden") is None]
    assert len(drawings) == 3 + 4 + 2
    for attributes in drawings:
        assert attributes["role"] == "img"
        assert set((attributes["aria-labelledby"] or "").split()) <= set(ids)


def test_a_calibration_draws_bands_and_lists_its_factors(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    plain, corrected = page_of(folder), page_of(folder, calibration=calibration())
    assert plain.count("<polygon") == 0
    assert corrected.count("<polygon") == 3
    factor = calibration().factors["prefill_factor"]
    assert {factor.value, factor.low, factor.high} <= set(Seen(corrected).values)
    assert "one shape only" in corrected


def test_a_run_without_readings_says_so(tmp_path: Path) -> None:
    assert "No reading of /metrics was kept" in page_of(run_folder(tmp_path / "run", readings=False))


def test_a_run_without_stages_says_so(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "summary.json").unlink()
    assert "Nothing was measured: the run ended before its first stage did." in page_of(folder)


def test_a_run_whose_stages_are_all_invalid_says_nothing_of_the_server(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    summary = orjson.loads((folder / "summary.json").read_bytes())
    for stage in summary["stages"]:
        stage |= {"valid": False, "window": None, "reasons": ["client: asleep"]}
    (folder / "summary.json").write_bytes(orjson.dumps(summary))
    page = page_of(folder)
    assert "every stage of it is invalid" in page
    assert "client: asleep" in page
    assert "There is no curve over users" in page or "there is no curve over users" in page


def test_a_run_by_rate_is_reported_too(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    summary = orjson.loads((folder / "summary.json").read_bytes())
    for stage in summary["stages"]:
        stage["request_rate"] = 2.5
    (folder / "summary.json").write_bytes(orjson.dumps(summary))
    page = page_of(folder)
    assert "does not say where the server saturates: no valid stage held a number of users" in page
    assert "2.5/s (at most 8)" in page


def test_a_peak_is_never_thinned_away() -> None:
    line = timeline(scrapes(5000), points=100)
    assert len(line.at_s) <= 100
    assert max(value or 0 for value in line.kv_cache_usage) == 1.0
    assert line.preemptions[-1] == 2 * 49
    assert line.scrapes == 5000
    rates = [rate for rate in line.output_tokens_per_s if rate is not None]
    assert rates == pytest.approx([20.0] * len(rates))


def test_a_server_that_restarts_counts_on() -> None:
    line = timeline([scrape(0, preemptions=5), scrape(1, preemptions=9), scrape(2, preemptions=1)])
    assert line.preemptions == [0, 4, 5]


def test_what_the_server_did_not_say_is_not_zero() -> None:
    line = timeline([scrape(0, running=1), {"at_ms": 500, "duration_ms": 1, "error": "gone"}, scrape(1, running=2)])
    assert line.kv_cache_usage == [None, None]
    assert line.running == [1, 2]
    assert line.errors == 1


def test_a_password_in_an_address_is_not_shown() -> None:
    assert without_user("http://me:secret@host:8000") == "http://***@host:8000"


def test_the_command_writes_exactly_that_file(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    write(folder, None, folder / "report.html")
    assert re.match(r"<!doctype html>\n<html lang=\"en\">", (folder / "report.html").read_text(encoding="utf-8"))
    assert not [*folder.glob(".*")]


def test_a_calibration_that_does_not_read_is_refused_by_name(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (tmp_path / "c.json").write_text('{"schema_version": 1}')
    with pytest.raises(UsageError, match=r"c\.json: harness_version is missing"):
        write(folder, tmp_path / "c.json", folder / "report.html")


def test_a_report_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(LocalFault, match="could not be written"):
        write_report(tmp_path / "nowhere" / "report.html", "x")
