"""``vllm-harness exporter``: Prometheus metrics of a finished run or a calibration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.errors import UsageError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from calibration.compare import Comparison
    from harness.store import RunData


def command(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|CALIBRATION", help="The folder of a run, or a calibration.json.")
    ],
    port: Annotated[int, typer.Option("--port", help="Port; 0 takes a free one.")] = 9400,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    once: Annotated[
        bool, typer.Option("--once", help="Print the metrics and end, as for node_exporter's textfile folder.")
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `plan --json` printed: for a run whose server did not show its pool."),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Prompt length that a calibration predicts for; that of its longest stages unless said."),
    ] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Output length that a calibration predicts for.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Errors only.")] = False,
) -> None:
    if not 0 <= port <= 65535:
        raise UsageError(f"--port: expected 0 to 65535, not {port}")
    families = families_of(source, plan, prompt_tokens, output_tokens)
    from prometheus_client import CollectorRegistry, generate_latest

    from harness.export.prometheus_finished import Finished

    registry = CollectorRegistry()
    registry.register(Finished(families))
    if once:
        from harness.cli.display import print_document

        print_document(generate_latest(registry))
        return
    from harness.export.prometheus_server import MetricsServer

    server = MetricsServer(registry, port=port, address=host)
    try:
        if not quiet:
            where = f"[{host}]" if ":" in host else host
            _say(f"exporter: serving {source} at http://{where}:{server.port}/metrics")
        _wait_for_the_end()
    finally:
        server.close()


def families_of(
    source: Path, plan: Path | None = None, prompt_tokens: int | None = None, output_tokens: int | None = None
) -> list[Metric]:
    """What is exported of a run's folder, of a calibration file, or of a folder that holds both.

    Raises:
        UsageError: it is neither, or does not read; the run has no finished stage.
        calibration.errors.InputError: lengths that cannot be.
    """
    from harness.calibration_file import NAME
    from harness.export.prometheus_finished import merged, run_families
    from harness.store import RUN, read_run

    families: list[Metric] = []
    if not source.is_dir() or (source / NAME).is_file():
        families = _calibration_families(source, prompt_tokens, output_tokens)
    elif prompt_tokens is not None or output_tokens is not None:
        raise UsageError(
            f"--prompt-tokens and --output-tokens belong to a calibration, and {source} holds none",
            "a run's limits are those of the lengths that it ran",
        )
    if not source.is_dir() or ((source / NAME).is_file() and not (source / RUN).is_file()):
        if plan is not None:
            raise UsageError("--plan belongs to a run", f"{source} is a calibration, which predicts by itself")
        return families
    run = read_run(source)
    return merged(families, run_families(run, _comparison(run, plan)))


def _comparison(run: RunData, plan: Path | None) -> Comparison | None:
    """The sweep beside its prediction; None where its stages were no levels of users."""
    from calibration.compare import levels_of
    from harness.cli.compare import document_of

    if run.stages and not levels_of(run.stages)[0]:
        return None
    comparison: Comparison = document_of(run, plan)["comparison"]
    return comparison


def _calibration_families(path: Path, prompt_tokens: int | None, output_tokens: int | None) -> list[Metric]:
    from calibration.errors import Unsupported
    from calibration.limits import size
    from calibration.plan import make_plan, resolve_load
    from harness.calibration_file import read_calibration
    from harness.export.prometheus_finished import calibration_families

    calibration = read_calibration(path)
    deployment = calibration.rebuild_deployment()
    if prompt_tokens is None and output_tokens is None and calibration.factors.domain is not None:
        longest = max(calibration.factors.domain.shapes, key=sum)
        prompt_tokens, output_tokens = (max(1, round(tokens)) for tokens in longest)
    plan = make_plan(
        deployment,
        resolve_load(deployment.max_model_len, prompt_tokens=prompt_tokens, output_tokens=output_tokens),
    )
    try:
        sizing = size(plan, factors=calibration.factors)
    except Unsupported:
        # no GPU is named, so no step can be timed: the pool and max_num_seqs still limit
        sizing = None
    return calibration_families(calibration, plan, None if sizing is None else sizing.limits)


def _say(line: str) -> None:
    import sys

    from harness.cli.display import print_document

    print_document(f"{line}\n".encode())
    sys.stdout.flush()


def _wait_for_the_end() -> None:
    """Until Ctrl-C or SIGTERM: the ways in which a server is meant to end."""
    import signal
    from threading import Event

    ended = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
