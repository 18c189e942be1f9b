"""A twin with random factors, calibrated as a live server is. The bench of the same name does twenty of them."""

from __future__ import annotations

import pytest
from known_truth import KNOWN, calibrated, predicted_tpot_s, server_of, simulated_tpot_s

from calibration.design import Wish


def test_a_twin_s_factors_are_recovered_from_designed_stages() -> None:
    server = server_of("llama-3.1-8b", 11)
    made, stages = calibrated(server, Wish(budget_s=45.0, users=[1, 4], shapes=[(64, 64), (1000, 32), (64, 8)]))
    assert len(made.used) == len(stages)
    told = [name for name in KNOWN if name in made.fit.findings and made.fit.findings[name].identified]
    assert {"step_overhead", "prefill_factor"} <= set(told)
    inside = [made.factors[name].low <= server.truth.value(name) <= made.factors[name].high for name in told]
    assert sum(inside) >= len(inside) - 1
    assert all(abs(stage.tpot_error or 0.0) < 0.02 for stage in made.used)
    far = predicted_tpot_s(server, made.factors, 16, (64, 64))
    assert far == pytest.approx(simulated_tpot_s(server, 16, (64, 64)), rel=0.03)
