"""`loraplex rate-card` against a real database: output and exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from loraplex.platform.cli import tenant
from loraplex.platform.cli.billing import rate_card

PRICES = ("--currency", "USD", "--prompt", "3", "--completion", "7")
LATER = ("--effective-from", "2030-01-31T12:00:00Z")


@pytest.fixture(autouse=True)
def configured(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("REDIS_URL", raising=False)


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(rate_card.app, arguments)


def made(*arguments: str) -> dict[str, Any]:
    result = run("create", *PRICES, *arguments, "--json")
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_versions_are_created_and_listed() -> None:
    assert CliRunner().invoke(tenant.app, ["create", "harbor"]).exit_code == 0
    general = made(*LATER)
    assert (general["scope"], general["prompt"], general["cached_prompt"], general["completion"]) == (
        "all",
        3,
        3,
        7,
    )
    assert (general["effective_from"], general["effective_to"]) == ("2030-01-31T12:00:00+00:00", None)
    adapter = made("--tenant", "harbor", "--adapter", "poet", "--cached-prompt", "0")
    assert (adapter["scope"], adapter["adapter"], adapter["cached_prompt"]) == ("adapter", "poet", 0)
    assert (general["reasoning"], made("--tier", "deep", "--reasoning", "9")["reasoning"]) == (None, 9)
    tier = made("--tier", "gold")
    listed = json.loads(run("list", "--json").stdout)
    assert [each["id"] for each in listed if each["tier"] != "deep"] == [
        *(tier["id"], adapter["id"], general["id"])
    ]
    assert [each["id"] for each in json.loads(run("list", "--tenant", "harbor", "--json").stdout)] == [
        adapter["id"]
    ]
    table = run("list").stdout
    assert "effective from" in table and "tier gold" in table and "poet" in table


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--tier", "gold", "--tenant", "harbor"), 2, "exclude each other"),
        (("--adapter", "poet"), 2, "needs --tenant"),
        (("--effective-from", "2030-01-31"), 2, "with its zone"),
        (("--effective-from", "soon"), 2, "with its zone"),
        (("--effective-from", "2020-01-31T12:00:00Z"), 1, "in the past"),
        (("--cached-prompt", "4"), 2, "at most the price prompt"),
        (("--tier", "Gold"), 2, "lower-case"),
        (("--currency", "usd"), 2, "capital letters"),
        (("--tenant", "nonesuch"), 1, "no tenant"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[str, ...], code: int, message: str) -> None:
    result = run("create", *PRICES, *arguments)
    assert result.exit_code == code and message in result.output
    assert json.loads(run("list", "--json").stdout) == []


def test_a_preview_names_its_month_and_writes_nothing() -> None:
    empty = run("preview", *PRICES, "--month", "2026-10", "--json")
    assert json.loads(empty.stdout) == {"month": "2026-10", "data": [], "totals": []}
    assert "billed pico" in run("preview", *PRICES).stdout
    unknown = run("preview", *PRICES, "--tier", "glod")
    assert unknown.exit_code == 2 and "there is no tier glod" in unknown.stderr
    refused = run("preview", *PRICES, "--month", "2026-13")
    assert refused.exit_code == 2 and "such as 2026-10" in refused.output
    assert json.loads(run("list", "--json").stdout) == []
