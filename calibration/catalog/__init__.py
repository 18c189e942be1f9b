"""Models and GPUs by name, from the YAML beside this file; a Hugging Face config.json is read the same way.

A look-up parses the one entry it needs: entries are top-level keys, so their text is cut out before YAML sees it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from calibration.architecture import Architecture, Weight
from calibration.errors import InputError
from calibration.families import read_config
from calibration.gpu import Gpu

#: taken off the NVML total where no CUDA total was found: the middle of 0.46 to 0.75 GiB seen on NVIDIA parts
_CUDA_GAP_BYTES = int(0.6 * (1 << 30))

_Loader: type[yaml.SafeLoader] | type[yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ModelEntry(NamedTuple):
    """One model of the catalog: its shape, and what the catalog says about it."""

    name: str
    hf_id: str
    aliases: tuple[str, ...]
    verified: bool
    unverified: tuple[str, ...]
    sources: tuple[str, ...]
    notes: tuple[str, ...]
    architecture: Architecture


@cache
def _entries(file: str) -> dict[str, str]:
    """Name -> YAML text of each entry of a catalog file."""
    text = _text(file)
    starts = [*re.finditer(r"^([a-z0-9][^\s:]*):$", text, re.MULTILINE)]
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return {match[1]: text[match.start() : end] for match, end in zip(starts, ends, strict=True)}


@cache
def _names(file: str) -> dict[str, str]:
    """Every accepted spelling, lower case -> name of the entry."""
    found: dict[str, str] = {}
    for name, text in _entries(file).items():
        found[name] = name
        for line in re.findall(r"^  (?:hf_id|aliases|title): (.*)$", text, re.MULTILINE):
            for word in line.strip("[]").split(","):
                found.setdefault(word.strip().strip('"').lower(), name)
        for variant in re.findall(r"^    ([\w.-]+/[\w.-]+): \{", text, re.MULTILINE):
            found.setdefault(variant.lower(), name)
    return found


def _resolve(file: str, key: str, asked: str) -> str:
    """The entry's name for an accepted spelling.

    Raises:
        InputError: none; names what comes near.
    """
    names = _names(file)
    wanted = asked.strip().lower()
    if wanted in names:
        return names[wanted]
    # read only where a name is wrong: a plan's start-up counts in milliseconds
    from difflib import get_close_matches

    near = dict.fromkeys(names[match] for match in get_close_matches(wanted, names, n=6, cutoff=0.5))
    hint = f"near it: {', '.join([*near][:4])}" if near else f"known: {', '.join(_entries(file))}"
    raise InputError(f"{key} = {asked!r} is not in the catalog", hint)


def _parse(file: str, name: str) -> Mapping[str, Any]:
    content: Mapping[str, Any] = yaml.load(_entries(file)[name], Loader=_Loader)[name]
    return content


@cache
def table(file: str) -> Mapping[str, Any]:
    """A whole file of this folder: ``step_priors.yaml``, ``sources.yaml``."""
    content: Mapping[str, Any] = yaml.load(_text(file), Loader=_Loader)
    return content


def _text(file: str) -> str:
    return Path(__file__).with_name(file).read_text(encoding="utf-8")


def _measured_bytes(table: Mapping[str, Any] | None) -> dict[str, tuple[int, str]]:
    return {key: (int(item["bytes"]), str(item["source"])) for key, item in (table or {}).items()}


def _beside(table: Mapping[str, int] | None) -> tuple[Weight, ...]:
    """Weights of the checkpoint outside the text model. Buffers of the router are no weights of a matrix product."""
    roles = {"vision": "vision", "mtp": "mtp"}
    return tuple(
        Weight(name, int(size), 1, "vision" if roles[name] == "vision" else "mtp", "tp")
        for name, size in (table or {}).items()
        if name in roles
    )


def _as_variant(config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The configuration with another checkpoint's ``quantization_config``."""
    return config if quantization is None else {**config, "quantization_config": quantization}


@cache
def model_entry(name: str) -> ModelEntry:
    """The catalog's entry for a name, a Hugging Face id or an alias, in any case; a variant's id gives the entry with
    that checkpoint's weight format.

    Raises:
        InputError: none of them; names what comes near.
    """
    key = _resolve("models.yaml", "model", name)
    entry = _parse("models.yaml", key)
    sources = tuple(str(source) for source in entry["source"])
    variants = {variant.lower(): content for variant, content in entry.get("variants", {}).items()}
    shape = read_config(_as_variant(entry["config"], variants.get(name.strip().lower())), f"catalog entry {key}")
    extra = _beside(entry.get("beside_the_text_model"))
    architecture = replace(
        shape,
        source="; ".join(sources),
        catalog_name=key,
        checkpoint_bytes=_measured_bytes(entry.get("checkpoint_bytes")),
        loaded_bytes=_measured_bytes(entry.get("loaded_bytes")),
        extra_weights=extra,
        unsized_parts=tuple(p for p in shape.unsized_parts if not any(w.role == "vision" for w in extra)),
    )
    return ModelEntry(
        name=key,
        hf_id=str(entry["hf_id"]),
        aliases=tuple(entry["aliases"]),
        verified=bool(entry["verified"]),
        unverified=tuple(entry.get("unverified", ())),
        sources=sources,
        notes=tuple(entry.get("notes", ())),
        architecture=architecture,
    )


def model_entries() -> Iterator[ModelEntry]:
    """All models, in the order of the file."""
    return (model_entry(name) for name in _entries("models.yaml"))


@cache
def find_gpu(name: str) -> Gpu:
    """The GPU of this name or alias, in any case.

    Raises:
        InputError: none; names what comes near.
    """
    key = _resolve("gpus.yaml", "gpu", name)
    entry = _parse("gpus.yaml", key)
    usable = entry["cuda_total_bytes"]
    return Gpu(
        name=key,
        title=str(entry["title"]),
        memory_bytes=int(entry["memory_bytes"]),
        usable_bytes=int(usable) if usable is not None else int(entry["memory_bytes"]) - _CUDA_GAP_BYTES,
        usable_is_measured=usable is not None,
        bandwidth_bytes_per_s=float(entry["bandwidth_bytes_s"]),
        flops_per_s={kind: float(rate) for kind, rate in entry["flops_dense"].items()},
        link_bytes_per_s=float(entry["link_bytes_s"]),
        link=str(entry["link"]),
        compute_capability=str(entry["compute_capability"]),
        watts=float(entry["tdp_w"]),
        sources=tuple(str(source) for source in entry["source"]),
        unverified=tuple(str(item) for item in entry.get("unverified", ())),
    )


def gpu_entries() -> Iterator[Gpu]:
    """All GPUs, in the order of the file."""
    return (find_gpu(name) for name in _entries("gpus.yaml"))


def find_model(text: str) -> Architecture:
    """A model by catalog name or Hugging Face id, or from a ``config.json`` (the file, or the folder it lies in).

    Raises:
        InputError: no such name or file, or a file that is no JSON object.
        Unsupported: an architecture this model does not know.
    """
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.is_file():
        return read_config_file(path)
    return model_entry(text).architecture


def read_config_file(path: Path) -> Architecture:
    """The architecture of a ``config.json``.

    Raises:
        InputError: the file cannot be read, or holds no JSON object.
        Unsupported: an architecture this model does not know.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model = {str(path)!r}: {error.strerror or error}, expected a config.json") from error
    except ValueError as error:
        raise InputError(f"model = {str(path)!r} is no JSON: {error}", "expected a Hugging Face config.json") from error
    return read_config(content, str(path))
