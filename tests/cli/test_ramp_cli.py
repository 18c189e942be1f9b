"""Bad input to ``ramp``: one clear message each, the contract's exit code, nothing left behind, never a traceback."""

from __future__ import annotations

import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from console import Cli, only_document, records_of, stages_of
from fault_thread import FaultThread

from harness.measure import summary
from harness.selftest import core_count, keep
from harness.store import RunWriter, read_run

TLS = Path(__file__).parent.parent / "data" / "tls"
ONE = ("--users", "1", "--requests", "1", "--output-tokens", "3", "--prompt-tokens", "8")


@pytest.fixture(autouse=True)
def any_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may keep this machine busy: the verdict on the client has its own (tests/measure/test_health.py)."""
    monkeypatch.setattr(summary, "client_verdict", lambda readings: (True, []))


def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# --- the server cannot be reached or used: 5


def test_an_unknown_host_is_named(cli: Cli, tmp_path: Path) -> None:
    done = cli("ramp", "--base-url", "http://no-such-host.invalid:8000", *ONE, "--out", tmp_path / "run")
    assert done.code == 5
    assert "unknown host no-such-host.invalid:8000" in done.one_message()
    assert not (tmp_path / "run").exists()


def test_a_refused_connection_says_so(cli: Cli, tmp_path: Path) -> None:
    port = unused_port()
    done = cli("ramp", "--base-url", f"http://127.0.0.1:{port}", *ONE, "--out", tmp_path / "run")
    assert (done.code, done.out) == (5, "")
    assert f"127.0.0.1:{port} refused the connection" in done.one_message()
    assert not (tmp_path / "run").exists()


def test_tls_against_a_plain_port_is_said(cli: Cli) -> None:
    """uvicorn answers a TLS hello as it answers any bytes that are no HTTP: with a plain 400."""

    class Plain(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\nInvalid HTTP request received.")

    with socketserver.TCPServer(("127.0.0.1", 0), Plain) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        done = cli("ramp", "--base-url", f"https://127.0.0.1:{server.server_address[1]}", *ONE)
        server.shutdown()
        thread.join()
    assert done.code == 5
    assert "TLS with 127.0.0.1" in done.one_message()
    assert "does the server speak http:// there?" in done.one_message()


def test_tls_against_a_plain_port_that_waits_for_a_line_is_said_too(cli: Cli, faults: FaultThread) -> None:
    done = cli("ramp", "--base-url", faults.base_url.replace("http:", "https:"), *ONE)
    assert done.code == 5
    assert "or a server that speaks http:// there" in done.one_message()


@pytest.fixture
def https() -> Iterator[str]:
    """A server whose certificate nobody signed."""

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that hangs up on the certificate is what the test is about."""

    httpd = Quiet(("127.0.0.1", 0), BaseHTTPRequestHandler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "localhost.crt", TLS / "localhost.key")
    httpd.socket = context.wrap_socket(httpd.socket, server_side=True)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_a_certificate_nobody_signed_is_refused_and_the_way_out_named(cli: Cli, https: str) -> None:
    done = cli("ramp", "--base-url", https, *ONE)
    assert done.code == 5
    assert "certificate" in done.one_message()
    assert "--insecure" in done.one_message()


def test_a_missing_key_and_a_wrong_key_are_told_apart(cli: Cli, tmp_path: Path) -> None:
    with FaultThread(api_key="right") as guarded:
        target = ("ramp", "--base-url", guarded.base_url, "--model", "normal", *ONE, "--no-scrape")
        without = cli(*target, "--out", tmp_path / "a")
        wrong = cli(*target, "--api-key", "wr0ng", "--out", tmp_path / "b")
        right = cli(*target, "--api-key", "right", "--out", tmp_path / "c", "--quiet")
    assert (without.code, wrong.code, right.code) == (5, 5, 0)
    assert "wants an API key" in without.one_message()
    assert "OPENAI_API_KEY" in without.one_message()
    assert "refuses the API key" in wrong.one_message()
    assert "wr0ng" not in wrong.err
    assert "right" not in (tmp_path / "c" / "run.json").read_text()
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


