"""Limits on users: each alone, the one that binds, and what users get there."""

from __future__ import annotations

import math
from typing import Any

import pytest

from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.errors import InputError, Unsupported
from calibration.knee import KNEE_SLOPE
from calibration.limits import Slo, limits_of, max_context, shape_of, size
from calibration.plan import Load, Plan, make_plan
from calibration.priors import prior_factors
from calibration.queueing import closed_loop
from calibration.serving import Serving, serving

LOAD = Load(2000, 1000, True)


def plan(model: str = "qwen3-32b", gpu: str | None = "h100-sxm", load: Load = LOAD, **changes: Any) -> Plan:
    asked = {"max_model_len": 8192, **changes}
    device = None if gpu is None else find_gpu(gpu)
    return make_plan(resolve_deployment(find_model(model), gpu=device, **asked), load)


def test_the_smallest_limit_binds_and_the_next_is_named() -> None:
    found = size(plan(), Slo(ttft_s=5, tpot_s=0.05))
    assert found is not None
    limits = found.limits
    assert limits.ranked[0] == (limits.binding, limits.users) == ("kv_staggered", limits.kv_staggered)
    assert [users for _, users in limits.ranked] == sorted(users for _, users in limits.ranked)
    assert limits.next == limits.ranked[1][0]
    assert {name for name, _ in limits.ranked} == {"kv_staggered", "max_num_seqs", "tpot", "ttft", "knee"}
    assert found.at_binding.users == math.floor(limits.kv_staggered)
    assert found.at_hard_limit is None
    assert found.why.startswith(
        "The KV pool binds at 8 users: 21,808 tokens; the pool holds 7.2 streams of 2,000 + 1,000"
    )


def test_the_pools_limits_are_those_of_the_plan() -> None:
    planned = plan("llama-3.1-8b", dp=2)
    found = size(planned)
    assert found is not None
    assert (found.limits.kv_full, found.limits.kv_staggered) == (planned.kv_full, planned.kv_staggered)
    assert found.limits.max_num_seqs == 2048
    assert found.limits.tpot is None
    assert found.limits.ttft is None


def test_at_the_limit_on_tpot_that_is_the_tpot() -> None:
    served, factors, shape = loaded()
    found = limits_of(served, factors, shape, Slo(tpot_s=0.03)).tpot
    assert found is not None
    free = served.server(factors, shape)._replace(max_running=None, max_num_seqs=10**6)
    assert closed_loop(free, shape, found.value).tpot_s == pytest.approx(0.03, rel=1e-3)
    assert found.low < found.value < found.high
    assert found.basis == "extrapolated"


def test_at_the_limit_on_ttft_that_is_the_ttft() -> None:
    served, factors, shape = loaded()
    found = limits_of(served, factors, shape, Slo(ttft_s=0.6)).ttft
    assert found is not None
    free = served.server(factors, shape)._replace(max_running=None, max_num_seqs=10**6)
    assert closed_loop(free, shape, found.value).ttft_s == pytest.approx(0.6, rel=1e-3)


def loaded() -> tuple[Serving, Any, Any]:
    served = serving(plan("llama-3.1-70b", tp=4, weights="fp8").deployment)
    return served, prior_factors(served.deployment), shape_of(LOAD)


def test_the_interval_of_a_limit_follows_the_spread_of_the_latency() -> None:
    served, factors, shape = loaded()
    wide = limits_of(served, factors, shape, Slo(tpot_s=0.03)).tpot
    point = limits_of(served, factors, shape, Slo(tpot_s=0.03), intervals=False).tpot
    assert wide is not None
    assert point is not None
    assert point.low == point.value == point.high == pytest.approx(wide.value)
    # were every step 10 % slower, as many users fewer as lie between these TPOTs
    slower = limits_of(served, factors, shape, Slo(tpot_s=0.03 / 1.1), intervals=False).tpot
    assert slower is not None
    assert wide.low < slower.value < wide.value


def test_a_limit_below_one_user_is_no_user() -> None:
    found = size(plan(), Slo(ttft_s=0.001))
    assert found is not None
    assert found.limits.binding == "ttft"
    assert found.limits.users == 0
    assert found.at_binding.users == 1
    assert found.why.startswith("The limit on time to first token binds before a single user")


def test_a_limit_nobody_reaches_is_none() -> None:
    served, factors, shape = loaded()
    assert limits_of(served, factors, shape, Slo(tpot_s=1e6)).tpot is None


