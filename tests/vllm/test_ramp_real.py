"""A ramp against a real vLLM: every token accounted for, first tokens timed as the server times them, the wall found."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.vllm

CLI = (sys.executable, "-m", "harness.cli")


def vllm_harness(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *args], capture_output=True, text=True, timeout=600, check=False)


def sums(text: str) -> dict[str, float]:
    """Sample name -> sum over all label sets."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[name] - before[name]


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


def stages_of(folder: Path) -> list[dict[str, Any]]:
    stages: list[dict[str, Any]] = json.loads((folder / "summary.json").read_text())["stages"]
    return stages


@pytest.fixture(scope="module")
def large_run(
    large_pool: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, float], dict[str, float]]:
    """1 to 32 users, 64 tokens in and out, every stream read to its end; the server's counters before and after."""
    out = tmp_path_factory.mktemp("large") / "run"
    before = sums(large_pool.metrics())
    done = vllm_harness(
        *("ramp", "--base-url", large_pool.base_url, "--users", "1,2,4,8,16,32", "--duration", "12s", "--grace", "3m"),
        *("--prompt-tokens", "64", "--output-tokens", "64", "--out", str(out), "--quiet"),
    )
    assert done.returncode == 0, done.stderr
    return out, before, sums(large_pool.metrics())


def test_every_token_of_the_server_is_in_the_records(
    large_run: tuple[Path, dict[str, float], dict[str, float]],
) -> None:
    out, before, after = large_run
    records = records_of(out)
    assert {record["outcome"] for record in records} == {"ok"}
    assert len(records) >= 63
    assert sum(record["output_tokens"] for record in records) == grown(before, after, "vllm:generation_tokens_total")
    assert sum(record["prompt_tokens"] for record in records) == grown(before, after, "vllm:prompt_tokens_total")
    assert {record["output_tokens"] for record in records} == {64}
    assert {record["output_tokens_source"] for record in records} == {"usage"}


def test_the_stages_account_for_the_same_tokens(large_run: tuple[Path, dict[str, float], dict[str, float]]) -> None:
    for stage in stages_of(large_run[0]):
        assert stage["server"]["generation_tokens"] == stage["totals"]["output_tokens"]
        assert stage["server"]["prompt_tokens"] == stage["totals"]["prompt_tokens"]
        assert stage["server"]["contamination"] == []
        assert stage["server"]["preemptions"] == 0
        assert stage["server"]["prefix_hit_ratio"] == 0


def test_the_first_token_is_timed_as_the_server_times_it(
    large_run: tuple[Path, dict[str, float], dict[str, float]],
) -> None:
    """The server's clock starts when its front end has the request and stops when the engine's output is processed; ours
    holds the HTTP server, the tokeniser's queue and loopback besides, which on two busy cores is some milliseconds."""
    out, before, after = large_run
    ours_ms = [record["ttft_ms"] for record in records_of(out)]
    theirs_ms = 1e3 * grown(before, after, "vllm:time_to_first_token_seconds_sum") / len(ours_ms)
    assert grown(before, after, "vllm:time_to_first_token_seconds_count") == len(ours_ms)
    mean_ms = sum(ours_ms) / len(ours_ms)
    assert mean_ms >= theirs_ms, "nothing arrives before it was sent"
    assert mean_ms - theirs_ms < max(15.0, 0.10 * theirs_ms)


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return sums(answer.read().decode())


