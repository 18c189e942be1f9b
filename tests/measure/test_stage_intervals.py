"""The keys `intervals` and `slo` of a stage, and the warm-up a profile asks for."""

from __future__ import annotations

import numpy as np
import pytest

from calibration.trace import RequestTrace
from harness.measure.summary import summarise
from harness.measure.window import StageLoad


def steady(users: int = 4, requests: int = 30, *, seed: int = 1, failed: frozenset[int] = frozenset()) -> RequestTrace:
    """Users back to back, each request about a second long: TTFT about 100 ms, 10 tokens, 100 ms each."""
    rng = np.random.default_rng(seed)
    n = users * requests
    user = np.repeat(np.arange(users), requests)
    ttft = 0.1 + 0.02 * rng.random(n)
    tpot = 0.1 + 0.005 * rng.random(n)
    e2e = ttft + 9 * tpot
    sent = np.concatenate([np.concatenate([[0.0], np.cumsum(part)[:-1]]) for part in np.split(e2e, users)])
    bad = np.isin(np.arange(n), list(failed))
    return RequestTrace(
        source="live",
        user=user,
        scheduled_s=sent,
        sent_s=sent,
        ttft_s=ttft,
        ttfa_s=ttft,
        e2e_s=e2e,
        stream_end_s=e2e,
        tpot_s=tpot,
        prompt_tokens=np.full(n, 5.0),
        output_tokens=np.full(n, 10.0),
        ok=~bad,
        incomplete=np.zeros(n, dtype=np.bool_),
        failure=np.where(bad, "http_500", "").astype(object),
    )


def test_each_mean_has_an_interval_around_it() -> None:
    stage = summarise(0, steady(), StageLoad(users=4))
    for key in ("ttft_ms", "tpot_ms", "e2e_ms"):
        found = stage["intervals"][key]
        assert found["low"] < stage[key]["mean"] < found["high"]
        assert found["confidence"] == 0.9
        assert 2 <= found["n_effective"] <= stage[key]["n"]
    assert stage["intervals"]["ttft_ms"]["high"] - stage["intervals"]["ttft_ms"]["low"] < 3
    rate = stage["intervals"]["output_tokens_per_s"]
    assert rate["low"] < stage["output_tokens_per_s"] * 1.01
    assert rate["high"] > stage["output_tokens_per_s"] * 0.99


def test_what_has_too_few_requests_has_no_interval() -> None:
    stage = summarise(0, steady(users=1, requests=3), StageLoad(users=1))
    assert stage["intervals"]["ttft_ms"] is None


def test_several_tiers_are_told_from_one_run() -> None:
    tiers = [{"tpot": 102.5}, {"ttft": 50.0}]
    stage = summarise(0, steady(), StageLoad(users=4), slo={"ttft": 500.0}, tiers=tiers)
    all_met, half, none = stage["slo"]
    assert all_met["limits_ms"] == {"ttft": 500.0}
    assert all_met["attainment"] == 1.0
    assert all_met["goodput_per_s"] == pytest.approx(stage["goodput_per_s"])
    assert half["attainment"] == pytest.approx(0.5, abs=0.15)
    assert half["low"] < half["attainment"] < half["high"]
    assert (none["met"], none["attainment"], none["goodput_per_s"]) == (0, 0.0, 0.0)
    assert all_met["of"] == half["of"] == stage["e2e_ms"]["n"]


def test_a_failed_request_has_met_nothing() -> None:
    stage = summarise(0, steady(failed=frozenset(range(0, 120, 4))), StageLoad(users=4), slo={"ttft": 500.0})
    (tier,) = stage["slo"]
    assert tier["of"] > stage["e2e_ms"]["n"]
    assert tier["attainment"] == pytest.approx(0.75, abs=0.03)


def test_without_limits_no_tier_is_told() -> None:
    assert summarise(0, steady(), StageLoad(users=4))["slo"] is None


def test_a_tier_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'itl'"):
        summarise(0, steady(), StageLoad(users=4), tiers=[{"itl": 3.0}])


def test_the_asked_warm_up_is_left_out() -> None:
    stage = summarise(0, steady(), StageLoad(users=4, not_before_s=12.0))
    assert stage["window"]["start_s"] >= 12.0
    assert summarise(0, steady(), StageLoad(users=4))["window"]["start_s"] < 12.0
