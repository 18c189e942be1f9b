"""The launch script, run by bash against a vLLM and a Ray that only write down what they are called with."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.artifacts import SCRIPT_NAME, launch_script, plan_launch
from calibration.catalog import find_gpu, find_model
from calibration.deployment import resolve_deployment

#: names that a shell would act on if any of them stood unquoted
NASTY = (
    "/models/a b",
    "/m/$(touch canary)",
    "/m/`touch canary`",
    "/m/'; touch canary; '",
    '/m/"; touch canary; "',
    "/m/$HOME/${PATH}/$$",
    "/m/x; touch canary",
    "/m/x && touch canary #",
    "/m/*?[a-z]{1,2}~\\",
    "/m/!!/^a^b",
    "/modèles/模型",
)

#: vllm: writes its arguments and environment down, then does as FAKE_VLLM says
FAKE_VLLM = f"""#!{sys.executable}
import json, os, signal, sys, time
def down(what):
    with open("calls.jsonl", "a") as out:
        out.write(json.dumps(what) + "\\n")
down({{"vllm": sys.argv[1:], "env": {{k: os.environ.get(k) for k in ("HF_TOKEN", "VLLM_CPU_KVCACHE_SPACE", "VLLM_HOST_IP")}}}})
def stop(number, frame):
    down({{"signal": number}})
    raise SystemExit(0)
signal.signal(signal.SIGTERM, stop)
does = os.environ["FAKE_VLLM"]
if does.isdigit():
    raise SystemExit(int(does))
if does == "serve":
    import http.server
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
        def log_message(self, *args):
            pass
    args = sys.argv
    http.server.HTTPServer(("127.0.0.1", int(args[args.index("--port") + 1])), Answer).serve_forever()
time.sleep(60)
"""

FAKE_RAY = f"""#!{sys.executable}
import json, os, sys
with open("calls.jsonl", "a") as out:
    out.write(json.dumps({{"ray": sys.argv[1:]}}) + "\\n")
"""

#: the module ray, of which the script asks the cluster's GPUs
FAKE_RAY_MODULE = """import os
def init(**options):
    assert options["address"] == "auto"
def cluster_resources():
    return {"CPU": 4.0, "GPU": float(os.environ["FAKE_GPUS"])}
