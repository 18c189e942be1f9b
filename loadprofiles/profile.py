"""Strict YAML -> frozen Profile. An unknown key, a misspelt one or an impossible value is an error that names the file,
the key, what stood there and what was expected.

A profile says what load is meant; it knows nothing of a server. Two sizes may be given relative to the server and are
resolved before the run (:mod:`loadprofiles.resolve`): ``users: {fill_pool: 1.5}`` and ``prompt_tokens: {of_context: 0.25}``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from loadprofiles.explain import explain
from loadprofiles.overrides import overridden
from loadprofiles.resolve import resolve
from loadprofiles.search import KneeSearch, Search, Slo, SloSearch
from loadprofiles.stage import MOST_LEVELS, FillPool, RateRamp, Stage, StageSpec, begun_anew, check_handovers, levels_of
from loadprofiles.units import ProfileError, Seconds, Strict, seconds
from loadprofiles.workload import Conversation, Dataset, OfContext, Synthetic, Trace, Workload

__all__ = [
    "SCHEMA_VERSION",
    "Conversation",
    "Dataset",
    "FillPool",
    "KneeSearch",
    "Limits",
    "OfContext",
    "Profile",
    "ProfileError",
    "ProfileFile",
    "RateRamp",
    "Repeat",
    "Slo",
    "SloSearch",
    "Stage",
    "Synthetic",
    "Trace",
    "Workload",
    "builtin_names",
    "load_profile",
    "parse_profile",
    "resolve",
    "seconds",
]

SCHEMA_VERSION = 1


class Limits(Strict):
    """When a run stops by itself."""

    error_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of failed requests of a stage above which the run ends after it."""
    max_users: Annotated[int, Field(ge=1)] | None = None
    """A stage with more users is refused before anything is sent; a search stays below."""
    ttft: Seconds | None = None
    """The run ends after a stage whose median time to first token is longer."""
    total_time: Seconds | None = None
    """No stage begins that would end later, counted from the start of the first."""
    saturation: Literal["stop", "ignore"] = "ignore"
    """stop: the run ends after a level that showed the server's limit (preemptions or a queue for room, or throughput
    that grew by less than a tenth of the users added since the level before)."""


class Repeat(Strict):
    """All stages again, to tell what one run's luck is worth."""

    times: Annotated[int, Field(ge=1, le=1_000)] = 1
    order: Literal["random", "as_written"] = "random"
    """random: the stages of each pass in an order of its own, drawn with the run's seed, so that drift of the server does
    not pass for an effect of the level."""


class _ProfileBase(Strict):
    name: str = Field(min_length=1, max_length=80)
    about: str = ""
    """What it is for, in a line."""
    shows: str = ""
    """What its output is read for."""
    workload: Workload = Synthetic()
    limits: Limits = Limits()
    repeat: Repeat = Repeat()
    search: Search | None = None
    """In place of fixed levels: the one stage is the first probe and the pattern of the others."""


class ProfileFile(_ProfileBase):
    """A load profile of vllm-harness: stages, workload and limits under a name."""

    stages: tuple[StageSpec, ...] = Field(min_length=1, max_length=MOST_LEVELS, strict=False)

    @model_validator(mode="after")
    def _makes_sense(self) -> ProfileFile:
        if self.search is not None:
            self._check_search()
        for number, stage in enumerate(self.stages):
            if not isinstance(self.workload, Synthetic) and (stage.prompt_tokens or stage.output_tokens):
                raise ValueError(
                    f"stages.{number}: lengths belong to the workload where its kind is {self.workload.kind}"
                )
            if stage.replay and not isinstance(self.workload, Trace):
                raise ValueError(f"stages.{number}: replay needs a workload of kind trace")
        return self

    def _check_search(self) -> None:
        if (
            len(self.stages) != 1
            or not isinstance(self.stages[0].users, int)
            or self.stages[0].request_rate is not None
        ):
            raise ValueError(
                "a search has one stage with a number of users: its first probe, and the pattern of the others"
            )
        if self.stages[0].duration is None or self.stages[0].requests is not None:
            raise ValueError("a search's stage has a duration: the search makes it longer where requests need it")
        if self.repeat.times > 1:
            raise ValueError("a search repeats by itself: leave repeat out")
        if self.stages[0].handover:
            raise ValueError("a search judges each level before it sets the next: leave handover out")


class Profile(_ProfileBase):
    """Stages, one level each, workload and limits under a name: what is run."""

    stages: tuple[Stage, ...] = Field(min_length=1)


