"""`loraplex invoice` and `loraplex credit`: list, preview, export, and verify without a database."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.tenants.invoices.billed_tenant import make_billed_tenant
from typer.testing import CliRunner

from loraplex.platform.cli.main import main
from loraplex.tenants.database import Database
from loraplex.tenants.invoices.months import Month

JANUARY = Month(2026, 1)


def loraplex(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output
    return result.output


def as_json(*arguments: str) -> Any:
    return json.loads(loraplex(*arguments, "--json"))


async def test_a_bill_is_finalized_exported_and_verified(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await make_billed_tenant(database)
    await tenant.use(JANUARY.begin, 10**6, 7, 5)
    await asyncio.to_thread(use_commands, database.url, tmp_path, monkeypatch)


def use_commands(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", url)
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(folder))
    of_tenant = ("--tenant", "acme")
    loraplex(
        "credit", "grant", "500000", *of_tenant, "--reason", "welcome", "--expires-at", "2999-01-01T00:00Z"
    )
    loraplex("credit", "grant", "5", *of_tenant, "--reason", "late", "--expires-at", "2999-01-01", code=2)
    preview = as_json("invoice", "preview", *of_tenant, "--month", "2026-01")
    assert (preview["state"], preview["total"]) == ("draft", "1.00")
    assert "draft" in loraplex("invoice", "preview", *of_tenant, "--month", "2026-01")
    final = as_json("invoice", "finalize", *of_tenant, "--month", "2026-01")
    assert (final["number"], final["credits"]) == (1, 500_000)
    (listed,) = as_json("invoice", "list", *of_tenant)
    assert (listed["id"], listed["total"]) == (final["id"], "1.00")
    assert final["id"] in loraplex("invoice", "list")
    paid = as_json("invoice", "paid", final["id"], "--reference", "SEPA 17")
    assert (paid["state"], paid["paid_reference"]) == ("paid", "SEPA 17")
    loraplex("invoice", "void", final["id"][:8], code=2)
    (credit,) = as_json("credit", "list", *of_tenant)
    assert (credit["available_micro"], credit["expires_at"]) == (0, "2999-01-01T00:00:00Z")
    loraplex("invoice", "export", final["id"], str(folder / "bill"))
    loraplex("invoice", "export", final["id"], str(folder / "bill"), code=2)
    # From here on without any database.
    monkeypatch.setenv("DATABASE_URL", "postgresql://nowhere.invalid/none")
    assert "every digit" in loraplex("invoice", "verify", str(folder / "bill"))
    rows = folder / "bill" / "usage.csv"
    rows.write_text(rows.read_text().replace("1000000,7,5,", "1000000,7,6,"))
    output = loraplex("invoice", "verify", str(folder / "bill"), code=1)
    assert output.startswith("usage.csv:2 amount_pico: exported ") and "first at character" in output
    result = CliRunner().invoke(main, ["invoice", "verify", str(folder / "bill"), "--json"])
    assert [each["place"] for each in json.loads(result.output)] == [
        "usage.csv:2 amount_pico",
        "usage.csv:2 (digest)",
    ]
    loraplex("invoice", "verify", str(folder / "nowhere"), code=2)
