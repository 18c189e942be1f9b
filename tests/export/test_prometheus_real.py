"""A real Prometheus server, configured by docker/, scrapes a real ramp against the twin past its wall: every expression of
the dashboard and of the alerts returns data, no counter falls, and after the run nothing is left that looks live."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import pytest
import yaml
from finished_runs import ROOT, calibrated_run

from harness.clock import wall_time

DOCKER = ROOT / "docker"
DASHBOARDS = sorted((DOCKER / "grafana" / "dashboards").glob("*.json"))
ALERTS = yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"]
#: 2.0 requests of 16 + 112 tokens fit the pool in lock step, 3.6 staggered; the finished run beside it had predicted 6.7.
#: A prompt of one block is let in wherever a block is free, so that the pool is full whenever requests wait.
TWIN = ("--num-gpu-blocks-override", "17", "--block-size", "16", "--max-model-len", "256", "--step-ms", "6")
LOAD = ("--users", "1,4,6", "--duration", "4s", "--prompt-tokens", "16", "--output-tokens", "112", "--grace", "2s")


@dataclass(frozen=True, slots=True)
class Observed:
    """A Prometheus server that saw a run. Wall times, seconds since 1970."""

    url: str
    began: float
    ended: float
    #: every series of the run that was there at one of two looks a second
    live: list[dict[str, Any]]
    ramp: str

    def ask(self, path: str, **query: Any) -> Any:
        return ask(self.url, path, **query)

    def at(self, expression: str, when: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=expression, time=when)["result"]
        return found

    def over_the_run(self, expression: str) -> list[float]:
        """Every value an expression took while the run went on."""
        found = self.ask("query_range", query=expression, start=self.began, end=self.ended, step=1)["result"]
        return [float(value) for series in found for _, value in series["values"]]


def ask(url: str, path: str, **query: Any) -> Any:
    address = f"{url}/api/v1/{path}?{urlencode(query)}"
    with build_opener(ProxyHandler({})).open(address, timeout=5) as answer:
        document = json.load(answer)
    assert document["status"] == "success", document
    return document["data"]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on. Held at once, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(held.getsockname()[1]) for held in sockets]
    for held in sockets:
        held.close()
    return ports


def configuration(folder: Path, targets: dict[str, int]) -> Path:
    """docker/prometheus.yml with these ports of this machine in place of its hosts, a scrape a second."""
    content = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    content["global"] = dict.fromkeys(content["global"], "1s")
    content["rule_files"] = [str(DOCKER / name) for name in content["rule_files"]]
    for job in content["scrape_configs"]:
        job["static_configs"][0]["targets"] = [f"127.0.0.1:{targets.pop(job['job_name'])}"]
    assert not targets
    path = folder / "prometheus.yml"
    path.write_text(yaml.dump(content))
    return path


def wait_for(condition: Any, what: str, within_s: float = 30.0) -> None:
    for _ in range(int(within_s / 0.1)):
        try:
            if condition():
                return
        except (URLError, ConnectionError):
            pass  # it does not listen yet
        time.sleep(0.1)
    raise AssertionError(f"{what} did not come about within {within_s:g} s")


class Processes:
    """Started here, ended here."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._running: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        with self._log.open("a") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        self._running.append(process)
        return process

    def harness(self, *args: str) -> subprocess.Popen[str]:
        return self.start(sys.executable, "-m", "harness.cli", *args)

    def served(self, *args: str) -> int:
        """Start a command that says where it serves; its port."""
        process = self.harness(*args, "--port", "0")
        assert process.stdout is not None
        found = re.search(r":(\d+)(/metrics)?\n", process.stdout.readline())
        assert found, self._log.read_text()
        return int(found[1])

    def end(self) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian's package prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    processes = Processes(folder / "stderr")
    try:
        yield watch_a_run(folder, processes)
    finally:
        processes.end()


def watch_a_run(folder: Path, processes: Processes) -> Observed:
    old = calibrated_run(folder / "finished", (wall_time() - timedelta(days=60)).isoformat(timespec="seconds"))
    twin = processes.served("twin", *TWIN)
    finished = processes.served("exporter", str(old))
    live, web = free_ports(2)
    url = f"http://127.0.0.1:{web}"
    ports = {"vllm": twin, "vllm-harness": live, "vllm-harness-finished": finished}
    processes.start(
        "prometheus",
        f"--config.file={configuration(folder, ports)}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{web}",
        "--log.level=warn",
    )
    wait_for(lambda: len(ask(url, "query", query="up == 1")["result"]) == 2, "a scrape of the twin and the exporter")
    began = time.time()
    ramp = processes.harness(
        "ramp",
        "--base-url",
        f"http://127.0.0.1:{twin}",
        *LOAD,
        "--prometheus-port",
        str(live),
        "--out",
        str(folder / "run"),
    )
    seen: dict[str, dict[str, Any]] = {}
    while ramp.poll() is None:
        now = ask(url, "query", query='{job="vllm-harness", __name__=~"vllm_harness_.+"}')["result"]
        seen |= {json.dumps(series["metric"], sort_keys=True): series for series in now}
        time.sleep(0.5)
    ended = time.time()
    assert ramp.stdout is not None
    said = ramp.stdout.read()
    assert ramp.returncode == 0, said + (folder / "stderr").read_text()
    # the next scrape fails, and Prometheus marks what the one before it saw as stale
    wait_for(lambda: ask(url, "query", query='up{job="vllm-harness"} == 0')["result"], "the end of the run's series")
    return Observed(url, began, ended, list(seen.values()), said)


