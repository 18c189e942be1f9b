"""``vllm-harness compare``: predicted and measured of a run side by side, or one run beside another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import Json
from harness.errors import GateFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from calibration.compare import Comparison, KvPool, Prediction
    from harness.store import RunData


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run; or A, a run or calibration.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="[B]", help="A second run or calibration: what changed from A to B.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Exit 3 where prediction and measurement are farther apart, as 0.25 for 25 %."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What `plan --json` printed: for a server that did not show its pool or max_num_seqs."
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Hold every level against what this calibration predicts."),
    ] = None,
    transfer: Annotated[
        bool,
        typer.Option("--transfer", help="Hold it though the run's server differs from the calibrated one."),
    ] = False,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE", help="Two runs: exit 3 where 'ttft_ms.p99 > +10%' or 'worse' holds; may be repeated."
        ),
    ] = None,
    run_noise: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Two runs: how far runs of one configuration scatter, as 0.02; repeats measure it."
        ),
    ] = 0.0,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Two runs: verdicts as JUnit XML.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Two runs: verdicts as Markdown.")] = None,
    json: Json = False,
) -> None:
    if tolerance is not None and not tolerance >= 0:
        raise UsageError(f"--tolerance is {tolerance:g}, expected a share of 0 or more, as 0.25")
    two = {"--fail-if": fail_if, "--run-noise": run_noise, "--junit": junit, "--markdown": markdown}
    one = {"--tolerance": tolerance, "--plan": plan, "--calibration": calibration}
    _refuse(one if other is not None else two, "two runs" if other is not None else "one run")
    if other is not None:
        from harness.cli.compare_gate import Asked, compare_two

        compare_two(run, other, Asked(tuple(fail_if or ()), run_noise, junit, markdown, json))
    elif calibration is not None:
        from harness.cli.compare_calibration import compare_with

        _refuse({"--plan": plan}, "--calibration")
        compare_with(run, calibration, transfer=transfer, tolerance=tolerance, json=json)
    else:
        _refuse({"--transfer": transfer}, "no --calibration")
        _saturation(run, plan, tolerance, json=json)


def _refuse(options: Mapping[str, Any], where: str) -> None:
    """Options that mean nothing here.

    Raises:
        UsageError: one of them is given.
    """
    for option, value in options.items():
        if value:
            raise UsageError(
                f"{option} says nothing of {where}", "`vllm-harness compare --help` tells what goes together"
            )


def _saturation(run: Path, plan: Path | None, tolerance: float | None, *, json: bool) -> None:
    """Predicted and measured saturation of one run."""
    from harness.cli.repeats_view import as_json, levels_repeated, repeats_table
    from harness.store import read_run

    data = read_run(run)
    document = document_of(data, plan)
    repeats = levels_repeated(data)
    comparison: Comparison = document.pop("comparison")
    missed = None if tolerance is None else comparison.missed(tolerance)
    if json:
        _print_json(
            {
                "run": str(run),
                **document,
                **comparison.to_dict(),
                **as_json(repeats),
                "tolerance": tolerance,
                "missed": missed,
            }
        )
    else:
        _show(comparison, document, repeats_table(repeats) if repeats else None)
    if missed is not None:
        raise GateFailed(missed, "see the table: which level showed the limit first, and by what")


def document_of(run: RunData, plan: Path | None = None) -> dict[str, Any]:
    """The comparison of a run (``comparison``) and what it was made from.

    Raises:
        UsageError: the run has no finished stage, or the plan does not read.
        calibration.errors.InputError: no request of the run has token counts.
    """
    from calibration.compare import compare, levels_of, mean_lengths

    if not run.stages:
        raise UsageError(f"{run.folder} has no finished stage: there is nothing to compare")
    prompt_tokens, output_tokens = mean_lengths(run.stages)
    levels, left_out = levels_of(run.stages)
    prediction = _prediction(run.run["deployment"], plan, prompt_tokens, output_tokens)
    engines = run.run["deployment"]["engines"] or 1
    return {
        "comparison": compare(levels, prediction, engines / prediction.kv_full if prediction else None),
        "prompt_tokens_mean": prompt_tokens,
        "output_tokens_mean": output_tokens,
        "left_out": left_out,
    }


def _prediction(
    deployment: Mapping[str, Any], plan: Path | None, prompt_tokens: float, output_tokens: float
) -> Prediction | None:
    """From the pool the server showed; where it showed none, or not how many may run at once, from the plan."""
    from dataclasses import replace

    from calibration.compare import predict_wall

    planned = None if plan is None else _read_plan(plan)
    pool = _pool(deployment)
    if pool is None:
        return planned
    predicted = predict_wall(pool, prompt_tokens, output_tokens, deployment["max_num_seqs"])
    if planned is not None and predicted.max_num_seqs is None:
        return replace(predicted, max_num_seqs=planned.max_num_seqs)
    return predicted


def _pool(deployment: Mapping[str, Any]) -> KvPool | None:
    from calibration.compare import KvPool

    pool = deployment["pool"]
    if pool is None or not (pool["usable_blocks"] and pool["block_size"] and pool["usable_tokens"]):
        return None
    return KvPool(
        usable_blocks=pool["usable_blocks"],
        block_size=pool["block_size"],
        usable_tokens=pool["usable_tokens"],
        engines=deployment["engines"] or 1,
    )


def _read_plan(path: Path) -> Prediction:
    import orjson

    from calibration.compare import Prediction

    try:
        users = orjson.loads(path.read_bytes())["users"]
        return Prediction(
            kv_full=float(users["kv_full"]),
            kv_staggered=float(users["kv_staggered"]),
            max_num_seqs=users["max_num_seqs"],
            source="planned",
        )
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is not what `plan --json` prints: {type(error).__name__}: {error}") from error


def _print_json(document: dict[str, Any]) -> None:
    import orjson

    from harness.cli.display import print_document

    print_document(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _show(comparison: Comparison, document: Mapping[str, Any], repeats: Table | None) -> None:
    import sys

    from harness.cli.display import Display

    console = Display(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(_levels_table(comparison))
    console.print()
    if repeats is not None:
        console.print(repeats, "", sep="\n")
    lengths = (document["prompt_tokens_mean"], document["output_tokens_mean"])
    for sentence in sentences(comparison, *lengths):
        console.print(sentence, markup=False, soft_wrap=True)
    for name in document["left_out"]:
        console.print(f"left out: {name}", style="yellow", markup=False, soft_wrap=True)


def _levels_table(comparison: Comparison) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("users", "tok/s", "KV max", "running", "waiting", "preempted"):
        table.add_column(name, justify="right")
    table.add_column("limit shown")
    for level, sign in zip(comparison.levels, comparison.signs, strict=True):
        usage = None if level.kv_usage is None else 100 * level.kv_usage
        cells = (level.output_tokens_per_s, usage, level.running, level.waiting, level.preemptions)
        shown = [_number(value, digits) for value, digits in zip(cells, (0, 0, 0, 1, 0), strict=True)]
        shown[1] += "%" if usage is not None else ""
        table.add_row(str(level.users), *shown, f"{sign.limit}: {sign.evidence}" if sign else "")
    return table


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def sentences(comparison: Comparison, prompt_tokens: float, output_tokens: float) -> Sequence[str]:
    """Prediction, measurement, knee and verdict, a sentence each."""
    return [
        f"requests    {prompt_tokens:,.0f} prompt and {output_tokens:,.0f} output tokens on average",
        f"predicted   {_predicted(comparison)}",
        f"measured    {_measured(comparison)}",
        f"knee        {_knee(comparison)}",
        f"binding     {_binding(comparison)}",
        f"verdict     {_verdict(comparison)}",
    ]


def _predicted(comparison: Comparison) -> str:
    found = comparison.prediction
    if found is None:
        return "nothing: the server did not show its KV pool (give --plan)"
    wall = f"wall at {found.kv_full:.1f} users in lock step, {found.kv_staggered:.1f} staggered ({found.source} pool)"
    return wall + (f"; max_num_seqs {found.max_num_seqs}" if found.max_num_seqs is not None else "")


def _measured(comparison: Comparison) -> str:
    found = comparison.onset
    if found is None:
        return "no level says whether requests waited or were preempted"
    if found.sign is None:
        return f"no limit reached: {found.last_good} users run without waiting or preemptions"
    good = f"{found.last_good} users run freely" if found.last_good is not None else "no level runs freely"
    return f"{found.sign.limit}: {good}, {found.first_bad} do not ({found.sign.evidence})"


def _knee(comparison: Comparison) -> str:
    bend = comparison.knee
    between = "" if bend.users is None else f"about {bend.users:.0f} users, between {bend.low} and {bend.high}: "
    return between + bend.reason


def _binding(comparison: Comparison) -> str:
    measured = "none reached"
    if comparison.binding is not None:
        measured = f"{comparison.binding}" + ("" if comparison.users is None else f" at {comparison.users:.0f} users")
    predicted = f", predicted {comparison.prediction.binding}" if comparison.prediction else ""
    return f"measured {measured}{predicted}"


def _verdict(comparison: Comparison) -> str:
    limit = comparison.limit
    said = _VERDICTS[limit.verdict]
    if limit.relative_error is not None:
        said += f"; relative error {limit.relative_error:+.0%}"
    if limit.full_error is not None and limit.staggered_error is not None:
        said += f" (of the first level to show it: {limit.full_error:+.0%} to {limit.staggered_error:+.0%})"
    return said


_VERDICTS = {
    "inside": "the limit shows inside the predicted interval",
    "beside": "the limit shows one level beside the predicted interval",
    "outside": "measurement and prediction contradict each other",
    "not_reached": "not reached by this sweep, as predicted or not yet refuted",
    "not_measured": "nothing was measured to compare with",
    "not_predicted": "nothing was predicted to compare with",
}
