"""The harness's own metrics, scraped over a real socket and read by prometheus_client."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from calibration.catalog import find_gpu, find_model
from calibration.compare import Prediction
from calibration.deployment import resolve_deployment
from calibration.factors import FactorSet
from calibration.priors import prior_factors
from harness.errors import UsageError
from harness.export.prometheus import BUCKETS_S, Exporter, _Known
from harness.observe.scrape import Scrape
from harness.observe.snapshot import Snapshot
from harness.record import Record

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter(port=0) as exporter:
        yield exporter


def scraped(exporter: Exporter) -> Series:
    """Every series but the buckets, as a scraper sees them."""
    with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{exporter.port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def plain(series: Series) -> dict[str, float]:
    return {name.removeprefix("vllm_harness_"): value for (name, labels), value in series.items() if not labels}


def record(outcome: str = "ok", **more: Any) -> Record:
    values = {"request_id": "r", "stage": 0, "user": 0, "scheduled_ms": 0.0, "sent_ms": 0.0, "outcome": outcome}
    return Record(**(values | more))


def scrape(**values: Any) -> Scrape:
    snapshot = Snapshot(model="m", model_names=("m",), version_family=None, engines=1, **values)
    return Scrape(at_s=0.0, duration_s=0.0, snapshot=snapshot)


def fitted(**values: float) -> FactorSet:
    """The priors of a deployment, with these factors as a fit found them."""
    factors = prior_factors(resolve_deployment(find_model("llama-3.1-8b"), gpu=find_gpu("h100-sxm")))
    return factors.with_factors(
        *(replace(factors[name], value=value, identified=True) for name, value in values.items())
    )


def stage(users: int, waiting: float = 0.0, preemptions: int = 0) -> dict[str, Any]:
    server = {"waiting_mean": waiting, "preemptions": preemptions, "kv_cache_usage_max": 0.5, "running_max": users}
    return {
        "index": 0,
        "users": users,
        "request_rate": None,
        "valid": True,
        "reasons": [],
        "output_tokens_per_s": 10.0 * users,
        "server": server,
    }


def labelled(exporter: Exporter, name: str, label: str) -> dict[str, float]:
    """Label value -> value of a gauge with one label."""
    return {
        dict(labels)[label]: value
        for (found, labels), value in scraped(exporter).items()
        if found == f"vllm_harness_{name}"
    }


def of_a_moment(exporter: Exporter) -> dict[str, float]:
    """The gauges that tell of a moment."""
    names = ("users", "streams_in_flight", "stage", "client_loop_lag_seconds", "server_kv_cache_usage_ratio")
    return {name: value for name, value in plain(scraped(exporter)).items() if name in names}


def test_before_anything_is_known_nothing_is_claimed(exporter: Exporter) -> None:
    assert plain(scraped(exporter)) == {
        "output_tokens_total": 0.0,
        "ttft_seconds_count": 0.0,
        "ttft_seconds_sum": 0.0,
        "tpot_seconds_count": 0.0,
        "tpot_seconds_sum": 0.0,
        "e2e_seconds_count": 0.0,
        "e2e_seconds_sum": 0.0,
    }


def test_what_is_found_last_waits_for_one_more_reading_where_somebody_reads(exporter: Exporter) -> None:
    assert not exporter.wait_for_a_read(60.0)
    scraped(exporter)
    exporter.on_calibration(fitted(prefill_factor=1.4))
    # it was read before that, and not since
    assert not exporter.wait_for_a_read(0.05)
    reader = threading.Timer(0.1, scraped, [exporter])
    reader.start()
    assert exporter.wait_for_a_read(60.0)
    reader.join()


def test_all_names_of_the_contract_are_there_once_they_are_known(exporter: Exporter) -> None:
    exporter.on_stage(2)
    exporter.on_progress(users=8, in_flight=7, output_tokens_total=640, loop_lag_s=0.002)
    exporter.on_record(record(ttft_ms=50.0, tpot_ms=20.0, e2e_ms=1000.0))
    exporter.on_record(record("failed", failure="http_503"))
    exporter.on_scrape(scrape(preemptions=3, kv_cache_usage=0.25))
    exporter.on_calibration(fitted(prefill_factor=1.4), {"kv_full": 6.7})
    exporter.on_measured({"wall": 6, "wall_shown": 8})
    series = scraped(exporter)
    assert plain(series) == {
        "users": 8.0,
        "streams_in_flight": 7.0,
        "stage": 2.0,
        "output_tokens_total": 640.0,
        "client_loop_lag_seconds": 0.002,
        "server_kv_cache_usage_ratio": 0.25,
        "server_preemptions_total": 0.0,
        "ttft_seconds_count": 1.0,
        "ttft_seconds_sum": 0.05,
        "tpot_seconds_count": 1.0,
        "tpot_seconds_sum": 0.02,
        "e2e_seconds_count": 1.0,
        "e2e_seconds_sum": 1.0,
    }
    assert {key: value for key, value in series.items() if key[1]} == {
        ("vllm_harness_requests_total", (("failure", ""), ("outcome", "incomplete"))): 0.0,
        ("vllm_harness_requests_total", (("failure", ""), ("outcome", "ok"))): 1.0,
        ("vllm_harness_requests_total", (("failure", "http_503"), ("outcome", "failed"))): 1.0,
        ("vllm_harness_predicted_users", (("limit", "kv_full"),)): 6.7,
        ("vllm_harness_measured_users", (("limit", "wall"),)): 6.0,
        ("vllm_harness_measured_users", (("limit", "wall_shown"),)): 8.0,
        ("vllm_harness_correction_factor", (("factor", "prefill_factor"),)): 1.4,
    }


def test_preemptions_are_those_since_the_first_scrape_and_survive_a_restart(exporter: Exporter) -> None:
    seen = []
    for preemptions in (40, 42, 42, 5, 6, None, 8):
        exporter.on_scrape(scrape(preemptions=preemptions))
        seen.append(plain(scraped(exporter))["server_preemptions_total"])
    assert seen[:5] == [0.0, 2.0, 2.0, 7.0, 8.0]
    assert seen == sorted(seen)


def test_a_failed_scrape_does_not_lose_what_grew_around_it(exporter: Exporter) -> None:
    exporter.on_scrape(scrape(preemptions=1))
    exporter.on_scrape(Scrape(at_s=1.0, duration_s=0.0, error="no answer"))
    exporter.on_scrape(scrape(preemptions=4))
    assert plain(scraped(exporter))["server_preemptions_total"] == 3.0


def test_a_stale_kv_usage_is_removed(exporter: Exporter) -> None:
    exporter.on_scrape(scrape(kv_cache_usage=0.5))
    assert plain(scraped(exporter))["server_kv_cache_usage_ratio"] == 0.5
    exporter.on_scrape(Scrape(at_s=1.0, duration_s=0.0, error="no answer"))
    assert "server_kv_cache_usage_ratio" not in plain(scraped(exporter))
    exporter.on_scrape(scrape(kv_cache_usage=0.25))
    assert plain(scraped(exporter))["server_kv_cache_usage_ratio"] == 0.25


def test_an_open_loop_stage_has_no_users(exporter: Exporter) -> None:
    exporter.on_progress(users=4, in_flight=4)
    exporter.on_progress(users=None, in_flight=9)
    assert "users" not in plain(scraped(exporter))
    assert plain(scraped(exporter))["streams_in_flight"] == 9.0


def test_a_limit_that_is_no_longer_predicted_is_removed(exporter: Exporter) -> None:
    exporter.on_calibration(fitted(), {"tpot": 12.0, "ttft": 20.0})
    exporter.on_calibration(fitted(), {"tpot": None, "ttft": 20.0})
    assert labelled(exporter, "predicted_users", "limit") == {"ttft": 20.0}


def test_only_factors_that_were_identified_are_numbers(exporter: Exporter) -> None:
    exporter.on_calibration(fitted(kv_read_factor=1.2, step_overhead=0.004))
    assert labelled(exporter, "correction_factor", "factor") == {"kv_read_factor": 1.2, "step_overhead": 0.004}
    exporter.on_calibration(fitted())
    assert labelled(exporter, "correction_factor", "factor") == {}


@pytest.mark.parametrize("tell", ["on_measured", "on_calibration"])
def test_a_label_takes_no_value_that_is_not_in_the_table(exporter: Exporter, tell: str) -> None:
    users = {"user-4711": 1.0}
    with pytest.raises(ValueError, match="limit 'user-4711', expected one of"):
        exporter.on_measured(users) if tell == "on_measured" else exporter.on_calibration(fitted(), users)


def test_a_stage_shows_nothing_of_the_one_before_it(exporter: Exporter) -> None:
    exporter.on_stage(0)
    exporter.on_progress(users=4, in_flight=4, loop_lag_s=0.001)
    exporter.on_stage(1)
    assert of_a_moment(exporter) == {"stage": 1.0}


def test_when_a_stage_has_ended_its_gauges_are_gone_and_its_counts_stay(exporter: Exporter) -> None:
    exporter.on_stage(0)
    exporter.on_progress(users=4, in_flight=4, loop_lag_s=0.001)
    exporter.on_record(record(output_tokens=64, ttft_ms=50.0))
    exporter.on_stage_end([])
    assert of_a_moment(exporter) == {}
    assert plain(scraped(exporter))["output_tokens_total"] == 64.0


def test_what_a_sweep_has_measured_is_shown_as_its_stages_end(exporter: Exporter) -> None:
    exporter.on_run(Prediction(kv_full=6.7, kv_staggered=9.8, max_num_seqs=256))
    assert labelled(exporter, "predicted_users", "limit") == {
        "kv_full": 6.7,
        "kv_staggered": 9.8,
        "max_num_seqs": 256.0,
    }
    stages = [stage(2, waiting=0.0), stage(4, waiting=0.0)]
    exporter.on_stage_end(stages)
    assert labelled(exporter, "measured_users", "limit") == {"none": 4.0}
    exporter.on_stage_end([*stages, stage(8, waiting=0.1, preemptions=4)])
    assert labelled(exporter, "measured_users", "limit") == {"wall": 4.0, "wall_shown": 8.0}


def test_a_stage_that_is_invalid_measures_nothing(exporter: Exporter) -> None:
    exporter.on_run(None)
    exporter.on_stage_end([stage(8, preemptions=4) | {"valid": False, "reasons": ["client: suspended"]}])
    assert labelled(exporter, "measured_users", "limit") == {}


def test_a_second_run_shows_nothing_of_the_first(exporter: Exporter) -> None:
    exporter.on_run(Prediction(kv_full=6.7, kv_staggered=9.8))
    exporter.on_stage(0)
    exporter.on_scrape(scrape(kv_cache_usage=0.25, preemptions=1))
    exporter.on_stage_end([stage(8, preemptions=4)])
    exporter.on_run_end()
    assert of_a_moment(exporter) == {}
    assert labelled(exporter, "measured_users", "limit") == {"wall_shown": 8.0}
    exporter.on_run(None)
    assert labelled(exporter, "measured_users", "limit") == {}
    assert labelled(exporter, "predicted_users", "limit") == {}


def test_what_grew_around_a_scrape_without_the_counter_is_not_lost(exporter: Exporter) -> None:
    for preemptions in (1, None, 4):
        exporter.on_scrape(scrape(preemptions=preemptions))
    assert plain(scraped(exporter))["server_preemptions_total"] == 3.0


@given(st.lists(st.one_of(st.none(), st.integers(0, 50)), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
def test_no_counter_falls_whatever_the_server_counts(counts: list[int | None]) -> None:
    known = Exporter.__new__(Exporter)  # without a socket
    known._known, known._last = _Known(), None
    shown = []
    for count in counts:
        known.on_scrape(scrape(preemptions=count))
        shown += [sample.value for family in known._known.collect() for sample in family.samples]
    assert shown == sorted(shown)
    assert shown[:1] in ([], [0.0])


def test_no_series_tells_when_a_counter_was_made(exporter: Exporter) -> None:
    exporter.on_record(record(output_tokens=1, ttft_ms=50.0))
    assert not [name for name, _ in scraped(exporter) if name.endswith("_created")]


def test_output_tokens_never_fall_whichever_count_is_ahead(exporter: Exporter) -> None:
    exporter.on_progress(users=1, in_flight=1, output_tokens_total=100)
    exporter.on_record(record(output_tokens=64))
    assert plain(scraped(exporter))["output_tokens_total"] == 100.0
    exporter.on_record(record(output_tokens=64))
    assert plain(scraped(exporter))["output_tokens_total"] == 128.0
    exporter.on_progress(users=1, in_flight=1, output_tokens_total=110)
    assert plain(scraped(exporter))["output_tokens_total"] == 128.0


def test_failed_requests_have_no_latency(exporter: Exporter) -> None:
    exporter.on_record(record("failed", failure="stalled", ttft_ms=50.0, e2e_ms=900.0))
    exporter.on_record(record("incomplete", ttft_ms=50.0))
    exporter.on_record(record(ttft_ms=50.0, tpot_ms=None, e2e_ms=60.0))
    got = plain(scraped(exporter))
    assert (got["ttft_seconds_count"], got["tpot_seconds_count"], got["e2e_seconds_count"]) == (1.0, 0.0, 1.0)


def test_the_buckets_are_fine_from_a_millisecond_to_minutes() -> None:
    assert (BUCKETS_S[0], BUCKETS_S[-1], len(BUCKETS_S)) == (0.001, 600.0, 47)
    assert list(BUCKETS_S) == sorted(set(BUCKETS_S))
    assert all(b / a <= 1.5000001 for a, b in itertools.pairwise(BUCKETS_S))


def test_a_second_exporter_in_one_process_is_no_conflict() -> None:
    with Exporter(port=0) as one, Exporter(port=0) as two:
        one.on_stage(1)
        two.on_stage(2)
        assert (plain(scraped(one))["stage"], plain(scraped(two))["stage"]) == (1.0, 2.0)
        assert one.port != two.port


def test_a_port_in_use_is_a_usage_error(exporter: Exporter) -> None:
    with pytest.raises(UsageError, match=f"127.0.0.1:{exporter.port} for the Prometheus export is in use") as caught:
        Exporter(port=exporter.port)
    assert caught.value.hint


@pytest.mark.parametrize(("address", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 99999)])
def test_what_cannot_be_bound_is_a_usage_error(address: str, port: int) -> None:
    with pytest.raises(UsageError, match="cannot serve"):
        Exporter(address=address, port=port)


def test_it_listens_on_loopback_alone_unless_told_otherwise(exporter: Exporter) -> None:
    assert exporter.address == "127.0.0.1"


def test_closing_frees_the_port_and_may_be_repeated() -> None:
    exporter = Exporter(port=0)
    port = exporter.port
    exporter.close()
    exporter.close()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))


def test_closing_removes_the_gauges() -> None:
    exporter = Exporter(port=0)
    exporter.on_stage(1)
    exporter.close()
    assert "vllm_harness_stage" not in [family.name for family in exporter.registry.collect()]