def test_the_knee_is_where_an_added_user_brings_little() -> None:
    served, factors, shape = loaded()
    knee = limits_of(served, factors, shape, Slo()).knee
    assert knee is not None
    free = served.server(factors, shape)._replace(max_running=None, max_num_seqs=10**6)

    def tokens(users: float) -> float:
        return closed_loop(free, shape, users).output_tokens_per_s

    slope = (tokens(knee.value * 1.01) - tokens(knee.value)) / (knee.value * 0.01)
    assert slope / tokens(1) == pytest.approx(KNEE_SLOPE, rel=0.05)


def test_where_prompts_are_all_the_work_the_knee_comes_at_once() -> None:
    served, factors, _ = loaded()
    knee = limits_of(served, factors, shape_of(Load(8000, 1, True)), Slo()).knee
    assert knee is not None
    assert 1 <= knee.value < 3


def test_where_users_cost_nothing_there_is_no_knee() -> None:
    served, factors, shape = loaded()
    for name in ("per_sequence", "kv_read_factor", "prefill_factor", "attention_factor", "mixed_step_overhead"):
        factors = factors.scaled(name, 0.0)
    assert limits_of(served, factors, shape, Slo()).knee is None


def test_where_the_knee_binds_the_first_hard_limit_is_shown_too() -> None:
    found = size(plan("llama-3.1-8b"))
    assert found is not None
    assert found.limits.binding == found.at_binding.limit == "knee"
    assert found.at_hard_limit is not None
    assert found.at_hard_limit.limit == found.limits.next == "kv_staggered"
    assert found.at_hard_limit.users > found.at_binding.users
    assert found.at_hard_limit.throughput_tokens_per_s.value > found.at_binding.throughput_tokens_per_s.value
    assert "an added user brings under 10% of the tokens per second" in found.why
    assert f"the first limit that stops users is the KV pool at {found.at_hard_limit.users}" in found.why


def test_a_knee_beyond_the_limits_does_not_bind() -> None:
    found = size(plan("llama-3.1-8b", max_num_seqs=16))
    assert found is not None
    assert found.limits.binding == "max_num_seqs"
    assert found.at_hard_limit is None
    assert "added user" not in found.why


@pytest.mark.parametrize(
    ("changes", "slo", "said"),
    [
        ({"max_num_seqs": 4}, Slo(), "max_num_seqs (4) binds: the pool holds 13.1 streams"),
        ({}, Slo(tpot_s=0.0245), "The limit on time per output token binds at"),
    ],
)
def test_a_sentence_says_why(changes: dict[str, Any], slo: Slo, said: str) -> None:
    found = size(plan(**changes), slo)
    assert found is not None
    assert said in found.why


def test_replicas_are_said() -> None:
    found = size(plan(dp=2))
    assert found is not None
    assert "tokens on 2 engines; the pool holds" in found.why


def test_what_users_get_agrees_with_itself() -> None:
    found = size(plan())
    assert found is not None
    at = found.at_binding
    assert at.tokens_per_s_per_user.value == pytest.approx(1 / at.tpot_s.value)
    life = at.ttft_s.value + 999 * at.tpot_s.value
    assert at.throughput_tokens_per_s.value == pytest.approx(at.users / life * 1000)
    for estimate in (at.tpot_s, at.ttft_s, at.throughput_tokens_per_s, at.tokens_per_s_per_user):
        assert estimate.low < estimate.value < estimate.high


def test_factors_change_the_times_and_not_the_pool() -> None:
    served = plan()
    slow = prior_factors(served.deployment).scaled("step_overhead", 2.0)
    before, after = size(served), size(served, factors=slow)
    assert before is not None
    assert after is not None
    assert after.at_binding.tpot_s.value > 1.5 * before.at_binding.tpot_s.value
    assert after.limits.kv_staggered == before.limits.kv_staggered


def test_what_does_not_fit_has_no_limits() -> None:
    assert size(plan("deepseek-v3", tp=8)) is None


def test_a_pool_without_a_device_cannot_be_timed() -> None:
    with pytest.raises(Unsupported, match="no step time without a device"):
        size(plan("llama-3.1-8b", None, kv_cache_memory_bytes=1 << 34))


@pytest.mark.parametrize("limits", [{"ttft_s": 0}, {"tpot_s": -1}])
def test_a_limit_that_cannot_be_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(InputError, match="expected more than 0"):
        Slo(**limits)


def test_the_longest_request_is_what_the_pool_holds() -> None:
    # 1,363 usable blocks of 16
    assert max_context(plan("qwen3-32b")) == 1362 * 16
    assert max_context(plan("llama-3.1-8b")) == 131_072
    assert max_context(plan("deepseek-v3", tp=8)) == 0
