"""``vllm-harness probe``: what is running there, and what it does not show."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from harness.cli.options import ApiKey, BaseUrl, Insecure, Json, MetricsUrl, Model

if TYPE_CHECKING:
    from harness.observe.probe import ProbeResult


def command(
    base_url: BaseUrl,
    model: Model = None,
    api_key: ApiKey = None,
    metrics_url: MetricsUrl = None,
    insecure: Insecure = False,
    as_json: Json = False,
) -> None:
    import asyncio

    from harness.http_get import Getter
    from harness.observe.probe import probe

    async def ask() -> ProbeResult:
        async with Getter(api_key=api_key, key_url=base_url, verify_tls=not insecure) as getter:
            return await probe(getter, base_url, model=model, metrics_url=metrics_url)

    result = asyncio.run(ask())
    if as_json:
        print(json.dumps(result.to_dict(), allow_nan=False))
    else:
        _show(result)


def _show(result: ProbeResult) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in _lines(result):
        if value is not None:
            table.add_row(label, value)
    console.print(table)
    for title, sentences in (
        ("Not shown by this server", [f"{m.what}: {m.why_it_matters}" for m in result.missing]),
        ("To mind", list(result.notes)),
    ):
        if sentences:
            console.print(f"\n{title}:", markup=False)
            for sentence in sentences:
                console.print(Padding(sentence, (0, 0, 0, 2)), markup=False)


def _lines(result: ProbeResult) -> list[tuple[str, str | None]]:
    others = [name for name in result.models if name != result.model]
    lines = [
        ("server", result.base_url),
        ("model", result.model + (f"  (also: {', '.join(others)})" if others else "")),
        ("loaded from", result.model_root if result.model_root != result.model else None),
        ("max_model_len", _tokens(result.max_model_len)),
        ("vLLM", result.vllm_version or ("version unknown" if result.is_vllm else "not seen to be vLLM")),
        ("engines", None if result.engines is None else str(result.engines)),
        ("max_num_seqs", None if result.max_num_seqs is None else f"{result.max_num_seqs:,}"),
        ("max_num_batched_tokens", _tokens(result.max_num_batched_tokens)),
        ("speculative decoding", _yes_no(result.speculative_decoding)),
    ]
    pool = result.pool
    if pool is not None:
        each = " an engine" if (result.engines or 1) > 1 else ""
        lines += [
            ("KV pool", None if pool.tokens is None else f"{pool.tokens:,} tokens{each}"),
            ("  usable", None if pool.usable_tokens is None else f"{pool.usable_tokens:,} tokens{each}"),
            ("  blocks", _blocks(result)),
            ("  dtype", pool.kv_cache_dtype),
            ("  prefix caching", _yes_no(pool.prefix_caching)),
            ("  gpu_memory_utilization", _number(pool.gpu_memory_utilization)),
        ]
    return lines


def _blocks(result: ProbeResult) -> str | None:
    pool = result.pool
    if pool is None or pool.num_blocks is None:
        return None
    return f"{pool.num_blocks:,} of {pool.block_size} tokens, {pool.usable_blocks:,} usable"


def _tokens(value: int | None) -> str | None:
    return None if value is None else f"{value:,} tokens"


def _yes_no(value: bool | None) -> str | None:
    return None if value is None else "on" if value else "off"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"
