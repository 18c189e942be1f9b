"""What pydantic found wrong with a profile, in one line: the key as the file has it, what was expected, what stood there."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from loadprofiles.units import ProfileError

Location = tuple[int | str, ...]


def explain(error: ValidationError, source: str) -> ProfileError:
    """The first of the errors, as a :class:`ProfileError`."""
    return explain_one(error.errors()[0], source, error.title)


def explain_one(first: ErrorDetails, source: str, title: str) -> ProfileError:
    from loadprofiles import profile

    model: type[BaseModel] = getattr(profile, title, profile.ProfileFile)
    if first["type"] == "extra_forbidden":
        return _unknown(first["loc"], source, model)
    key = _key(first["loc"])
    text = first["msg"].removeprefix("Value error, ")
    where = f"{source}: {key}" if key else source
    shown = _shown(first)
    if text[:1].isupper():
        text = text[0].lower() + text[1:]
    return ProfileError(f"{where}: {text}{'' if shown in text else shown}")


def _shown(first: ErrorDetails) -> str:
    given = first.get("input")
    if isinstance(given, dict | list | tuple | BaseModel) or first["type"] == "missing":
        return ""
    return f", not {given!r}"


def _unknown(location: Location, source: str, model: type[BaseModel]) -> ProfileError:
    *path, name = location
    key = ".".join(part for part in (_key(tuple(path)), str(name)) if part)
    known = known_keys(tuple(path), model)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(known)}"
    return ProfileError(f"{source}: unknown key {key!r}", hint)


def _key(location: Location) -> str:
    """``("stages", 0, "users", "levels", 1)`` -> ``stages.0.users.1``: names of union members are no keys."""
    return ".".join(str(part) for part in location if isinstance(part, int) or part in _field_names())


def _field_names() -> frozenset[str]:
    return frozenset(name for model in _models() for name in model.model_fields)


def _models() -> list[type[BaseModel]]:
    from loadprofiles.units import Strict

    found: list[type[BaseModel]] = []
    rooms: list[type[BaseModel]] = [Strict]
    while rooms:
        below = rooms.pop().__subclasses__()
        found += below
        rooms += below
    return found


def known_keys(location: Location, model: type[BaseModel]) -> list[str]:
    """The keys of the mapping at ``location`` of a ``model``; a union member's name in it picks the member."""
    schema: dict[str, Any] = model.model_json_schema()
    here = _followed(schema, schema)
    for part in location:
        here = _followed(_step(here, part, schema), schema)
    names: list[str] = list(here.get("properties", {}))
    for member in _members(here, schema):
        names += [name for name in member.get("properties", {}) if name not in names]
    return names


def _members(here: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a union, and of the unions in it."""
    found = []
    for member in here.get("oneOf", []) + here.get("anyOf", []):
        known = _followed(member, schema)
        found += [known, *_members(known, schema)]
    return found


def _followed(here: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in here:
        found: dict[str, Any] = schema["$defs"][here["$ref"].rsplit("/", 1)[-1]]
        here = found
    return here


def _step(here: dict[str, Any], part: int | str, schema: dict[str, Any]) -> dict[str, Any]:
    """One step down: into a key, an item, or the member of a union that has the name."""
    members = _members(here, schema)
    if isinstance(part, int):
        items: dict[str, Any] = here.get("items", {})
        return items
    if part in here.get("properties", {}):
        below: dict[str, Any] = here["properties"][part]
        return below
    if part.startswith("<"):
        named = [member for member in members if part.strip("<>") in member.get("properties", {})]
        return named[0] if len(named) == 1 else here
    for member in members:
        kinds = member.get("properties", {})
        constants = [kinds[name].get("const") for name in ("kind", "distribution") if name in kinds]
        if part in constants or part in kinds:
            return member
    return here
