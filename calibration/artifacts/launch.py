"""Everything the launch files of a deployment say, as values."""

from __future__ import annotations

from dataclasses import dataclass

from calibration.artifacts import since
from calibration.artifacts.checkpoint import Checkpoint, checkpoint_of
from calibration.artifacts.flags import cpu_pool_environment, vllm_flags
from calibration.artifacts.nodes import GPUS_PER_NODE, Nodes, place
from calibration.deployment import Deployment
from calibration.weights import weights_by_stage

SCRIPT_NAME = "run_vllm_cluster.sh"

#: start-up besides reading weights: imports, compilation, CUDA graphs
_START_S = 600
#: slowest reading of a checkpoint that is waited for, bytes/s: a network of 4 Gbit/s
_READ_BYTES_PER_S = 500e6


@dataclass(frozen=True, slots=True)
class Launch:
    """How a deployment is started.

    ``flags`` are those of ``vllm serve`` (host and port excepted), ``environment`` what must be set beside them.
    ``start_timeout_s`` bounds the wait for ``/health``. ``notes`` are sentences for whoever starts it.
    """

    deployment: Deployment
    checkpoint: Checkpoint
    flags: tuple[str, ...]
    environment: dict[str, str]
    nodes: Nodes
    start_timeout_s: int
    notes: tuple[str, ...]

    @property
    def version(self) -> str:
        """The release, as its tag and package are named."""
        return ".".join(map(str, self.deployment.version))

    @property
    def is_amd(self) -> bool:
        gpu = self.deployment.gpu
        return gpu is not None and gpu.compute_capability.startswith("gfx")

    @property
    def headline(self) -> str:
        """What is started, in a line."""
        d = self.deployment
        where = f"{d.gpus} x {d.gpu.title}" if d.gpu is not None else d.device
        name = self.checkpoint.model or self.checkpoint.wanted
        split = f"TP {d.tp}, PP {d.pp}, DP {d.dp}" + (", EP" if d.expert_parallel else "")
        return f"{name} on {where} ({split}), vLLM {self.version}"


def plan_launch(deployment: Deployment, model: str | None, gpus_per_node: int = GPUS_PER_NODE) -> Launch:
    """The launch of a deployment; ``model`` as :func:`~calibration.artifacts.checkpoint.served_model` gives it.

    Raises:
        InputError: a value this vLLM version refuses, or a name that is none.
        Unsupported: a flag this version does not know, or a placement on nodes that it does not do.
    """
    checkpoint = checkpoint_of(deployment, model)
    nodes = place(deployment, gpus_per_node)
    return Launch(
        deployment=deployment,
        checkpoint=checkpoint,
        flags=tuple(vllm_flags(deployment, gpus_per_node)),
        environment=cpu_pool_environment(deployment),
        nodes=nodes,
        start_timeout_s=_start_timeout(deployment, checkpoint),
        notes=tuple(_notes(deployment, checkpoint, nodes, gpus_per_node)),
    )


def _start_timeout(deployment: Deployment, checkpoint: Checkpoint) -> int:
    """Seconds until ``/health`` must answer, whole minutes: the checkpoint at the slowest reading, and the rest."""
    size = sum(stage.total_bytes for stage in weights_by_stage(deployment)) * deployment.tp
    if checkpoint.quantization is not None:
        # read in 16 bits, kept in 8
        size *= 2
    return 60 * -(-int(_START_S + size / _READ_BYTES_PER_S) // 60)


def _notes(deployment: Deployment, checkpoint: Checkpoint, nodes: Nodes, gpus_per_node: int) -> list[str]:
    found = []
    if checkpoint.model is None:
        found.append(f"MODEL must name {checkpoint.wanted}: vLLM reads that format, it does not make it")
    if checkpoint.quantization is not None:
        found.append(
            "vLLM makes the FP8 weights from a 16-bit checkpoint each time it loads; a checkpoint stored in FP8 loads half "
            "the bytes and needs no --quantization"
        )
    if deployment.kv.name == "fp8_e5m2":
        found.append(
            "fp8_e5m2: FlashAttention takes no such cache, so vLLM falls back to another backend, at another speed; fp8 "
            "(e4m3) is the usual one where the GPU has it"
        )
    if nodes.spans and deployment.tp > gpus_per_node:
        found.append(
            f"TP {deployment.tp} reaches over {nodes.count} nodes, and each layer's all-reduce with it; TP {gpus_per_node} "
            "inside a node and PP over nodes is the usual split"
        )
    if nodes.is_cluster and deployment.version >= since.NO_RAY_IN_IMAGE:
        found.append(
            "vLLM comes without Ray since 0.18: install ray[cgraph] on every node (docker-compose.yml builds it in)"
        )
    return found
