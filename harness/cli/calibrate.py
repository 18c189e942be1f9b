"""``vllm-harness calibrate``: design stages, run them, fit; or fit finished runs; or check that a fit still holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import ApiKey, Insecure, Json, MetricsUrl
from harness.errors import HarnessError, Interrupted, RunInvalid, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibration.calibration_file import Calibration
    from calibration.design import Wish
    from harness.calibrating import Told
    from harness.cli.calibrate_live import Live

_MODEL, _SERVER = "The deployment, where the server does not tell", "Server"


def command(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN|FILE]...",
            help="Finished runs of one deployment to fit, in place of --base-url, or results of it that vllm bench serve,"
            " guidellm or aiperf saved (what these do not say of it, the options below do).",
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option("--base-url", metavar="URL", help="The server to measure, as http://HOST:PORT."),
    ] = None,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="Time for all stages; the most informative ones are run.")
    ] = "5m",
    users: Annotated[
        str | None,
        typer.Option("--users", metavar="N,N,...", help="Levels that may be run; else 1, 2, 4 ... to the wall."),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            "--shapes", metavar="IN/OUT,...", help="Prompt/output tokens that may be run, as 64/256,1024/32; else four."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="As `gpus` names it; unknown without, with wide priors.", rich_help_panel=_MODEL),
    ] = None,
    model_config: Annotated[
        str | None,
        typer.Option(
            "--model-config", metavar="NAME|FILE", help="A config.json or a catalog name.", rich_help_panel=_MODEL
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cuda or cpu.", rich_help_panel=_MODEL)] = None,
    tp: Annotated[int, typer.Option("--tp", help="Tensor parallelism.", rich_help_panel=_MODEL)] = 1,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline parallelism.", rich_help_panel=_MODEL)] = 1,
    weights: Annotated[str, typer.Option("--weights", help="Weight format.", rich_help_panel=_MODEL)] = "auto",
    dp: Annotated[int | None, typer.Option("--dp", help="Engines side by side.", rich_help_panel=_MODEL)] = None,
    kv: Annotated[str | None, typer.Option("--kv", help="Format of the KV cache.", rich_help_panel=_MODEL)] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of activations.", rich_help_panel=_MODEL)] = None,
    vllm_version: Annotated[str | None, typer.Option("--vllm-version", rich_help_panel=_MODEL)] = None,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", rich_help_panel=_MODEL)] = None,
    max_num_seqs: Annotated[int | None, typer.Option("--max-num-seqs", rich_help_panel=_MODEL)] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", rich_help_panel=_MODEL)
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option("--gpu-memory-utilization", help="Where the pool is not known.", rich_help_panel=_MODEL),
    ] = None,
    block_size: Annotated[int | None, typer.Option("--block-size", rich_help_panel=_MODEL)] = None,
    num_gpu_blocks: Annotated[
        int | None, typer.Option("--num-gpu-blocks", help="Of one engine's pool.", rich_help_panel=_MODEL)
    ] = None,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="It runs without CUDA graphs.", rich_help_panel=_MODEL)
    ] = False,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="RUN", help="Does --calibration still hold on this run? Exit 3 if not."),
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option("--calibration", metavar="FILE", help="What --check is held against.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Exactly this folder; calibration.json is written there."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and of the order of stages.")] = 0,
    endpoint: Annotated[str, typer.Option(help="completions or chat.", rich_help_panel=_SERVER)] = "completions",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME|FILE",
            help="With --base-url the served model, where it has several; of finished runs as --model-config.",
        ),
    ] = None,
    api_key: ApiKey = None,
    metrics_url: MetricsUrl = None,
    insecure: Insecure = False,
    no_scrape: Annotated[
        bool, typer.Option("--no-scrape", help="Leave /metrics alone.", rich_help_panel=_SERVER)
    ] = False,
    processes: Annotated[str, typer.Option(metavar="N|auto", help="Load workers.", rich_help_panel=_SERVER)] = "auto",
    prometheus_port: Annotated[
        int | None, typer.Option(help="Serve live Prometheus metrics of the run there.", rich_help_panel=_SERVER)
    ] = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Errors only.")] = False,
) -> None:
    from harness.calibrating import Told

    if model is not None and base_url is None:
        if model_config is not None:
            raise UsageError("--model and --model-config are one and the same of finished runs", "give one of them")
        model_config = model
    told = Told(
        model_config=model_config,
        gpu=gpu,
        device=device,
        tp=tp,
        pp=pp,
        weights=weights,
        dp=dp,
        kv=kv,
        dtype=dtype,
        vllm_version=vllm_version,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        gpu_memory_utilization=gpu_memory_utilization,
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        enforce_eager=enforce_eager,
    )
    if check is not None or calibration is not None:
        from harness.cli.calibrate_check import check_run

        check_run(check, calibration, base_url, runs, json=json)
        return
    if (base_url is None) == (not runs):
        raise UsageError(
            "expected either --base-url or finished runs",
            "`calibrate --base-url URL` measures a server, `calibrate RUN` fits what a ramp measured",
        )
    if runs:
        _finish(*_fit_finished(runs, told, out), json=json, quiet=quiet)
        return
    assert base_url is not None, "one of the two was given"
    from harness.cli.calibrate_live import Live

    live = Live(
        base_url=base_url,
        wish=_wish(budget, users, shapes, seed),
        told=told,
        out=out,
        seed=seed,
        endpoint=_endpoint(endpoint),
        quiet=quiet or json,
        processes=processes,
        prometheus=None if prometheus_port is None else ("127.0.0.1", prometheus_port),
        options={
            "model": model,
            "api_key": api_key,
            "metrics_url": metrics_url,
            "verify_tls": not insecure,
            "scrape_interval_s": None if no_scrape else 0.5,
        },
    )
    with live.exported():
        interrupted: HarnessError | None = None
        try:
            live.measure()
        except (Interrupted, RunInvalid) as error:
            if not live.folder_has_stages():
                raise
            interrupted = error
        _finish(*_fitted_or(interrupted, live), json=json, quiet=quiet)
        if interrupted is not None:
            raise interrupted
        live.wait_for_a_read()


def _fitted_or(interrupted: HarnessError | None, live: Live) -> tuple[Calibration, Path]:
    """What was measured, fitted; where that is too little after an interrupt, the interrupt is what is said."""
    from calibration.errors import NotIdentifiable

    try:
        return live.fit()
    except NotIdentifiable:
        if interrupted is not None:
            raise interrupted from None
        raise


def _wish(budget: str, users: str | None, shapes: str | None, seed: int) -> Wish:
    from calibration.design import Wish
    from loadprofiles.profile import seconds

    try:
        budget_s = seconds(budget)
    except ValueError as error:
        raise UsageError(f"--budget: {error}") from error
    if budget_s <= 0:
        raise UsageError(f"--budget: expected more than 0, not {budget!r}")
    return Wish(budget_s=budget_s, users=_users(users), shapes=_shapes(shapes), seed=seed)


def _users(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"--users: expected whole numbers above 0, separated by commas, not {text!r}")
    return sorted({int(part) for part in parts})


def _shapes(text: str | None) -> list[tuple[int, int]] | None:
    if text is None:
        return None
    found = []
    for part in text.split(","):
        prompt, slash, output = part.strip().partition("/")
        if not (slash and prompt.isdigit() and output.isdigit() and int(prompt) > 0 and int(output) > 1):
            raise UsageError(
                f"--shapes: expected PROMPT/OUTPUT tokens separated by commas, outputs of at least 2, not {part!r}",
                "for example --shapes 64/256,1024/32",
            )
        found.append((int(prompt), int(output)))
    return list(dict.fromkeys(found))


def _endpoint(text: str) -> str:
    if text not in ("completions", "chat"):
        raise UsageError(f"--endpoint: expected completions or chat, not {text!r}")
    return text


# --- finished runs ---------------------------------------------------------------------------------------------------


def _fit_finished(folders: Sequence[Path], told: Told, out: Path | None) -> tuple[Calibration, Path]:
    from harness.calibrating import calibrate_runs, one_server, read_runs, record_of
    from harness.cli.ramp import default_folder
    from harness.formats.read import is_result

    runs = read_runs(folders)
    made = calibrate_runs(record_of(one_server(runs), told), runs)
    # a file of another tool is no folder to write to
    target = out or (default_folder("calibrate") if is_result(folders[0]) else folders[0])
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{target} cannot be made: {error.strerror or error}", "give --out another folder") from error
    return made, target / "calibration.json"


def _finish(calibration: Calibration, path: Path, *, json: bool, quiet: bool) -> None:
    """Write the file and say what is in it."""
    from harness.calibration_file import write_calibration

    write_calibration(path, calibration)
    if json:
        from harness.cli.calibrate_check import print_json

        print_json({"file": str(path), **_content(calibration)})
        return
    if quiet:
        return
    import sys

    from harness.cli.calibrate_view import factor_table, not_told, sentences
    from harness.cli.display import Display

    screen = Display(width=None if sys.stdout.isatty() else 140, highlight=False)
    screen.print(factor_table(calibration))
    screen.print("")
    for line in sentences(calibration):
        screen.print(line, markup=False)
    for line in not_told(calibration):
        screen.print(f"  {line}", markup=False)
    for note in calibration.notes:
        screen.print(f"note: {note}", markup=False)
    for stage in calibration.left_out:
        screen.print(f"left out: {stage.label}: {stage.reason}", markup=False)
    screen.print(f"written to {path}; `vllm-harness predict --calibration {path}` uses it", markup=False)


def _content(calibration: Calibration) -> dict[str, Any]:
    from calibration.calibration_file import calibration_to_json

    return calibration_to_json(calibration)
