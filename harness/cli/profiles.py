"""``vllm-harness profiles``: the load profiles that ship, or one of them explained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.options import Json
from harness.errors import UsageError

if TYPE_CHECKING:
    from loadprofiles.profile import Profile, Stage


def command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME|FILE]", help="One profile, stage by stage.")] = None,
    json: Json = False,
) -> None:
    from loadprofiles.profile import ProfileError, builtin_names, load_profile

    try:
        chosen = [load_profile(one) for one in ([name] if name else builtin_names())]
    except ProfileError as error:
        raise UsageError(error.message, error.hint) from error
    if json:
        import orjson

        document = [profile.model_dump(exclude_none=True) for profile in chosen]
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
        return
    _print(chosen, detailed=name is not None)


def _print(profiles: list[Profile], *, detailed: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not detailed:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("profile", "stages", "takes", "what it is for"):
            table.add_column(column)
        for profile in profiles:
            table.add_row(profile.name, str(len(profile.stages)), _takes(profile), profile.about)
        console.print(table)
        return
    for profile in profiles:
        console.print(f"[bold]{profile.name}[/]: {profile.about}", highlight=False)
        for index, stage in enumerate(profile.stages):
            console.print(f"  stage {index + 1}: {_describe(stage, profile)}", highlight=False)


def _takes(profile: Profile) -> str:
    if any(stage.duration is None for stage in profile.stages):
        return "by count"
    total_s = sum(stage.duration or 0.0 for stage in profile.stages)
    return f"{total_s:.0f} s" if total_s < 120 else f"{total_s / 60:.0f} min"


def _describe(stage: Stage, profile: Profile) -> str:
    from loadprofiles.profile import FillPool, OfContext

    if stage.request_rate is not None:
        load = f"{stage.request_rate:g} requests/s ({stage.arrival})"
    elif isinstance(stage.users, FillPool):
        load = f"as many users as hold {stage.users.fill_pool:g} x the KV pool"
    else:
        load = f"{stage.users} users"
    prompt = stage.prompt_tokens if stage.prompt_tokens is not None else profile.workload.prompt_tokens
    length = f"{prompt.of_context:.0%} of the context" if isinstance(prompt, OfContext) else f"{prompt}"
    ends = [f"{stage.duration:g} s"] if stage.duration is not None else []
    ends += [f"{stage.requests} requests"] if stage.requests is not None else []
    output = stage.output_tokens or profile.workload.output_tokens
    return f"{load}, {length} prompt / {output} output tokens, {' or '.join(ends)}"
