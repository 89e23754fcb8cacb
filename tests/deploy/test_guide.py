"""The operator's guide names what exists: alerts, metrics, panels, settings, commands and files."""

import json
import re
from pathlib import Path

import pytest
from tests.deploy.promql import filled, selectors
from tests.deploy.test_rules import DASHBOARDS, queries, rules
from tests.test_documents import code

from loraplex.platform.cli.main import COMMANDS
from loraplex.platform.config import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
PAGES = [DEPLOY / "README.md", *sorted((DEPLOY / "guide").glob("*.md"))]
RUNBOOKS = DEPLOY / "guide" / "runbooks.md"
GENERATED = ("loraplex.toml", "cuda.conf", "compose/secrets/loraplex.toml")
ALERTS = {str(rule["alert"]) for rule in rules() if "alert" in rule}


def metrics() -> set[str]:
    """Every metric that a dashboard or a rule reads, which a live scrape is compared with elsewhere, and those of the code."""
    sources = "".join(
        path.read_text() for path in (DEPLOY.parent / "platform" / "observability").glob("*.py")
    )
    expressions = [expression for path in DASHBOARDS for expression in queries(path)]
    expressions += [str(rule["expr"]) for rule in rules()]
    names = {each.name for expression in expressions for each in selectors(filled(expression, "tiny"))}
    names |= set(re.findall(r'"((?:loraplex|vllm)[_:][\w:]+)"', sources))
    return names | {str(rule["record"]) for rule in rules() if "record" in rule}


def test_every_alert_has_a_runbook_and_every_named_alert_exists() -> None:
    assert ALERTS <= set(re.findall(r"`(Loraplex\w+)`", RUNBOOKS.read_text()))
    for page in PAGES:
        assert set(re.findall(r"`(Loraplex\w+)`", page.read_text())) <= ALERTS


def test_every_metric_and_panel_of_the_guide_exists() -> None:
    known = metrics()
    panels = {
        panel["title"]
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        if "title" in panel
    }
    for page in PAGES:
        named = re.findall(r"`((?:loraplex|vllm)[_:][a-z][\w:]+)`", page.read_text())
        if page.name == "monitoring.md":
            named = [name for name in named if name.startswith("loraplex:")]
        families = {re.sub(r"_(?:bucket|total|sum|count)$", "", name) for name in known}
        for name in named:
            assert re.sub(r"_total$", "", name) in families | known, (page.name, name)
    for title in re.findall(r"\*([A-Z][^*.?]+)\*[,;: ]", RUNBOOKS.read_text()):
        assert title in panels or title == "Killed process", title


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_setting_of_a_page_exists(page: Path) -> None:
    for piece in code(page.read_text()):
        for name in re.findall(r"(?<!-[nug] )(?<![\w.-])loraplex ([a-z][\w-]+)\b", piece):
            assert name in COMMANDS, (page.name, name)
        for variable in re.findall(r"\bLORAPLEX_([A-Z_]+)\b", piece):
            composed = (DEPLOY / "compose.yaml").read_text() + (DEPLOY / "compose.cuda.yaml").read_text()
            known = variable.lower() in Settings.model_fields or f"${{LORAPLEX_{variable}:" in composed
            assert known or variable == "VERSION", (page.name, variable)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_a_page_names_exists(page: Path) -> None:
    suffixes = "py|md|txt|toml|yaml|yml|conf|sql|sh|service|html|example"
    for name in re.findall(
        rf"[` ]((?:deploy/)?[\w@.-]*(?:/[\w@.-]+)*\.(?:{suffixes}))[` \n,]", page.read_text()
    ):
        if name not in GENERATED and "*" not in name:
            found = [*DEPLOY.rglob(name.removeprefix("../")), *DEPLOY.parent.glob(name.removeprefix("../"))]
            assert found, (page.name, name)


def test_the_index_leads_to_every_page() -> None:
    text = (DEPLOY / "README.md").read_text()
    for page in PAGES[1:]:
        assert f"(guide/{page.name})" in text


def test_the_objectives_are_those_of_the_alerts() -> None:
    text = (DEPLOY / "guide" / "monitoring.md").read_text()
    written = re.findall(r"^\| ([\d.]+) % of .*`loraplex:(\w+):ratio_rate4w`", text, re.MULTILINE)
    alerts = " ".join(str(rule["expr"]) for rule in rules() if "alert" in rule)
    assert {name for _, name in written} == {"requests_bad", "first_token_late"}
    for share, name in written:
        (budget,) = set(re.findall(rf"loraplex:{name}:ratio_rate\w+ > [\d.]+ \* ([\d.]+)", alerts))
        assert float(budget) == pytest.approx(1 - float(share) / 100)
    assert 'le="2.5"' in (DEPLOY / "prometheus" / "recording.yml").read_text()
    assert "2.5 s" in text
