"""``plan``: limits in time, service levels, combinations, and the fewest GPUs."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from typing import Any

import pytest
from console import Cli

LLAMA = ("--model", "llama-3.3-70b", "--weights", "fp8", "--prompt-tokens", "2000", "--output-tokens", "500")


def planned(cli: Cli, *args: str) -> dict[str, Any]:
    done = cli("plan", *args, "--json")
    assert done.code == 0, done.err
    content: dict[str, Any] = json.loads(done.out)
    return content


def test_times_and_tokens_have_an_interval_and_a_basis(cli: Cli) -> None:
    found = planned(cli, *LLAMA, "--gpu", "h100-sxm", "--tp", "4")
    for key in ("throughput_tokens_per_s", "throughput_tokens_per_s_per_user", "tpot_ms", "ttft_ms"):
        estimate = found[key]
        assert set(estimate) == {"value", "low", "high", "basis"}
        assert estimate["low"] < estimate["value"] < estimate["high"]
        assert estimate["basis"] == "extrapolated"
    assert 10 < found["tpot_ms"]["value"] < 60
    assert found["at_users"] < found["at_hard_limit"]["at_users"]
    assert 40 < found["at_hard_limit"]["tpot_ms"]["value"] < 200
    assert found["at_limit"] == found["users"]["binding"]
    assert found["at_users"] == int(found["users"][found["at_limit"]])
    assert found["why"]


def test_service_levels_are_limits_with_an_interval(cli: Cli) -> None:
    found = planned(cli, *LLAMA, "--gpu", "h100-sxm", "--tp", "4", "--slo", "ttft:2000,tpot:40")
    for name in ("tpot", "ttft"):
        limit = found["user_limits"][name]
        assert limit["low"] < limit["value"] < limit["high"]
        assert found["users"][name] == limit["value"]
    none = planned(cli, *LLAMA, "--gpu", "h100-sxm", "--tp", "4")
    assert none["users"]["tpot"] is none["users"]["ttft"] is None


def test_the_binding_limit_is_the_smallest(cli: Cli) -> None:
    users = planned(cli, *LLAMA, "--gpu", "h100-sxm", "--tp", "4", "--slo", "tpot:25")["users"]
    known = {name: users[name] for name in ("kv_staggered", "max_num_seqs", "tpot", "ttft", "knee") if users[name]}
    ranked = sorted(known, key=lambda name: known[name])
    assert [users["binding"], users["next"]] == ranked[:2]


@pytest.mark.parametrize("slo", ["tpot", "tpot:fast", "ttft:100,ttft:200", "e2e:100", "", "tpot:0"])
def test_a_service_level_that_cannot_be_is_refused(cli: Cli, slo: str) -> None:
    done = cli("plan", *LLAMA, "--gpu", "h100-sxm", "--tp", "4", "--slo", slo)
    assert done.code == 2
    assert "slo" in done.one_message()


def test_a_pool_without_a_device_has_no_times(cli: Cli) -> None:
    found = planned(cli, "--model", "llama-3.1-8b", "--kv-cache-memory", "32GiB", "--max-model-len", "8192")
    assert found["tpot_ms"] is found["ttft_ms"] is found["throughput_tokens_per_s"] is None
    assert found["users"]["binding"] == "kv_staggered"
    assert found["max_context_tokens"] == 131_072


def test_people_see_what_users_get(cli: Cli) -> None:
    done = cli("plan", *LLAMA, "--gpu", "h100-sxm", "--tp", "4", "--slo", "tpot:25")
    said = " ".join(done.out.split())
    for words in ("TPOT", "knee", "output tokens/s, all streams", "output tokens/s, one stream", "90 % interval"):
        assert words in said
    assert "nothing was measured here" in said


def test_combinations_are_one_table(cli: Cli) -> None:
    done = cli("plan", *LLAMA, "--gpu", "h100-sxm,h200-sxm", "--tp", "1,2,4")
    assert done.code == 0
    assert done.out.count("TP4") == 2
    assert "binding" in done.out


def test_combinations_are_one_document(cli: Cli) -> None:
    found = planned(cli, *LLAMA, "--gpu", "h100-sxm,h200-sxm", "--tp", "1,2", "--kv", "auto,fp8")["comparison"]
    assert [(c["gpu"], c["tp"], c["kv"]) for c in found][:3] == [
        ("h100-sxm", 1, "bfloat16"),
        ("h100-sxm", 1, "fp8_e4m3"),
        ("h100-sxm", 2, "bfloat16"),
    ]
    assert len(found) == 8
    no, yes = found[0], found[2]
    assert (no["fits"], no["users"], no["tpot_ms"]) == (False, None, None)
    assert "leave nothing of" in no["reason"]
    assert yes["fits"] is True
    assert yes["reason"] is None
    assert yes["throughput_tokens_per_s_per_gpu"] == pytest.approx(yes["throughput_tokens_per_s"] / 2)
    alone = planned(cli, *LLAMA, "--gpu", "h100-sxm", "--tp", "2")
    assert yes["users"] == alone["users"]
    assert yes["kv_pool_tokens"] == alone["memory"]["cluster"]["kv_pool_tokens"]


def test_pipelines_are_compared_too(cli: Cli) -> None:
    done = cli("plan", *LLAMA, "--gpu", "h100-sxm", "--tp", "4", "--pp", "1,2")
    assert "TP4 PP2" in " ".join(done.out.split())


def test_the_fewest_gpus_that_fit_are_planned(cli: Cli) -> None:
    found = planned(cli, "--model", "deepseek-v3", "--gpu", "h200-sxm", "--fit")
    assert found["fits"] is True
    assert (found["deployment"]["gpus"], found["deployment"]["tp"]) == (8, 8)


@pytest.mark.parametrize("tp", ["two", "1,x", "0", "-1", ","])
def test_a_parallelism_that_is_no_number_is_refused(cli: Cli, tp: str) -> None:
    done = cli("plan", *LLAMA, "--gpu", "h100-sxm", f"--tp={tp}")
    assert done.code == 2
    assert "expected whole numbers" in done.one_message()


@pytest.mark.bench
def test_a_hundred_combinations_take_under_a_second_of_cpu() -> None:
    options = ["--gpu", "h100-sxm,h200-sxm,b200-sxm,a100-80-sxm,l40s", "--tp", "1,2,4,8"]
    options += ["--weights", "bf16,fp8,int4", "--kv", "auto,fp8", "--json"]
    begun = children_s()
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "plan", *LLAMA[:2], *options], capture_output=True, check=True, timeout=60
    )
    assert children_s() - begun < 1
    assert len(json.loads(done.stdout)["comparison"]) == 120


def children_s() -> float:
    """CPU seconds of processes that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
