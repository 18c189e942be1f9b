"""``predict --simulate``: a profile on the virtual clock, printed and written as a ramp prints and writes it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli import calibrated
from harness.cli.ramp import parse_slo

if TYPE_CHECKING:
    from argparse import Namespace

    from calibration.predict import Predictor
    from harness.simulated import Simulation
    from harness.store import RunWriter
    from loadprofiles.profile import Profile


def simulate(predictor: Predictor, profile: Profile, asked: Namespace, known: calibrated.Known | None) -> None:
    """Play every stage, print the table or the document; with ``--out`` the run's folder is written as it goes.

    Raises:
        UsageError: no twin of the deployment, a profile that cannot be played, or a folder that holds another run.
    """
    from harness.clock import wall_time
    from harness.simulated import Simulation, refuse, shared_prefix_of
    from harness.store import RunWriter

    refuse(profile)
    slo_ms = parse_slo(asked.slo)
    name = predictor.served.deployment.architecture.catalog_name or predictor.served.deployment.architecture.name
    simulation = Simulation(
        predictor,
        name,
        seed=asked.seed,
        noise=asked.noise,
        slo_ms=slo_ms,
        shared_prefix=shared_prefix_of(profile),
    )
    writer = None if asked.out is None else RunWriter(Path(asked.out))
    stages: list[dict[str, Any]] = []
    marked = predicted_mark(known, asked.noise)
    started = wall_time()
    try:
        simulation.writer = writer
        stopped = _play(simulation, profile, stages)
        if writer is not None:
            writer.write_run(_run_document(simulation, profile, asked, started, marked))
            writer.write_summary(stages, predicted=marked)
    finally:
        if writer is not None:
            writer.close()
    _print(stages, asked, {**marked, "stopped": stopped}, writer)


def _play(simulation: Simulation, profile: Profile, stages: list[dict[str, Any]]) -> str | None:
    """Every stage, or as many as the profile's limits let; why it ended before the last one."""
    from harness.load.stops import out_of_time, reason_to_stop

    began_s = simulation.now_s
    for index, stage in enumerate(profile.stages):
        summary = simulation.stage(index, stage)
        stages.append(summary)
        following = profile.stages[index + 1] if index + 1 < len(profile.stages) else None
        failed, ok = (summary["requests"][key] for key in ("failed", "ok"))
        why = reason_to_stop(profile, stages, (failed, failed + ok), following)
        if why is None and following is not None:
            why = out_of_time(profile, simulation.now_s - began_s, following)
        if why is not None:
            return why
    return None


def predicted_mark(known: calibrated.Known | None, noise: float) -> dict[str, Any]:
    """What tells a predicted run from a measured one: ``predicted`` of run.json and summary.json."""
    return {
        "by": "twin on the virtual clock",
        "calibration": None if known is None else str(known.path),
        "transferred": known is not None and known.transferred,
        "noise": noise,
    }


def _run_document(
    simulation: Simulation, profile: Profile, asked: Namespace, started: Any, marked: dict[str, Any]
) -> dict[str, Any]:
    """run.json, by the function that writes a ramp's."""
    from harness.clock import wall_time
    from harness.load.account import description
    from harness.load.options import RampOptions

    options = RampOptions(
        base_url="twin", profile=profile, out=Path(asked.out), seed=asked.seed, slo_ms=simulation.slo_ms
    )
    content = description(options, simulation.probed(), profile, started=started, ended=wall_time(), selftest=None)
    return {**content, "predicted": marked}


def _print(stages: list[dict[str, Any]], asked: Namespace, marked: dict[str, Any], writer: RunWriter | None) -> None:
    if asked.json:
        import orjson

        from harness.cli.display import print_document
        from harness.store import SCHEMA_VERSION

        document = {"schema_version": SCHEMA_VERSION, "out": asked.out, "predicted": marked, "stages": stages}
        print_document(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        return
    if asked.quiet:
        return
    from harness.cli.display import Display
    from harness.cli.live import stage_table

    out = Display(width=None if sys.stdout.isatty() else 140, highlight=False)
    out.print("predicted on the virtual clock: nothing was sent", style="bold")
    out.print(stage_table(stages))
    for stage in stages:
        for reason in stage["reasons"]:
            out.print(f"  stage {stage['index'] + 1}: {reason}", style="yellow", markup=False)
    if marked["stopped"] is not None:
        out.print(f"ended early: {marked['stopped']}", style="yellow", markup=False)
    if writer is not None:
        out.print(f"written to {writer.folder}", markup=False)