def _expanded(file: ProfileFile) -> Profile:
    stages = [stage for spec in file.stages for stage in levels_of(spec)]
    if len(stages) > MOST_LEVELS:
        raise ProfileError(f"{file.name}: {len(stages)} stages, at most {MOST_LEVELS} are run")
    if stages[0].handover and isinstance(file.stages[0].users, int | FillPool):
        raise ProfileError(f"{file.name}: stages.0.handover: there is no level before it to take users over from")
    stages = begun_anew(stages)
    check_handovers(file.name, stages)
    shared = {name: getattr(file, name) for name in _ProfileBase.model_fields if name in file.model_fields_set}
    return Profile(**shared, stages=tuple(stages))


def parse_profile(data: object, source: str) -> Profile:
    """A mapping (from YAML or built from options) -> Profile, one stage a level.

    Raises:
        ProfileError: naming ``source``, the key and what was expected.
    """
    if not isinstance(data, Mapping):
        raise ProfileError(f"{source}: expected a mapping with name, workload and stages, not {type(data).__name__}")
    try:
        return _expanded(ProfileFile.model_validate(_without_repetition(dict(data))))
    except ValidationError as error:
        raise explain(error, source) from error


def _without_repetition(data: dict[str, Any]) -> dict[str, Any]:
    """Profiles as they were run read like those written: which pass a stage was of is no wish."""
    if not isinstance(data.get("stages"), list | tuple):
        return data
    stages = [
        {key: value for key, value in stage.items() if key != "repetition"} if isinstance(stage, Mapping) else stage
        for stage in data["stages"]
    ]
    return {**data, "stages": stages}


def builtin_names() -> list[str]:
    """The profiles that ship with the package, by name."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.yaml"))


def load_profile(
    name_or_file: str,
    overrides: Sequence[str] = (),
    *,
    workload: Mapping[str, int] | None = None,
    endpoint: str | None = None,
    ends: Mapping[str, Any] | None = None,
) -> Profile:
    """A shipped profile by name, or any YAML file by path.

    Args:
        overrides: ``KEY=VALUE`` each, such as ``stages.0.users=64``: set in the file's content before it is read.
        workload: ``prompt_tokens`` and ``output_tokens`` in place of the workload's and of the stages' that have them.
        endpoint: in place of the workload's.
        ends: ``duration`` and ``requests`` in place of both of every stage.

    Raises:
        ProfileError: there is no such profile or file, it cannot be read, is no YAML, or does not validate.
    """
    path = _path_of(name_or_file)
    data = _read(path)
    if isinstance(data, dict):
        data = _with_options(data, workload or {}, endpoint, ends or {})
        data = _with_path(overridden(data, overrides), path.parent)
    return parse_profile(data, str(path))


def _path_of(name_or_file: str) -> Path:
    shipped = Path(__file__).parent / f"{name_or_file}.yaml"
    looks_like_file = "/" in name_or_file or "\\" in name_or_file or name_or_file.endswith((".yaml", ".yml"))
    path = Path(name_or_file) if looks_like_file or not shipped.is_file() else shipped
    if not path.is_file():
        near = difflib.get_close_matches(name_or_file, builtin_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(builtin_names())}"
        raise ProfileError(f"no profile named {name_or_file!r} and no such file", hint)
    return path


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ProfileError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read: {error}") from error


def _with_options(
    data: dict[str, Any], lengths: Mapping[str, int], endpoint: str | None, ends: Mapping[str, Any]
) -> dict[str, Any]:
    """The file's content with what the command line says in short; what is no mapping there is left for the reading."""
    workload, stages = data.get("workload", {}), data.get("stages")
    if isinstance(workload, dict):
        data = {**data, "workload": {**workload, **lengths, **({} if endpoint is None else {"endpoint": endpoint})}}
    if isinstance(stages, list) and all(isinstance(stage, dict) for stage in stages):
        kept = [
            {key: value for key, value in stage.items() if not ends or key not in ("duration", "requests")}
            for stage in stages
        ]
        data = {**data, "stages": [{**s, **ends, **{k: v for k, v in lengths.items() if k in s}} for s in kept]}
    return data


def _with_path(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A workload's file is meant relative to the profile's own folder."""
    workload = data.get("workload")
    if not isinstance(workload, dict) or not isinstance(workload.get("file"), str) or not workload["file"]:
        return data
    return {**data, "workload": {**workload, "file": str(folder / workload["file"])}}
