"""``docker-compose.yml``: the same launch in containers, one service on one node, ``head`` and ``worker`` over several.

Written by PyYAML from plain values, so no value can leave its string; ``$`` is doubled, for Compose reads it before YAML's
strings are used. Keys are those of the Compose Specification.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from calibration.artifacts import since
from calibration.artifacts.launch import SCRIPT_NAME, Launch
from calibration.artifacts.text import comment

_CACHE = "/root/.cache/huggingface"
_HEALTHY = (
    "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=5)"
)
_USAGE_ONE = """# docker compose up -d --wait                  start, return when it is healthy
# Taken from the environment or a file .env beside this one: SERVE_PORT (8000), VLLM_IMAGE, HF_HOME; HF_TOKEN and
# VLLM_API_KEY, which are not written here. After three failed starts it stays down.
"""
_USAGE_CLUSTER = f"""# {SCRIPT_NAME} must lie beside this file, on every node.
#   first node:   docker compose --profile head up -d --build
#   each other:   HEAD_ADDRESS=... docker compose --profile worker up -d --build
# Taken from the environment or a file .env beside this one: SERVE_PORT (8000), RAY_PORT (6379), NODE_ADDRESS, HEAD_ADDRESS,
# VLLM_IMAGE, HF_HOME; HF_TOKEN and VLLM_API_KEY, which are not written here. After three failed starts it stays down.
"""


def compose_file(launch: Launch) -> str:
    """The text of ``docker-compose.yml``."""
    cluster = launch.nodes.is_cluster
    services = {"head": _node(launch, "head"), "worker": _node(launch, "worker")} if cluster else {"vllm": _one(launch)}
    head = [*comment(f"{launch.headline}. Written by `vllm-harness plan --write`.")]
    head += [line for note in launch.notes for line in ("#", *comment(f"Note: {note}."))]
    body = yaml.dump({"services": services}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=116)
    return "".join(f"{line}\n" for line in head) + "#\n" + (_USAGE_CLUSTER if cluster else _USAGE_ONE) + body


class _Lines(str):
    """Text that is written as a block of lines."""


class _Quoted(str):
    """Text that stands in quotes whatever it is: YAML 1.1 and 1.2 differ in which plain words are numbers or truths."""


class _Dumper(yaml.SafeDumper):
    pass


def _in_style(style: str) -> Any:
    return lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(_Lines, _in_style("|"))
_Dumper.add_representer(_Quoted, _in_style('"'))


def _literal(text: str) -> str:
    """Text that is only itself: Compose finds no variable in it, YAML no number."""
    return _Quoted(text.replace("$", "$$"))


def _quoted(values: dict[str, str]) -> dict[str, str]:
    return {name: _literal(value) for name, value in values.items()}


def _image(launch: Launch) -> str:
    """The release's image: of NVIDIA GPUs, of AMD GPUs, of x86 CPUs."""
    tag = f"v{launch.version}"
    if launch.deployment.device == "cpu":
        name = f"vllm/vllm-openai-cpu:{tag}-x86_64"
    elif launch.is_amd:
        name = f"vllm/vllm-openai-rocm:{tag}"
    else:
        name = f"vllm/vllm-openai:{tag}"
    return f"${{VLLM_IMAGE:-{name}}}"


def _one(launch: Launch) -> dict[str, Any]:
    """The service of a single node."""
    service = {"image": _image(launch), **_shared(launch)}
    service["entrypoint"] = ["vllm", "serve"]
    service["command"] = [
        _model(launch),
        *map(_literal, launch.flags),
        *map(_literal, ("--host", "0.0.0.0", "--port", "8000")),
    ]
    service["ports"] = ["${SERVE_PORT:-8000}:8000"]
    service["healthcheck"] = _healthcheck(launch, ["CMD", "python3", "-c", _HEALTHY])
    return service


def _node(launch: Launch, role: str) -> dict[str, Any]:
    """The service of one node of several: the script, in a container that shares the node's network."""
    service = {**_cluster_image(launch), "profiles": [role], **_shared(launch)}
    service["network_mode"] = "host"
    service["entrypoint"] = ["bash", f"/{SCRIPT_NAME}"]
    service["command"] = [role]
    service["volumes"] = [f"./{SCRIPT_NAME}:/{SCRIPT_NAME}:ro", *service["volumes"]]
    variables: dict[str, str | None] = {
        "SERVE_PORT": None,
        "RAY_PORT": None,
        "NODE_ADDRESS": None,
        "HEAD_ADDRESS": None,
    }
    if launch.checkpoint.model is None:
        variables["MODEL"] = None
    service["environment"] = {**service["environment"], **variables}
    if role == "head":
        service["healthcheck"] = _healthcheck(launch, ["CMD", "bash", f"/{SCRIPT_NAME}", "check"])
    return service


def _cluster_image(launch: Launch) -> dict[str, Any]:
    """The image, with Ray built in where the release's own has none."""
    if launch.deployment.version < since.NO_RAY_IN_IMAGE:
        return {"image": _image(launch)}
    recipe = f"FROM {_image(launch)}\nRUN uv pip install --system 'ray[cgraph]'\n"
    return {"image": f"vllm-ray:v{launch.version}", "build": {"dockerfile_inline": _Lines(recipe)}}


def _model(launch: Launch) -> str:
    """The model, or a variable that Compose refuses to go without."""
    if launch.checkpoint.model is not None:
        return _literal(launch.checkpoint.model)
    wanted = re.sub(r"[^A-Za-z0-9 .,/_-]", "", launch.checkpoint.wanted)
    return f"${{MODEL:?expected {wanted}}}"


def _shared(launch: Launch) -> dict[str, Any]:
    """What every service has: environment, volumes, devices, shared memory, what happens when it ends."""
    cpu = launch.deployment.device == "cpu"
    shared: dict[str, Any] = {
        # without a value: handed on from the environment of docker compose, absent where it is not set there
        "environment": {"HF_TOKEN": None, "VLLM_API_KEY": None, **_quoted(launch.environment)},
        "volumes": [f"${{HF_HOME:-~/.cache/huggingface}}:{_CACHE}"],
        # processes of one node exchange tensors through /dev/shm, which Docker keeps at 64 MiB otherwise
        "shm_size": "4gb" if cpu else "16gb",
        "init": True,
        "restart": "on-failure:3",
        "stop_grace_period": "60s",
    }
    model = launch.checkpoint.model
    if launch.checkpoint.is_local and model is not None:
        # the same path inside, so that the command is the script's
        path = _literal(model)
        shared["volumes"].append({"type": "bind", "source": path, "target": path, "read_only": True})
    return {**shared, **_devices(launch)}


def _devices(launch: Launch) -> dict[str, Any]:
    """The GPUs, or what a CPU needs to place its threads."""
    if launch.deployment.device == "cpu":
        return {"cap_add": ["SYS_NICE"]}
    if launch.is_amd:
        # no reservation: the driver's devices are handed over whole
        return {"devices": ["/dev/kfd", "/dev/dri"], "group_add": ["video"], "security_opt": ["seccomp=unconfined"]}
    wanted = {"driver": "nvidia", "count": launch.nodes.gpus, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [wanted]}}}}


def _healthcheck(launch: Launch, test: list[str]) -> dict[str, Any]:
    """Unhealthy after a minute without an answer; until the start's bound is over, no answer counts as starting."""
    return {
        "test": test,
        "interval": "15s",
        "timeout": "10s",
        "retries": 4,
        "start_period": f"{launch.start_timeout_s}s",
    }
