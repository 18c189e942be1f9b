"""``probe`` and ``metrics`` from the command line: one document, one message, the contract's exit code."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from observe_servers import DATA, metrics_text, unused_port

from harness.cli.app import main

Routes = Mapping[str, tuple[int, str]]
MODELS = json.dumps(
    {"data": [{"id": "smollm2", "owned_by": "vllm", "root": "/m", "parent": None, "max_model_len": 2048}]}
)
VLLM: Routes = {
    "/v1/models": (200, MODELS),
    "/version": (200, '{"version":"0.32.0"}'),
    "/metrics": (200, metrics_text("vllm_032")),
    "/tokenize": (200, '{"count":3}'),
}


@pytest.fixture
def server() -> Iterator[Callable[[Routes], str]]:
    """start(routes) -> base URL, served from a thread: the command runs an event loop of its own."""
    started: list[ThreadingHTTPServer] = []

    def start(routes: Routes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.headers.get("Content-Length"):
                    self.rfile.read(int(self.headers["Content-Length"]))
                status, body = routes.get(self.path.split("?")[0], (404, ""))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

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


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """run("probe", ...) -> code, out, err of the console script."""
    for name in ("OPENAI_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args: str) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["vllm-harness", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        streams = capsys.readouterr()
        return SimpleNamespace(code=ended.value.code or 0, out=streams.out, err=streams.err)

    return call


@pytest.mark.parametrize("name", ["vllm_v0", "vllm_v1_09", "vllm_032"])
def test_metrics_of_a_file_are_one_json_document(run: Callable[..., SimpleNamespace], name: str) -> None:
    expected = json.loads((DATA / "metrics" / "expected.json").read_text())[f"{name}.txt"]
    got = run("metrics", str(DATA / "metrics" / f"{name}.txt"), "--json")
    document = json.loads(got.out)
    assert (got.code, got.err) == (0, "")
    assert {key: document[key] for key in expected} == expected


def test_metrics_of_a_server_are_read_below_its_root(
    run: Callable[..., SimpleNamespace], server: Callable[[Routes], str]
) -> None:
    got = run("metrics", server(VLLM) + "/v1", "--json", "--model", "smollm2")
    assert (got.code, json.loads(got.out)["running"]) == (0, 15)


def test_metrics_of_standard_input(run: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(metrics_text("vllm_v0").encode())))
    got = run("metrics", "-", "--json")
    assert json.loads(got.out)["preemptions"] == 3


def test_metrics_for_people_are_a_table_of_what_is_there(run: Callable[..., SimpleNamespace]) -> None:
    got = run("metrics", str(DATA / "metrics" / "vllm_032.txt"))
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip() for line in got.out.splitlines() if line.count("│") == 3
    }
    assert rows["kv_cache_size_tokens"] == "46,592"
    assert rows["kv_cache_usage"] == "0.0413223"
    assert rows["cache_config.enable_prefix_caching"] == "yes"
    assert rows["prompt_tokens_by_source.local_compute"] == "5,089"
    assert "swapped" not in rows


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("no-such-file.txt", "No such file"),
        (str(DATA), "Is a directory"),
        (str(DATA / "metrics" / "expected.json"), "JSON, not metrics"),
    ],
)
def test_a_file_that_is_no_metrics_text_is_exit_2(
    run: Callable[..., SimpleNamespace], argument: str, says: str
) -> None:
    got = run("metrics", argument)
    assert (got.code, got.out) == (2, "")
    assert says in got.err
    assert argument in got.err


def test_a_model_that_is_not_in_the_file_is_exit_2(run: Callable[..., SimpleNamespace]) -> None:
    got = run("metrics", str(DATA / "metrics" / "vllm_032.txt"), "--model", "gpt-5")
    assert got.code == 2
    assert "there are: smollm2" in got.err


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((404, ""), "HTTP 404"),
        ((401, ""), "OPENAI_API_KEY"),
        ((200, "<html><title>Login</title>"), "'Login'"),
        ((200, 'vllm:num_requests_running{model_name="other"} 1\n'), "there are: other"),
    ],
)
def test_a_server_whose_metrics_cannot_be_used_is_exit_5(
    run: Callable[..., SimpleNamespace], server: Callable[[Routes], str], answer: tuple[int, str], says: str
) -> None:
    got = run("metrics", server({"/metrics": answer}), "--model", "smollm2", "--json")
    assert (got.code, got.out) == (5, "")
    assert says in got.err


def test_probe_is_one_json_document(run: Callable[..., SimpleNamespace], server: Callable[[Routes], str]) -> None:
    base = server(VLLM)
    got = run("probe", "--base-url", base, "--json")
    document = json.loads(got.out)
    assert (got.code, got.err) == (0, "")
    assert (document["model"], document["vllm_version"], document["usable_pool_tokens"]) == ("smollm2", "0.32.0", 46464)
    assert [m["what"].split(" ")[0] for m in document["missing"]] == ["max_num_seqs"]


def test_probe_for_people_says_what_is_there_and_what_is_not(
    run: Callable[..., SimpleNamespace], server: Callable[[Routes], str]
) -> None:
    got = run("probe", "--base-url", server(VLLM))
    lines = [" ".join(line.split()) for line in got.out.splitlines()]
    assert "model smollm2" in lines
    assert "max_model_len 2,048 tokens" in lines
    assert "usable 46,464 tokens" in lines
    assert "blocks 364 of 128 tokens, 363 usable" in lines
    assert "Not shown by this server:" in lines
    assert any(line.startswith("max_num_seqs (shown only by /server_info") for line in lines)


def test_probe_of_a_server_without_metrics_still_answers(
    run: Callable[..., SimpleNamespace], server: Callable[[Routes], str]
) -> None:
    got = run("probe", "--base-url", server({"/v1/models": (200, MODELS)}))
    assert got.code == 0
    assert "KV pool" not in got.out
    assert "the server's metrics" in got.out


def test_the_key_of_the_environment_is_sent_and_the_option_wins(
    run: Callable[..., SimpleNamespace], server: Callable[[Routes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setattr("harness.http_get.bearer", lambda key: sent.append(key) or {})
    base = server(VLLM)
    run("probe", "--base-url", base)
    monkeypatch.setenv("VLLM_API_KEY", "second")
    run("probe", "--base-url", base)
    monkeypatch.setenv("OPENAI_API_KEY", "first")
    run("probe", "--base-url", base)
    run("probe", "--base-url", base, "--api-key", "option")
    assert sent == [None, "second", "first", "option"]


def test_a_key_is_never_shown(
    run: Callable[..., SimpleNamespace], server: Callable[[Routes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-s3cret")
    for got in (
        run("probe", "--help"),
        run("probe", "--base-url", server(VLLM), "--json"),
        run("probe", "--base-url", server({"/v1/models": (401, "")})),
        run("metrics", server({"/metrics": (401, "")})),
    ):
        assert "s3cret" not in got.out + got.err


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("http://127.0.0.1:{port}", 5, "refused the connection"),
        ("http://no.such.host.invalid", 5, "unknown host no.such.host.invalid"),
        ("localhost:8000", 2, "expected http://HOST:PORT"),
    ],
)
def test_a_server_that_is_not_there_is_one_clear_message(
    run: Callable[..., SimpleNamespace], url: str, code: int, says: str
) -> None:
    got = run("probe", "--base-url", url.format(port=unused_port()))
    assert (got.code, got.out) == (code, "")
    assert says in got.err
    assert len(got.err.splitlines()) == 2


def test_a_wrong_model_names_those_that_are_there(
    run: Callable[..., SimpleNamespace], server: Callable[[Routes], str]
) -> None:
    got = run("probe", "--base-url", server(VLLM), "--model", "gpt-5")
    assert got.code == 5
    assert "there are: smollm2" in got.err
