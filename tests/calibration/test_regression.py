"""The regression: exact on exact data, robust to outliers, honest about what data cannot tell."""

from __future__ import annotations

import numpy as np
import pytest

from calibration.regression import Floats, Solution, condition, inflation, solve

RNG = np.random.default_rng(7)
TRUTH = np.array([0.012, 4e-5, 1.4])


def design(n: int = 24) -> Floats:
    """One, a batch and a read time, as of a step."""
    batch = np.geomspace(1, 256, n)
    return np.column_stack([np.ones(n), batch, batch * RNG.uniform(1e-5, 1e-4, n)])


def solved(amounts: Floats, y: Floats, prior: Floats = TRUTH, sd: float = 1.0, scatter: float = 0.02) -> Solution:
    n = len(y)
    return solve(amounts, np.zeros(n), y, np.zeros(n), prior, np.full(amounts.shape[1], sd), scatter)


def test_exact_data_give_the_factors_exactly() -> None:
    amounts = design()
    found = solved(amounts, amounts @ TRUTH, prior=TRUTH * np.array([2.0, 0.5, 1.5]))
    assert np.exp(found.log_factors) == pytest.approx(TRUTH, rel=1e-3)
    assert found.scatter < 0.01
    assert np.abs(found.residuals).max() < 1e-3


def test_an_offset_is_taken_as_known() -> None:
    amounts = design()
    y = 0.005 + amounts @ TRUTH
    found = solve(amounts, np.full(24, 0.005), y, np.zeros(24), TRUTH * 1.3, np.ones(3), 0.02)
    assert np.exp(found.log_factors) == pytest.approx(TRUTH, rel=1e-3)


def test_an_outlier_moves_little() -> None:
    amounts = design()
    y = amounts @ TRUTH
    y[10] *= 3
    found = solved(amounts, y, prior=TRUTH * 1.2)
    assert np.exp(found.log_factors) == pytest.approx(TRUTH, rel=0.05)
    assert found.weights[10] < 0.2
    assert np.delete(found.weights, 10).min() > 0.9


def test_what_the_data_cannot_tell_stays_at_its_prior() -> None:
    batch = np.array([4.0, 4.0, 4.0, 4.0])
    amounts = np.column_stack([np.ones(4), batch])
    prior = np.array([0.01, 1e-3])
    found = solve(amounts, np.zeros(4), np.full(4, 0.02), np.zeros(4), prior, np.array([0.1, 0.2]), 0.02)
    # the sum is told, the parts are not: their spreads stay near the priors'
    assert np.sqrt(found.covariance[0, 0]) > 0.06
    total = np.exp(found.log_factors) @ np.array([1, 4])
    assert total == pytest.approx(0.02, rel=0.08)


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_intervals_hold_the_truth_as_often_as_they_say(noise: float) -> None:
    rng = np.random.default_rng(11)
    inside = []
    for _ in range(150):
        amounts = design(20)
        truth = TRUTH * np.exp(rng.normal(0, 0.3, 3))
        y = amounts @ truth * np.exp(rng.normal(0, noise, 20))
        found = solve(amounts, np.zeros(20), y, np.zeros(20), TRUTH, np.full(3, 0.3), 0.02)
        sd = np.sqrt(np.diag(found.covariance))
        inside += list(np.abs(found.log_factors - np.log(truth)) < 1.645 * sd)
    assert 0.85 < np.mean(inside) < 0.97


def test_scatter_is_estimated_from_what_is_left() -> None:
    rng = np.random.default_rng(3)
    amounts = design(200)
    found = solved(amounts, amounts @ TRUTH * np.exp(rng.normal(0, 0.05, 200)))
    assert found.scatter == pytest.approx(0.05, rel=0.2)


def test_known_errors_are_not_scatter() -> None:
    rng = np.random.default_rng(3)
    amounts = design(200)
    y = amounts @ TRUTH * np.exp(rng.normal(0, 0.05, 200))
    found = solve(amounts, np.zeros(200), y, np.full(200, 0.05), TRUTH, np.ones(3), 0.02)
    assert found.scatter < 0.035


def test_like_columns_inflate_each_other() -> None:
    unlike = np.column_stack([[1.0, 0, 0], [0, 1.0, 0]])
    assert inflation(unlike) == pytest.approx([1, 1])
    assert condition(unlike) == pytest.approx(1)
    like = np.column_stack([[1.0, 1, 1], [1.0, 1.1, 0.9]])
    assert inflation(like).min() > 50
    assert condition(like) > 15
    same = np.column_stack([[1.0, 1, 1], [2.0, 2, 2]])
    assert np.isinf(inflation(same)).all()
    assert condition(same) > 1e7


def test_a_column_of_nothing_tells_nothing() -> None:
    amounts = np.column_stack([[1.0, 2, 3], [0.0, 0, 0]])
    assert np.isinf(inflation(amounts)[1])
    assert condition(np.zeros((3, 1))) == np.inf
    assert inflation(np.zeros((3, 0))).shape == (0,)
    assert condition(np.ones((1, 2))) == np.inf


def test_a_prior_that_the_data_contradict_lets_go() -> None:
    batch = np.array([1.0, 2.0, 4.0, 8.0])
    amounts = np.column_stack([np.ones(4), batch])
    truth = np.array([0.01, 8e-3])
    # eight times its prior, ten standard deviations off
    found = solve(
        amounts, np.zeros(4), amounts @ truth, np.full(4, 0.03), np.array([0.01, 1e-3]), np.full(2, 0.2), 0.01
    )
    assert np.exp(found.log_factors[1]) == pytest.approx(truth[1], rel=0.03)


def test_an_error_common_to_all_observations_is_not_averaged_out() -> None:
    rng = np.random.default_rng(4)
    inside: dict[bool, list[bool]] = {True: [], False: []}
    many = 40
    for _ in range(200):
        amounts = rng.uniform(0.5, 2.0, (many, 1))
        common = np.full(many, 0.05)
        measured = amounts[:, 0] * np.exp(0.05 * rng.normal() + 0.01 * rng.normal(size=many))
        for told in inside:
            found = solve(
                amounts,
                np.zeros(many),
                measured,
                common,
                np.ones(1),
                np.ones(1),
                0.01,
                common_sd=common if told else None,
            )
            sd = float(np.sqrt(found.covariance[0, 0]))
            inside[told].append(abs(float(found.log_factors[0])) <= 1.645 * sd)
    assert 0.84 <= np.mean(inside[True]) <= 0.96
    assert np.mean(inside[False]) < 0.5
