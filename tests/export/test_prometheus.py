"""The harness's own metrics, scraped over a real socket and read by prometheus_client."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.errors import UsageError
from harness.export.prometheus import BUCKETS_S, Exporter
from harness.observe.scrape import Scrape
from harness.observe.snapshot import Snapshot
from harness.record import Record

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    with Exporter(port=0) as exporter:
        yield exporter


def scraped(exporter: Exporter) -> Series:
    """Every series but the buckets and creation times, as a scraper sees them."""
    with build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{exporter.port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def plain(series: Series) -> dict[str, float]:
    return {name.removeprefix("vllm_harness_"): value for (name, labels), value in series.items() if not labels}


def record(outcome: str = "ok", **more: Any) -> Record:
    values = {"request_id": "r", "stage": 0, "user": 0, "scheduled_ms": 0.0, "sent_ms": 0.0, "outcome": outcome}
    return Record(**(values | more))


def scrape(**values: Any) -> Scrape:
    snapshot = Snapshot(model="m", model_names=("m",), version_family=None, engines=1, **values)
    return Scrape(at_s=0.0, duration_s=0.0, snapshot=snapshot)


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


def test_all_names_of_the_contract_are_there_once_they_are_known(exporter: Exporter) -> None:
    exporter.on_stage(2)
    exporter.on_progress(users=8, in_flight=7, output_tokens_total=640, loop_lag_s=0.002)
    exporter.on_record(record(ttft_ms=50.0, tpot_ms=20.0, e2e_ms=1000.0))
    exporter.on_record(record("failed", failure="http_503"))
    exporter.on_scrape(scrape(preemptions=3, kv_cache_usage=0.25))
    exporter.predicted_users("kv_full", 6.7)
    exporter.measured_users("kv_full", 8)
    exporter.correction_factor("prefill_factor", 1.4)
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
        ("vllm_harness_requests_total", (("failure", ""), ("outcome", "ok"))): 1.0,
        ("vllm_harness_requests_total", (("failure", "http_503"), ("outcome", "failed"))): 1.0,
        ("vllm_harness_predicted_users", (("limit", "kv_full"),)): 6.7,
        ("vllm_harness_measured_users", (("limit", "kv_full"),)): 8.0,
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
    exporter.predicted_users("tpot", 12.0)
    exporter.predicted_users("ttft", 20.0)
    exporter.predicted_users("tpot", None)
    labelled = {key[1]: value for key, value in scraped(exporter).items() if key[0] == "vllm_harness_predicted_users"}
    assert labelled == {(("limit", "ttft"),): 20.0}


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
    assert exporter._server.server_address[0] == "127.0.0.1"


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
