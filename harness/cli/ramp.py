"""``vllm-harness ramp``: a profile, or levels given on the line, against a live server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import ApiKey, BaseUrl, Insecure, Json, MetricsUrl, Model
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.cli.live import LiveView, QuietView
    from harness.load.options import RampOptions
    from harness.load.run import Run
    from loadprofiles.profile import Profile

DEFAULT_DURATION = "30s"
SLO_NAMES = ("ttft", "tpot", "e2e")


def command(
    base_url: BaseUrl,
    model: Model = None,
    api_key: ApiKey = None,
    users: Annotated[
        str | None, typer.Option("--users", metavar="N,N,...", help="Levels of concurrent users, one stage each.")
    ] = None,
    request_rate: Annotated[
        str | None,
        typer.Option(
            "--request-rate", metavar="R,R,...", help="Arrivals a second instead; --users then caps those in flight."
        ),
    ] = None,
    arrival: Annotated[str | None, typer.Option(help="constant, poisson or gamma; poisson unless said.")] = None,
    burstiness: Annotated[
        float | None, typer.Option(help="Shape of gamma arrivals: 1 is Poisson, below burstier.")
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option(metavar="TIME", help=f"Of each stage; {DEFAULT_DURATION} where no --requests are given."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests of each stage; whichever of it and --duration ends first.")
    ] = None,
    ramp_up: Annotated[str | None, typer.Option(metavar="TIME", help="Over which a stage's users start.")] = None,
    think: Annotated[str | None, typer.Option(metavar="TIME", help="Pause of a user between its requests.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Length of each prompt; 256 unless said.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Length of each answer; 128 unless said.")] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(help="completions (token ids, exact lengths) or chat (text, lengths learned from the server)."),
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Ask the prompts of a file: ShareGPT-like JSON, or JSONL with a prompt a line; through chat unless said.",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option("--profile", metavar="NAME|FILE", help="A load profile; `vllm-harness profiles` lists them."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the profile, such as stages.0.users=64; repeatable."),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ttft:MS,tpot:MS",
            help="What a good request meets; gives goodput. Repeatable: further ones are told beside the first.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Exactly this folder; results/<time>-<profile> unless said."),
    ] = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Errors only.")] = False,
    save_content: Annotated[bool, typer.Option("--save-content", help="Keep each answer's text.")] = False,
    save_gaps: Annotated[bool, typer.Option("--save-gaps", help="Keep each gap between chunks.")] = False,
    stall_timeout: Annotated[
        str, typer.Option(metavar="TIME", help="A stream without content for so long has failed.")
    ] = "120s",
    request_timeout: Annotated[str, typer.Option(metavar="TIME", help="Of one whole request.")] = "10m",
    connect_timeout: Annotated[str, typer.Option(metavar="TIME", help="Of opening a connection.")] = "10s",
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="Streams in flight at a stage's end are cut after it.")
    ] = "30s",
    scrape_interval: Annotated[str, typer.Option(metavar="TIME", help="Between two readings of /metrics.")] = "500ms",
    no_scrape: Annotated[bool, typer.Option("--no-scrape", help="Leave /metrics alone.")] = False,
    metrics_url: MetricsUrl = None,
    processes: Annotated[
        str, typer.Option(metavar="N|auto", help="Load workers; auto is one per 500 users, one core left free.")
    ] = "auto",
    loop: Annotated[str, typer.Option(help="Event loop: auto, uvloop or asyncio.")] = "auto",
    honour_retry_after: Annotated[
        bool, typer.Option("--honour-retry-after", help="Users wait as long as a 429 or 503 tells them.")
    ] = False,
    prometheus_port: Annotated[
        int | None, typer.Option(help="Serve live Prometheus metrics of this run there.")
    ] = None,
    prometheus_host: Annotated[str, typer.Option(help="Address of --prometheus-port.")] = "127.0.0.1",
    insecure: Insecure = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no report.html.")] = False,
) -> None:
    if profile is None:
        if overrides:
            raise UsageError("--set changes a profile, and none was given", "give --profile NAME|FILE")
        chosen = _levels(
            users=users,
            request_rate=request_rate,
            arrival=arrival,
            burstiness=burstiness,
            duration=duration,
            requests=requests,
            ramp_up=ramp_up,
            think=think,
            workload=_workload(prompt_tokens, output_tokens, endpoint, dataset),
        )
    else:
        if dataset is not None:
            raise UsageError("--dataset and --profile both say what is asked", f"give --set workload.file={dataset}")
        levels = {
            "--users": users,
            "--request-rate": request_rate,
            "--arrival": arrival,
            "--burstiness": burstiness,
            "--ramp-up": ramp_up,
            "--think": think,
        }
        chosen = _profile(profile, levels, duration, requests, prompt_tokens, output_tokens, endpoint, overrides or [])
    tiers = [parse_slo(one) for one in slo or []]
    if json:
        quiet = True
    from harness.load.options import RampOptions

    execute(
        RampOptions(
            base_url=base_url,
            profile=chosen,
            out=out or default_folder(chosen.name),
            model=model,
            api_key=api_key,
            metrics_url=metrics_url,
            verify_tls=not insecure,
            seed=_at_least("--seed", seed, 0),
            slo_ms=tiers[0] if tiers else {},
            slo_tiers=tuple(tiers[1:]),
            processes=_processes(processes, chosen),
            loop_name=_one_of("--loop", loop, ("auto", "uvloop", "asyncio")),
            scrape_interval_s=None if no_scrape else _seconds("--scrape-interval", scrape_interval),
            connect_timeout_s=_seconds("--connect-timeout", connect_timeout),
            stall_timeout_s=_seconds("--stall-timeout", stall_timeout),
            request_timeout_s=_seconds("--request-timeout", request_timeout),
            grace_s=_seconds("--grace", grace),
            save_content=save_content,
            save_gaps=save_gaps,
            honour_retry_after=honour_retry_after,
            prometheus=None if prometheus_port is None else (prometheus_host, _port(prometheus_port)),
        ),
        json=json,
        quiet=quiet,
        report=not no_report,
    )


def execute(options: RampOptions, *, json: bool, quiet: bool, report: bool = True) -> list[dict[str, Any]]:
    """Run, draw, write the report, print the table or the JSON document; errors pass through after what was measured was
    printed."""
    import asyncio
    import sys

    from harness.cli.display import Display
    from harness.cli.live import LiveView, QuietView, stage_table
    from harness.cli.repeats_view import levels_repeated, repeats_table
    from harness.load.run import Run
    from harness.store import read_run

    view: LiveView | QuietView = QuietView() if quiet else LiveView(Display(stderr=True))
    run = Run(options, view)
    try:
        asyncio.run(run.execute())
    finally:
        view.close()
        if report and run.stages:
            _report(options.out, view)
        if json and run.stages:
            _print_json(options, run)
        elif run.stages and not quiet:
            out = Display(width=None if sys.stdout.isatty() else 140)
            out.print(stage_table(run.stages))
            if repeats := levels_repeated(read_run(options.out)):
                out.print("", repeats_table(repeats), "", sep="\n")
            for stage in run.stages:
                for reason in stage["reasons"]:
                    out.print(f"  stage {stage['index'] + 1}: {reason}", style="yellow", highlight=False)
            for line in _slo_lines(run.stages):
                out.print(line, highlight=False)
            if run.answer is not None:
                out.print(run.answer.sentence, style="bold", highlight=False)
            out.print(f"written to {options.out}", highlight=False)
    return run.stages


def _report(folder: Path, view: LiveView | QuietView) -> None:
    """report.html beside what was measured. A report that cannot be written takes nothing from the run, which stands."""
    from harness.cli.report import write
    from harness.errors import HarnessError
    from harness.export.report import NAME

    try:
        write(folder, None, folder / NAME)
    except HarnessError as error:
        view.says(f"no report was written: {error.message}")


def _slo_lines(stages: list[dict[str, Any]]) -> Iterator[str]:
    """By tier, the share of the requests that met it at each level, and the goodput."""
    from harness.cli.live import level_of

    tiers = max((len(stage["slo"] or ()) for stage in stages), default=0)
    for number in range(tiers):
        rows = [(stage, stage["slo"][number]) for stage in stages if stage["slo"]]
        limits = ", ".join(f"{name.upper()} <= {limit:g} ms" for name, limit in rows[0][1]["limits_ms"].items())
        yield f"within {limits}:"
        for stage, tier in rows:
            if tier["attainment"] is None:
                yield f"  {level_of(stage):>5}  -"
                continue
            yield (
                f"  {level_of(stage):>5}  {tier['attainment']:4.0%} of {tier['of']} requests"
                f" ({tier['low']:.0%} to {tier['high']:.0%}), {tier['goodput_per_s']:.3g} good ones a second"
            )


def _print_json(options: RampOptions, run: Run) -> None:
    import orjson

    from harness.cli.display import print_document
    from harness.cli.repeats_view import as_json, levels_repeated
    from harness.store import SCHEMA_VERSION, read_run

    document = {
        "schema_version": SCHEMA_VERSION,
        "out": str(options.out),
        "stages": run.stages,
        **as_json(levels_repeated(read_run(options.out))),
        **run.found(),
    }
    print_document(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def default_folder(name: str) -> Path:
    """results/<UTC time>-<name>."""
    from harness.clock import wall_time

    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    return Path("results") / f"{wall_time():%Y%m%d-%H%M%S}-{safe}"


def parse_slo(text: str | None) -> dict[str, float]:
    """``ttft:500,tpot:50`` -> {"ttft": 500.0, "tpot": 50.0}, milliseconds.

    Raises:
        UsageError: another name, or no number.
    """
    slo: dict[str, float] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, _, value = part.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if name.strip() not in SLO_NAMES or not 0 < limit < float("inf"):
            raise UsageError(
                f"--slo: expected {', '.join(f'{n}:MS' for n in SLO_NAMES)}, not {part.strip()!r}",
                "for example --slo ttft:500,tpot:50",
            )
        slo[name.strip()] = limit
    return slo


def _seconds(option: str, text: str) -> float:
    from loadprofiles.profile import seconds

    try:
        value = seconds(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error
    if value <= 0:
        raise UsageError(f"{option}: expected more than 0, not {text!r}")
    return value


def _numbers(option: str, text: str, kind: type[int] | type[float]) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        what = "whole numbers above 0" if kind is int else "numbers above 0"
        raise UsageError(
            f"{option}: expected {what}, separated by commas, not {text!r}", f"for example {option} 1,2,4,8"
        )
    return values


def _at_least(option: str, value: int, least: int, most: float = float("inf")) -> int:
    if not least <= value <= most:
        upto = "or more" if most == float("inf") else f"to {most:g}"
        raise UsageError(f"{option}: expected {least} {upto}, not {value}")
    return value


def _port(number: int) -> int:
    return _at_least("--prometheus-port", number, 0, 65535)


def _one_of(option: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise UsageError(f"{option}: expected {' or '.join(known)}, not {value!r}")
    return value


def _workload(
    prompt_tokens: int | None, output_tokens: int | None, endpoint: str | None, dataset: Path | None
) -> dict[str, Any]:
    if dataset is None:
        return {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "endpoint": endpoint}
    from harness.workload.dataset import format_of

    if prompt_tokens is not None:
        raise UsageError("--prompt-tokens and --dataset both say what the prompts are", "leave one of them out")
    chosen = {"kind": "dataset", "file": str(dataset), "format": format_of(dataset)}
    return {**chosen, "output_tokens": output_tokens, "endpoint": endpoint}


def _levels(
    *,
    users: str | None,
    request_rate: str | None,
    arrival: str | None,
    burstiness: float | None,
    duration: str | None,
    requests: int | None,
    ramp_up: str | None,
    think: str | None,
    workload: dict[str, Any],
) -> Profile:
    from loadprofiles.profile import ProfileError, parse_profile

    if users is None and request_rate is None:
        raise UsageError("no load was given", "give --users 1,2,4,8 or --request-rate 5 or --profile ramp")
    if duration is None and requests is None:
        duration = DEFAULT_DURATION
    shared = {
        "arrival": arrival,
        "burstiness": burstiness,
        "duration": duration,
        "requests": requests,
        "ramp_up": ramp_up,
        "think": think,
    }
    stage: dict[str, Any] = {key: value for key, value in shared.items() if value is not None}
    if request_rate is not None:
        stage["request_rate"] = _numbers("--request-rate", request_rate, float)
        if users is not None:
            caps = _numbers("--users", users, int)
            if len(caps) != 1:
                raise UsageError(
                    "--users: with --request-rate it is one cap on the requests in flight", f"not {users!r}"
                )
            stage["users"] = caps[0]
    elif users is not None:
        stage["users"] = _numbers("--users", users, int)
    data = {
        "name": "levels",
        "workload": {key: value for key, value in workload.items() if value is not None},
        "stages": [stage],
    }
    try:
        return parse_profile(data, "command line")
    except ProfileError as error:
        raise UsageError(error.message, error.hint) from error


def _profile(
    name: str,
    levels: dict[str, Any],
    duration: str | None,
    requests: int | None,
    prompt_tokens: int | None,
    output_tokens: int | None,
    endpoint: str | None,
    overrides: list[str],
) -> Profile:
    """A profile with the lengths and stage ends given on the line in place of its own."""
    from loadprofiles.profile import ProfileError, load_profile

    if clash := [option for option, value in levels.items() if value is not None]:
        raise UsageError(f"{clash[0]} and --profile both say what the levels are", "leave one of them out")
    lengths = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    given = {key: value for key, value in lengths.items() if value is not None}
    ends = {key: value for key, value in (("duration", duration), ("requests", requests)) if value is not None}
    try:
        return load_profile(name, overrides, workload=given, endpoint=endpoint, ends=ends)
    except ProfileError as error:
        raise UsageError(error.message, error.hint) from error


def _processes(text: str, profile: Profile) -> int:
    most = max((stage.users for stage in profile.stages if isinstance(stage.users, int)), default=1)
    return processes_for(text, most if profile.search is None else profile.search.most)


def processes_for(text: str, most: int) -> int:
    """``--processes`` for at most so many streams. ``auto``: one worker carries 500 users' streams of 50 tokens a second
    on one core; a core is left for the rest."""
    import os

    if text == "auto":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(-(-most // 500), cores - 1))
    if not text.isdigit() or not 1 <= int(text) <= 256:
        raise UsageError(f"--processes: expected auto or a number from 1 to 256, not {text!r}")
    return int(text)
