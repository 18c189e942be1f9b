"""Counters only grow, unless the server began anew."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observe_servers import metrics_text

from harness.observe.deltas import COUNTER_FIELDS, Delta, delta, delta_over, has_restarted
from harness.observe.snapshot import Counters, Snapshot, read


def snap(**values: object) -> Snapshot:
    return replace(Snapshot(model="m", model_names=("m",), version_family=None, engines=1), **values)  # type: ignore[arg-type]


def test_growth_is_the_difference() -> None:
    grown = delta(
        snap(preemptions=3, ttft_sum_s=1.5, success_by_reason={"stop": 1, "length": 4}),
        snap(preemptions=7, ttft_sum_s=4.0, success_by_reason={"stop": 1, "length": 9}),
    )
    assert (grown.preemptions, grown.ttft_sum_s, grown.success_by_reason) == (4, 2.5, {"stop": 0, "length": 5})
    assert (grown.success, grown.restarted) == (5, False)


def test_what_an_end_lacks_is_unknown() -> None:
    assert delta(snap(), snap(preemptions=7)).preemptions is None
    assert delta(snap(preemptions=7), snap()).preemptions is None
    assert delta(snap(), snap(success_by_reason={"stop": 1})).success is None


def test_ray_shows_a_counter_only_after_its_first_event() -> None:
    assert delta(snap(via_ray=True), snap(via_ray=True, preemptions=2)).preemptions == 2


def test_a_label_that_is_new_grew_from_zero() -> None:
    before, after = {"/v1/completions": 3.0}, {"/v1/completions": 3.0, "/v1/chat/completions": 2.0}
    assert delta(snap(http_requests=before), snap(http_requests=after)).http_requests == {
        "/v1/completions": 0,
        "/v1/chat/completions": 2,
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"steps": 10}, {"steps": 9}),
        ({"success_by_reason": {"stop": 2}}, {"success_by_reason": {"stop": 1}}),
        ({"http_requests": {"/a": 2}}, {"http_requests": {}}),
        ({"process_start_time_s": 1.0}, {"process_start_time_s": 2.0}),
    ],
)
def test_a_fall_or_another_start_time_is_a_restart(before: dict[str, object], after: dict[str, object]) -> None:
    assert has_restarted(snap(**before), snap(**after))
    assert not has_restarted(snap(**before), snap(**before))


def test_after_a_restart_every_counter_counts_from_zero() -> None:
    """Also one that has already passed its old value: 12 grew, not 2."""
    grown = delta(snap(steps=100, generation_tokens=10), snap(steps=5, generation_tokens=12))
    assert (grown.steps, grown.generation_tokens, grown.restarted) == (5, 12, True)


def test_growth_before_a_restart_in_the_middle_is_kept() -> None:
    grown = delta_over([snap(preemptions=10), snap(preemptions=14), snap(preemptions=1), snap(preemptions=3)])
    assert grown == Delta(preemptions=4 + 1 + 2, restarted=True)


def test_growth_over_one_scrape_is_unknown() -> None:
    assert delta_over([snap(preemptions=1)]) is None
    assert delta_over([]) is None


def test_a_counter_missing_in_the_middle_is_unknown_over_the_whole() -> None:
    grown = delta_over([snap(steps=1, preemptions=1), snap(steps=2), snap(steps=4, preemptions=5)])
    assert grown == Delta(steps=3)


def test_labelled_growth_adds_up() -> None:
    grown = delta_over([snap(success_by_reason={"stop": n}) for n in (1, 4, 9)])
    assert grown is not None
    assert grown.success_by_reason == {"stop": 8}


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=20))
def test_a_delta_is_never_negative(readings: list[int]) -> None:
    grown = delta_over([snap(steps=value) for value in readings])
    assert grown is not None
    assert grown.steps is not None
    assert grown.steps >= 0
    assert grown.restarted == any(b < a for a, b in itertools.pairwise(readings))
    if not grown.restarted:
        assert grown.steps == readings[-1] - readings[0]


def test_a_scrape_against_itself_grew_by_nothing() -> None:
    same = read(metrics_text("vllm_032"))
    grown = delta(same, same)
    assert not grown.restarted
    for name in COUNTER_FIELDS:
        value = getattr(grown, name)
        assert not any(value.values()) if isinstance(value, dict) else value == 0


def test_every_counter_has_a_delta() -> None:
    assert {f.name for f in fields(Delta)} == {f.name for f in fields(Counters)} | {"restarted"}
