"""Are the prices in the catalog those that the public table gives, and how far are they on deployments left out?

.venv/bin/pytest -m bench tests/bench/test_step_priors.py -s
"""

from __future__ import annotations

import derive_step_priors as derive
import numpy as np
import pytest

from calibration import step_prices
from calibration.priors import generation

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(not (derive.shared_folder() / "data").is_dir(), reason="the public table is not here"),
]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> step_prices.Table:
    if "bench" not in request.config.getoption("-m"):
        pytest.skip("a minute of CPU: only with -m bench")
    return step_prices.table(derive.load())


def test_the_catalogs_prices_come_out_of_the_table(table: step_prices.Table) -> None:
    found = step_prices.fit(table)
    hopper, blackwell, ampere = (generation(name).prices for name in ("hopper", "blackwell", "ampere"))
    for name, price in found.items():
        if name == "layer@ampere":
            stated = ampere.layer_overhead_s / hopper.layer_overhead_s
        elif name == "kv_read_fp8":
            stated = hopper.kv_read_fp8
        else:
            key, _, kind = name.partition("@")
            stated = getattr(blackwell if kind == "blackwell" else hopper, key)
        assert stated == pytest.approx(price, rel=0.03), name


def test_a_deployment_left_out_is_predicted_within_ten_percent(table: step_prices.Table) -> None:
    error = np.abs(step_prices.left_out(table, table.deployment) / table.tpot_s - 1)
    assert error.mean() < 0.08
    assert np.median(error) < 0.055
