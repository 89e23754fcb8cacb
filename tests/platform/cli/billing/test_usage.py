"""`loraplex usage` against real stores: every row of a month with its price, and comparisons with their exit codes."""

import asyncio
import csv
import io
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from tests.tenants.ledger.stored_usage import Used, UsingTenant, make_tenant, settle
from typer.testing import CliRunner, Result

from loraplex.platform.cli.billing import usage
from loraplex.tenants.admission import counter_drift
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.usage_export import COLUMNS
from loraplex.tenants.ledger.usage_ledger import UsageLedger
from loraplex.tenants.valkey import open_valkey

NOW = datetime.now(UTC)
MONTH = f"{NOW:%Y-%m}"


@pytest.fixture(autouse=True)
def configured(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("REDIS_URL", raising=False)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(usage.app, arguments)


def use(url: str) -> UsingTenant:
    """Three requests of this month, one of them without a price, and one of the last month."""
    tenant = make_tenant(url, "acme")
    key = next(iter(tenant.keys.values()))
    one = Used(tenant.adapters["coral"], key, NOW, price_version_id=tenant.version("USD"))
    before = NOW.replace(day=1, hour=0, minute=0) - timedelta(hours=1)
    settle(
        url,
        tenant,
        [
            replace(one, client_request_id="-2-3"),
            replace(one, price_version_id=tenant.version("USD", 1), client_request_id="plain"),
            replace(one, price_version_id=None, adapter_id=None, amount_pico=77),
            replace(one, at=before),
        ],
    )
    return tenant


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_an_export_has_all_that_an_amount_follows_from(database_url: str, form: str) -> None:
    tenant = use(database_url)
    result = command("export", "--tenant", "acme", "--month", MONTH, "--format", form)
    assert result.exit_code == 0, result.output
    if form == "csv":
        rows = [*csv.DictReader(io.StringIO(result.stdout))]
    else:
        rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [tuple(row) for row in rows] == [COLUMNS] * 3
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
    priced = [row for row in rows if row["price_version_id"]]
    assert len(priced) == 2
    for row in priced:
        amount = sum(
            int(row[f"{name}_tokens"]) * int(row[f"price_{name}"])
            for name in ("uncached", "cached", "completion")
        )
        assert int(row["amount_pico"]) == amount > 0
        assert (row["tenant_id"], row["currency"], row["month"]) == (str(tenant.id), "USD", f"m:{MONTH}")
        assert datetime.fromisoformat(row["admitted_at"]) == NOW
    texts = {row["client_request_id"] for row in rows}
    assert texts == ({"'-2-3", "plain", ""} if form == "csv" else {"-2-3", "plain", None})


def test_an_export_is_a_new_file(database_url: str, tmp_path: Path) -> None:
    use(database_url)
    arguments = ("export", "--tenant", "acme", "--month", MONTH, "--output", str(tmp_path / "rows.csv"))
    assert command(*arguments).exit_code == 0
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 4
    assert command(*arguments).exit_code == 2, "no file is overwritten"


def test_wrong_arguments_of_an_export(database_url: str) -> None:
    assert command("export", "--tenant", "acme", "--month", "2026-13").exit_code == 2
    assert command("export", "--tenant", "acme", "--month", "november").exit_code == 2
    assert command("export", "--tenant", "nonesuch", "--month", MONTH).exit_code == 1


def test_reconcile_prints_what_it_compared(database_url: str) -> None:
    use(database_url)
    result = command("reconcile", "--json")
    assert result.exit_code == 0, result.output
    found = {row["compared"]: row for row in json.loads(result.stdout)}
    assert found.keys() == {"rollups", "monthly_rollups", "totals", "invoices"}
    assert found["rollups"]["sums"] == 4
    assert all(
        (row["differing"], row["drift_pico"], row["differences"]) == (0, 0, []) for row in found.values()
    )
    assert "no Valkey" in result.stderr


def test_an_empty_ledger_reconciles() -> None:
    assert command("reconcile").exit_code == 0


def test_reconcile_names_a_drift_and_fails(database_url: str) -> None:
    tenant = use(database_url)
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE usage_rollups SET amount_pico = amount_pico + 5 WHERE amount_pico = 77")
    result = command("reconcile")
    assert result.exit_code == 1
    assert f"rollups: tenant {tenant.id}" in result.stderr and "amount_pico +5" in result.stderr
    found = {row["compared"]: row for row in json.loads(command("reconcile", "--json").stdout)}
    assert (found["rollups"]["differing"], found["rollups"]["drift_pico"]) == (1, 5)
    assert found["totals"]["differing"] == 0


def test_reconcile_names_counters_that_differ(
    database_url: str, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", valkey_url)
    monkeypatch.setattr(counter_drift, "APART_S", 0.0)
    tenant = use(database_url)
    asyncio.run(build_counters(database_url, valkey_url, tenant))
    found = {row["compared"]: row for row in json.loads(command("reconcile", "--json").stdout)}
    assert (found["counters"]["sums"], found["counters"]["differing"]) == (1, 0)
    with psycopg.connect(database_url) as connection:
        connection.execute("UPDATE usage_totals SET tokens = tokens + 3 WHERE level = 'tenant'")
    result = command("reconcile", "--json")
    assert result.exit_code == 1
    found = {row["compared"]: row for row in json.loads(result.stdout)}
    assert found["counters"]["differing"] == 1
    (named,) = found["counters"]["differences"]
    assert str(tenant.id) in named and f"m:{MONTH} tokens -3" in named


async def build_counters(database_url: str, valkey_url: str, tenant: UsingTenant) -> None:
    """As the first admission of the tenant does."""
    database, client = Database(database_url), open_valkey(valkey_url)
    ledger, counters = UsageLedger(database), Counters(client)
    taken = await ledger.take_snapshot(await ledger.raise_fence(tenant.id))
    assert taken is not None
    epoch, snapshot = taken
    await counters.rebuild(tenant.id, epoch, snapshot)
    assert await counter_drift.counter_drift(ledger, counters, tenant.id) is None
    await ledger.close()
    await client.aclose()
    await database.close()
