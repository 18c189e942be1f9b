"""``--set KEY=VALUE``: a value put into a profile's content before it is read, so that it is checked like the file."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import yaml

from loadprofiles.units import ProfileError


def overridden(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of ``data`` with every ``KEY=VALUE`` set.

    A key is a path of names and numbers: ``workload.output_tokens``, ``stages.0.users`` (stages count from 0, as the file
    has them, ``*`` means all of them). A value is YAML: a number, a text, a list or a mapping. ``null`` takes the key away.

    Raises:
        ProfileError: no ``=``, no YAML, or a path that leads nowhere.
    """
    data = copy.deepcopy(data)
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ProfileError(f"--set: expected KEY=VALUE, not {text!r}", "for example --set stages.0.users=64")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ProfileError(f"--set {key}: {value!r} is not YAML: {getattr(error, 'problem', error)}") from error
        _put(data, parts, parsed, key)
    return data


def _put(room: Any, parts: list[str], value: Any, key: str) -> None:
    first, rest = parts[0], parts[1:]
    if isinstance(room, list):
        for index in _indices(room, first, key):
            if rest:
                _put(room[index], rest, value, key)
            else:
                room[index] = copy.deepcopy(value)
    elif not isinstance(room, dict):
        raise ProfileError(f"--set {key}: {first!r} leads nowhere: what stands before it is {room!r}, no mapping")
    elif rest:
        _put(room.setdefault(first, {}), rest, value, key)
    elif value is None:
        room.pop(first, None)
    else:
        room[first] = copy.deepcopy(value)


def _indices(room: list[Any], part: str, key: str) -> range:
    if part == "*":
        return range(len(room))
    if not part.isdigit():
        raise ProfileError(f"--set {key}: expected a number from 0 to {len(room) - 1}, or *, not {part!r}")
    if int(part) >= len(room):
        raise ProfileError(f"--set {key}: there is no {part}: {len(room)} stand there, counted from 0")
    return range(int(part), int(part) + 1)
