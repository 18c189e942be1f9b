"""Strict YAML -> frozen Profile. An unknown key, a misspelt one or an impossible value is an error that names the file,
the key, what stood there and what was expected.

A profile says what load is meant; it knows nothing of a server. Two sizes may be given relative to the server and are
resolved before the run (:func:`resolve`): ``users: {fill_pool: 1.5}`` and ``prompt_tokens: {of_context: 0.25}``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

SCHEMA_VERSION = 1

_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*(ms|s|m|min|h)?\s*$")


class ProfileError(ValueError):
    """A profile that cannot be run. ``hint`` says what to do, one line."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def seconds(value: object) -> float:
    """``30``, ``"30s"``, ``"500ms"``, ``"5m"`` or ``"1h"`` -> seconds.

    Raises:
        ValueError: it is none of these, or not positive.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a duration such as 30s, 5m or 500ms, not {value!r}")
    if isinstance(value, str):
        match = _DURATION.match(value)
        if match is None:
            raise ValueError(f"expected a duration such as 30s, 5m or 500ms, not {value!r}")
        value = float(match[1]) * _UNITS_S[match[2] or "s"]
    if not 0 <= value < float("inf"):
        raise ValueError(f"expected a duration of 0 or more, not {value!r}")
    return float(value)


Seconds = Annotated[float, BeforeValidator(seconds)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FillPool(_Strict):
    """As many users as hold this multiple of the KV pool at the end of their requests."""

    fill_pool: float = Field(gt=0, le=100)


class OfContext(_Strict):
    """This share of the model's maximum length."""

    of_context: float = Field(gt=0, lt=1)


class Workload(_Strict):
    """What is asked: prompt and output lengths, and through which endpoint."""

    prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | OfContext = 256
    output_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 128
    endpoint: Literal["completions", "chat"] = "completions"


class Stage(_Strict):
    """One level held: N users (closed loop), or an arrival rate (open loop), for a time or a count.

    With ``request_rate``, ``users`` is the greatest number in flight.
    """

    users: Annotated[int, Field(ge=1, le=100_000)] | FillPool | None = None
    request_rate: Annotated[float, Field(gt=0, le=100_000)] | None = None
    arrival: Literal["constant", "poisson", "gamma"] = "poisson"
    burstiness: Annotated[float, Field(gt=0, le=1_000)] = 1.0
    duration: Seconds | None = None
    requests: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    ramp_up: Seconds | None = None
    think: Seconds = 0.0
    prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | OfContext | None = None
    output_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> Stage:
        if self.users is None and self.request_rate is None:
            raise ValueError("a stage needs users (closed loop) or request_rate (open loop)")
        if self.duration is None and self.requests is None:
            raise ValueError("a stage needs duration or requests, or it would never end")
        if self.duration is not None and self.duration <= 0:
            raise ValueError("duration must be longer than 0")
        if self.request_rate is not None and self.think:
            raise ValueError("think belongs to users; with request_rate the arrivals decide")
        return self


class Limits(_Strict):
    """When a run stops by itself."""

    #: share of failed requests of a stage above which the run ends after it
    error_rate: Annotated[float, Field(gt=0, le=1)] = 0.5
    max_users: Annotated[int, Field(ge=1)] | None = None


class Profile(_Strict):
    """Stages, workload and limits under a name."""

    name: str = Field(min_length=1, max_length=80)
    about: str = ""
    workload: Workload = Workload()
    stages: tuple[Stage, ...] = Field(min_length=1, max_length=1_000)
    limits: Limits = Limits()


def _spread_levels(data: Any) -> Any:
    """A stage whose ``users`` or ``request_rate`` is a list stands for one stage a level."""
    if not isinstance(data, dict) or not isinstance(data.get("stages"), list):
        return data
    stages: list[Any] = []
    for stage in data["stages"]:
        key = next(
            (k for k in ("users", "request_rate") if isinstance(stage, dict) and isinstance(stage.get(k), list)), None
        )
        stages += [stage] if key is None else [{**stage, key: level} for level in stage[key]]
    return {**data, "stages": tuple(stages)}


def _key(location: tuple[int | str, ...]) -> str:
    """``("stages", 0, "users", "int")`` -> ``stages.0.users``: pydantic's names of union members are no keys."""
    members = {"int", "FillPool", "OfContext", "constrained-int", "function-before[seconds(), float]"}
    return ".".join(str(part) for part in location if part not in members)


def _known_keys(key: str) -> list[str]:
    room: type[BaseModel] = Profile
    if key.startswith("stages."):
        room = Stage
    elif key.startswith("workload."):
        room = Workload
    elif key.startswith("limits."):
        room = Limits
    return list(room.model_fields)


