"""``vllm-harness gpus``: the GPUs of the catalog."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from calibration.gpu import Gpu


def command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One GPU, with its sources.")] = None,
    json: Json = False,
) -> None:
    from calibration.catalog import find_gpu, gpu_entries

    found = list(gpu_entries()) if name is None else [find_gpu(name)]
    if json:
        import orjson

        content: object = [document(gpu) for gpu in found] if name is None else document(found[0])
        typer.echo(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())
    elif name is None:
        _print(found)
    else:
        _print_one(document(found[0]))


def document(gpu: Gpu) -> dict[str, Any]:
    """One GPU as ``--json`` prints it."""
    return {
        "name": gpu.name,
        "title": gpu.title,
        "memory_bytes": gpu.memory_bytes,
        "usable_bytes": gpu.usable_bytes,
        "usable_is_measured": gpu.usable_is_measured,
        "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
        "flops_per_s": dict(gpu.flops_per_s),
        "link": gpu.link,
        "link_bytes_per_s": gpu.link_bytes_per_s,
        "compute_capability": gpu.compute_capability,
        "watts": gpu.watts,
        "unverified": list(gpu.unverified),
        "source": list(gpu.sources),
    }


def _print(gpus: Sequence[Gpu]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("gpu")
    for column in ("GiB vLLM sees", "GB/s", "bf16 TFLOPS", "fp8", "fp4", "link GB/s", "W"):
        table.add_column(column, justify="right")
    table.add_column("what")
    for gpu in gpus:
        table.add_row(
            gpu.name,
            f"{gpu.usable_bytes / (1 << 30):.2f}" + ("" if gpu.usable_is_measured else " ~"),
            f"{gpu.bandwidth_bytes_per_s / 1e9:,.0f}",
            *(_rate(gpu, *kinds) for kinds in (("bf16", "fp16"), ("fp8",), ("fp4",))),
            f"{gpu.link_bytes_per_s / 1e9:,.0f}",
            f"{gpu.watts:.0f}",
            gpu.title,
        )
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    console.print("~ nvidia-smi's total less 0.6 GiB: no printout of CUDA's total was found", highlight=False)


def _rate(gpu: Gpu, *kinds: str) -> str:
    """TFLOPS of the first of these formats the device has, dense."""
    found = next((gpu.flops_per_s[kind] for kind in kinds if kind in gpu.flops_per_s), None)
    return "-" if found is None else f"{found / 1e12:,.0f}"


def _print_one(content: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for key, value in content.items():
        lines = value if isinstance(value, list) else [value]
        for index, line in enumerate(lines):
            console.print(f"{key if index == 0 else '':<22} {line}", markup=False, soft_wrap=True)
