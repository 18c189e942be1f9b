"""``vllm-harness profiles``: the load profiles that ship, or one of them explained; the schema of a profile for editors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import Json
from harness.errors import UsageError

if TYPE_CHECKING:
    from loadprofiles.profile import Profile, Stage


def command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME|FILE]", help="One profile, stage by stage.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the profile, such as stages.0.users=64; repeatable."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="The JSON schema of a profile, for editors, and nothing else.")
    ] = False,
    json: Json = False,
) -> None:
    from loadprofiles.profile import ProfileError, builtin_names, load_profile

    if schema:
        from harness.cli.display import print_document
        from loadprofiles.schema import schema_text

        print_document(schema_text().encode())
        return
    if overrides and name is None:
        raise UsageError("--set changes one profile, and none was named", "for example: profiles ramp --set ...")
    try:
        chosen = [load_profile(one, overrides or []) for one in ([name] if name else builtin_names())]
    except ProfileError as error:
        raise UsageError(error.message, error.hint) from error
    if json:
        _print_json(chosen)
    else:
        _print(chosen, detailed=name is not None)


def _print_json(profiles: list[Profile]) -> None:
    import orjson

    from harness.cli.display import print_document

    document = [profile.model_dump(mode="json", exclude_none=True) for profile in profiles]
    print_document(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _print(profiles: list[Profile], *, detailed: bool) -> None:
    from rich.table import Table

    from harness.cli.display import Display

    out = Display()
    if not detailed:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("profile", "stages", "takes", "what it is for"):
            table.add_column(column, no_wrap=column != "what it is for")
        for profile in profiles:
            stages = "search" if profile.search is not None else str(len(profile.stages) * profile.repeat.times)
            table.add_row(profile.name, stages, _takes(profile), profile.about)
        out.print(table)
        return
    for profile in profiles:
        for line in _explained(profile):
            out.print(line, highlight=False)


def _takes(profile: Profile) -> str:
    if profile.search is not None:
        return "by search"
    if any(stage.duration is None for stage in profile.stages):
        return "by trace" if any(stage.replay for stage in profile.stages) else "by count"
    total_s = profile.repeat.times * sum(stage.duration or 0.0 for stage in profile.stages)
    return f"{total_s:.0f} s" if total_s < 120 else f"{total_s / 60:.0f} min"


def _explained(profile: Profile) -> list[str]:
    lines = [f"[bold]{profile.name}[/]: {profile.about}"]
    lines += [f"shows       {profile.shows}"] if profile.shows else []
    lines += [f"workload    {_workload(profile)}", f"takes       {_takes(profile)}"]
    if profile.search is not None:
        lines.append(f"search      {_search(profile)}")
    for index, stage in enumerate(profile.stages):
        label = "first probe" if profile.search is not None else f"stage {index + 1}"
        lines.append(f"  {label}: {_describe(stage, profile)}")
    if profile.repeat.times > 1:
        order = "in an order drawn anew each time" if profile.repeat.order == "random" else "in this order"
        lines.append(f"repeat      {profile.repeat.times} times, {order}")
    return [*lines, *(f"limits      {limit}" for limit in _limits(profile))]


def _limits(profile: Profile) -> list[str]:
    limits = profile.limits
    known: list[tuple[Any, str]] = [
        (limits.error_rate, f"ends after a stage with more than {limits.error_rate:.0%} failed requests"),
        (limits.ttft, f"ends after a stage with a median TTFT over {limits.ttft} s"),
        (limits.total_time, f"begins no stage that would end after {limits.total_time} s"),
        (limits.max_users, f"never more than {limits.max_users} users"),
        (limits.saturation == "stop" or None, "ends after a level that shows the server's limit"),
    ]
    return [text for value, text in known if value is not None]


def _search(profile: Profile) -> str:
    search = profile.search
    assert search is not None
    upto = f"up to {search.most} users, {search.max_probes} probes at most, to {search.precision:.0%}"
    if search.kind == "knee":
        return f"knee: where an added user brings less than {search.slope:.0%} of the first; {upto}"
    limits = search.slo.model_dump(exclude_none=True)
    named = ", ".join(f"{name.upper()} <= {value:g} ms" for name, value in limits.items()) or "limits by --slo"
    return f"most users with whom {search.attainment:.0%} of the requests meet {named}; {upto}"


def _lengths(value: Any) -> str:
    from loadprofiles.workload import OfContext

    if isinstance(value, int):
        return str(value)
    if isinstance(value, OfContext):
        return f"{value.of_context:.0%} of the context"
    return f"{value.distribution} (mean {value.mean:.0f}, at most {value.most})"


def _workload(profile: Profile) -> str:
    from loadprofiles.workload import Conversation, Synthetic

    work = profile.workload
    if isinstance(work, Synthetic):
        prefix = work.shared_prefix
        if prefix is None:
            return f"synthetic prompts, each its own, /{work.endpoint}"
        reuse = "never replaced" if prefix.reuse is None else f"each for {prefix.reuse} requests"
        return (
            f"synthetic prompts, {prefix.share:.0%} with one of {prefix.prefixes} shared beginnings of {prefix.tokens} tokens"
            f" ({reuse}), /{work.endpoint}"
        )
    if isinstance(work, Conversation):
        return (
            f"conversations of {_lengths(work.turns)} turns, {_lengths(work.prompt_tokens)} prompt /"
            f" {_lengths(work.output_tokens)} output tokens a turn, history: {work.history}, /{work.endpoint}"
        )
    return f"{work.kind} of {work.file} ({work.format}), /{work.endpoint}"


def _describe(stage: Stage, profile: Profile) -> str:
    ends = [f"{stage.duration:g} s"] if stage.duration is not None else []
    ends += [f"{stage.requests} requests"] if stage.requests is not None else []
    parts = [_load(stage), *_stage_lengths(stage, profile), " or ".join(ends) or "until the trace ends"]
    parts += [_think(stage)] if stage.think else []
    parts += ["takes over the users of the level before"] if stage.handover else []
    parts += [f"{stage.warm_up:g} s warm-up"] if stage.warm_up else []
    expected = _expected(stage)
    parts += [f"about {expected:,.0f} requests"] if expected is not None else []
    return ", ".join(parts)


def _think(stage: Stage) -> str:
    if isinstance(stage.think, float):
        return f"{stage.think:g} s think time"
    return f"{stage.think.distribution} think time of {stage.think.mean_s:.3g} s on average"


def _load(stage: Stage) -> str:
    from loadprofiles.profile import FillPool, RateRamp

    if stage.replay:
        return "the trace's own times" + (f", {stage.users} in flight at most" if stage.users else "")
    if isinstance(stage.request_rate, RateRamp):
        ramp = stage.request_rate.ramp
        return f"{ramp.start:g} to {ramp.end:g} requests/s ({ramp.shape}, {stage.arrival})"
    if stage.request_rate is not None:
        return f"{stage.request_rate:g} requests/s ({stage.arrival})"
    if isinstance(stage.users, FillPool):
        return f"as many users as hold {stage.users.fill_pool:g} x the KV pool"
    return f"{stage.users} user{'' if stage.users == 1 else 's'}"


def _stage_lengths(stage: Stage, profile: Profile) -> list[str]:
    from loadprofiles.workload import Synthetic

    if not isinstance(profile.workload, Synthetic):
        return []
    prompt = stage.prompt_tokens if stage.prompt_tokens is not None else profile.workload.prompt_tokens
    output = stage.output_tokens if stage.output_tokens is not None else profile.workload.output_tokens
    return [f"{_lengths(prompt)} prompt / {_lengths(output)} output tokens"]


def _expected(stage: Stage) -> float | None:
    """Requests that a stage will send, where the server does not decide: by its rate or its count."""
    from loadprofiles.profile import RateRamp

    rate = stage.request_rate.mean if isinstance(stage.request_rate, RateRamp) else stage.request_rate
    by_rate = None if rate is None or stage.duration is None else rate * stage.duration
    return min((count for count in (by_rate, stage.requests) if count is not None), default=None)
