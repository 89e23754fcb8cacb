"""Dashboards are what their source says, and rules are valid: by a parser, and by promtool where it is installed."""

import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.alert_cases import CASES, DEPLOY, RULES, TABLE, document, uncovered
from tests.deploy.promql import filled, selectors

DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
BURN = re.compile(r"loraplex:\w+:ratio_rate(\w+) > ([\d.]+) \* ([\d.]+)")
# The windows of the SRE workbook, with the factor by which the budget burns too fast.
WINDOWS = {("1h", "5m", "14.4"), ("6h", "30m", "6"), ("1d", "2h", "3"), ("3d", "6h", "1")}
ROWS = {"slo", "saturation", "tokens", "prefix-cache", "adapters", "tenants", "dependencies", "process"}


def rules() -> list[dict[str, Any]]:
    documents = [yaml.safe_load(path.read_text()) for path in RULES]
    return [rule for document in documents for group in document["groups"] for rule in group["rules"]]


def queries(path: Path) -> list[str]:
    """The expressions of a dashboard's panels."""
    panels = json.loads(path.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_there_is_a_dashboard_for_each_subject() -> None:
    assert {path.stem for path in DASHBOARDS} == ROWS


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_what_its_source_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DEPLOY.parent)
    build = importlib.import_module("deploy.grafana.build")
    (source,) = [each for each in build.DASHBOARDS if each.uid == f"loraplex-{path.stem}"]
    assert json.loads(path.read_text()) == build.document(source)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_lie_side_by_side_and_their_queries_parse(path: Path) -> None:
    document = json.loads(path.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    variables = {each["name"] for each in document["templating"]["list"]}
    for query in queries(path):
        assert set(re.findall(r"\$(\w+)", query)) - {"__rate_interval"} <= variables
        assert selectors(filled(query, "m"))


def test_every_rule_parses_and_every_recorded_series_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = [each for rule in rules() for each in selectors(rule["expr"])]
    asked += [
        each for path in DASHBOARDS for query in queries(path) for each in selectors(filled(query, "m"))
    ]
    assert {each.name for each in asked if each.recorded} <= recorded


def test_alerts_say_what_is_wrong_and_how_urgent_it_is() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    for rule in alerts:
        assert rule["labels"] == {"severity": rule["labels"]["severity"]}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_every_alert_has_a_case_that_lets_it_fire() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert uncovered(alerts) == set() and {case.alert for case in TABLE} <= alerts
    assert uncovered({*alerts, "LoraplexNew"}) == {"LoraplexNew"}


@pytest.mark.parametrize(("series", "budget"), [("requests_bad", "0.001"), ("first_token_late", "0.01")])
def test_budgets_are_watched_over_the_windows_of_the_workbook(series: str, budget: str) -> None:
    found = set()
    for rule in rules():
        if "alert" in rule and f"loraplex:{series}:" in rule["expr"]:
            (long, factor, first), (short, same, second) = BURN.findall(rule["expr"])
            assert factor == same and first == second == budget
            assert rule["labels"]["severity"] == ("page" if float(factor) > 5 else "ticket")
            found.add((long, short, factor))
    assert found == WINDOWS


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_promtool_accepts_the_rules_and_they_fire_as_they_should(tmp_path: Path) -> None:
    table = tmp_path / "table.yml"
    table.write_text(document(rules()))
    check = ["promtool", "check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")]
    for command in (check, ["promtool", "test", "rules", str(CASES), str(table)]):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
