"""The launch files of a plan: ``run_vllm_cluster.sh``, ``docker-compose.yml`` and the vLLM flags that it means.

    launch = plan_launch(deployment, model)  ->  Launch
    launch_script(launch), compose_file(launch)  ->  text of the two files

Nothing here writes a file, and no file holds a secret: tokens and keys come from the environment when vLLM starts.
"""

from calibration.artifacts.checkpoint import Checkpoint, checkpoint_of, served_model
from calibration.artifacts.compose import compose_file
from calibration.artifacts.flags import vllm_flags
from calibration.artifacts.launch import SCRIPT_NAME, Launch, plan_launch
from calibration.artifacts.nodes import Nodes, place
from calibration.artifacts.script import launch_script

__all__ = [
    "SCRIPT_NAME",
    "Checkpoint",
    "Launch",
    "Nodes",
    "checkpoint_of",
    "compose_file",
    "launch_script",
    "place",
    "plan_launch",
    "served_model",
    "vllm_flags",
]