def _explain(error: ValidationError, source: str) -> ProfileError:
    first = error.errors()[0]
    key = _key(first["loc"])
    if first["type"] == "extra_forbidden":
        name = key.rsplit(".", 1)[-1]
        near = difflib.get_close_matches(name, _known_keys(key), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(_known_keys(key))}"
        return ProfileError(f"{source}: unknown key {key!r}", hint)
    text = first["msg"].removeprefix("Value error, ")
    where = f"{source}: {key}" if key else source
    given = first.get("input")
    shown = "" if isinstance(given, dict | list | tuple) or first["type"] == "missing" else f", not {given!r}"
    if shown in text:
        shown = ""
    return ProfileError(f"{where}: {text[:1].lower()}{text[1:]}{shown}")


def parse_profile(data: object, source: str) -> Profile:
    """A mapping (from YAML or built from options) -> Profile.

    Raises:
        ProfileError: naming ``source``, the key and what was expected.
    """
    if not isinstance(data, Mapping):
        raise ProfileError(f"{source}: expected a mapping with name, workload and stages, not {type(data).__name__}")
    try:
        return Profile.model_validate(_spread_levels(dict(data)))
    except ValidationError as error:
        raise _explain(error, source) from error


def builtin_names() -> list[str]:
    """The profiles that ship with the package, by name."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.yaml"))


def load_profile(name_or_file: str) -> Profile:
    """A shipped profile by name, or any YAML file by path.

    Raises:
        ProfileError: there is no such profile or file, it cannot be read, is no YAML, or does not validate.
    """
    shipped = Path(__file__).parent / f"{name_or_file}.yaml"
    looks_like_file = "/" in name_or_file or "\\" in name_or_file or name_or_file.endswith((".yaml", ".yml"))
    path = Path(name_or_file) if looks_like_file or not shipped.is_file() else shipped
    if not path.is_file():
        near = difflib.get_close_matches(name_or_file, builtin_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(builtin_names())}"
        raise ProfileError(f"no profile named {name_or_file!r} and no such file", hint)
    try:
        text = path.read_text(encoding="utf-8")
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ProfileError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: cannot be read: {error}") from error
    return parse_profile(data, str(path))


def resolve(profile: Profile, *, max_model_len: int | None, pool_tokens: int | None) -> Profile:
    """The profile with every size that is relative to the server made a number.

    Args:
        max_model_len: tokens of prompt and output one request may hold; None when unknown.
        pool_tokens: usable tokens of the KV pool; None when unknown.

    Raises:
        ProfileError: a relative size meets an unknown, or a request would not fit ``max_model_len``.
    """
    stages = tuple(
        _resolve_stage(stage, profile, index, max_model_len, pool_tokens) for index, stage in enumerate(profile.stages)
    )
    first = stages[0]
    assert isinstance(first.prompt_tokens, int)
    workload = profile.workload.model_copy(
        update={"prompt_tokens": first.prompt_tokens} if isinstance(profile.workload.prompt_tokens, OfContext) else {}
    )
    return profile.model_copy(update={"stages": stages, "workload": workload})


def _resolve_stage(
    stage: Stage, profile: Profile, index: int, max_model_len: int | None, pool_tokens: int | None
) -> Stage:
    where = f"{profile.name}: stages.{index}"
    output = stage.output_tokens or profile.workload.output_tokens
    asked = stage.prompt_tokens if stage.prompt_tokens is not None else profile.workload.prompt_tokens
    if isinstance(asked, OfContext):
        if max_model_len is None:
            raise ProfileError(
                f"{where}.prompt_tokens: {asked.of_context:g} of the context was asked, and the server does not say its length",
                "give --prompt-tokens",
            )
        asked = max(1, min(int(asked.of_context * max_model_len), max_model_len - output))
    if max_model_len is not None and asked + output > max_model_len:
        raise ProfileError(
            f"{where}: {asked} prompt + {output} output tokens exceed the server's max_model_len of {max_model_len}",
            "vLLM would cut the answers short without saying so; ask for less, or start the server with a longer --max-model-len",
        )
    users = stage.users
    if isinstance(users, FillPool):
        if pool_tokens is None:
            raise ProfileError(
                f"{where}.users: {users.fill_pool:g} of the KV pool was asked, and the server does not show its pool",
                "give --users, or open /metrics",
            )
        users = max(1, round(users.fill_pool * pool_tokens / (asked + output)))
    if users is not None and profile.limits.max_users is not None and users > profile.limits.max_users:
        raise ProfileError(f"{where}.users: {users} users exceed limits.max_users of {profile.limits.max_users}")
    return stage.model_copy(update={"users": users, "prompt_tokens": asked, "output_tokens": output})
