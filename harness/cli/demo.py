"""``vllm-harness demo``: plan, ramp, calibrate, compare and report against the twin, in about a minute, without a GPU."""

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

MODEL, GPU = "llama-3.1-8b", "h100-sxm"
#: what the deployment is told, the plan's and the server's alike: a pool cut so small that its wall lies within a few
#: dozen users
DEPLOYMENT = (
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    "256",
    "--block-size",
    "16",
    "--num-gpu-blocks-override",
    "513",
)
#: the server's step is no plan's: slower kernels than the prior knows, for the calibration to find
TWIN_FLAGS = (
    *("--model", MODEL, *DEPLOYMENT, "--no-enable-prefix-caching", "--async-scheduling", "--noise", "0.03"),
    *("--step-ms", "8", "--per-sequence-ms", "0.05", "--per-1k-kv-tokens-ms", "0.04"),
    *("--per-1k-prefill-tokens-ms", "18"),
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
    from harness.calibration_file import NAME
    from harness.cli import calibrate, compare, plan, report
    from harness.cli.ramp import default_folder, execute
    from harness.load.options import RampOptions

    folder = out or default_folder("demo")
    lengths = ("--prompt-tokens", str(PROMPT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS))
    _say("1. plan: what this deployment holds and gives, before it runs")
    plan.run(["--model", MODEL, "--gpu", GPU, *DEPLOYMENT, *lengths])
    _say(
        f"2. ramp: {', '.join(map(str, LEVELS))} users, {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens each,"
        " against a server whose steps the plan does not know"
    )
    with running_twin(TWIN_FLAGS) as twin:
        execute(
            RampOptions(base_url=twin.base_url, profile=_profile(2 if quick else LEVEL_S), out=folder, grace_s=5.0),
            json=False,
            quiet=False,
        )
    _say("3. calibrate: the factors that tell this server from the plan, from the levels below the wall")
    calibrate.command([folder], gpu=GPU, model_config=MODEL, out=folder)
    _say("4. compare: measured and predicted saturation, then every level beside the calibrated model")
    compare.command(folder)
    _say("")
    compare.command(folder, calibration=folder / NAME)
    _say("5. report")
    report.command(folder)
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
