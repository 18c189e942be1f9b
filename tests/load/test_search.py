"""The decision cores of the searches: what they ask next, what bounds an answer and what does not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from harness.load.knee_fit import LevelRate, fit_knee
from harness.load.search import Answer, Ask, Probe, Search, probe_of, search_of
from loadprofiles.search import KneeSearch, Slo, SloSearch

LIMITS = SloSearch(kind="slo", slo=Slo(ttft=500.0, tpot=50.0))


def drive(search: Search, server: Callable[[Ask], Probe], most: int = 200) -> tuple[Answer, list[Ask]]:
    asks: list[Ask] = []
    while isinstance(step := search.next(), Ask):
        asks.append(step)
        assert len(asks) <= most, "the search does not end"
        search.feed(server(step))
    return step, asks


def good_below(limit: float, *, of: float = 100.0) -> Callable[[Ask], Probe]:
    """A server on which every request meets the limits up to so many users, and none beyond."""

    def server(ask: Ask) -> Probe:
        return Probe(users=ask.users, usable=True, met=of if ask.users <= limit else 0.0, of=of, residence_s=1.0)

    return server


@pytest.mark.parametrize("limit", [1, 2, 7, 19, 20, 100, 777, 4000])
def test_an_slo_search_finds_a_sharp_limit(limit: int) -> None:
    answer, asks = drive(search_of(LIMITS, 1, 30.0), good_below(limit))
    assert answer.low is not None
    assert answer.high is not None
    assert answer.low <= limit < answer.high
    assert answer.high - answer.low <= max(1, 0.05 * answer.low)
    assert answer.users == answer.low
    assert answer.confidence is not None
    assert answer.confidence > 0.99
    assert len(asks) <= 4 + 2 * math.log2(limit + 1)


def test_it_starts_where_the_profile_says_and_doubles_then_halves() -> None:
    _, asks = drive(search_of(LIMITS, 8, 30.0), good_below(100))
    assert [ask.users for ask in asks][:5] == [8, 16, 32, 64, 128]
    assert all(64 < ask.users < 128 for ask in asks[5:])


def test_a_start_beyond_the_limit_goes_down() -> None:
    answer, _ = drive(search_of(LIMITS, 64, 30.0), good_below(5))
    assert (answer.low, answer.high) == (5, 6)


def test_not_even_one_user_is_an_answer() -> None:
    answer, _ = drive(search_of(LIMITS, 4, 30.0), good_below(0))
    assert (answer.users, answer.high) == (0, 1)
    assert answer.sentence.startswith("not even one user meets TTFT <= 500 ms and TPOT <= 50 ms")


def test_a_limit_above_the_most_is_not_made_up() -> None:
    spec = LIMITS.model_copy(update={"most": 64})
    answer, asks = drive(search_of(spec, 1, 30.0), good_below(1000))
    assert (answer.users, answer.low, answer.high) == (64, 64, None)
    assert max(ask.users for ask in asks) == 64
    assert "more were not tried" in answer.sentence


def test_an_unusable_probe_bounds_nothing() -> None:
    """The client cannot drive 32 users or more: the answer lies below, and says that nothing bounds it above."""

    def server(ask: Ask) -> Probe:
        if ask.users >= 32:
            return Probe(users=ask.users, usable=False, reason="client: event-loop lag", met=0.0, of=100.0)
        return good_below(1000)(ask)

    answer, asks = drive(search_of(LIMITS, 1, 30.0), server)
    assert (answer.low, answer.high) == (31, None)
    assert "whether 32 would is not known" in answer.sentence
    assert any("event-loop lag" in reason for reason in answer.unusable)
    at_32 = [ask.duration_s for ask in asks if ask.users == 32]
    assert at_32 == [at_32[0] * factor for factor in (1, 2, 4)]


def test_a_probe_that_fails_once_and_is_unusable_once_is_tried_again() -> None:
    seen: list[int] = []

    def server(ask: Ask) -> Probe:
        seen.append(ask.users)
        if ask.users == 4 and seen.count(4) == 1:
            return Probe(users=4, usable=False, reason="cut short", met=0.0, of=50.0)
        return good_below(10)(ask)

    answer, _ = drive(search_of(LIMITS, 1, 30.0), server)
    assert (answer.low, answer.high) == (10, 11)
    assert seen.count(4) == 2


def test_nothing_usable_is_no_answer() -> None:
    answer, _ = drive(
        search_of(LIMITS, 4, 30.0), lambda ask: Probe(users=ask.users, usable=False, reason="client: paused")
    )
    assert answer.users is None
    assert answer.confidence is None
    assert "no level could be probed" in answer.sentence


def test_a_noisy_level_is_probed_again_and_the_confidence_is_lower() -> None:
    """Attainment falls slowly through the target: the answer is near it, and less sure than where it falls at once."""
    rng = np.random.default_rng(1)

    def server(ask: Ask) -> Probe:
        share = 1 / (1 + math.exp((ask.users - 50) / 6))
        return Probe(users=ask.users, usable=True, met=float(rng.binomial(60, share)), of=60.0, residence_s=1.0)

    truth = 50 - 6 * math.log(0.9 / 0.1)
    found = [drive(search_of(LIMITS, 1, 30.0), server) for _ in range(40)]
    users = [answer.users for answer, _ in found if answer.users is not None]
    assert np.median(users) == pytest.approx(truth, rel=0.06)
    repeated = [len(asks) > len({ask.users for ask in asks}) for _, asks in found]
    assert np.mean(repeated) > 0.8
    assert all(0 <= (answer.confidence or 0) <= 1 for answer, _ in found)


def test_stated_confidence_is_not_more_than_what_comes_true() -> None:
    """Over many searches of a noisy server, low passes and high fails as often as the searches say."""
    rng = np.random.default_rng(4)

    def server(ask: Ask) -> Probe:
        share = 1 / (1 + math.exp((ask.users - 50) / 3))
        return Probe(users=ask.users, usable=True, met=float(rng.binomial(80, share)), of=80.0, residence_s=1.0)

    truth = 50 - 3 * math.log(0.9 / 0.1)
    held, said = [], []
    for _ in range(120):
        answer, _ = drive(search_of(LIMITS, 1, 30.0), server)
        assert answer.low is not None
        assert answer.high is not None
        held.append(answer.low <= truth < answer.high)
        said.append(answer.confidence or 0.0)
    assert np.mean(held) >= np.mean(said) - 0.1


def test_bounds_are_levels_that_are_sure_where_those_beside_the_answer_are_not() -> None:
    """At 12 and 13 users, nine of ten: neither passes nor fails with confidence. 11 and 14 do."""

    def server(ask: Ask) -> Probe:
        met = 20.0 if ask.users <= 11 else 18.0 if ask.users == 12 else 17.9 if ask.users == 13 else 2.0
        return Probe(users=ask.users, usable=True, met=met, of=20.0, residence_s=1.0)

    answer, _ = drive(search_of(LIMITS, 1, 30.0), server)
    assert answer.users in (11, 12, 13)
    assert (answer.low, answer.high) == (11, 14)
    assert answer.confidence is not None
    assert answer.confidence > 0.8
    assert "11 do; 14 do not (confidence" in answer.sentence or answer.users == 11


def test_probes_last_as_long_as_requests_need() -> None:
    def server(ask: Ask) -> Probe:
        probe = good_below(20)(ask)
        return Probe(users=probe.users, usable=True, met=probe.met, of=probe.of, residence_s=10.0 * ask.users)

    _, asks = drive(search_of(LIMITS, 1, 30.0), server)
    assert asks[0].duration_s == 30.0
    assert asks[1].duration_s >= 8 * 20.0
    assert max(ask.duration_s for ask in asks) <= 600.0
    assert asks[1].ramp_up_s == pytest.approx(20.0)


def curve(users: float, a: float = 0.01, b: float = 0.0002, wall: float = math.inf) -> float:
    users = min(users, wall)
    return users / (a + b * users)


def knee_of(a: float, b: float, slope: float = 0.25) -> float:
    """Where the slope of N / (a + bN) is so much of X(1) = 1 / (a + b)."""
    return (math.sqrt(a * (a + b) / slope) - a) / b


def rates(noise: float, rng: np.random.Generator, **of: float) -> Callable[[Ask], Probe]:
    def server(ask: Ask) -> Probe:
        rate = curve(ask.users, **of)
        return Probe(
            users=ask.users,
            usable=True,
            output_tokens_per_s=rate * (1 + noise * float(rng.normal())),
            rate_se=rate * noise,
            residence_s=1.0,
        )

    return server


@pytest.mark.parametrize("b", [0.00005, 0.0002, 0.001])
def test_a_knee_search_finds_a_smooth_bend(b: float) -> None:
    answer, asks = drive(search_of(KneeSearch(kind="knee"), 1, 30.0), rates(0.003, np.random.default_rng(2), b=b))
    assert answer.users == pytest.approx(knee_of(0.01, b), rel=0.05)
    assert answer.low is not None
    assert answer.high is not None
    assert answer.low < answer.users < answer.high
    assert answer.confidence == 0.9
    assert len(asks) <= 20


@pytest.mark.parametrize("wall", [6.0, 23.0, 90.0])
def test_a_knee_search_finds_a_wall(wall: float) -> None:
    server = rates(0.003, np.random.default_rng(2), b=0.00002, wall=wall)
    answer, _ = drive(search_of(KneeSearch(kind="knee"), 1, 30.0), server)
    assert answer.users == pytest.approx(wall, rel=0.05)


def test_nine_of_ten_knee_intervals_hold_the_knee() -> None:
    rng = np.random.default_rng(9)
    truth, held, noise = knee_of(0.01, 0.0003), 0, 0.02
    for _ in range(60):
        levels = [
            LevelRate(n, curve(n, b=0.0003) * (1 + noise * float(rng.normal())), curve(n, b=0.0003) * noise)
            for n in (1, 2, 4, 8, 16, 24, 28, 33, 39, 46, 64)
        ]
        found = fit_knee(levels, 0.25, 0.9)
        assert found is not None
        held += found.low <= truth <= found.high
    assert 47 <= held <= 60


def test_throughput_that_does_not_bend_has_no_knee() -> None:
    spec = KneeSearch(kind="knee", most=64)
    answer, asks = drive(search_of(spec, 1, 30.0), rates(0.003, np.random.default_rng(2), b=1e-7))
    assert answer.users is None
    assert answer.sentence.startswith("no knee up to 64 users")
    assert max(ask.users for ask in asks) <= 64


def test_an_unusable_level_keeps_a_knee_search_below_itself() -> None:
    def server(ask: Ask) -> Probe:
        if ask.users > 100:
            return Probe(users=ask.users, usable=False, reason="client: CPU")
        return rates(0.002, np.random.default_rng(ask.users), b=0.0002)(ask)

    answer, _ = drive(search_of(KneeSearch(kind="knee"), 1, 30.0), server)
    assert answer.users == pytest.approx(knee_of(0.01, 0.0002), rel=0.05)
    assert len(answer.unusable) == 3


def test_thinking_users_are_told_from_streaming_ones() -> None:
    """Users who think half of the time: S (a + b (N - z S) + z) = N."""
    a, b, z = 0.01, 0.0005, 0.01

    def rate(n: float) -> float:
        c = a + b * n + z
        return 2 * n / (c + math.sqrt(c * c - 4 * b * z * n))

    levels = [LevelRate(n, rate(n), 0.001 * rate(n)) for n in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)]
    grid = np.geomspace(1, 200, 20_000)
    slopes = np.gradient(np.array([rate(n) for n in grid]), grid) / rate(1.0)
    truth = float(grid[int(np.argmax(slopes < 0.25))])
    found = fit_knee(levels, 0.25, 0.9, think_s_per_token=z)
    assert found is not None
    assert found.users == pytest.approx(truth, rel=0.02)
    assert fit_knee(levels[:3], 0.25, 0.9) is None


def stage(**changed: object) -> dict[str, object]:
    base: dict[str, object] = {
        "users": 4,
        "valid": True,
        "reasons": [],
        "window": {"start_s": 0.0, "end_s": 9.0, "steady": True},
        "slo": [{"attainment": 0.5, "n_effective": 40.0}],
        "intervals": {"output_tokens_per_s": {"low": 90.0, "high": 110.0}},
        "output_tokens_per_s": 100.0,
        "requests_per_s": 10.0,
        "e2e_ms": {"p50": 1500.0},
    }
    return base | changed


def test_a_stage_becomes_a_probe() -> None:
    probe = probe_of(stage(), think_s=2.0)
    assert (probe.users, probe.usable, probe.met, probe.of) == (4, True, 20.0, 40.0)
    assert probe.residence_s == 1.5
    assert probe.rate_se == pytest.approx(10 / 1.645)
    assert probe.think_s_per_token == pytest.approx(0.2)


@pytest.mark.parametrize(
    "changed",
    [
        {"valid": False, "reasons": ["client: CPU"]},
        {"window": {"start_s": 0.0, "end_s": 9.0, "steady": False}, "reasons": ["not steady: too short"]},
        {"window": None, "reasons": ["no window"]},
    ],
)
def test_a_stage_that_does_not_count_is_an_unusable_probe(changed: dict[str, object]) -> None:
    probe = probe_of(stage(**changed))
    assert not probe.usable
    assert probe.reason == changed["reasons"][0]  # type: ignore[index]


def test_a_stage_that_was_cut_is_an_unusable_probe() -> None:
    probe = probe_of(stage(), cut=True)
    assert (probe.usable, probe.reason) == (False, "cut short")