def test_a_wrong_model_name_says_which_there_are(cli: Cli, tmp_path: Path) -> None:
    with FaultThread(models={"llama": "normal", "qwen": "normal"}) as served:
        done = cli("ramp", "--base-url", served.base_url, "--model", "lama", *ONE, "--out", tmp_path / "run")
    assert done.code == 5
    assert "no model 'lama'" in done.one_message()
    assert "llama, qwen" in done.one_message()
    assert not (tmp_path / "run").exists()


def test_a_server_that_refuses_every_request_ends_the_run(cli: Cli, faults: FaultThread, tmp_path: Path) -> None:
    """/v1/models answers, the completions do not: seen only once the load runs."""
    done = cli(
        *("ramp", "--base-url", faults.base_url, "--model", "unauthorized", "--users", "2", "--duration", "60s"),
        *("--no-scrape", "--out", tmp_path / "run"),
    )
    assert done.code == 5
    assert "refuses every request (http_401): Unauthorized" in done.one_message()
    records = records_of(tmp_path / "run")
    assert 2 <= len(records) <= 10
    assert {record.failure for record in records} <= {"http_401", None}
    assert stages_of(tmp_path / "run")[0]["requests"]["ok"] == 0


# --- usage: 2


def test_a_request_longer_than_the_context_is_refused_before_it_is_sent(
    cli: Cli, faults: FaultThread, tmp_path: Path
) -> None:
    done = cli(
        *("ramp", "--base-url", faults.base_url, "--model", "normal", "--users", "1", "--requests", "1"),
        *("--prompt-tokens", "99990", "--output-tokens", "11", "--out", tmp_path / "run"),
    )
    assert done.code == 2
    assert "99990 prompt + 11 output tokens exceed the server's max_model_len of 100000" in done.one_message()
    assert not (tmp_path / "run").exists()
    assert faults.server.prompts == []


def test_answers_cut_short_in_silence_are_said(cli: Cli, tmp_path: Path) -> None:
    """vLLM 0.32 clamps max_tokens to the context without an error."""
    with FaultThread(models={"clamped": "normal:ttft=0.3,clamp=3"}) as served:
        done = cli(
            *("ramp", "--base-url", served.base_url, "--users", "1", "--requests", "2", "--model", "clamped"),
            *("--output-tokens", "9", "--no-scrape", "--out", tmp_path / "run", "--json"),
        )
    assert done.code == 0
    assert [record.output_tokens for record in records_of(tmp_path / "run")] == [3, 3]
    assert any(
        "2 of 2 good answers are shorter than asked" in r for r in only_document(done.out)["stages"][0]["reasons"]
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: x\nstages:\n- {usres: 4, duration: 5s}\n", ["stages.0.usres", "did you mean 'users'?"]),
        ("name: x\nworkloads: {}\nstages:\n- {users: 4, duration: 5s}\n", ["unknown key 'workloads'", "'workload'"]),
        ("name: x\nstages:\n- {users: 0, duration: 5s}\n", ["stages.0.users", "greater than or equal to 1, not 0"]),
        ("name: x\nstages:\n- {users: 4, duration: fast}\n", ["stages.0.duration", "expected a duration", "'fast'"]),
        ("name: x\nstages:\n- {users: 4}\n", ["stages.0", "needs duration or requests"]),
        ("name: x\nstages:\n- {users: 4, duration: 5s}\nlimits: {error_rate: 7}\n", ["limits.error_rate", "not 7"]),
        (
            "name: x\nworkload: {endpoint: embeddings}\nstages:\n- {users: 4, duration: 5s}\n",
            ["workload.endpoint", "'completions' or 'chat'", "'embeddings'"],
        ),
        ("stages: [}\n", ["profile.yaml:1: not YAML"]),
        ("- 1\n", ["expected a mapping with name, workload and stages"]),
    ],
)
def test_a_bad_profile_is_told_by_file_key_and_what_was_expected(
    cli: Cli, tmp_path: Path, text: str, says: list[str]
) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    done = cli("ramp", "--base-url", "http://127.0.0.1:1", "--profile", path, "--out", tmp_path / "run")
    assert (done.code, done.out) == (2, "")
    message = done.one_message()
    assert str(path) in message
    assert [part for part in says if part not in message] == []


