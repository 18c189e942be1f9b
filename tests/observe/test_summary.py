"""What a stage did to the server, over the window and over the whole stage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.observe.names import VersionFamily
from harness.observe.scrape import Scrape
from harness.observe.snapshot import Snapshot
from harness.observe.summary import OurTraffic, ServerSummary, summarise_server, time_weighted_mean

STAGE = (10.0, 20.0)
WINDOW = (12.0, 18.0)


def scrape(at_s: float, duration_s: float = 0.0, family: str = VersionFamily.V1, **values: Any) -> Scrape:
    if "running" in values:
        values.setdefault("running_by_engine", {"0": values["running"]})
    snapshot = Snapshot(model="m", model_names=("m",), version_family=family, engines=1, **values)
    return Scrape(at_s=at_s, duration_s=duration_s, snapshot=snapshot)


def failed(at_s: float) -> Scrape:
    return Scrape(at_s=at_s, duration_s=0.0, error="no answer")


def summary(scrapes: list[Scrape], **more: Any) -> ServerSummary:
    return summarise_server(scrapes, more.pop("window", WINDOW), more.pop("stage", STAGE), **more)


def test_a_gauge_stands_for_the_time_nearest_to_it() -> None:
    """2 at second 1 stands for 0..2, 8 at second 3 for 2..10: (2*2 + 8*8) / 10."""
    assert time_weighted_mean([(1.0, 2.0), (3.0, 8.0)], (0.0, 10.0)) == pytest.approx(6.8)


def test_a_mean_knows_only_what_lies_inside() -> None:
    assert time_weighted_mean([(0.0, 100.0), (5.0, 3.0), (11.0, 100.0)], (1.0, 10.0)) == 3.0
    assert time_weighted_mean([(0.0, 100.0), (5.0, None), (11.0, 100.0)], (1.0, 10.0)) is None
    assert time_weighted_mean([(5.0, 3.0), (5.0, 5.0)], (5.0, 5.0)) == 4.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1e6)), min_size=1), st.floats(-1e3, 1e3))
def test_a_mean_lies_between_its_readings_and_a_constant_is_its_own_mean(
    points: list[tuple[float, float]], level: float
) -> None:
    points.sort()
    mean = time_weighted_mean(points, (0.0, 10.0))
    values = [value for _, value in points]
    assert mean is not None
    assert min(values) - 1e-6 <= mean <= max(values) + 1e-6
    assert time_weighted_mean([(at, level) for at, _ in points], (0.0, 10.0)) == pytest.approx(level)


def test_gauges_are_means_of_the_window_and_maxima_of_the_stage() -> None:
    scrapes = [
        scrape(9.0, running=0, waiting=0, kv_cache_usage=0.0, kv_cache_usage_max=0.0),
        scrape(11.0, running=2, waiting=9, waiting_by_reason={"capacity": 9.0}, kv_cache_usage=0.9, kv_cache_usage_max=0.95),
        scrape(13.0, running=4, waiting=1, waiting_by_reason={"capacity": 1.0}, kv_cache_usage=0.4, kv_cache_usage_max=0.5),
        scrape(17.0, running=8, waiting=3, waiting_by_reason={"capacity": 2.0}, kv_cache_usage=0.6, kv_cache_usage_max=0.7),
        scrape(21.0, running=99, waiting=99, kv_cache_usage=1.0, kv_cache_usage_max=1.0),
    ]  # fmt: skip
    got = summary(scrapes)
    assert (got.running_mean, got.waiting_mean, got.waiting_capacity_mean) == (6.0, 2.0, 1.5)
    assert got.kv_cache_usage_mean == pytest.approx(0.5)
    assert (got.kv_cache_usage_max, got.running_max, got.waiting_max, got.waiting_capacity_max) == (0.95, 8, 9, 9)


def test_steps_and_token_times_are_of_the_window() -> None:
    """Window 12..18, scrapes nearest its edges at 12 and 18: 300 steps in 6 busy seconds are 20 ms each."""
    scrapes = [
        scrape(9.0, running=0, steps=0, step_tokens=0, itl_count=0, itl_sum_s=0.0, generation_tokens=0),
        scrape(12.0, running=4, steps=50, step_tokens=900, itl_count=90, itl_sum_s=9.0, generation_tokens=100),
        scrape(15.0, running=4, steps=180, step_tokens=1500, itl_count=600, itl_sum_s=20.0, generation_tokens=700),
        scrape(18.0, running=4, steps=350, step_tokens=2100, itl_count=1290, itl_sum_s=33.0, generation_tokens=1300),
        scrape(21.0, running=0, steps=400, step_tokens=2200, itl_count=1400, itl_sum_s=40.0, generation_tokens=1400),
    ]
    got = summary(scrapes)
    assert got.steps == 300
    assert got.step_ms_mean == pytest.approx(20.0)
    assert got.tokens_per_step_mean == 4.0
    assert got.itl_ms_mean == pytest.approx(20.0)
    assert got.generation_tokens_per_s == 200.0
    assert got.generation_tokens == 1400


def test_only_busy_time_makes_a_step_long() -> None:
    """Nothing ran between 14 and 16; the changes are somewhere in the halves around."""
    times = {12.0: 1, 14.0: 0, 16.0: 0, 18.0: 1}
    scrapes = [scrape(at, running=running, steps=at * 10) for at, running in times.items()]
    assert summary(scrapes).step_ms_mean == pytest.approx((1 + 0 + 1) / 60 * 1e3)


def test_engines_step_beside_one_another() -> None:
    both = {"0": 3.0, "1": 2.0}
    scrapes = [scrape(12.0, running_by_engine=both, steps=0), scrape(18.0, running_by_engine=both, steps=600)]
    assert summary(scrapes).step_ms_mean == pytest.approx(2 * 6 / 600 * 1e3)


def test_counts_are_of_the_whole_stage_with_the_fill_phase_and_the_drain() -> None:
    common: dict[str, Any] = {"prefix_cache_queries": 0, "prefix_cache_hits": 0}
    scrapes = [
        scrape(5.0, preemptions=0, prompt_tokens=0, **common),
        scrape(9.9, preemptions=1, prompt_tokens=100, **common),
        scrape(11.0, preemptions=5, prompt_tokens=300, **common),
        scrape(19.0, preemptions=5, prompt_tokens=400, **common),
        scrape(20.1, preemptions=6, prompt_tokens=500, prefix_cache_queries=400, prefix_cache_hits=100),
        scrape(30.0, preemptions=50, prompt_tokens=900, **common),
    ]
    got = summary(scrapes, window=None)
    assert (got.preemptions, got.prompt_tokens, got.prefix_hit_ratio) == (5, 400, 0.25)
    assert (got.running_mean, got.steps, got.step_ms_mean) == (None, None, None)


def test_a_scrape_in_flight_at_the_border_is_not_taken_for_before_or_after() -> None:
    """Its numbers were read at some moment of the call: perhaps after the first request was sent."""
    scrapes = [
        scrape(9.0, preemptions=1),
        scrape(9.9, 0.4, preemptions=2),
        scrape(20.1, 0.4, preemptions=7),
        scrape(21.0, preemptions=9),
    ]
    assert summary(scrapes).preemptions == 8


def test_phases_are_means_per_request_in_ms() -> None:
    before = {f"{phase}_{what}": 0.0 for phase in PHASES for what in ("count", "sum_s")}
    after = {f"{phase}_count": 4.0 for phase in PHASES} | {
        f"{phase}_sum_s": total for phase, total in zip(PHASES, (0.2, 0.4, 0.8, 1.6, 3.2), strict=True)
    }
    got = summary([scrape(9.0, **before), scrape(21.0, **after)])
    assert (
        got.ttft_ms_mean,
        got.queue_ms_mean,
        got.prefill_ms_mean,
        got.decode_ms_mean,
        got.e2e_ms_mean,
    ) == pytest.approx((50.0, 100.0, 200.0, 400.0, 800.0))


PHASES = ("ttft", "queue", "prefill", "decode", "e2e")


def test_a_mean_of_no_request_is_unknown() -> None:
    idle = {"ttft_count": 7.0, "ttft_sum_s": 3.0}
    assert summary([scrape(9.0, **idle), scrape(21.0, **idle)]).ttft_ms_mean is None


def test_accepted_tokens_per_draft_have_the_token_that_is_always_there() -> None:
    before = {"spec_decode_drafts": 0, "spec_decode_accepted_tokens": 0}
    after = {"spec_decode_drafts": 400, "spec_decode_accepted_tokens": 600}
    assert summary([scrape(9.0, **before), scrape(21.0, **after)]).accepted_tokens_per_draft_mean == 2.5


def test_where_nothing_was_scraped_nothing_is_known() -> None:
    for scrapes in ([], [failed(11.0), failed(15.0)]):
        got = summary(scrapes)
        assert got == ServerSummary(scrapes=len(scrapes), scrape_errors=len(scrapes))
        assert got.to_dict()["preemptions"] is None


def test_one_scrape_has_gauges_and_no_growth() -> None:
    got = summary([scrape(15.0, running=3, preemptions=7)])
    assert (got.running_mean, got.preemptions, got.restarted) == (3.0, None, None)


def test_failed_scrapes_are_counted_and_the_gap_is_told() -> None:
    got = summary([scrape(9.0), scrape(11.0), failed(12.0), failed(13.0), scrape(14.5), scrape(21.0)])
    assert (got.scrapes, got.scrape_errors, got.scrape_gap_s_max) == (4, 2, 6.5)


def test_a_summary_is_json() -> None:
    document = summary([scrape(9.0, running=1, preemptions=1), scrape(21.0, running=1, preemptions=2)]).to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["preemptions"] == 1


# --- contamination -------------------------------------------------------------------------------------------------


def kinds(got: ServerSummary) -> list[str]:
    return [sentence.split(":")[0] for sentence in got.contamination]


def test_a_clean_stage_has_no_contamination() -> None:
    scrapes = [
        scrape(9.0, generation_tokens=50, prefix_cache_hits=0, prefix_cache_queries=9, success_by_reason={"length": 1.0}),
        scrape(21.0, generation_tokens=690, prefix_cache_hits=0, prefix_cache_queries=99, success_by_reason={"length": 11.0}),
    ]  # fmt: skip
    got = summary(scrapes, ours=OurTraffic(output_tokens=640, ended=10), prompts_unique=True)
    assert got.contamination == ()
    assert (got.unaccounted_tokens, got.finished_requests) == (0, 10)


def test_prefix_hits_on_unique_prompts_are_contamination() -> None:
    scrapes = [
        scrape(9.0, prefix_cache_hits=0, prefix_cache_queries=0),
        scrape(21.0, prefix_cache_hits=32, prefix_cache_queries=640),
    ]
    got = summary(scrapes, prompts_unique=True)
    assert got.contamination == (
        "prefix_hits: 32 hits of the prefix cache (5.0% of the queries), with prompts meant unique",
    )
    assert summary(scrapes).contamination == ()


@pytest.mark.parametrize(("family", "expected"), [(VersionFamily.V1, ["prefix_hits"]), (VersionFamily.V1_EARLY, [])])
def test_before_0_32_a_preempted_request_may_hit_its_own_blocks(family: str, expected: list[str]) -> None:
    scrapes = [
        scrape(9.0, family=family, prefix_cache_hits=0, preemptions=0),
        scrape(21.0, family=family, prefix_cache_hits=32, preemptions=2),
    ]
    assert kinds(summary(scrapes, prompts_unique=True)) == expected


def test_tokens_that_are_not_ours_are_other_clients_traffic() -> None:
    scrapes = [scrape(9.0, generation_tokens=0), scrape(21.0, generation_tokens=700)]
    got = summary(scrapes, ours=OurTraffic(output_tokens=640, ended=10))
    assert (got.unaccounted_tokens, kinds(got)) == (60, ["other_traffic"])


def test_requests_that_are_not_ours_are_other_clients_traffic() -> None:
    scrapes = [scrape(9.0, success_by_reason={"stop": 0.0}), scrape(21.0, success_by_reason={"stop": 12.0})]
    assert kinds(summary(scrapes, ours=OurTraffic(output_tokens=None, ended=9, cut=1))) == ["other_traffic"]
    assert kinds(summary(scrapes, ours=OurTraffic(output_tokens=None, ended=9, cut=3))) == []


def test_requests_that_others_broke_off_are_seen_by_the_http_layer_alone() -> None:
    def posts(count: float) -> dict[str, Any]:
        return {
            "success_by_reason": {"stop": 0.0 if count == 0 else 10.0},
            "http_requests": {"/v1/completions": count, "/v1/chat/completions": 3.0, "/tokenize": count},
        }

    ours = OurTraffic(output_tokens=None, ended=10)
    assert kinds(summary([scrape(9.0, **posts(0)), scrape(21.0, **posts(10))], ours=ours)) == []
    assert summary([scrape(9.0, **posts(0)), scrape(21.0, **posts(14))], ours=ours).contamination == (
        "other_traffic: the server served 4 requests more than our 10",
    )


def test_with_a_request_cut_tokens_cannot_be_held_against_ours() -> None:
    """The server counts tokens of broken-off requests that no client saw."""
    scrapes = [scrape(9.0, generation_tokens=0), scrape(21.0, generation_tokens=700)]
    got = summary(scrapes, ours=OurTraffic(output_tokens=640, ended=10, cut=1))
    assert (got.unaccounted_tokens, got.contamination) == (None, ())


def test_a_restart_is_told_and_its_counts_are_kept() -> None:
    scrapes = [scrape(9.0, steps=900), scrape(13.0, steps=950), scrape(16.0, steps=10), scrape(21.0, steps=40)]
    got = summary(scrapes)
    assert (got.restarted, kinds(got)) == (True, ["restart"])
    assert got.steps == 10


def test_a_sleeping_engine_is_told() -> None:
    asleep = {"sleep_state": {"awake": 0.0, "weights_offloaded": 1.0}}
    assert kinds(summary([scrape(9.0, **asleep), scrape(21.0, **asleep)])) == ["asleep"]
