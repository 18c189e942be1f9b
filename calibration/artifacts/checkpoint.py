"""Which checkpoint a plan serves, and how it comes to its weight format.

vLLM reads a checkpoint in the format it was stored in. Of the formats a plan may ask for beyond that, it makes FP8 itself
while it loads a 16-bit checkpoint; any other needs a checkpoint of that format, which only the operator can name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from calibration.artifacts import since
from calibration.deployment import Deployment
from calibration.errors import InputError
from calibration.formats import declared_format

#: weight formats that are the dtype itself
_DTYPE_OF = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What ``vllm serve`` is given.

    ``model`` is a Hugging Face id or an absolute folder; None: whoever starts it names one, and ``wanted`` says which.
    ``dtype`` and ``quantization`` are the values of those flags, None: the flag is not needed.
    """

    model: str | None
    wanted: str
    dtype: str | None
    quantization: str | None

    @property
    def is_local(self) -> bool:
        return self.model is not None and self.model.startswith("/")


def served_model(asked: str) -> str | None:
    """What ``--model`` of a plan names, for vLLM: the Hugging Face id of a catalog entry (of an alias, that alias), or the
    folder a ``config.json`` lies in, absolute. None: a configuration that is no checkpoint's own.

    Raises:
        InputError: no such entry.
    """
    # a launch file is written seldom: the plan itself need not load the catalog's text again
    from calibration.catalog import model_entry

    path = Path(asked)
    if path.is_dir():
        return str(path.resolve())
    if path.suffix == ".json" or path.is_file():
        return str(path.resolve().parent) if path.name == "config.json" else None
    entry = model_entry(asked)
    spellings = (entry.hf_id, *entry.aliases)
    return next((name for name in spellings if name.lower() == asked.strip().lower()), entry.hf_id)


def checkpoint_of(deployment: Deployment, model: str | None) -> Checkpoint:
    """The checkpoint of a plan; ``model`` as :func:`served_model` gives it.

    Raises:
        InputError: a name vLLM would take for a flag, or a weight format that the dtype contradicts.
    """
    if model is not None and (not model or model.startswith("-") or not model.isprintable()):
        raise InputError(
            f"model = {model!r}, expected a Hugging Face id or a folder, in characters that can be printed"
        )
    asked = deployment.dtype if "dtype" in deployment.given else None
    name = deployment.architecture.catalog_name or "this model"
    own = declared_format(deployment.architecture.quantization, deployment.dtype)
    if deployment.weights.name == own.name:
        return Checkpoint(model, f"a checkpoint of {name}", asked, None)
    if deployment.architecture.quantization is None:
        if deployment.weights.name in _DTYPE_OF:
            return Checkpoint(model, f"a checkpoint of {name}", _dtype(deployment), None)
        online = _online(deployment)
        if online is not None:
            return Checkpoint(model, f"a 16-bit checkpoint of {name}", asked, online)
    return Checkpoint(None, f"a checkpoint of {name} with {deployment.weights.name} weights", asked, None)


def _dtype(deployment: Deployment) -> str:
    """The dtype that 16- or 32-bit weights ask for; the cache follows it, so only one of the same width will do."""
    wanted = _DTYPE_OF[deployment.weights.name]
    if "dtype" in deployment.given or wanted == "float32" or deployment.dtype == "float32":
        raise InputError(
            f"weights = {deployment.weights.name!r} with dtype = {deployment.dtype!r}, expected the same of both",
            "vLLM keeps weights that are not quantised in the dtype it computes in",
        )
    return wanted


def _online(deployment: Deployment) -> str | None:
    """``--quantization`` for a 16-bit checkpoint that vLLM quantises while it loads, or None where it does not."""
    young = deployment.version >= since.ONLINE_NAMES
    if deployment.weights.name == "fp8":
        return "fp8_per_tensor" if young else "fp8"
    return "fp8_per_block" if deployment.weights.name == "fp8-block" and young else None