@pytest.fixture(scope="module")
def small_run(small_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """A pool of 1,312 tokens, and what the harness exported while it ran."""
    out = tmp_path_factory.mktemp("small") / "run"
    port = 9400 + os.getpid() % 500
    process = subprocess.Popen(
        [
            *CLI,
            *("ramp", "--base-url", small_pool.base_url, "--users", "2,4,6,8,12", "--duration", "16s", "--grace", "3m"),
            *("--prompt-tokens", "64", "--output-tokens", "100", "--out", str(out), "--prometheus-port", str(port)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    exported: list[dict[str, float]] = []
    while process.poll() is None:
        # not yet up, or just closed: the run's ends
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            exported.append(scrape(port))
        time.sleep(0.5)
    assert process.stderr is not None
    assert process.returncode == 0, process.stderr.read()
    process.stderr.close()
    return out, exported


def test_preemptions_reach_summary_and_prometheus(small_run: tuple[Path, list[dict[str, float]]]) -> None:
    out, exported = small_run
    by_users = {stage["users"]: stage["server"]["preemptions"] for stage in stages_of(out)}
    assert by_users[2] == by_users[4] == 0
    assert by_users[12] > 0
    live = [
        values["vllm_harness_server_preemptions_total"]
        for values in exported
        if "vllm_harness_server_preemptions_total" in values
    ]
    assert live == sorted(live), "a counter never falls"
    # the last half second of a run may pass between two of our scrapes
    assert 0 < live[-1] <= sum(by_users.values())
    assert max(values.get("vllm_harness_streams_in_flight", 0) for values in exported) == 12
    assert max(values.get("vllm_harness_server_kv_cache_usage_ratio", 0) for values in exported) > 0.9


def test_the_wall_shows_where_the_pool_says(small_run: tuple[Path, list[dict[str, float]]]) -> None:
    done = vllm_harness("compare", str(small_run[0]), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    # 40 usable blocks of 32 tokens; 164 tokens are 6 blocks at the end of a request
    assert document["predicted"]["kv_full"] == pytest.approx(40 / 6)
    assert 8.0 < document["predicted"]["kv_staggered"] < 11.0
    assert document["verdict"] in ("inside", "beside")
    assert document["measured"]["sign"]["limit"] == "wall"


def test_compare_prints_both_and_keeps_the_gate(small_run: tuple[Path, list[dict[str, float]]]) -> None:
    done = vllm_harness("compare", str(small_run[0]))
    assert "predicted   wall at 6.7 users in lock step" in done.stdout
    assert "measured    wall:" in done.stdout
    assert vllm_harness("compare", str(small_run[0]), "--tolerance", "5").returncode == 0


def test_probe_reads_version_context_and_pool(small_pool: Any) -> None:
    done = vllm_harness("probe", "--base-url", small_pool.base_url, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["vllm_version"] == "0.32.0"
    assert (found["model"], found["max_model_len"]) == ("smollm2", 512)
    assert (found["pool"]["num_blocks"], found["pool"]["block_size"], found["pool"]["usable_blocks"]) == (41, 32, 40)


def test_chat_prompts_come_to_the_asked_length(large_pool: Any, tmp_path: Path) -> None:
    out = tmp_path / "chat"
    done = vllm_harness(
        *("ramp", "--base-url", large_pool.base_url, "--endpoint", "chat", "--users", "2", "--requests", "6"),
        *("--prompt-tokens", "120", "--output-tokens", "16", "--out", str(out), "--quiet"),
    )
    assert done.returncode == 0, done.stderr
    lengths = [record["prompt_tokens"] for record in records_of(out)]
    assert len(lengths) == 6
    assert all(abs(length - 120) <= 3 for length in lengths), lengths


def test_a_request_longer_than_the_context_is_refused_before_it_is_sent(small_pool: Any, tmp_path: Path) -> None:
    done = vllm_harness(
        *("ramp", "--base-url", small_pool.base_url, "--users", "1", "--requests", "1", "--prompt-tokens", "500"),
        *("--output-tokens", "100", "--out", str(tmp_path / "long")),
    )
    assert done.returncode == 2
    assert "exceed the server's max_model_len of 512" in done.stderr


def test_a_wrong_model_name_says_which_models_there_are(small_pool: Any, tmp_path: Path) -> None:
    done = vllm_harness(
        *("ramp", "--base-url", small_pool.base_url, "--model", "llama", "--users", "1", "--requests", "1"),
        *("--out", str(tmp_path / "wrong")),
    )
    assert done.returncode == 5
    assert "smollm2" in done.stderr
    assert not (tmp_path / "wrong").exists()
