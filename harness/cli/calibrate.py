"""``vllm-harness calibrate``: design stages, run them, fit; or fit finished runs; or check that a fit still holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import ApiKey, Insecure, Json, MetricsUrl, Model
from harness.errors import GateFailed, HarnessError, Interrupted, RunInvalid, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibration.calibration_file import Calibration, DeploymentRecord
    from calibration.design import DesignedStage, Wish
    from calibration.drift import Drift
    from calibration.factors import FactorSet
    from calibration.serving import Serving
    from harness.calibrating import Told
    from harness.load.run import RampOptions
    from harness.observe.probe import ProbeResult

_SCOUT_SEED = 1_000_003
_MODEL, _SERVER = "The deployment, where the server does not tell", "Server"


def command(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Finished runs of one deployment to fit, in place of --base-url."),
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
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of activations.", rich_help_panel=_MODEL)] = None,
    max_num_seqs: Annotated[int | None, typer.Option("--max-num-seqs", rich_help_panel=_MODEL)] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", rich_help_panel=_MODEL)
    ] = None,
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
    model: Model = None,
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

    told = Told(
        model_config=model_config,
        gpu=gpu,
        device=device,
        tp=tp,
        pp=pp,
        weights=weights,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_gpu_blocks=num_gpu_blocks,
        enforce_eager=enforce_eager,
    )
    if check is not None or calibration is not None:
        _check(check, calibration, base_url, runs, json=json)
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
    live = _Live(
        base_url=base_url,
        wish=_wish(budget, users, shapes, seed),
        told=told,
        out=out,
        seed=seed,
        endpoint=_endpoint(endpoint),
        quiet=quiet or json,
        processes=processes,
        options={
            "model": model,
            "api_key": api_key,
            "metrics_url": metrics_url,
            "verify_tls": not insecure,
            "scrape_interval_s": None if no_scrape else 0.5,
            "prometheus": None if prometheus_port is None else ("127.0.0.1", prometheus_port),
        },
    )
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


def _fitted_or(interrupted: HarnessError | None, live: _Live) -> tuple[Calibration, Path]:
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


# --- measuring -------------------------------------------------------------------------------------------------------


class _Live:
    """Probe, scout, plan anew, run. ``folder`` is the run's; the scout's lies in it."""

    def __init__(
        self,
        *,
        base_url: str,
        wish: Wish,
        told: Told,
        out: Path | None,
        seed: int,
        endpoint: str,
        quiet: bool,
        processes: str,
        options: dict[str, Any],
    ) -> None:
        from harness.cli.display import Display
        from harness.cli.ramp import default_folder

        self._base_url, self._wish, self._told, self._seed = base_url, wish, told, seed
        self._endpoint, self._quiet, self._processes, self._options = endpoint, quiet, processes, options
        self._screen = Display(stderr=True, highlight=False, quiet=quiet)
        self.folder = out or default_folder("calibrate")
        self._record: DeploymentRecord | None = None

    def measure(self) -> None:
        """Run the stages.

        Raises:
            HarnessError, CalibrationError: nothing could be measured, or the run ended early.
        """
        from calibration.calibrate import prior_of
        from calibration.design import design, scout
        from calibration.serving import serving
        from harness.calibrating import record_of
        from harness.clock import now_ns

        if (self.folder / "run.json").exists():
            raise UsageError(f"{self.folder} holds another run (run.json)", "give --out another folder")
        begun_ns = now_ns()
        self._record = record_of(self._probe(), self._told)
        served = serving(self._record.rebuild())
        self._say_deployment(self._record)
        prior = prior_of(served.deployment, served)
        first = scout(served, prior, self._wish)
        self._say(
            f"first {len(first)} short stages to see how fast it is, then stages for the rest of {self._wish.budget_s:.0f} s"
        )
        # other prompts than the run's: the server may still hold what it computed of them
        self._run("calibrate-scout", first, self.folder / "scout", self._seed + _SCOUT_SEED)
        factors = self._scouted(served, prior)
        left_s = max(1.0, self._wish.budget_s - (now_ns() - begun_ns) / 1e9)
        from dataclasses import replace

        plan = design(served, factors, replace(self._wish, budget_s=left_s))
        self._say(
            f"\n{len(plan.stages)} stages, about {plan.seconds:.0f} s; they narrow what is predicted from "
            f"{plan.spread_before:.0%} to {plan.spread_after:.1%}, by what is known now"
        )
        from harness.cli.calibrate_view import design_table

        self._screen.print(design_table(plan.stages))
        self._run("calibrate", plan.stages, self.folder, self._seed)

    def folder_has_stages(self) -> bool:
        return (self.folder / "summary.json").is_file()

    def fit(self) -> tuple[Calibration, Path]:
        """The calibration of what was measured, and where it belongs."""
        from harness.calibrating import calibrate_runs, read_runs

        assert self._record is not None, "measured before it is fitted"
        return calibrate_runs(self._record, read_runs([self.folder])), self.folder / "calibration.json"

    def _probe(self) -> ProbeResult:
        import asyncio

        from harness.http_get import Getter
        from harness.observe.probe import probe

        options = self._options

        async def ask() -> ProbeResult:
            async with Getter(
                api_key=options["api_key"], key_url=self._base_url, verify_tls=options["verify_tls"]
            ) as getter:
                return await probe(getter, self._base_url, model=options["model"], metrics_url=options["metrics_url"])

        return asyncio.run(ask())

    def _say(self, text: str) -> None:
        self._screen.print(text, markup=False, soft_wrap=True)

    def _say_deployment(self, record: DeploymentRecord) -> None:
        from calibration.calibration_file import UNKNOWN_GPU

        gpu = "an unknown GPU (--gpu narrows the priors)" if record.gpu == UNKNOWN_GPU.name else record.gpu or "CPU"
        plain = record.plain
        self._say(
            f"{record.served_model} on {gpu}, vLLM {plain['vllm_version']}: max_num_seqs {plain['max_num_seqs']}, "
            f"max_num_batched_tokens {plain['max_num_batched_tokens']}, {plain['num_gpu_blocks_override']} blocks"
        )

    def _scouted(self, served: Serving, prior: FactorSet) -> FactorSet:
        """What the scout's stages make of the prior; the prior where they tell nothing."""
        from calibration.calibrate import read_run_stages
        from calibration.errors import NotIdentifiable
        from calibration.fit import Scatter, fit
        from harness.calibrating import finished_run, read_runs

        run = finished_run(read_runs([self.folder / "scout"])[0], is_scout=True)
        readings = read_run_stages(served.deployment, served, run)
        try:
            # a few requests each, not settled: not worth more than a tenth
            rough = Scatter(tpot=0.1, ttft=0.2, weight=8.0)
            return fit(served, prior, [r.observation for r in readings if r.observation is not None], rough).factors
        except NotIdentifiable as error:
            self._screen.print(
                f"the short stages tell too little ({error.message}): planned by the priors", style="yellow"
            )
            return prior

    def _run(self, name: str, stages: Sequence[DesignedStage], folder: Path, seed: int) -> None:
        import asyncio

        from harness.cli.display import Display
        from harness.cli.live import LiveView, QuietView
        from harness.load.run import Run

        view: LiveView | QuietView = QuietView() if self._quiet else LiveView(Display(stderr=True))
        try:
            asyncio.run(Run(self._ramp_options(name, stages, folder, seed), view).execute())
        finally:
            view.close()

    def _ramp_options(self, name: str, stages: Sequence[DesignedStage], folder: Path, seed: int) -> RampOptions:
        from harness.calibrating import profile_of
        from harness.cli.ramp import processes_for
        from harness.load.run import RampOptions

        longest_s = max(stage.expected_s for stage in stages)
        return RampOptions(
            base_url=self._base_url,
            profile=profile_of(name, stages, self._endpoint),
            out=folder,
            seed=seed,
            processes=processes_for(self._processes, max(stage.users for stage in stages)),
            grace_s=max(10.0, longest_s),
            **self._options,
        )


# --- finished runs ---------------------------------------------------------------------------------------------------


def _fit_finished(folders: Sequence[Path], told: Told, out: Path | None) -> tuple[Calibration, Path]:
    from harness.calibrating import calibrate_runs, one_server, read_runs, record_of

    runs = read_runs(folders)
    target = out or folders[0]
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{out} cannot be made: {error.strerror or error}", "give --out another folder") from error
    return calibrate_runs(record_of(one_server(runs), told), runs), target / "calibration.json"


def _finish(calibration: Calibration, path: Path, *, json: bool, quiet: bool) -> None:
    """Write the file and say what is in it."""
    from harness.calibration_file import write_calibration

    write_calibration(path, calibration)
    if json:
        _print_json({"file": str(path), **_content(calibration)})
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


def _print_json(document: dict[str, Any]) -> None:
    import orjson

    from harness.cli.display import print_document

    print_document(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


# --- drift -----------------------------------------------------------------------------------------------------------


def _check(
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
            _print_json({"holds": False, "changes": changed, "drift": None})
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
        _print_json(
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
