"""``--calibration`` of the commands that take a deployment: its factors, checked against what is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from pathlib import Path

    from calibration.calibration_file import Calibration
    from calibration.deployment import Deployment
    from calibration.factors import FactorSet
    from calibration.limits import Sizing
    from calibration.plan import Plan

#: options that name another deployment than the file's
_NAMES = ("model", "preset", "gpu")
#: options that change a deployment, with what they are where nobody gave them
_CHANGES: dict[str, object] = {
    **dict.fromkeys(("tp", "pp", "dp", "weights", "kv", "dtype", "device", "vllm_version", "max_model_len")),
    **dict.fromkeys(("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "block_size")),
    **dict.fromkeys(("num_gpu_blocks_override", "kv_cache_memory", "kv_cache_memory_bytes", "enable_prefix_caching")),
    "mamba_ssm_cache_dtype": None,
    "expert_parallel": False,
    "hybrid_kv_cache_manager": True,
    "enforce_eager": False,
}


class Known(NamedTuple):
    """A calibration as it is used: ``differences`` between its deployment and this one, in words."""

    path: Path
    calibration: Calibration
    deployment: Deployment
    factors: FactorSet
    differences: tuple[str, ...]

    @property
    def transferred(self) -> bool:
        """Were factors moved, rather than taken as they are?"""
        return self.factors is not self.calibration.factors


def add_options(parser: ArgumentParser) -> None:
    """``--calibration`` and ``--transfer``."""
    add = parser.add_argument_group("a calibration").add_argument
    add(
        "--calibration",
        metavar="FILE",
        help="correct the model by its factors; alone, it is the calibrated deployment that is meant",
    )
    add(
        "--transfer",
        action="store_true",
        help="use the factors for another deployment on the same GPU (other model, TP, format, version): as wide priors",
    )


def speaks_alone(asked: Namespace) -> bool:
    """Is the calibrated deployment meant, no other named?

    Raises:
        UsageError: it is, and an option would change it.
    """
    if asked.calibration is None or any(getattr(asked, name) is not None for name in _NAMES):
        return False
    from harness.errors import UsageError

    changed = [name for name, default in _CHANGES.items() if getattr(asked, name) != default]
    if changed or asked.transfer:
        option = changed[0].replace("_", "-") if changed else "transfer"
        raise UsageError(
            f"--{option} with --calibration alone, which is of one deployment",
            "to carry its factors over to another, name it whole (--model, --gpu ...) and give --transfer",
        )
    return True


def refuse_several(asked: Namespace) -> None:
    """Factors are of one deployment.

    Raises:
        UsageError: a calibration with several.
    """
    if asked.calibration is not None:
        from harness.errors import UsageError

        raise UsageError("--calibration with several deployments, expected one", "name one GPU, one --tp and so on")


def read(asked: Namespace, deployment: Deployment | None) -> Known | None:
    """The calibration that the options name, for this deployment (None: its own); None where they name none.

    Raises:
        UsageError: the file does not read, or ``--transfer`` without one.
        InputError: it is of another deployment.
    """
    if asked.calibration is None:
        if asked.transfer:
            from harness.errors import UsageError

            raise UsageError(
                "--transfer is given without --calibration", "name the file whose factors are carried over"
            )
        return None
    from pathlib import Path

    return known_of(Path(asked.calibration), deployment, transfer=asked.transfer)


def known_of(path: Path, deployment: Deployment | None, *, transfer: bool) -> Known:
    """A file's factors for a deployment (None: its own).

    Raises:
        UsageError: the file does not read.
        InputError: it is of another deployment and no transfer was asked for, or none is possible.
    """
    from calibration.calibration_file import mismatches
    from calibration.transfer import factors_for
    from harness.calibration_file import read_calibration

    calibration = read_calibration(path)
    if deployment is None:
        own = calibration.rebuild_deployment()
        return Known(path, calibration, own, calibration.factors, ())
    factors = factors_for(calibration, deployment, transfer=transfer)
    return Known(path, calibration, deployment, factors, tuple(mismatches(calibration, deployment)))


def sizing_of(plan: Plan, asked: Namespace, known: Known) -> Sizing | None:
    """Limits and operating point of a plan under the calibrated factors."""
    from calibration.limits import size
    from harness.cli.plan_limits import parse_slo

    return size(plan, parse_slo(asked.slo), known.factors)


def document(known: Known | None) -> dict[str, Any]:
    """``{"calibration": {...}}`` of a JSON document; nothing without one."""
    if known is None:
        return {}
    return {
        "calibration": {
            "file": str(known.path),
            "created": known.calibration.created,
            "stages": len(known.calibration.used),
            "transferred": known.transferred,
            "differences": list(known.differences),
            "factors": {
                name: {"value": f.value, "low": f.low, "high": f.high, "unit": f.unit, "source": f.source}
                for name, f in known.factors.factors.items()
            },
        }
    }


def sentence(known: Known) -> str:
    """What the numbers rest on, for people."""
    stages = len(known.calibration.used)
    said = f"corrected by {known.path}: {stages} stages, {known.calibration.created[:10]}"
    if known.transferred:
        return f"{said}; carried over as wide priors, for here are {'; '.join(known.differences)}"
    if known.differences:
        return f"{said}; the factors hold, the bounds are other ones: {'; '.join(known.differences)}"
    return said


def show(known: Known) -> None:
    """Print it."""
    from harness.cli.display import Display

    Display(highlight=False).print(f"note: {sentence(known)}", markup=False, soft_wrap=True)
