"""``vllm-harness demo``: plan, ramp and compare against the twin, in about a minute and without a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.errors import LocalFault

if TYPE_CHECKING:
    import subprocess

    from loadprofiles.profile import Profile

#: an 8B model's step on one large GPU, with a pool cut so small that its wall lies within a few dozen users
TWIN_FLAGS = (
    *("--served-model-name", "demo", "--max-model-len", "2048", "--max-num-seqs", "256"),
    *("--block-size", "16", "--num-gpu-blocks-override", "513", "--no-enable-prefix-caching"),
    *(
        "--step-ms",
        "8",
        "--per-sequence-ms",
        "0.05",
        "--per-1k-kv-tokens-ms",
        "0.04",
        "--per-1k-prefill-tokens-ms",
        "18",
    ),
)
PROMPT_TOKENS, OUTPUT_TOKENS = 192, 96
LEVELS = (1, 4, 8, 16, 24, 32, 48)
LEVEL_S = 6
START_S = 20.0


@dataclass(frozen=True, slots=True)
class Twin:
    base_url: str
    process: subprocess.Popen[str]


def command(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Exactly this folder; results/... unless said.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Levels of 2 s: a look, not a measurement.")] = False,
) -> None:
    from harness.cli import compare
    from harness.cli.ramp import default_folder, execute
    from harness.load.run import RampOptions

    folder = out or default_folder("demo")
    with running_twin(TWIN_FLAGS) as twin:
        _say("1. plan: what the pool of this server holds")
        _print_plan(twin)
        _say(
            f"2. ramp: {', '.join(map(str, LEVELS))} users, {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens each"
        )
        execute(
            RampOptions(base_url=twin.base_url, profile=_profile(2 if quick else LEVEL_S), out=folder, grace_s=5.0),
            json=False,
            quiet=False,
        )
    _say("3. compare: measured and predicted saturation")
    compare.command(folder)
    _say(f"Everything is in {folder}. Against your own server: vllm-harness ramp --base-url URL --users 1,2,4,8,16")


def _say(text: str) -> None:
    typer.echo(f"\n{text}", color=None)


def _profile(level_s: float) -> Profile:
    from loadprofiles.profile import parse_profile

    return parse_profile(
        {
            "name": "demo",
            "workload": {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS},
            "stages": [{"users": list(LEVELS), "duration": level_s, "ramp_up": 1.0}],
        },
        "demo",
    )


def _print_plan(twin: Twin) -> None:
    """The wall that follows from the pool the server shows, before anything is sent."""
    import asyncio

    from calibration.compare import KvPool, predict_wall
    from harness.http_get import Getter
    from harness.observe.probe import ProbeResult, probe

    async def ask() -> ProbeResult:
        async with Getter() as getter:
            return await probe(getter, twin.base_url)

    pool = asyncio.run(ask()).pool
    if pool is None or pool.usable_blocks is None or pool.block_size is None or pool.usable_tokens is None:
        raise LocalFault("the twin does not show its pool", "this is a bug of ours: please report it")
    sizes = KvPool(usable_blocks=pool.usable_blocks, block_size=pool.block_size, usable_tokens=pool.usable_tokens)
    wall = predict_wall(sizes, PROMPT_TOKENS, OUTPUT_TOKENS, None)
    typer.echo(
        f"   {pool.usable_blocks} blocks of {pool.block_size} tokens = {pool.usable_tokens:,} tokens of KV cache:"
        f" full at {wall.kv_full:.1f} users in lock step, {wall.kv_staggered:.1f} staggered"
    )


@contextmanager
def running_twin(flags: tuple[str, ...]) -> Iterator[Twin]:
    """A twin in a process of its own on a free port, ended with the block.

    Raises:
        LocalFault: it does not start.
    """
    import subprocess
    import sys

    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.cli", "twin", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            if " at http" not in ready:
                process.wait(START_S)
                errors.seek(0)
                raise LocalFault(f"the twin did not start: {errors.read().strip()[-500:] or 'it said nothing'}")
            yield Twin(ready.rsplit(" at ", 1)[1].strip(), process)
        finally:
            process.terminate()
            process.wait(START_S)
            if process.stdout is not None:
                process.stdout.close()
