"""``ramp`` to an https target that only a proxy reaches: through its tunnels, with the certificate looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from connect_proxy import ConnectProxy
from console import Cli, ended, records_of, stages_of, started
from fault_thread import FaultThread

from harness.measure import summary

TLS = Path(__file__).parent.parent / "data" / "tls"
#: no name server knows it: who reaches it reaches it through the proxy
TARGET = "https://gpu7.test:8443"
RAMP = ("ramp", "--base-url", TARGET, "--model", "quick", "--users", "1,3", "--requests", "6")
SHORT = ("--prompt-tokens", "8", "--output-tokens", "4", "--no-scrape")


@pytest.fixture(autouse=True)
def no_other_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setattr(summary, "client_verdict", lambda readings: (True, []))


@pytest.fixture
def proxy() -> Iterator[ConnectProxy]:
    with (
        FaultThread(models={"quick": "normal:ttft=0.01,itl=0.002"}) as server,
        ConnectProxy(server.base_url, TLS / "gpu7.crt", TLS / "gpu7.key", login="team:s3cret") as served,
    ):
        yield served


def use(monkeypatch: pytest.MonkeyPatch, proxy: ConnectProxy, login: str = "team:s3cret@") -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://{login}127.0.0.1:{proxy.port}")


def test_a_ramp_goes_through_the_tunnels_of_a_proxy(
    cli: Cli, proxy: ConnectProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, proxy)
    done = cli(*RAMP, *SHORT, "--insecure", "--api-key", "sk-1", "--out", tmp_path / "run", "--quiet")
    assert done.code == 0, done.err
    records = records_of(tmp_path / "run")
    assert [record.outcome for record in records] == ["ok"] * 12
    assert all(record.output_tokens == 4 and record.ttft_ms is not None for record in records)
    assert [stage["users"] for stage in stages_of(tmp_path / "run")] == [1, 3]
    # nothing but tunnels, fewer than requests: connections are kept
    assert set(proxy.asked) == {"CONNECT gpu7.test:8443 HTTP/1.1"}
    assert 1 <= proxy.tunnels < 12
    inside = bytes(proxy.inside)
    assert inside.count(b"POST /v1/") == 12
    assert b"Host: gpu7.test:8443" in inside
    # each password goes to whom it is for
    assert inside.lower().count(b"proxy-authorization") == 0
    assert b"Bearer sk-1" in inside
    assert "s3cret" not in (tmp_path / "run" / "run.json").read_text()


def test_an_authority_of_the_environment_is_trusted_through_a_proxy_too(proxy: ConnectProxy, tmp_path: Path) -> None:
    """As a process: what is trusted is read once in each, at its start."""
    trusting = {"HTTPS_PROXY": f"http://team:s3cret@127.0.0.1:{proxy.port}", "SSL_CERT_FILE": str(TLS / "gpu7.crt")}
    done = ended(started(*RAMP, *SHORT, "--out", tmp_path / "run", "--quiet", env=os.environ | trusting))
    # a machine that others keep busy may call the client too slow
    assert done.code in (0, 4), done.err
    assert [record.outcome for record in records_of(tmp_path / "run")] == ["ok"] * 12


def test_a_certificate_nobody_signed_is_refused_through_a_proxy_too(
    cli: Cli, proxy: ConnectProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, proxy)
    done = cli(*RAMP, *SHORT, "--out", tmp_path / "run")
    assert done.code == 5
    assert "the TLS certificate of gpu7.test:8443 is not trusted" in done.one_message()
    assert "--insecure" in done.one_message()
    assert proxy.inside == b""
    assert not (tmp_path / "run").exists()


def test_a_proxy_that_wants_a_login_is_told_apart_from_the_server(
    cli: Cli, proxy: ConnectProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, proxy, login="")
    done = cli(*RAMP, *SHORT, "--insecure", "--out", tmp_path / "run")
    assert done.code == 5
    assert "the proxy on the way to gpu7.test:8443 failed" in done.one_message()
    assert "Proxy Authentication Required" in done.one_message()
    assert "HTTPS_PROXY" in done.one_message()
    assert not (tmp_path / "run").exists()