def test_an_unknown_profile_says_which_is_near(cli: Cli) -> None:
    done = cli("ramp", "--base-url", "http://127.0.0.1:1", "--profile", "smokey")
    assert done.code == 2
    assert "did you mean 'smoke'?" in done.one_message()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "no load was given"),
        (("--users", "4,x"), "--users: expected whole numbers above 0, separated by commas, not '4,x'"),
        (("--users", "0"), "--users"),
        (("--users", "1", "--requests", "0"), "requests"),
        (("--users", "1", "--duration", "soon"), "expected a duration"),
        (("--users", "1", "--prompt-tokens", "0"), "prompt_tokens"),
        (("--users", "1", "--endpoint", "embeddings"), "endpoint"),
        (("--users", "1", "--stall-timeout", "0"), "--stall-timeout: expected more than 0"),
        (("--users", "1", "--processes", "none"), "--processes: expected auto or a number"),
        (("--users", "1", "--loop", "trio"), "--loop: expected auto or uvloop or asyncio"),
        (("--users", "1", "--slo", "ttft:nan"), "--slo: expected"),
        (("--users", "1", "--slo", "speed:5"), "--slo: expected"),
        (("--users", "1", "--seed", "-1"), "--seed: expected 0 or more"),
        (("--request-rate", "nan"), "request_rate"),
        (("--request-rate", "5", "--users", "1,2"), "--users: with --request-rate it is one cap"),
        (("--users", "1", "--profile", "smoke"), "--users and --profile both say"),
        (("--users", "1", "--prometheus-port", "99999"), "--prometheus-port: expected"),
    ],
)
def test_an_impossible_option_is_told_by_name(cli: Cli, tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    done = cli("ramp", "--base-url", "http://127.0.0.1:1", *options, "--out", tmp_path / "run")
    assert (done.code, done.out) == (2, "")
    assert says in done.one_message()


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://localhost", "http://", "http://user:pw@localhost", "http://h:x"]
)
def test_a_base_url_that_is_none_is_refused(cli: Cli, url: str) -> None:
    done = cli("ramp", "--base-url", url, *ONE)
    assert done.code == 2
    assert "--base-url" in done.one_message()
    assert "pw" not in done.err


def test_a_folder_that_holds_another_run_is_left_alone(cli: Cli, faults: FaultThread, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    writer.write_run({"of": "another"})
    writer.close()
    before = (tmp_path / "run" / "run.json").read_bytes()
    done = cli("ramp", "--base-url", faults.base_url, "--model", "normal", *ONE, "--out", tmp_path / "run")
    assert done.code == 2
    assert f"{tmp_path / 'run'} holds another run" in done.one_message()
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert faults.server.prompts == []


@pytest.mark.parametrize("kind", ["file", "below a file", "proc"])
def test_a_folder_that_cannot_be_written_to_stops_the_run_before_it_starts(
    cli: Cli, faults: FaultThread, tmp_path: Path, kind: str
) -> None:
    """Root may write anywhere but into a file's place and the kernel's own tree."""
    (tmp_path / "file").write_text("kept")
    out = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "run", "proc": Path("/proc/self/run")}[kind]
    done = cli("ramp", "--base-url", faults.base_url, "--model", "normal", *ONE, "--out", out)
    assert done.code in (1, 2)
    assert str(out) in done.one_message()
    assert (tmp_path / "file").read_text() == "kept"
    assert faults.server.prompts == []


def test_a_prometheus_port_in_use_is_said(cli: Cli, faults: FaultThread, tmp_path: Path) -> None:
    done = cli(
        *("ramp", "--base-url", faults.base_url, "--model", "normal", *ONE, "--out", tmp_path / "run"),
        *("--prometheus-port", str(faults.server.port)),
    )
    assert done.code == 2
    assert str(faults.server.port) in done.one_message()
    assert not (tmp_path / "run").exists()


# --- invalid or vacuous: 4


def test_a_run_without_a_token_is_vacuous(cli: Cli, tmp_path: Path) -> None:
    with FaultThread(models={"mute": "no_json:after=0"}) as served:
        done = cli(
            *("ramp", "--base-url", served.base_url, "--model", "mute", "--users", "1", "--requests", "2"),
            *("--no-scrape", "--out", tmp_path / "run", "--json"),
        )
    assert done.code == 4
    assert "no output token was received" in done.one_message()
    assert only_document(done.out)["stages"][0]["requests"]["by_failure"] == {"protocol": 2}
    assert len(records_of(tmp_path / "run")) == 2


