"""The twin's /metrics beside a live vLLM 0.32.0's."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from calibration.steptime import LinearStep
from calibration.twin.config import EngineConfig, Speculation
from calibration.twin.counters import Histogram, tokens_buckets
from calibration.twin.engine import Engine
from calibration.twin.kernel import Kernel
from calibration.twin.sequence import Sequence
from harness.twin_metrics import LATENESS_BUCKETS_S, Scrape, render

DATA = Path(__file__).parents[1] / "data" / "metrics"
#: families of the recording that stand for features the twin does not have, or for the Python process around it
NOT_OURS = (
    *("python_", "process_", "http_request_", "http_response_", "http_requests"),
    *("vllm:lora_", "vllm:num_requests_kv_fetch", "vllm:corrupted_requests", "vllm:spec_decode_"),
)
OWN = "vllm_twin_write_lateness_seconds"

Shape = dict[str, tuple[str, set[tuple[str, frozenset[str]]]]]


def text_of(engines: int = 1, speculation: Speculation | None = None, model: str = "smollm2", users: int = 0) -> str:
    config = EngineConfig(num_gpu_blocks=364, block_size=128, max_model_len=2048, speculation=speculation)
    made = [Engine(config, LinearStep(0.01, 0, 0, 0)) for _ in range(engines)]
    kernel = Kernel(made, lambda index, output: None)
    for _user in range(users):
        kernel.at(0.0, lambda _: kernel.submit(0, Sequence(64, 10)))
    kernel.run()
    scrape = Scrape(
        model_name=model,
        engines=[(config, engine.counters) for engine in made],
        lateness=Histogram(LATENESS_BUCKETS_S),
        created_s=1.5e9,
        cpu_s=1.0,
        http_requests={("/v1/models", "GET", "2xx"): 1},
    )
    return render(scrape).decode()


def shape(text: str) -> Shape:
    """family -> type, and the (sample name, label names) of its samples."""
    found: Shape = {}
    for family in text_string_to_metric_families(text):
        samples = {(sample.name, frozenset(sample.labels)) for sample in family.samples}
        found[family.name] = (family.type, samples)
    return found


def ours(found: Shape) -> Shape:
    return {name: value for name, value in found.items() if not name.startswith(NOT_OURS) and name != OWN}


def test_families_types_and_labels_are_a_live_servers() -> None:
    theirs = ours(shape((DATA / "vllm_032.txt").read_text()))
    assert ours(shape(text_of())) == theirs


def test_label_values_that_name_parts_are_a_live_servers() -> None:
    parts = ("reason", "source", "finished_reason", "sleep_state", "le")

    def values(text: str) -> set[tuple[str, str, str]]:
        return {
            (sample.name, label, sample.labels[label])
            for family in text_string_to_metric_families(text)
            if not family.name.startswith(NOT_OURS) and family.name != OWN
            for sample in family.samples
            for label in parts
            if label in sample.labels
        }

    assert values(text_of()) == values((DATA / "vllm_032.txt").read_text())


def test_speculation_adds_its_families() -> None:
    theirs = {
        name: value
        for name, value in shape((DATA / "vllm_032.txt").read_text()).items()
        if name.startswith("vllm:spec_decode_")
    }
    mine = shape(text_of(speculation=Speculation(acceptance=(0.5, 0.5, 0.5)), users=1))
    # the recording has no _created series for these
    assert {
        name: (kind, {sample for sample in samples if not sample[0].endswith("_created")})
        for name, (kind, samples) in mine.items()
        if name.startswith("vllm:spec_decode_") and not name.endswith("_created")
    } == theirs


def test_two_engines_are_told_apart_and_blocks_are_summed() -> None:
    rows = {
        sample.labels["engine"]: sample.labels
        for family in text_string_to_metric_families(text_of(engines=2))
        for sample in family.samples
        if sample.name == "vllm:cache_config_info"
    }
    assert set(rows) == {"0", "1"}
    assert rows["0"]["num_gpu_blocks"] == str(2 * 364)
    assert rows["0"]["kv_cache_size_tokens"] == str(364 * 128)


def test_the_pools_labels_are_the_live_servers() -> None:
    def labels(text: str) -> dict[str, str]:
        families = text_string_to_metric_families(text)
        return next(s.labels for f in families for s in f.samples if s.name == "vllm:cache_config_info")

    mine, theirs = labels(text_of()), labels((DATA / "vllm_032.txt").read_text())
    differ = {name for name in theirs if mine[name] != theirs[name]}
    # given by the user to the twin, measured by that server
    assert differ == {"kv_cache_memory_bytes", "num_gpu_blocks_override", "user_specified_block_size"}


def test_counts_are_cumulative_and_end_with_the_count() -> None:
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text_of(users=3))
        for sample in family.samples
    }
    assert samples["vllm:request_prompt_tokens_bucket", "50.0"] == 0
    assert samples["vllm:request_prompt_tokens_bucket", "100.0"] == 3
    assert samples["vllm:request_prompt_tokens_bucket", "+Inf"] == 3
    assert samples["vllm:request_prompt_tokens_count", None] == 3
    assert samples["vllm:request_prompt_tokens_sum", None] == 192


def test_odd_model_names_are_escaped() -> None:
    name = 'a"b\\c\nd'
    families = list(text_string_to_metric_families(text_of(model=name)))
    running = next(family for family in families if family.name == "vllm:num_requests_running")
    assert running.samples[0].labels["model_name"] == name


@pytest.mark.parametrize(("limit", "last"), [(1, 1), (2048, 2000), (5000, 5000), (4999, 2000), (131_072, 100_000)])
def test_token_buckets_end_at_the_models_length(limit: int, last: int) -> None:
    assert tokens_buckets(limit)[-1] == last


def test_a_histogram_puts_a_value_on_a_bound_inside() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.add(value)
    histogram.add_times(2, 3)
    assert histogram.counts == [2, 5, 1]
    assert histogram.count == 8
    assert histogram.sum == pytest.approx(14)
