"""How the GPUs of a deployment lie on nodes: replicas whole on a node where they fit, else stages over nodes."""

from __future__ import annotations

from dataclasses import dataclass

from calibration.deployment import Deployment
from calibration.errors import InputError, Unsupported

#: GPUs of one node where nothing else is said: an HGX or DGX board of A100, H100, H200 or B200
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Nodes:
    """``count`` nodes, ``gpus`` taken on each (0 on CPU). ``replicas`` of the data-parallel replicas lie on one node; a
    replica that does not fit one spans them all (``spans``)."""

    count: int
    gpus: int
    replicas: int
    spans: bool

    @property
    def is_cluster(self) -> bool:
        return self.count > 1


def place(deployment: Deployment, gpus_per_node: int = GPUS_PER_NODE) -> Nodes:
    """Nodes a deployment needs.

    Raises:
        InputError: no node has fewer GPUs than one.
        Unsupported: several replicas of which each spans nodes.
    """
    if gpus_per_node < 1:
        raise InputError(f"gpus_per_node = {gpus_per_node}, expected at least 1")
    replica = deployment.tp * deployment.pp
    if deployment.device == "cpu":
        return Nodes(1, 0, deployment.dp, False)
    if replica <= gpus_per_node:
        most = min(deployment.dp, gpus_per_node // replica)
        # Ray places the same number of replicas on every node (VLLM_RAY_DP_PACK_STRATEGY "strict")
        here = next(n for n in range(most, 0, -1) if deployment.dp % n == 0)
        return Nodes(deployment.dp // here, here * replica, here, False)
    if deployment.dp > 1:
        raise Unsupported(
            f"dp = {deployment.dp} replicas of {replica} GPUs on nodes of {gpus_per_node}: each spans nodes",
            "write one replica (--dp 1) and start it once for each group of nodes",
        )
    if deployment.tp > gpus_per_node:
        return Nodes(-(-replica // gpus_per_node), gpus_per_node, 1, True)
    stages = gpus_per_node // deployment.tp
    return Nodes(-(-deployment.pp // stages), stages * deployment.tp, 1, True)
