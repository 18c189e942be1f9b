"""One scrape, one value, whatever the vLLM version calls it."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from observe_servers import DATA, metrics_text

from harness.observe import names
from harness.observe.cache_config import CacheConfig
from harness.observe.snapshot import Counters, NoSuchModel, NoVllmMetrics, Snapshot, read

EXPECTED: dict[str, dict[str, Any]] = json.loads((DATA / "metrics" / "expected.json").read_text())


def text_of(*lines: str) -> str:
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", EXPECTED)
def test_a_reader_gets_the_expected_values(name: str) -> None:
    contract = read((DATA / "metrics" / name).read_bytes()).contract()
    assert {key: contract[key] for key in EXPECTED[name]} == EXPECTED[name]


def test_the_contract_has_its_keys_first_and_in_order() -> None:
    keys = list(read(metrics_text("vllm_032")).contract())
    assert keys[:18] == [
        "running",
        "waiting",
        "swapped",
        "kv_cache_usage",
        "kv_cache_usage_max",
        "preemptions",
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "ttft_count",
        "itl_count",
        "success",
        "block_size",
        "num_gpu_blocks",
        "kv_cache_size_tokens",
        "engines",
        "version_family",
    ]


@pytest.mark.parametrize(
    ("name", "family"), [("vllm_v0", "v0 0.4-0.8"), ("vllm_v1_09", "v1 0.8-0.11"), ("vllm_032", "v1 0.12-0.32")]
)
def test_the_family_of_names_is_recognised(name: str, family: str) -> None:
    assert read(metrics_text(name)).version_family == family


def test_the_identities_of_a_real_scrape_hold() -> None:
    """Live figures of a 0.32.0 server: how its counters hang together."""
    s = read(metrics_text("vllm_032"))
    assert s.success is not None
    assert s.running is not None
    assert s.itl_count is not None
    assert s.ttft_count == s.success + s.running
    assert s.generation_tokens == s.itl_count + s.ttft_count
    assert s.step_tokens == 10138 == (s.prompt_tokens or 0) + s.generation_tokens
    assert s.steps == 786
    assert s.prompt_tokens_by_source == {"external_kv_transfer": 0, "local_cache_hit": 0, "local_compute": 5089}
    assert s.success_by_reason == {"abort": 0, "error": 0, "length": 65, "repetition": 0, "stop": 0}
    assert s.e2e_count == s.queue_count == s.prefill_count == s.decode_count == s.inference_count == 65
    assert (s.ttft_sum_s, s.itl_sum_s, s.e2e_sum_s) == (81.248694896698, 2152.2827276209846, 395.4500529766083)
    assert s.kv_cache_usage == pytest.approx(15 / 363)
    assert s.waiting_by_reason == {"capacity": 0, "deferred": 0}
    assert s.http_requests == {"/v1/chat/completions": 1, "/v1/completions": 64}
    assert (s.spec_decode_drafts, s.spec_decode_draft_tokens, s.spec_decode_accepted_tokens) == (400, 1200, 600)
    assert s.estimated_flops_per_gpu == s.estimated_read_bytes_per_gpu == 0
    assert s.process_start_time_s == 1796044922.76
    assert (s.asleep, s.via_ray, s.model, s.model_names) == (False, False, "smollm2", ("smollm2",))


def test_the_cache_config_is_typed() -> None:
    config = read(metrics_text("vllm_032")).cache_config
    assert config == CacheConfig(
        block_size=128,
        num_gpu_blocks=364,
        kv_cache_size_tokens=46592,
        kv_cache_memory_bytes=1073741824,
        kv_cache_max_concurrency=22.75,
        cache_dtype="auto",
        gpu_memory_utilization=0.92,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256",
        is_attention_free=False,
        user_specified_block_size=False,
    )
    v0 = read(metrics_text("vllm_v0")).cache_config
    assert v0 is not None
    assert (v0.enable_prefix_caching, v0.swap_space_bytes, v0.sliding_window) == (False, 4294967296.0, None)


def test_a_label_of_an_unknown_kind_is_named_and_not_guessed() -> None:
    config = CacheConfig.from_labels(
        {"block_size": "16", "sliding_window": "[4096, None]", "enable_prefix_caching": "1"}
    )
    assert (config.block_size, config.sliding_window, config.enable_prefix_caching) == (16, None, None)
    assert config.unread == ('enable_prefix_caching="1"', 'sliding_window="[4096, None]"')


def test_the_blocks_that_0_8_1_forgot_are_unknown() -> None:
    assert CacheConfig.from_labels({"num_gpu_blocks": "None", "block_size": "16"}).num_gpu_blocks is None


def test_absent_is_none_and_zero_is_zero() -> None:
    s = read(text_of('vllm:num_requests_running{model_name="m"} 0'))
    assert s.running == 0
    assert [f.name for f in fields(Counters) if getattr(s, f.name) is not None] == []
    assert (s.waiting, s.kv_cache_usage, s.swapped, s.cache_config, s.asleep, s.success) == (None,) * 6
    assert s.version_family is None


def test_counters_are_summed_and_usage_is_averaged_over_the_engines_of_one_model() -> None:
    s = read(
        text_of(
            'vllm:num_requests_running{engine="0",model_name="m"} 3',
            'vllm:num_requests_running{engine="1",model_name="m"} 5',
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25',
            'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75',
            'vllm:num_preemptions_total{engine="0",model_name="m"} 2',
            'vllm:num_preemptions_total{engine="1",model_name="m"} 7',
            'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1',
            'vllm:request_success_total{engine="1",finished_reason="stop",model_name="m"} 4',
            'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1',
            'vllm:engine_sleep_state{engine="1",model_name="m",sleep_state="awake"} 0',
        )
    )
    assert (s.engines, s.running, s.preemptions, s.success) == (2, 8, 9, 5)
    assert (s.kv_cache_usage, s.kv_cache_usage_max) == (0.5, 0.75)
    assert s.running_by_engine == {"0": 3, "1": 5}
    assert s.kv_cache_usage_by_engine == {"0": 0.25, "1": 0.75}
    assert s.success_by_reason == {"stop": 5}
    assert s.asleep is True


TWO_MODELS = text_of(
    'vllm:num_requests_running{engine="0",model_name="a"} 3',
    'vllm:num_requests_running{engine="0",model_name="b"} 5',
    'vllm:prompt_tokens_total{engine="0",model_name="b"} 50',
)


def test_of_several_models_the_asked_one_is_read() -> None:
    assert (read(TWO_MODELS, "a").running, read(TWO_MODELS, "b").running) == (3, 5)
    assert (read(TWO_MODELS, "a").prompt_tokens, read(TWO_MODELS, "b").prompt_tokens) == (None, 50)
    assert read(TWO_MODELS, "a").model_names == ("a", "b")


def test_of_several_models_one_must_be_named() -> None:
    with pytest.raises(NoSuchModel) as caught:
        read(TWO_MODELS)
    assert "a, b" in caught.value.hint


def test_a_model_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(NoSuchModel, match="'c'") as caught:
        read(metrics_text("vllm_032"), "c")
    assert "smollm2" in caught.value.hint


def test_a_text_without_vllm_is_refused() -> None:
    with pytest.raises(NoVllmMetrics) as caught:
        read("python_info 1\nprocess_start_time_seconds 3\n")
    assert "--disable-log-stats" in caught.value.hint


def test_names_that_only_begin_alike_are_not_counted() -> None:
    s = read(
        text_of(
            'vllm:num_requests_waiting{engine="0",model_name="m"} 3',
            'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2',
            'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 1',
            'vllm:request_time_per_output_token_seconds_count{engine="0",model_name="m"} 9',
        )
    )
    assert (s.waiting, s.waiting_by_reason) == (3, {"capacity": 2, "deferred": 1})
    assert (s.itl_count, s.tpot_count) == (None, 9)


def test_of_two_names_for_one_meaning_the_newer_speaks() -> None:
    """vLLM 0.9.2-0.11 exports both names of the KV usage, 0.11 both of the time between tokens."""
    s = read(
        text_of(
            'vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5',
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25',
            'vllm:time_per_output_token_seconds_count{engine="0",model_name="m"} 7',
            'vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 8',
        )
    )
    assert (s.kv_cache_usage, s.itl_count, s.version_family) == (0.25, 8, "v1 0.8-0.11")


@pytest.mark.parametrize("prefix", ["ray_vllm_", "ray_vllm:"])
def test_ray_serve_spells_the_same_names_otherwise(prefix: str) -> None:
    s = read(
        text_of(
            f'{prefix}num_requests_running{{ReplicaId="r1",WorkerId="w1",engine="0",model_name="m"}} 3',
            f'{prefix}num_requests_running{{ReplicaId="r2",WorkerId="w2",engine="0",model_name="m"}} 4',
            f"# TYPE {prefix}num_preemptions counter",
            f'{prefix}num_preemptions{{ReplicaId="r1",WorkerId="w1",engine="0",model_name="m"}} 2',
            f'{prefix}generation_tokens_total{{ReplicaId="r1",WorkerId="w1",engine="0",model_name="m"}} 50',
            f'{prefix}time_to_first_token_seconds_sum{{ReplicaId="r1",WorkerId="w1",engine="0",model_name="m"}} 1.5',
            f'{prefix}iteration_tokens_total_count{{ReplicaId="r1",WorkerId="w1",engine="0",model_name="m"}} 20',
        )
    )
    assert s.via_ray
    assert (s.engines, s.running, s.preemptions, s.generation_tokens, s.ttft_sum_s, s.steps) == (2, 7, 2, 50, 1.5, 20)


def test_what_is_no_number_is_unknown() -> None:
    s = read(
        text_of(
            'vllm:num_requests_running{engine="0",model_name="m"} 3',
            'vllm:num_requests_running{engine="1",model_name="m"} NaN',
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5',
            'vllm:kv_cache_usage_perc{engine="1",model_name="m"} NaN',
            'vllm:prompt_tokens_total{engine="0",model_name="m"} +Inf',
        )
    )
    assert (s.running, s.running_by_engine, s.prompt_tokens) == (None, {"0": 3}, None)
    assert s.kv_cache_usage == 0.5
    json.dumps(s.contract(), allow_nan=False)


@pytest.mark.parametrize(("rate", "known"), [("-1.0", None), ("0.0", 0), ("0.75", 0.75)])
def test_the_hit_rate_of_v0_is_unknown_when_caching_is_off(rate: str, known: float | None) -> None:
    s = read(text_of(f'vllm:gpu_prefix_cache_hit_rate{{model_name="m"}} {rate}', "vllm:num_requests_swapped 0"))
    assert (s.prefix_cache_hit_rate, s.version_family) == (known, "v0 0.4-0.8")


@pytest.mark.parametrize("name", ["vllm_v0", "vllm_v1_09", "vllm_032"])
def test_a_row_is_json_and_gives_the_snapshot_back(name: str) -> None:
    snapshot = read(metrics_text(name))
    row = json.loads(json.dumps(snapshot.to_row(), allow_nan=False))
    assert Snapshot.from_row(row) == snapshot
    assert all(value is not None for value in row.values())


@pytest.mark.parametrize(
    ("change", "says"), [({"speed": 1}, "unknown key 'speed'"), ({"engines": ...}, "missing key 'engines'")]
)
def test_a_row_with_an_unknown_or_missing_key_is_refused(change: dict[str, Any], says: str) -> None:
    row = read(metrics_text("vllm_032")).to_row() | change
    row = {key: value for key, value in row.items() if value is not ...}
    with pytest.raises(ValueError, match=says):
        Snapshot.from_row(row)


def test_every_meaning_of_the_table_is_a_field() -> None:
    counters = {f.name for f in fields(Counters)}
    everything = {f.name for f in fields(Snapshot)}
    assert counters == (
        set(names.COUNTERS)
        | {field for pair in names.HISTOGRAMS for field in pair}
        | set(names.COUNTERS_BY_LABEL)
        | {"http_requests"}
    )
    assert everything >= set(names.GAUGES) | set(names.GAUGES_BY_LABEL)


def test_no_name_is_in_two_meanings() -> None:
    tables = [*names.GAUGES.values(), *names.COUNTERS.values(), *names.HISTOGRAMS.values()]
    tables += [aliases for aliases, _ in (*names.GAUGES_BY_LABEL.values(), *names.COUNTERS_BY_LABEL.values())]
    every = [name for aliases in tables for name in aliases]
    assert len(every) == len(set(every))


def test_a_live_server_with_two_engines_is_read_as_one() -> None:
    s = read(metrics_text("vllm_032_two_engines"))
    assert (s.engines, s.running, s.running_by_engine) == (2, 1, {"0": 0, "1": 1})
    assert s.kv_cache_usage_by_engine == {"0": 0, "1": pytest.approx(1 / 40)}
    assert s.kv_cache_usage == pytest.approx(1 / 80)
    assert (s.prompt_tokens, s.generation_tokens, s.ttft_count, s.itl_count) == (120, 41, 6, 35)
    assert (s.success, s.asleep, s.version_family) == (5, False, "v1 0.12-0.32")


def test_numbers_too_large_to_add_are_unknown_and_never_infinite() -> None:
    """Found by fuzz_metrics.py."""
    s = read(
        text_of(
            'vllm:prompt_tokens_total{engine="0",model_name="m"} 1.7e308',
            'vllm:prompt_tokens_total{engine="1",model_name="m"} 1.7e308',
            'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1.7e308',
            'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.7e308',
            'vllm:cache_config_info{engine="0",gpu_memory_utilization="nan",kv_cache_max_concurrency="1e999"} 1',
        )
    )
    assert (s.prompt_tokens, s.success) == (None, None)
    assert s.cache_config == CacheConfig(unread=('kv_cache_max_concurrency="1e999"', 'gpu_memory_utilization="nan"'))
    json.dumps(s.contract(), allow_nan=False)
