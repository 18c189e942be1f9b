"""``calibrate --check RUN --calibration FILE``: do the factors still hold? Exit 3 where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import GateFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibration.calibration_file import Calibration
    from calibration.drift import Drift
    from harness.observe.probe import ProbeResult


def print_json(document: dict[str, Any]) -> None:
    import orjson

    from harness.cli.display import print_document

    print_document(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def check_run(
    run: Path | None, file: Path | None, base_url: str | None, runs: Sequence[Path] | None, *, json: bool
) -> None:
    if run is None or file is None or base_url is not None or runs:
        raise UsageError(
            "--check and --calibration belong together, and stand alone",
            "calibrate --check RUN --calibration FILE",
        )
    from calibration.calibrate import read_run_stages
    from calibration.drift import check
    from calibration.serving import serving
    from harness.calibrating import finished_run, probe_of, read_runs
    from harness.calibration_file import read_calibration

    calibration = read_calibration(file)
    data = read_runs([run])[0]
    changed = _changes(calibration, probe_of(data))
    if changed:
        if json:
            print_json({"holds": False, "changes": changed, "drift": None})
        raise GateFailed(
            f"another server than the one calibrated: {'; '.join(changed)}", "calibrate again; no factor was tested"
        )
    served = serving(calibration.rebuild_deployment())
    readings = read_run_stages(served.deployment, served, finished_run(data))
    drift = check(calibration, [r.observation for r in readings if r.observation is not None])
    _say_drift(drift, [f"{r.label}: {r.reason}" for r in readings if r.observation is None], json=json)


def _changes(calibration: Calibration, probed: ProbeResult) -> list[str]:
    """What the server shows otherwise than when it was calibrated: version, flags, pool."""
    plain = calibration.deployment.plain
    pool = probed.pool
    pairs = [
        ("vllm_version", plain["vllm_version"], probed.vllm_version),
        ("max_model_len", plain["max_model_len"], probed.max_model_len),
        ("max_num_seqs", plain["max_num_seqs"], probed.max_num_seqs),
        ("max_num_batched_tokens", plain["max_num_batched_tokens"], probed.max_num_batched_tokens),
        ("engines", plain["dp"], probed.engines),
        ("num_gpu_blocks", plain["num_gpu_blocks_override"], pool and pool.num_blocks),
        ("block_size", plain["block_size"], pool and pool.block_size),
        ("kv_cache_dtype", calibration.deployment.kv, pool and pool.kv_cache_dtype),
        ("enable_prefix_caching", plain["enable_prefix_caching"], pool and pool.prefix_caching),
    ]
    return [
        f"{name} was {then} and is {now}"
        for name, then, now in pairs
        if now is not None and then is not None and then != now
    ]


def _say_drift(drift: Drift, left_out: Sequence[str], *, json: bool) -> None:
    if json:
        print_json(
            {
                "holds": drift.holds,
                "changes": [],
                "drift": {
                    "false_alarm_rate": drift.alpha,
                    "moved": drift.moved,
                    "tests": [test._asdict() for test in drift.tests],
                    "factors": [
                        {"factor": s.factor, "ratio": s.ratio, "low": s.low, "high": s.high, "p": s.test.p}
                        for s in drift.shifts
                    ],
                    "stages": [stage._asdict() for stage in drift.stages],
                    "left_out": list(left_out),
                },
            }
        )
    else:
        from harness.cli.calibrate_view import drift_tables
        from harness.cli.display import Display

        screen = Display(highlight=False)
        for table in drift_tables(drift):
            screen.print(table)
            screen.print("")
        for line in left_out:
            screen.print(f"left out: {line}", markup=False)
        if drift.holds:
            screen.print(
                f"The factors hold on {len(drift.stages)} stages. All {len(drift.tests)} tests together raise a false alarm "
                f"in at most {drift.alpha:.0%} of checks.",
                markup=False,
            )
    if not drift.holds:
        shift = next((s for s in drift.shifts if s.factor == drift.moved), None)
        said = (
            ""
            if shift is None
            else f": {shift.factor} moved by {shift.ratio - 1:+.0%} ({shift.low - 1:+.0%} to {shift.high - 1:+.0%})"
        )
        raise GateFailed(
            f"the factors do not hold any more{said}",
            f"false alarms of all tests together: at most {drift.alpha:.0%}; calibrate again",
        )