def expressions() -> list[tuple[str, str]]:
    """(where it stands, expression) of every panel of every dashboard."""
    return [
        (f"{path.stem}: {panel['title']} {target['refId']}", target["expr"])
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", [])
    ]


def asked(expression: str) -> str:
    """As Grafana asks it: all deployments, a rate over four scrapes."""
    filled = expression.replace("$deployment", ".*").replace("$__rate_interval", "4s")
    assert "$" not in filled
    return filled


def test_every_panel_of_the_dashboard_shows_the_run(observed: Observed) -> None:
    known = {where: observed.over_the_run(asked(expression)) for where, expression in expressions()}
    assert len(known) > 40
    # a quantile of no request is NaN, which shows nothing
    empty = [where for where, values in known.items() if not any(value == value for value in values)]
    assert empty == []


def test_every_alert_is_raised_by_the_situation_it_is_for(observed: Observed) -> None:
    rules = [rule for group in ALERTS for rule in group["rules"]]
    silent = [rule["alert"] for rule in rules if not observed.over_the_run(rule["expr"])]
    assert silent == []
    raised = observed.at("max_over_time(ALERTS[2m])", observed.ended)
    assert {series["metric"]["alertname"] for series in raised} == {rule["alert"] for rule in rules}
    assert {series["metric"]["deployment"] for series in raised} == {"default"}


def test_prometheus_evaluates_every_rule_without_complaint(observed: Observed) -> None:
    groups = observed.ask("rules")["groups"]
    states = [(rule["name"], rule["health"], rule.get("lastError")) for group in groups for rule in group["rules"]]
    assert [state for state in states if state[1:] != ("ok", None)] == []
    assert len(states) == sum(len(group["rules"]) for group in ALERTS)


def test_no_counter_falls_within_the_run(observed: Observed) -> None:
    names = {series["metric"]["__name__"] for series in observed.live}
    counters = sorted(name for name in names if re.search(r"_(total|count|sum|bucket)$", name))
    assert len(counters) == 12
    for name in counters:
        resets = observed.at(f'resets({name}{{job="vllm-harness"}}[2m])', observed.ended)
        assert resets, name
        assert {float(series["value"][1]) for series in resets} == {0.0}, name


def test_counters_end_at_what_the_run_wrote(observed: Observed) -> None:
    """But for what ended after the last scrape, a second before the end at most."""
    ok = observed.over_the_run('vllm_harness_requests_total{outcome="ok"}')
    table = [line.split() for line in observed.ramp.splitlines()]
    written = sum(int(row[1]) for row in table if len(row) > 2 and row[0] in ("1", "4", "6"))
    assert written * 0.7 < max(ok) <= written


def test_no_series_is_left_after_the_run_that_looks_live(observed: Observed) -> None:
    assert observed.at('{job="vllm-harness", __name__=~"vllm_harness_.+"}', time.time()) == []
    assert len(observed.live) > 100


def test_the_run_had_every_metric_and_only_labels_of_the_contract(observed: Observed) -> None:
    names = {series["metric"]["__name__"] for series in observed.live}
    kinds = {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}
    assert kinds == {
        f"vllm_harness_{name}"
        for name in (
            "users",
            "streams_in_flight",
            "requests_total",
            "output_tokens_total",
            "ttft_seconds",
            "tpot_seconds",
            "e2e_seconds",
            "stage",
            "client_loop_lag_seconds",
            "server_preemptions_total",
            "server_kv_cache_usage_ratio",
            "predicted_users",
            "measured_users",
        )
    }
    labels = {label for series in observed.live for label in series["metric"]}
    # Prometheus has no label without a value: a run without a failure has no `failure`
    assert labels - {"failure"} == {"__name__", "job", "instance", "deployment", "le", "outcome", "limit"}


def test_a_finished_run_shares_no_name_with_a_live_one_but_what_tells_of_a_deployment(observed: Observed) -> None:
    finished = observed.at('{job="vllm-harness-finished", __name__=~"vllm_harness_.+"}', time.time())
    names = {series["metric"]["__name__"] for series in finished}
    shared = {"vllm_harness_predicted_users", "vllm_harness_measured_users", "vllm_harness_correction_factor"}
    assert shared <= names
    assert all(name.startswith("vllm_harness_finished_") for name in names - shared)
    assert not any(re.search(r"_(total|bucket|count|sum)$", name) for name in names)
