"""A profile on the virtual clock beside a ramp against the twin's server: the same keys, the same numbers within noise."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from calibration.predict import Predictor
from calibration.priors import prior_factors
from calibration.serving import serving
from harness.cli.demo import running_twin
from harness.cli.ramp import execute
from harness.errors import UsageError
from harness.load.options import RampOptions
from harness.measure.from_records import by_stage
from harness.simulated import Simulation, records_of, refuse, shared_prefix_of
from harness.store import RunWriter, read_run
from loadprofiles.profile import Profile, parse_profile, resolve

FLAGS = ("--max-model-len", "2048", "--num-gpu-blocks-override", "200", "--block-size", "16")


@cache
def predictor() -> Predictor:
    deployment = resolve_deployment(
        find_model("llama-3.1-8b"),
        gpu=find_gpu("h100-sxm"),
        max_model_len=2048,
        num_gpu_blocks_override=200,
        block_size=16,
    )
    served = serving(deployment)
    return Predictor(served, prior_factors(deployment, served.physics))


def profile(*stages: dict[str, Any], **workload: Any) -> Profile:
    asked = {"prompt_tokens": 128, "output_tokens": 64} | workload
    parsed = parse_profile({"name": "test", "workload": asked, "stages": list(stages)}, "test")
    return resolve(parsed, max_model_len=2048, pool_tokens=199 * 16)


def test_it_gives_what_a_ramp_against_the_twin_gives(tmp_path: Path) -> None:
    """16 users fit the pool of 199 blocks, 24 do not: 192 tokens are 12 blocks."""
    played = profile({"users": [2, 24], "duration": "4s", "ramp_up": "300ms"})
    with running_twin(("--gpu", "h100-sxm", "--model", "llama-3.1-8b", *FLAGS)) as twin:
        measured = execute(
            RampOptions(base_url=twin.base_url, profile=played, out=tmp_path / "run", grace_s=5.0),
            json=False,
            quiet=True,
        )
    # what the way through HTTP takes here
    simulation = Simulation(predictor(), "llama-3.1-8b", overhead_s=0.002, grace_s=5.0)
    simulated = [simulation.stage(index, stage) for index, stage in enumerate(played.stages)]
    for real, virtual in zip(measured, simulated, strict=True):
        assert virtual.keys() == real.keys()
        assert virtual["server"].keys() == real["server"].keys()
        assert virtual["client"].keys() == real["client"].keys()
        assert virtual["totals"].keys() == real["totals"].keys()
        assert virtual["valid"]
        assert virtual["tpot_ms"]["mean"] == pytest.approx(real["tpot_ms"]["mean"], rel=0.06)
        assert virtual["output_tokens_per_s"] == pytest.approx(real["output_tokens_per_s"], rel=0.06)
        assert virtual["ttft_ms"]["mean"] == pytest.approx(real["ttft_ms"]["mean"], rel=0.15)
        # half a dozen scrapes of a gauge that goes up and down
        assert virtual["server"]["running_mean"] == pytest.approx(real["server"]["running_mean"], rel=0.25)
    assert [stage["server"]["preemptions"] > 0 for stage in simulated] == [False, True]
    assert [stage["server"]["preemptions"] > 0 for stage in measured] == [False, True]


def test_a_stage_is_measured_and_scraped_as_a_ramps_is() -> None:
    simulation = Simulation(predictor(), "m")
    stage = simulation.stage(0, profile({"users": 4, "requests": 40, "ramp_up": "10ms"}).stages[0])
    assert stage["requests"] == {"ok": 40, "failed": 0, "by_failure": {}, "incomplete": 0}
    assert stage["totals"]["output_tokens"] == 40 * 64
    assert stage["server"]["generation_tokens"] == 40 * 64
    assert stage["server"]["unaccounted_tokens"] == 0
    assert stage["server"]["contamination"] == []
    assert stage["client"]["loop_lag_ms_p99"] is None
    # the mean TTFT is the predicted one, though the twin's scheduler alone would be quicker
    assert simulation.now_s > 1


def test_counters_go_on_from_stage_to_stage_and_nobody_is_left_behind(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    simulation = Simulation(predictor(), "m", grace_s=0.0, writer=writer)
    stages = [simulation.stage(i, s) for i, s in enumerate(profile({"users": [8, 30], "duration": "2s"}).stages)]
    writer.write_run({"deployment": simulation.probed().to_dict()})
    writer.write_summary(stages)
    writer.close()
    assert all(stage["requests"]["incomplete"] > 0 for stage in stages)
    run = read_run(tmp_path / "run")
    rows = [row["snapshot"] for row in run.scrapes()]
    generated = [row["generation_tokens"] for row in rows]
    assert generated == sorted(generated)
    assert rows[-1]["running"] == 0
    assert rows[-1]["waiting"] == 0
    assert sum(1 for _ in run.records()) == sum(sum(s["requests"][k] for k in ("ok", "incomplete")) for s in stages)


def test_records_say_what_the_trace_says() -> None:
    rows: list[dict[str, Any]] = []

    class Keeper(RunWriter):
        def __init__(self) -> None:
            pass

        def add_record(self, line: bytes) -> None:
            import orjson

            rows.append(orjson.loads(line))

        def add_scrape(self, row: dict[str, Any]) -> None:
            assert row["at_ms"] >= 0

        def flush(self) -> None:
            pass

    simulation = Simulation(predictor(), "m", grace_s=0.05, writer=Keeper())
    stage = simulation.stage(0, profile({"users": 3, "duration": "1s"}).stages[0])
    trace = by_stage(rows, "twin")[0].trace
    assert int(trace.ok.sum()) == stage["requests"]["ok"]
    assert float(np.nansum(trace.output_tokens)) == stage["totals"]["output_tokens"]
    again = list(records_of(0, trace))
    assert [record.outcome for record in again] == [row["outcome"] for row in rows]


def test_lengths_are_drawn_with_the_seed() -> None:
    drawn = profile(
        {"users": 2, "requests": 30},
        prompt_tokens={"distribution": "uniform", "low": 50, "high": 200},
        output_tokens={"distribution": "uniform", "low": 10, "high": 30},
    ).stages[0]
    one, two, other = (Simulation(predictor(), "m", seed=seed).stage(0, drawn) for seed in (1, 1, 2))
    assert one["totals"] == two["totals"]
    assert one["totals"] != other["totals"]
    assert 80 < one["totals"]["prompt_tokens_mean"] < 170


def test_shared_prefixes_are_found_in_the_cache() -> None:
    played = profile({"users": 4, "requests": 60}, shared_prefix={"tokens": 64, "prefixes": 2, "reuse": 10})
    found = Simulation(predictor(), "m", shared_prefix=shared_prefix_of(played)).stage(0, played.stages[0])
    # half of each prompt, but for the first request with a prefix and those that come before it is computed
    assert 0.3 < found["server"]["prefix_hit_ratio"] <= 0.5
    alone = Simulation(predictor(), "m").stage(0, played.stages[0])
    assert alone["server"]["prefix_hit_ratio"] == 0
    assert found["server"]["contamination"] == []


def test_a_rate_waits_at_the_client_beyond_its_cap() -> None:
    stage = profile({"request_rate": 200, "users": 4, "duration": "2s"}).stages[0]
    found = Simulation(predictor(), "m").stage(0, stage)
    assert found["users"] == 4
    assert found["client"]["concurrency_mean"] <= 4 + 1e-9
    assert found["client"]["schedule_delay_ms_p99"] > 100


def test_what_cannot_be_played_is_refused() -> None:
    parsed = parse_profile(
        {"name": "s", "search": {"kind": "knee"}, "stages": [{"users": 1, "duration": "1s"}]}, "test"
    )
    with pytest.raises(UsageError, match="a search cannot be predicted"):
        refuse(parsed)
