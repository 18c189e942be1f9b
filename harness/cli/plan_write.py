"""``plan --write DIR``: the launch script and the compose file of a plan."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import LocalFault, UsageError

if TYPE_CHECKING:
    from calibration.plan import Plan

COMPOSE_NAME = "docker-compose.yml"


def add_options(parser: ArgumentParser) -> None:
    """The options of ``plan`` that write launch files."""
    add = parser.add_argument_group("launch files").add_argument
    add("--write", metavar="DIR", help=f"write run_vllm_cluster.sh and {COMPOSE_NAME} for this plan there")
    add("--force", action="store_true", help="replace such files that are there, and write what does not fit")
    add("--gpus-per-node", type=int, metavar="N", default=8, help="more GPUs than this need Ray over nodes (8)")


def refuse_several(asked: Namespace) -> None:
    """Launch files are of one deployment.

    Raises:
        UsageError: ``--write`` beside lists of GPUs, splits or formats.
    """
    if asked.write is not None:
        raise UsageError(
            "--write with several deployments, expected one", "name one GPU, split and format, or use --fit"
        )


def write(asked: Namespace, model: str, plan: Plan) -> None:
    """Write both files, or neither, and say what was written on stderr; nothing where ``--write`` was not asked.

    Raises:
        UsageError: the plan does not fit, or a file is there and ``--force`` is not given.
        InputError: this vLLM version refuses a flag that the plan means.
        LocalFault: the disk refuses.
    """
    if asked.write is None:
        return
    from calibration.artifacts import SCRIPT_NAME, compose_file, launch_script, plan_launch, served_model

    folder = Path(asked.write)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--write {folder}, expected a folder: it is a file")
    if not plan.memory.fits and not asked.force:
        raise UsageError(
            f"nothing written: the plan does not fit, {plan.memory.reason}", "--force writes it all the same"
        )
    launch = plan_launch(plan.deployment, served_model(model), asked.gpus_per_node)
    files = {SCRIPT_NAME: launch_script(launch), COMPOSE_NAME: compose_file(launch)}
    there = [name for name in files if (folder / name).exists()]
    if there and not asked.force:
        raise UsageError(f"nothing written: {folder} holds {' and '.join(there)} already", "--force replaces them")
    _save(folder, files)
    for name in files:
        sys.stderr.write(f"wrote {folder / name}\n")
    for note in launch.notes:
        sys.stderr.write(f"note: {note}\n")


def _save(folder: Path, files: dict[str, str]) -> None:
    """The files, each whole or not at all; scripts may be executed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            part = folder / f".{name}.part"
            part.write_text(text, encoding="utf-8")
            part.chmod(0o755 if name.endswith(".sh") else 0o644)
            part.replace(folder / name)
    except OSError as error:
        raise LocalFault(f"cannot write {folder}: {error.strerror or error}") from error
