"""The gate's false alarms and its power, on the virtual clock: 40 pairs of equal servers, 40 with steps a tenth slower.

    .venv/bin/python -m pytest -m bench -s tests/bench/test_gate.py

Runs are what `predict --simulate --noise 0.1` writes: two levels of users and one rate, drawn lengths, a seed each. The
alarms counted are those of ``--fail-if worse``, the widest rule there is, and of four plain ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.factors import FactorSet
from calibration.gate import Sample
from calibration.gate_rules import Rule, parse_rule, rulings
from calibration.predict import Predictor
from calibration.priors import prior_factors
from calibration.serving import Serving, serving
from harness import simulated
from harness.measure.blocks import sample_of
from harness.measure.from_records import by_stage
from harness.simulated import Simulation
from harness.store import RunWriter
from loadprofiles.profile import Profile, parse_profile, resolve

PAIRS = 40
RULES = [
    parse_rule(text)
    for text in (
        "worse",
        "tpot_ms.mean > +5%",
        "ttft_ms.mean > +5%",
        "ttft_ms.p99 > +10%",
        "output_tokens_per_s < -5%",
    )
]
STEP = ("step_overhead", "per_sequence", "kv_read_factor", "prefill_factor", "attention_factor", "mixed_step_overhead")


class Keeper(RunWriter):
    """Keeps records in memory in place of a folder."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add_record(self, line: bytes) -> None:
        self.rows.append(orjson.loads(line))

    def add_scrape(self, row: dict[str, Any]) -> None:
        """Not read here."""

    def flush(self) -> None:
        """Nothing to hand on."""


def played() -> Profile:
    data = {
        "name": "gate",
        "workload": {
            "prompt_tokens": {"distribution": "uniform", "low": 100, "high": 400},
            "output_tokens": {"distribution": "uniform", "low": 30, "high": 100},
        },
        "stages": [{"users": [4, 16], "duration": "15s"}, {"request_rate": 8, "duration": "20s"}],
    }
    return resolve(parse_profile(data, "bench"), max_model_len=4096, pool_tokens=None)


def run(served: Serving, factors: FactorSet, seed: int) -> list[Sample]:
    keeper = Keeper()
    simulation = Simulation(Predictor(served, factors), "m", seed=seed, noise=0.1, writer=keeper)
    stages = [simulation.stage(index, stage) for index, stage in enumerate(played().stages)]
    requests = by_stage(keeper.rows, "twin")
    samples = [sample_of(stage, requests[stage["index"]]) for stage in stages]
    return [sample for sample in samples if isinstance(sample, Sample)]


def broken(rules: Sequence[Rule], a: Sequence[Sample], b: Sequence[Sample]) -> list[str]:
    # a load without its like in the other run fails the command
    assert all(any(s.same_load(other) for other in b) for s in a)
    return [ruling.rule.text for ruling in rulings(rules, a, b) if ruling.broken]


@pytest.mark.bench
def test_equal_servers_are_let_pass_and_slower_ones_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "SCRAPE_INTERVAL_S", 5.0)
    deployment = resolve_deployment(find_model("llama-3.1-8b"), gpu=find_gpu("h100-sxm"), max_model_len=4096)
    served = serving(deployment)
    factors = slower = prior_factors(deployment, served.physics)
    for name in STEP:
        slower = slower.scaled(name, 1.1)
    alarms: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    for pair in range(PAIRS):
        a, b, c = (run(served, f, 3 * pair + i) for i, f in enumerate((factors, factors, slower)))
        alarms.update(broken(RULES, a, b))
        caught.update(broken(RULES, a, c))
    for rule in RULES:
        print(f"{rule.text:28} alarms {alarms[rule.text]} of {PAIRS}, caught {caught[rule.text]} of {PAIRS}")
    assert all(alarms[rule.text] <= 0.05 * PAIRS for rule in RULES)
    assert all(caught[text] >= 0.95 * PAIRS for text in ("worse", "tpot_ms.mean > +5%"))