"""


@dataclass(frozen=True)
class Ended:
    code: int
    err: str
    calls: list[dict[str, Any]]


@dataclass(frozen=True)
class Node:
    """A folder with the script, where ``vllm`` and ``ray`` are the fakes."""

    folder: Path
    port: int

    def write(self, text: str) -> None:
        (self.folder / SCRIPT_NAME).write_text(text, encoding="utf-8")

    def start(self, *args: str, does: str, **environment: str) -> subprocess.Popen[str]:
        base = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(self.folder / "lib")}
        return subprocess.Popen(
            ["bash", SCRIPT_NAME, *args],
            cwd=self.folder,
            env={**base, "SERVE_PORT": str(self.port), "FAKE_VLLM": does, "FAKE_GPUS": "0", **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, process: subprocess.Popen[str]) -> Ended:
        _, err = process.communicate(timeout=30)
        return Ended(process.returncode, err, self.calls())

    def run(self, *args: str, does: str = "0", **environment: str) -> Ended:
        return self.end(self.start(*args, does=does, **environment))

    def calls(self) -> list[dict[str, Any]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def node(tmp_path: Path) -> Node:
    for name, text in (("bin/vllm", FAKE_VLLM), ("bin/ray", FAKE_RAY), ("lib/ray.py", FAKE_RAY_MODULE)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    return Node(tmp_path, port)


def script(
    name: str | None = "org/model", model: str = "llama-3.1-8b", gpu: str | None = "h100-sxm", **asked: Any
) -> str:
    found = None if gpu is None else find_gpu(gpu)
    return launch_script(plan_launch(resolve_deployment(find_model(model), gpu=found, **asked), name))


def cluster() -> str:
    return script("org/model", "deepseek-v3", "h200-sxm", tp=8, pp=2)


VARIANTS: dict[str, Callable[[], str]] = {
    "one node": lambda: script(tp=2, max_model_len=8192, kv="fp8_e5m2"),
    "no flag": script,
    "no checkpoint": lambda: script(None, weights="int4"),
    "CPU": lambda: script(gpu=None, device="cpu", kv_cache_memory_bytes=(1 << 30) + 1),
    "CPU, whole GiB": lambda: script(gpu=None, device="cpu", kv_cache_memory_bytes=1 << 30),
    "stages over nodes": cluster,
    "replicas over nodes": lambda: script("m", "qwen3-30b-a3b", tp=2, dp=8, expert_parallel=True),
    "old": lambda: script(vllm_version="0.9.2 (fork)\ntouch canary"),
    "every nasty name": partial(script, "".join(NASTY)),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_bash_takes_every_script(variant: str) -> None:
    done = subprocess.run(["bash", "-n"], input=VARIANTS[variant](), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is not installed (Debian package shellcheck)"
)
def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    files = [str(tmp_path / f"{name}.sh") for name in VARIANTS]
    for path, variant in zip(files, VARIANTS.values(), strict=True):
        Path(path).write_text(variant(), encoding="utf-8")
    done = subprocess.run(["shellcheck", *files], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1).filter(lambda name: name[0] != "-"))
def test_a_name_stays_in_its_quotes(name: str) -> None:
    lines = script(name).split("\n")
    start = lines.index("set -euo pipefail")
    assert all(line.startswith("#") for line in lines[:start])
    assert shlex.split(lines[start + 2]) == [f"MODEL={name}"]


@pytest.mark.parametrize("name", NASTY)
def test_a_name_reaches_vllm_as_it_is_and_runs_nothing(name: str, node: Node) -> None:
    node.write(script(name, tp=2, max_model_len=8192))
    done = node.run("serve", "--served-model-name", name)
    flags = ["--tensor-parallel-size", "2", "--max-model-len", "8192", "--host", "0.0.0.0", "--port", str(node.port)]
    assert [call["vllm"] for call in done.calls] == [["serve", name, *flags, "--served-model-name", name]]
    assert not [*node.folder.rglob("canary")]


def test_a_usage_error_of_vllm_ends_the_script_with_its_code_at_once(node: Node) -> None:
    node.write(script())
    done = node.run(does="2")
    assert done.code == 2
    assert "vLLM ended with exit code 2 before it was healthy" in done.err
    assert len(done.calls) == 1


def test_the_script_waits_for_health_stays_and_hands_a_signal_on(node: Node) -> None:
    node.write(script())
    assert node.run("check").code == 1
    process = node.start("--enforce-eager", does="serve", VLLM_API_KEY="secret")
    assert process.stderr is not None
    assert process.stderr.readline() == f"run_vllm_cluster: healthy: 127.0.0.1 port {node.port}, /health\n"
    assert node.run("check").code == 0
    again = node.run()
    assert (again.code, len(again.calls)) == (2, 1)
    assert "answers on" in again.err
    process.send_signal(signal.SIGTERM)
    done = node.end(process)
    assert (done.code, done.calls[1:]) == (0, [{"signal": signal.SIGTERM}])
    assert done.calls[0]["vllm"][-1] == "--enforce-eager"


def test_a_server_that_does_not_become_healthy_is_stopped_after_the_bound(node: Node) -> None:
    node.write(script())
    started = time.monotonic()
    done = node.run(does="hang", START_TIMEOUT_S="1")
    assert done.code == 1
    assert "not healthy after 1 s, stopped" in done.err
    assert done.calls[-1] == {"signal": signal.SIGTERM}
    assert time.monotonic() - started < 15


def test_an_open_server_without_a_key_is_warned_of(node: Node) -> None:
    node.write(script())
    assert "whoever reaches port" in node.run().err
    assert "whoever reaches port" not in node.run(VLLM_API_KEY="secret").err
    assert "whoever reaches port" not in node.run(SERVE_HOST="127.0.0.1").err


def test_tokens_pass_from_the_environment_and_stand_in_no_file(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    node.write(script())
    assert "hf_secret" not in script()
    assert node.run(HF_TOKEN="hf_secret").calls[0]["env"]["HF_TOKEN"] == "hf_secret"


def test_a_checkpoint_only_the_operator_knows_is_asked_for(node: Node) -> None:
    node.write(script(None, weights="int4"))
    wanted = "expected a checkpoint of llama-3.1-8b with int4 weights"
    for name in ("", "--swap-space"):
        refused = node.run(MODEL=name)
        assert (refused.code, refused.calls) == (2, [])
        assert refused.err == f"run_vllm_cluster: MODEL = '{name}', {wanted}\n"
    assert node.run(MODEL="org/m-$(touch canary)").calls[0]["vllm"][:2] == ["serve", "org/m-$(touch canary)"]
    assert not (node.folder / "canary").exists()


@pytest.mark.parametrize(
    "changed", [{"SERVE_PORT": "x[$(touch canary)]"}, {"SERVE_PORT": "0"}, {"START_TIMEOUT_S": "x[$(touch canary)]"}]
)
def test_numbers_of_the_environment_are_numbers(changed: dict[str, str], node: Node) -> None:
    node.write(script())
    refused = node.run(**changed)
    assert (refused.code, refused.calls) == (2, [])
    assert "expected" in refused.err
    assert not (node.folder / "canary").exists()


def test_a_wrong_word_is_refused(node: Node) -> None:
    node.write(script())
    assert node.run("start").err == "run_vllm_cluster: start: expected serve or check\n"
    node.write(cluster())
    assert node.run().err == "run_vllm_cluster: expected head, worker or check\n"


def test_no_vllm_on_the_path_is_said(node: Node) -> None:
    node.write(script(vllm_version="0.20.0"))
    (node.folder / "bin" / "vllm").unlink()
    if shutil.which("vllm") is not None:
        pytest.skip("a vllm is on PATH")
    refused = node.run()
    assert refused.code == 2
    assert "install vllm==0.20.0" in refused.err


def test_the_pool_of_a_cpu_is_the_plans_whatever_the_environment_says(node: Node) -> None:
    node.write(script(gpu=None, device="cpu", kv_cache_memory_bytes=3 << 30))
    assert node.run(VLLM_CPU_KVCACHE_SPACE="9").calls[-1]["env"]["VLLM_CPU_KVCACHE_SPACE"] == "3"
    node.write(script(gpu=None, device="cpu", kv_cache_memory_bytes=12345678))
    done = node.run(VLLM_CPU_KVCACHE_SPACE="9")
    assert done.calls[-1]["env"]["VLLM_CPU_KVCACHE_SPACE"] is None
    assert done.calls[-1]["vllm"][2:4] == ["--kv-cache-memory-bytes", "12345678"]


def test_the_head_starts_ray_waits_for_every_gpu_and_serves(node: Node) -> None:
    node.write(cluster())
    done = node.run("head", FAKE_GPUS="16", NODE_ADDRESS="10.0.0.1")
    assert done.code == 0
    start, serve, stop = done.calls
    assert start["ray"] == ["start", "--head", "--port", "6379", "--node-ip-address", "10.0.0.1"]
    split = ["--tensor-parallel-size", "8", "--pipeline-parallel-size", "2", "--distributed-executor-backend", "ray"]
    assert serve["vllm"][:8] == ["serve", "org/model", *split]
    assert serve["env"]["VLLM_HOST_IP"] == "10.0.0.1"
    assert stop["ray"] == ["stop"]


@pytest.mark.parametrize("found", ["8", "not a number"])
def test_the_head_gives_up_on_workers_that_do_not_come(found: str, node: Node) -> None:
    node.write(cluster())
    done = node.run("head", FAKE_GPUS=found, START_TIMEOUT_S="1")
    assert done.code == 1
    assert f"Ray has {found if found.isdigit() else 0} of 16 GPUs after 1 s" in done.err
    assert [call["ray"][0] for call in done.calls] == ["start", "stop"]


def test_a_worker_joins_the_head_it_is_given(node: Node) -> None:
    node.write(cluster())
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        port = str(head.getsockname()[1])
        joined = ["start", "--address", f"127.0.0.1:{port}", "--block"]
        assert node.run("worker", "127.0.0.1", RAY_PORT=port).calls == [{"ray": joined}]
        assert node.run("worker", HEAD_ADDRESS="127.0.0.1", RAY_PORT=port).calls[1:] == [{"ray": joined}]
    alone = node.run("worker", "127.0.0.1", RAY_PORT=port, START_TIMEOUT_S="1")
    assert (alone.code, len(alone.calls)) == (1, 2)
    assert f"no Ray on 127.0.0.1:{port} after 1 s" in alone.err


@pytest.mark.parametrize("address", ["", "-x", "a b", "h/../x", "x$(touch canary)"])
def test_an_address_that_is_none_is_refused(address: str, node: Node) -> None:
    node.write(cluster())
    refused = node.run("worker", address)
    assert (refused.code, refused.calls) == (2, [])
    assert "expected the address of the first node" in refused.err
