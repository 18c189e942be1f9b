"""``vllm-harness models``: the models of the catalog, with what a token of theirs costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibration.architecture import Architecture
    from calibration.catalog import ModelEntry

#: KV dtypes listed for each kind of attention
_PLAIN = ("bf16", "fp8")
_LATENT = ("bf16", "fp8", "fp8_ds_mla")


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME|CONFIG.json]", help="One model, with its sources.")
    ] = None,
    json: Json = False,
) -> None:
    from calibration.catalog import model_entries, model_entry

    if name is not None and name.endswith(".json"):
        _one_file(name, json)
        return
    entries = list(model_entries()) if name is None else [model_entry(name)]
    if json:
        _print_json([document(entry) for entry in entries] if name is None else document(entries[0]))
    elif name is None:
        _print(entries)
    else:
        _print_one(document(entries[0]))


def kv_bytes(architecture: Architecture) -> dict[str, int]:
    """KV bytes of one token by KV dtype: nominal, every attention layer holding it."""
    from calibration.formats import kv_format

    sizes = {}
    for name in _LATENT if architecture.is_mla else _PLAIN:
        cache = kv_format(name)
        sizes[name] = sum(
            cache.latent_bytes(a.latent_dim)
            if a.latent_dim is not None
            else cache.token_bytes(a.kv_heads, a.head_dim, a.v_head_dim)
            for a in architecture.attention_layers
        )
    return sizes


def shape(architecture: Architecture) -> dict[str, Any]:
    """What a plan needs to know of a model."""
    kinds = {kind: architecture.count(kind) for kind in ("full", "mla", "sliding", "chunked")}
    kinds["state"] = len(architecture.state_layers)
    return {
        "architecture": architecture.name,
        "params_total": architecture.params_total,
        "params_active": architecture.params_active,
        "layers": architecture.num_layers,
        "layers_by_cache": {kind: count for kind, count in kinds.items() if count},
        "kv_bytes_per_token": kv_bytes(architecture),
        "context": architecture.context,
        "weights": _native(architecture),
    }


def _native(architecture: Architecture) -> str:
    from calibration.formats import declared_format

    return declared_format(architecture.quantization, architecture.dtype).name


def document(entry: ModelEntry) -> dict[str, Any]:
    """One model as ``--json`` prints it."""
    stated = {
        fmt: {"bytes": size, "source": source} for fmt, (size, source) in entry.architecture.checkpoint_bytes.items()
    }
    return {
        "name": entry.name,
        "hf_id": entry.hf_id,
        "aliases": list(entry.aliases),
        **shape(entry.architecture),
        "checkpoint_bytes": stated,
        "verified": entry.verified,
        "unverified": list(entry.unverified),
        "source": list(entry.sources),
        "notes": list(entry.notes),
    }


def _one_file(path: str, json: bool) -> None:
    from calibration.catalog import find_model

    found = {"name": path, **shape(find_model(path))}
    if json:
        _print_json(found)
    else:
        _print_one(found)


def _print_json(content: object) -> None:
    import orjson

    typer.echo(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())


def _print(entries: Sequence[ModelEntry]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("model")
    for column in ("B params", "B active", "layers", "KV B/token bf16", "fp8", "context"):
        table.add_column(column, justify="right")
    table.add_column("weights")
    table.add_column("")
    for entry in entries:
        row = shape(entry.architecture)
        sizes = row["kv_bytes_per_token"]
        table.add_row(
            entry.name,
            f"{row['params_total'] / 1e9:.2f}",
            f"{row['params_active'] / 1e9:.2f}",
            f"{row['layers']}",
            f"{sizes['bf16']:,}",
            f"{sizes['fp8']:,}",
            f"{row['context']:,}",
            row["weights"],
            "" if entry.verified else "not verified",
        )
    Console(width=None if Console().is_terminal else 120).print(table)


def _print_one(content: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for key, value in content.items():
        lines = value if isinstance(value, list) else [value]
        if not lines:
            continue
        first, *rest = [_plain(line) for line in lines]
        console.print(f"{key:<20} {first}", markup=False, soft_wrap=True)
        for line in rest:
            console.print(f"{'':<20} {line}", markup=False, soft_wrap=True)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
