"""Predictions of loads nobody ran: laws of the numbers, and closed form beside twin."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.errors import InputError
from calibration.factors import Domain, FactorSet
from calibration.limits import Slo
from calibration.predict import Load, Overloaded, Prediction, Predictor, measured_loads
from calibration.predict_twin import TwinLoad, quantiles, read_load
from calibration.prediction import Estimate
from calibration.priors import prior_factors
from calibration.queueing import Shape
from calibration.serving import serving
from calibration.steptime import step_time

SHAPE = Shape(prompt_tokens=512, output_tokens=128)
#: mean TPOT and throughput of the twin lie within this of the closed form, below the wall
MARGIN, TTFT_MARGIN = 0.03, 0.25


@cache
def predictor(gpu: str = "h100-sxm", max_model_len: int = 4096, max_num_seqs: int | None = None) -> Predictor:
    deployment = resolve_deployment(
        find_model("llama-3.1-8b"), gpu=find_gpu(gpu), max_model_len=max_model_len, max_num_seqs=max_num_seqs
    )
    served = serving(deployment)
    return Predictor(served, prior_factors(deployment, served.physics))


def predicted(load: Load, **options: bool) -> Prediction:
    found = predictor().predict(load, **options)
    assert isinstance(found, Prediction)
    return found


def estimates(found: Prediction) -> list[Estimate]:
    means = [
        found.output_tokens_per_s,
        found.output_tokens_per_s_per_user,
        found.requests_per_s,
        found.tpot_s,
        found.ttft_s,
        found.e2e_s,
    ]
    return means + [each for by_key in found.percentiles.values() for each in by_key.values()]


@given(st.integers(1, 500), st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_below_the_wall_more_users_are_slower_and_bring_more(users: int, more: int) -> None:
    few, many = (predicted(Load(shape=SHAPE, users=n), percentiles=False) for n in (users, users + more))
    assert many.output_tokens_per_s.value >= few.output_tokens_per_s.value
    assert many.tpot_s.value >= few.tpot_s.value
    assert many.ttft_s.value >= few.ttft_s.value
    assert many.running > few.running


@pytest.mark.parametrize("users", [1, 16, 64])
def test_intervals_contain_their_value_and_percentiles_ascend(users: int) -> None:
    found = predicted(Load(shape=SHAPE, users=users))
    assert all(each.low <= each.value <= each.high for each in estimates(found))
    for by_key in found.percentiles.values():
        values = [by_key[key].value for key in ("p50", "p90", "p95", "p99")]
        assert values == sorted(values)
    assert found.percentiles["ttft"]["p50"].value <= found.ttft_s.high


@pytest.mark.parametrize("users", [1, 4, 16, 64, 128])
def test_twin_and_closed_form_agree_below_the_wall(users: int) -> None:
    it = predictor()
    assert it.twin is not None
    load = Load(shape=SHAPE, users=users)
    closed = predicted(load, percentiles=False)
    reading = read_load(
        it.twin,
        step_time(it.served.physics, it.factors),
        TwinLoad(
            shape=SHAPE, users=users, request_rate=None, overhead_s=it.overhead_s(load), life_s=closed.e2e_s.value
        ),
    )
    assert reading is not None
    assert reading.means["tpot"] == pytest.approx(closed.tpot_s.value, rel=MARGIN)
    assert reading.output_tokens_per_s == pytest.approx(closed.output_tokens_per_s.value, rel=MARGIN)
    # equal requests keep the order they fell into, and with it who waits for whom
    assert reading.means["ttft"] == pytest.approx(closed.ttft_s.value, rel=TTFT_MARGIN)
    assert reading.preemptions_per_request == 0


def test_users_who_start_together_wait_for_each_other_s_prompts() -> None:
    shape, users = Shape(prompt_tokens=1024, output_tokens=32), 32
    even = predicted(Load(shape=shape, users=users), percentiles=False)
    together = predicted(Load(shape=shape, users=users, start_spread_s=0.0), percentiles=False)
    simulated = predictor()._simulate(predictor().factors, together.load, 0.0)
    assert simulated is not None
    assert together.ttft_s.value > 2 * even.ttft_s.value
    assert together.ttft_s.value == pytest.approx(simulated.means["ttft"], rel=TTFT_MARGIN)
    assert together.tpot_s.value == pytest.approx(simulated.means["tpot"], rel=0.1)
    assert together.ttft_s.holds(simulated.means["ttft"])
    # what is gained in one is lost in the other: the work is the same
    assert together.output_tokens_per_s.value == pytest.approx(even.output_tokens_per_s.value, rel=0.25)


def test_where_a_cycle_is_a_few_steps_the_virtual_clock_counts_them() -> None:
    """Whose prompts share a step moves TPOT there by more than the closed form can know."""
    shape, users = Shape(prompt_tokens=64, output_tokens=8), 48
    even = predicted(Load(shape=shape, users=users), percentiles=False)
    known = Load(shape=shape, users=users, start_spread_s=1.1 * even.e2e_s.value)
    found = predicted(known, percentiles=False)
    it = predictor()
    simulated = it._simulate(it.factors, known, it._fixed_s(it.factors, shape))
    assert simulated is not None
    assert found.tpot_s.value == pytest.approx(simulated.means["tpot"], rel=1e-9)
    assert found.tpot_s.value == pytest.approx(even.tpot_s.value, rel=0.1)
    assert found.tpot_s.high / found.tpot_s.low > even.tpot_s.high / even.tpot_s.low
    assert found.output_tokens_per_s_per_user.value == pytest.approx(1 / found.tpot_s.value, rel=1e-9)
    assert found.e2e_s.value == pytest.approx(found.ttft_s.value + 7 * found.tpot_s.value, rel=1e-9)
    assert found.requests_per_s.value == pytest.approx(users / found.e2e_s.value, rel=1e-6)


@pytest.mark.parametrize("lives", [0.5, 1.2, 5.0])
def test_users_who_start_apart_are_the_closed_form_s(lives: float) -> None:
    even = predicted(Load(shape=SHAPE, users=16), percentiles=False)
    apart = Load(shape=SHAPE, users=16, start_spread_s=lives * even.e2e_s.value * 1.001)
    assert predicted(apart, percentiles=False).ttft_s == even.ttft_s


def test_beyond_the_wall_the_twin_speaks_and_users_wait() -> None:
    it = predictor("l4")
    wall = it.served.wall(SHAPE)
    assert wall is not None
    found = it.predict(Load(shape=SHAPE, users=round(1.5 * wall[1])))
    assert isinstance(found, Prediction)
    assert (found.method, found.regime) == ("twin", "kv_full")
    assert found.waiting is not None
    assert found.waiting > 0.2 * wall[1]
    assert found.preemptions_per_request is not None
    assert found.preemptions_per_request > 0
    below = it.predict(Load(shape=SHAPE, users=round(0.7 * wall[0])))
    assert isinstance(below, Prediction)
    assert found.ttft_s.value > 5 * below.ttft_s.value
    assert all(each.low <= each.value <= each.high for each in estimates(found))


def test_percentiles_of_a_rate_come_from_its_arrivals() -> None:
    calm, busy = (predicted(Load(shape=SHAPE, request_rate=rate)) for rate in (10.0, 60.0))
    assert calm.in_flight < busy.in_flight
    assert calm.requests_per_s.value == pytest.approx(10.0)
    spread = {name: found.percentiles["ttft"]["p99"].value - found.ttft_s.value for name, found in
              (("calm", calm), ("busy", busy))}  # fmt: skip
    assert spread["busy"] > spread["calm"] > 0


def test_a_rate_beyond_what_can_be_served_settles_nowhere() -> None:
    found = predictor().predict(Load(shape=SHAPE, request_rate=1e4))
    assert isinstance(found, Overloaded)
    assert found.most_requests_per_s.low < found.most_requests_per_s.value < 1e4


def test_a_fitted_load_is_measured_one_between_interpolated_others_extrapolated() -> None:
    base = predictor()
    factors = replace(base.factors, domain=Domain((1.0, 32.0), ((512.0, 128.0), (1024.0, 256.0))))
    it = Predictor(base.served, factors, measured_loads([(8.0, SHAPE)]))
    assert [it.basis(users, SHAPE) for users in (8, 9, 64)] == ["measured", "interpolated", "extrapolated"]
    assert it.basis(8, Shape(prompt_tokens=512, output_tokens=4)) == "extrapolated"


def test_a_deployment_without_a_twin_has_means_and_says_why_no_percentiles() -> None:
    deployment = resolve_deployment(find_model("gpt-oss-20b"), gpu=find_gpu("h100-sxm"), max_model_len=8192)
    served = serving(deployment)
    found = Predictor(served, prior_factors(deployment, served.physics)).predict(Load(shape=SHAPE, users=8))
    assert isinstance(found, Prediction)
    assert found.percentiles == {}
    assert found.tpot_s.value > 0
    assert any("no percentiles" in note for note in found.notes)


def test_limits_name_what_binds_and_the_users_that_fit() -> None:
    it = predictor()
    limits = it.limits(SHAPE, Slo(tpot_s=0.02, ttft_s=1.0))
    fit = it.slo_users(limits)
    assert limits.tpot is not None
    assert fit.value == limits.tpot.value
    assert fit.low < fit.value < fit.high
    at = predicted(Load(shape=SHAPE, users=int(fit.value)), percentiles=False)
    assert at.tpot_s.value == pytest.approx(0.02, rel=0.01)
    assert limits.knee is not None
    assert limits.knee.low < limits.knee.value < limits.knee.high


def test_a_limit_one_user_is_over_may_still_be_met() -> None:
    it = predictor("l4")
    one = it.predict(Load(shape=SHAPE, users=1), percentiles=False)
    assert isinstance(one, Prediction)
    limits = it.limits(SHAPE, Slo(tpot_s=one.tpot_s.value * 0.95))
    assert limits.tpot is not None
    assert (limits.tpot.value, limits.tpot.low) == (0.0, 0.0)
    assert limits.tpot.high > 1


def test_beyond_the_wall_what_is_recomputed_weighs_as_it_comes() -> None:
    """A factor that the loads below hardly told is uncertain beyond, where prompts are computed again."""
    base = predictor("l4")
    wall = base.served.wall(SHAPE)
    assert wall is not None
    load = Load(shape=SHAPE, users=round(1.5 * wall[1]))
    sharp = {name: replace(base.factors[name], log_sd=0.01) for name in base.factors.factors}
    wide = {**sharp, "prefill_factor": replace(sharp["prefill_factor"], log_sd=0.5)}
    found = [Predictor(base.served, FactorSet(factors, {})).predict(load) for factors in (sharp, wide)]
    spreads = [p.tpot_s.high / p.tpot_s.value for p in found if isinstance(p, Prediction)]
    assert spreads[0] < 1.02 < 1.08 < spreads[1]


def test_quantiles_interpolate_and_know_their_rank() -> None:
    import numpy as np

    found = quantiles(np.arange(101, dtype=np.float64))
    assert found["p90"].value == pytest.approx(90.0)
    assert found["p90"].low < 90 < found["p90"].high
    assert quantiles(np.array([3.0]))["p99"].high == 3.0


@pytest.mark.parametrize("given_", [{}, {"users": 2, "request_rate": 1.0}, {"users": 0}])
def test_a_load_is_users_or_a_rate(given_: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Load(shape=SHAPE, **given_)  # type: ignore[arg-type]
