"""The compose files of docker/: what Docker Compose itself makes of them, and what every service of ours must hold to."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from compose_binary import compose_config

from calibration.artifacts import compose_file, plan_launch
from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment
from harness.cli.app import app

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
FILES = {"compose.yml": {"MODEL": "org/model", "TP": "2"}, "compose.twin.yml": {}}
OURS = "vllm-harness:0.1.0"

Service = dict[str, Any]


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def services(file: str) -> dict[str, Service]:
    found: dict[str, Service] = compose_config(DOCKER / file, **FILES[file])["services"]
    return found


def test_docker_compose_takes_the_file_with_these_services(file: str, services: dict[str, Service]) -> None:
    server = "vllm" if file == "compose.yml" else "twin"
    assert set(services) == {server, "harness", "finished", "prometheus", "grafana"}


def test_a_model_is_asked_for() -> None:
    with pytest.raises(ValueError, match="required variable MODEL is missing a value: expected a model"):
        compose_config(DOCKER / "compose.yml")


def test_every_image_is_pinned_to_a_release(services: dict[str, Service]) -> None:
    for name, service in services.items():
        assert re.fullmatch(r"[a-z0-9/-]+:v?\d+\.\d+\.\d+", service["image"]), name


def test_nobody_is_root_or_can_become_it(services: dict[str, Service]) -> None:
    for name, service in services.items():
        assert re.fullmatch(r"[1-9]\d*:\d+", service["user"]), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged", False), name


def test_file_systems_are_read_only_but_for_volumes(services: dict[str, Service]) -> None:
    for name, service in services.items():
        # vLLM compiles kernels where it likes: not tried without a GPU
        assert service.get("read_only", False) == (name != "vllm"), name
        for volume in service.get("volumes", []):
            assert volume["type"] == "volume" or volume["read_only"], name


def test_ports_are_open_to_this_machine_only(services: dict[str, Service]) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}
    assert {port["target"] for port in published} == {8000, 9090, 3000}


def test_no_secret_is_written(services: dict[str, Service]) -> None:
    secret = re.compile(r"TOKEN|KEY|PASSWORD|SECRET")
    for service in services.values():
        environment = service.get("environment", {})
        assert [name for name, value in environment.items() if secret.search(name) and value is not None] == []
        assert not any("api-key" in word for word in (service["command"] or []))


def test_a_secret_of_the_environment_is_handed_on() -> None:
    services = compose_config(DOCKER / "compose.yml", **FILES["compose.yml"], VLLM_API_KEY="k", HF_TOKEN="t")[
        "services"
    ]
    assert services["vllm"]["environment"]["VLLM_API_KEY"] == services["harness"]["environment"]["VLLM_API_KEY"] == "k"
    assert services["vllm"]["environment"]["HF_TOKEN"] == "t"
    assert "HF_TOKEN" not in services["harness"]["environment"]


def test_each_has_a_health_check_that_asks_the_port_it_serves(services: dict[str, Service]) -> None:
    ports = {"vllm": 8000, "twin": 8000, "harness": 9400, "finished": 9400, "prometheus": 9090, "grafana": 3000}
    for name, service in services.items():
        # our image has a check of its own, told what to ask
        asks = (
            service["environment"]["HEALTH_URL"]
            if service["image"] == OURS
            else " ".join(service["healthcheck"]["test"])
        )
        assert f"http://127.0.0.1:{ports[name]}/" in asks, name


def test_a_service_waits_for_what_it_needs(file: str, services: dict[str, Service]) -> None:
    server = "vllm" if file == "compose.yml" else "twin"
    waits = {
        name: {other: condition["condition"] for other, condition in service.get("depends_on", {}).items()}
        for name, service in services.items()
    }
    assert waits == {
        server: {},
        "harness": {server: "service_healthy"},
        "finished": {"harness": "service_completed_successfully"},
        "prometheus": {},
        "grafana": {"prometheus": "service_healthy"},
    }


def test_what_our_image_is_told_to_run_is_what_the_command_line_takes(services: dict[str, Service]) -> None:
    group = typer.main.get_command(app)
    ours = {name: service["command"] for name, service in services.items() if service["image"] == OURS}
    assert {"harness", "finished"} < set(ours) | {""}
    for name, (word, *rest) in ours.items():
        command = group.get_command(None, word)  # type: ignore[attr-defined]
        context = command.make_context(word, list(rest))
        assert context.params, name


def test_the_run_is_written_where_the_exporter_reads_it(services: dict[str, Service]) -> None:
    out = next(word for word in services["harness"]["command"] if word.startswith("--out="))
    assert out.removeprefix("--out=") == services["finished"]["command"][1] == "/bench/results/first"
    mounts = {name: services[name]["volumes"][0] for name in ("harness", "finished")}
    assert mounts["harness"]["source"] == mounts["finished"]["source"] == "results"
    assert mounts["harness"]["target"] == mounts["finished"]["target"] == "/bench/results"
    assert "read_only" not in mounts["harness"]
    assert mounts["finished"]["read_only"]


def test_prometheus_finds_each_target_by_its_name(services: dict[str, Service]) -> None:
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    targets = {job["static_configs"][0]["targets"][0] for job in config["scrape_configs"]}
    known = {
        alias
        for name, service in services.items()
        for alias in (name, *((service["networks"]["default"] or {}).get("aliases", [])))
    }
    assert targets == {"vllm:8000", "harness:9400", "finished:9400"}
    assert {target.split(":")[0] for target in targets} <= known
    mounts = {volume["target"] for volume in services["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in ("prometheus.yml", *config["rule_files"])} <= mounts


def test_what_is_mounted_from_here_is_here(services: dict[str, Service]) -> None:
    binds = [v["source"] for s in services.values() for v in s.get("volumes", []) if v["type"] == "bind"]
    assert binds
    assert [path for path in binds if not Path(path).exists()] == []
    targets = {volume["target"] for volume in services["grafana"]["volumes"]}
    provider = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/vllm-harness.yml").read_text())
    assert provider["providers"][0]["options"]["path"] in targets


def test_vllm_is_started_as_plan_writes_it() -> None:
    """The same release, entry point, devices and shared memory as `plan --write`."""
    deployment = resolve_deployment(find_model("llama-3.1-8b"), gpu=find_gpu("h100-sxm"), tp=2)
    planned = yaml.safe_load(compose_file(plan_launch(deployment, "org/model")))["services"]["vllm"]
    here = yaml.safe_load((DOCKER / "compose.yml").read_text())["services"]["vllm"]
    for key in ("image", "entrypoint", "shm_size", "init", "restart", "stop_grace_period"):
        assert here[key] == planned[key], key
    assert here["healthcheck"]["test"] == planned["healthcheck"]["test"]
    found = compose_config(DOCKER / "compose.yml", **FILES["compose.yml"])["services"]["vllm"]
    assert found["deploy"]["resources"] == planned["deploy"]["resources"]
    assert found["command"][0] == planned["command"][0] == "org/model"
    assert shlex.join(found["command"]).endswith("--host=0.0.0.0 --port=8000")
