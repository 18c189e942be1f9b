"""``plan --base-url``: a server's numbers replace the prior, and the difference is the first correction factor."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from console import Cli

TEXT = (Path(__file__).resolve().parents[1] / "data" / "metrics" / "vllm_032.txt").read_text()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
Start = Callable[..., str]


def metrics(blocks: int, *, block_size: int = 16, memory: str = "None", override: str = "None") -> str:
    """The text of a vLLM 0.32 whose pool is this one."""
    labels = {
        "num_gpu_blocks": ("364", str(blocks)),
        "block_size": ("128", str(block_size)),
        "kv_cache_size_tokens": ("46592", str(blocks * block_size)),
        "kv_cache_memory_bytes": ("1073741824", memory),
        "num_gpu_blocks_override": ("None", override),
    }
    text = TEXT
    for name, (old, new) in labels.items():
        text = text.replace(f',{name}="{old}"', f',{name}="{new}"')
    return text


@pytest.fixture
def server() -> Iterator[Start]:
    """start(metrics, root=...) -> base URL of a server that shows them."""
    started: list[ThreadingHTTPServer] = []

    def start(text: str | None, root: str = LLAMA) -> str:
        card = {"id": "smollm2", "owned_by": "vllm", "root": root, "parent": None, "max_model_len": 8192}
        routes = {"/v1/models": json.dumps({"data": [card]}), "/version": '{"version": "0.32.0"}', "/metrics": text}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = routes.get(self.path)
                self.send_response(404 if body is None else 200)
                self.end_headers()
                self.wfile.write((body or "").encode())

            do_POST = do_GET  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

        httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        started.append(httpd)
        return f"http://127.0.0.1:{httpd.server_port}"

    yield start
    for httpd in started:
        httpd.shutdown()
        httpd.server_close()


def planned(cli: Cli, *args: str) -> dict[str, Any]:
    done = cli("plan", *args, "--json")
    assert done.code == 0, done.err
    content: dict[str, Any] = json.loads(done.out)
    return content


def test_the_servers_pool_replaces_the_prior_and_the_difference_is_a_factor(cli: Cli, server: Start) -> None:
    url = server(metrics(26_000))
    found = planned(cli, "--base-url", url, "--gpu", "h100-sxm")
    prior = planned(cli, "--model", "llama-3.1-8b", "--gpu", "h100-sxm", "--max-model-len", "8192")
    assert found["memory"]["cluster"]["num_blocks"] == 26_000
    assert found["memory"]["cluster"]["kv_pool_tokens"] == 416_000
    factor = found["corrections"]["memory_overhead"]
    assert factor["predicted"]["num_blocks"] == prior["memory"]["cluster"]["num_blocks"]
    assert factor["prior_bytes"] == prior["memory"]["per_gpu"]["overhead_bytes"]
    assert factor["measured_bytes"] == found["memory"]["per_gpu"]["overhead_bytes"]
    assert factor["value"] == factor["measured_bytes"] / factor["prior_bytes"]
    assert factor["difference_bytes"] == factor["measured_bytes"] - factor["prior_bytes"]
    taken = found["server"]["taken"]
    assert taken["max_model_len"] == found["deployment"]["max_model_len"] == 8192
    assert (taken["vllm_version"], taken["gpu_memory_utilization"], taken["dp"]) == ("0.32.0", 0.92, 1)


def test_people_read_both_pools_and_the_factor(cli: Cli, server: Start) -> None:
    done = cli("plan", "--base-url", server(metrics(26_000)), "--gpu", "h100-sxm")
    said = " ".join(done.out.split())
    assert "The server's own pool: 416,000 tokens (26,000 blocks); predicted" in said
    assert "Correction factor memory_overhead 1." in said
    assert "of each GPU, +" in said
    assert "what the server leaves beside weights and pool" in said


def test_what_is_asked_for_beats_what_the_server_shows(cli: Cli, server: Start) -> None:
    found = planned(cli, "--base-url", server(metrics(26_000)), "--gpu", "h100-sxm", "--max-model-len", "4096")
    assert found["deployment"]["max_model_len"] == 4096
    assert "max_model_len" not in found["server"]["taken"]


@pytest.mark.parametrize("label", [{"memory": str(2 << 30)}, {"override": "1024"}])
def test_a_pool_that_was_given_to_the_server_is_no_correction(cli: Cli, server: Start, label: dict[str, Any]) -> None:
    url = server(metrics(1024, **label))
    found = planned(cli, "--base-url", url, "--gpu", "h100-sxm")
    assert found["corrections"]["memory_overhead"]["value"] is None
    assert found["corrections"]["memory_overhead"]["pool_error"] == 0
    assert found["memory"]["cluster"]["num_blocks"] == 1024
    assert "exactly as predicted" in cli("plan", "--base-url", url, "--gpu", "h100-sxm").out


def test_without_a_gpu_the_servers_pool_stands_alone(cli: Cli, server: Start) -> None:
    url = server(metrics(26_000))
    assert planned(cli, "--base-url", url)["memory"]["cluster"]["num_blocks"] == 26_000
    assert "Name its --gpu" in " ".join(cli("plan", "--base-url", url).out.split())


@pytest.mark.parametrize(
    ("args", "root", "message"),
    [
        (["--gpu", "l4"], LLAMA, "exceed the"),
        (["--gpu", "h100-sxm", "--model", "qwen3-8b"], LLAMA, "exceed the"),
        (["--gpu", "h100-sxm"], "/models/mine", "model '/models/mine' of"),
        (["--gpu", "h100-sxm,h200-sxm"], LLAMA, "--base-url with several deployments"),
        (["--gpu", "h100-sxm", "--fit"], LLAMA, "--base-url with --fit"),
    ],
)
def test_what_the_server_contradicts_is_refused(
    cli: Cli, server: Start, args: list[str], root: str, message: str
) -> None:
    done = cli("plan", "--base-url", server(metrics(26_000 if "l4" in args else 30_500), root), *args)
    assert done.code == 2
    assert message in done.one_message()


def test_a_server_without_metrics_cannot_be_planned_from(cli: Cli, server: Start) -> None:
    done = cli("plan", "--base-url", server(None), "--gpu", "h100-sxm")
    assert done.code == 2
    assert "does not show its KV pool" in done.one_message()


def test_no_server_there_is_exit_5(cli: Cli) -> None:
    done = cli("plan", "--base-url", "http://127.0.0.1:9", "--gpu", "h100-sxm")
    assert done.code == 5
    done.one_message()
