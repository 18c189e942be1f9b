"""The dashboard, the alerts and the files that bring them in, as Prometheus' own tool and a reader see them. What they
return from a real server is tests/export/test_prometheus_real.py."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from harness.export.prometheus import _GAUGES
from harness.export.prometheus_names import SHARED

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/vllm-harness.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
RULES = [rule for group in yaml.safe_load((DOCKER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
SERVER = text_string_to_metric_families((ROOT / "tests/data/metrics/vllm_032.txt").read_text())
SERVER_NAMES = {sample.name for family in SERVER for sample in family.samples}


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    done = promtool("check", "config", DOCKER / "prometheus.yml")
    assert done.returncode == 0, done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


def test_each_alert_is_raised_by_its_case_and_by_no_other() -> None:
    cases = Path(__file__).with_name("alerts_test.yml")
    done = promtool("test", "rules", cases)
    assert done.returncode == 0, done.stdout + done.stderr
    text = cases.read_text()
    assert [rule["alert"] for rule in RULES if rule["alert"] not in text] == []


def test_every_alert_says_what_happened_what_to_do_and_how_bad() -> None:
    for rule in RULES:
        assert set(rule["annotations"]) == {"summary", "description"}, rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning"), rule["alert"]
        assert "$labels.deployment" in rule["annotations"]["summary"], rule["alert"]


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel.get("targets", [])] + [
        rule["expr"] for rule in RULES
    ]


def test_every_name_asked_of_vllm_is_one_that_a_real_vllm_has() -> None:
    asked = {name for text in expressions() for name in re.findall(r"vllm:\w+", text)}
    assert len(asked) > 8
    assert asked - SERVER_NAMES == set()


def test_every_name_asked_of_the_harness_is_one_of_the_contract() -> None:
    """A misspelt one would show nothing, for ever. Counters, histograms and stages are read by the test with a real server."""
    asked = {name for text in expressions() for name in re.findall(r"vllm_harness_\w+", text)}
    known = {*_GAUGES, *SHARED}
    others = asked - known
    assert all(re.search(r"^vllm_harness_finished_|_(total|bucket|count|sum)$", name) for name in others)
    assert known <= asked, "everything that is exported is shown"


def test_panels_are_told_apart_explained_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    shown = [panel for panel in PANELS if panel["type"] != "row"]
    assert [panel["title"] for panel in shown if not panel["description"] or not panel["title"]] == []
    boxes = [(panel["gridPos"], panel["title"]) for panel in PANELS]
    for (a, first), (b, second) in itertools.combinations(boxes, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (first, second)
    assert all(box["x"] + box["w"] <= 24 for box, _ in boxes)


def test_units_are_those_of_the_metrics() -> None:
    units = {panel["title"]: panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS if panel["type"] != "row"}
    for panel in PANELS:
        asked = " ".join(target["expr"] for target in panel.get("targets", []))
        if panel["type"] == "timeseries" and re.search(r"_seconds(_bucket|_sum)?\{", asked):
            assert units[panel["title"]] == "s", panel["title"]
        if panel["type"] == "timeseries" and re.search(r"_ratio\{|usage_perc\{", asked):
            assert units[panel["title"]] == "percentunit", panel["title"]


def test_it_asks_the_source_that_is_provisioned() -> None:
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    asked = {(t["datasource"]["uid"], t["datasource"]["type"]) for p in PANELS for t in p.get("targets", [])}
    assert asked == {(source["uid"], source["type"])}
    scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scraped


def test_every_panel_can_be_narrowed_to_a_deployment() -> None:
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["deployment"]
    for panel in PANELS:
        for target in panel.get("targets", []):
            selectors = re.findall(r"(?:vllm:|vllm_harness_)\w+\{([^}]*)\}", target["expr"])
            assert selectors, panel["title"]
            assert all('deployment=~"$deployment"' in selector for selector in selectors), panel["title"]