# --- what is printed where


def test_json_is_one_document_and_nothing_else(cli: Cli, tmp_path: Path) -> None:
    with FaultThread(models={"slow": "normal:ttft=0.3"}) as served:
        done = cli(
            *("ramp", "--base-url", served.base_url, "--model", "slow", "--users", "1,2", "--requests", "4"),
            *("--output-tokens", "3", "--no-scrape", "--out", tmp_path / "run", "--json"),
        )
    document = only_document(done.out)
    assert (done.code, done.err) == (0, ""), document["stages"]
    assert document["schema_version"] == 1
    assert document["out"] == str(tmp_path / "run")
    assert document["stages"] == stages_of(tmp_path / "run")
    assert [stage["users"] for stage in document["stages"]] == [1, 2]


def test_quiet_says_nothing(cli: Cli, faults: FaultThread, tmp_path: Path) -> None:
    done = cli(
        *("ramp", "--base-url", faults.base_url, "--model", "normal", *ONE),
        *("--no-scrape", "--out", tmp_path / "run", "--quiet"),
    )
    assert (done.code, done.out, done.err) == (0, "", "")
    assert len(records_of(tmp_path / "run")) == 1


def test_quiet_still_says_what_went_wrong(cli: Cli, tmp_path: Path) -> None:
    done = cli("ramp", "--base-url", f"http://127.0.0.1:{unused_port()}", *ONE, "--quiet")
    assert (done.code, done.out) == (5, "")
    assert "refused" in done.one_message()


def test_people_get_a_table_on_stdout_and_progress_on_stderr(cli: Cli, faults: FaultThread, tmp_path: Path) -> None:
    done = cli(
        *("ramp", "--base-url", faults.base_url, "--model", "normal", *ONE),
        *("--no-scrape", "--out", tmp_path / "run"),
    )
    assert done.code == 0
    assert "TTFT ms" in done.out
    assert f"written to {tmp_path / 'run'}" in done.out
    assert "1 stages against normal" in done.err
    assert "TTFT ms" not in done.err


# --- what a selftest said of this machine


def selftested(streams: int, tokens_per_s: float) -> dict[str, object]:
    return {
        "schema_version": 1,
        "cores": core_count(),
        "when": "2026-11-30T12:00:00+00:00",
        "processes": 1,
        "trusted": {"streams": streams, "tokens_per_s": tokens_per_s},
    }


def test_a_run_quotes_the_selftest_and_says_where_it_goes_beyond(
    cli: Cli, faults: FaultThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = ("ramp", "--base-url", faults.base_url, "--model", "normal", "--users", "1,4", "--requests", "8")
    cli(*target, "--no-scrape", "--output-tokens", "20", "--quiet", "--out", tmp_path / "a")
    assert read_run(tmp_path / "a").run["selftest"] is None
    keep(selftested(2, 1e6))
    cli(*target, "--no-scrape", "--output-tokens", "20", "--quiet", "--out", tmp_path / "b")
    assert read_run(tmp_path / "b").run["selftest"]["streams"] == 2
    beyond = [[r for r in stage["reasons"] if "selftest of 2026-11-30" in r] for stage in stages_of(tmp_path / "b")]
    assert [len(reasons) for reasons in beyond] == [0, 1]
    assert "shown to measure truly (2 streams" in beyond[1][0]


def test_a_selftest_that_does_not_read_is_said_and_stops_nothing(
    cli: Cli, faults: FaultThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep(selftested(2, 1e6)).write_bytes(b"{")
    done = cli(
        *("ramp", "--base-url", faults.base_url, "--model", "normal", *ONE, "--no-scrape", "--out", tmp_path / "run")
    )
    assert done.code == 0
    assert "does not read" in done.err
    assert "vllm-harness selftest makes it anew" in done.err


# --- proxies


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_dead_proxy_in_the_environment_is_never_used_for_loopback(
    cli: Cli, faults: FaultThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    done = cli(
        *("ramp", "--base-url", faults.base_url.replace("127.0.0.1", host), "--model", "normal", *ONE),
        *("--out", tmp_path / "run", "--quiet"),
    )
    assert (done.code, done.err) == (0, "")
    assert [record.outcome for record in records_of(tmp_path / "run")] == ["ok"]
