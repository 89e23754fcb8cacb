"""`loraplex tenant` and `loraplex key` against a real database: output and exit codes."""

import asyncio
import json
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner, Result

from loraplex.platform.cli import key, tenant
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.audit_queries import audit_entries
from loraplex.tenants.counters.counters import Counters
from loraplex.tenants.database import Database
from loraplex.tenants.scopes import effective_scopes
from loraplex.tenants.valkey import open_valkey


@pytest.fixture(autouse=True)
def configured(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setenv("LORAPLEX_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("REDIS_URL", raising=False)


def tenant_command(*arguments: str) -> Result:
    return CliRunner().invoke(tenant.app, arguments)


def key_command(*arguments: str) -> Result:
    return CliRunner().invoke(key.app, arguments)


def issued(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return str(json.loads(result.stdout)["api_key"])


async def scopes_of(database_url: str, plaintext: str) -> frozenset[str]:
    database = Database(database_url)
    async with database.as_operator() as session:
        record = await KeyRepository(session).authenticate(plaintext)
    await database.close()
    return effective_scopes(record.scopes)


def test_create_prints_the_first_key_alone(database_url: str) -> None:
    result = tenant_command("create", "acme")
    assert result.exit_code == 0
    assert result.stdout.startswith("lpx_live_") and len(result.stdout.split()) == 1
    assert "shown once" in result.stderr


def test_the_first_key_may_do_everything_in_its_tenant(database_url: str) -> None:
    plaintext = issued(tenant_command("create", "acme", "--json"))
    scopes = asyncio.run(scopes_of(database_url, plaintext))
    assert {"tenant:admin", "inference", "keys:write"} <= scopes and "operator" not in scopes


def test_list_show_suspend_resume() -> None:
    tenant_command("create", "acme", "--weight", "2")
    tenant_command("create", "beta")
    listed = json.loads(tenant_command("list", "--json").stdout)
    assert [(row["name"], row["weight"]) for row in listed] == [("acme", 2.0), ("beta", 1.0)]
    assert json.loads(tenant_command("suspend", "acme", "--json").stdout)["suspended_at"] is not None
    shown = json.loads(tenant_command("show", "acme", "--json").stdout)
    assert shown["suspended_at"] is not None and len(shown["key_ids"]) == 1 and shown["adapters"] == []
    assert json.loads(tenant_command("resume", "acme", "--json").stdout)["suspended_at"] is None
    assert "beta" in tenant_command("list").stdout


def test_exit_codes() -> None:
    assert tenant_command("create", "acme").exit_code == 0
    taken = tenant_command("create", "acme", "--json")
    assert taken.exit_code == 1 and taken.stdout == "" and "exists already" in taken.stderr
    assert tenant_command("create", "Not Allowed").exit_code == 2
    assert tenant_command("create", "acme2", "--weight", "0").exit_code == 2
    assert tenant_command("show", "nobody").exit_code == 1
    assert key_command("create", "--tenant", "nobody").exit_code == 1
    assert key_command("create").exit_code == 2
    assert key_command("create", "--tenant", "acme", "--operator").exit_code == 2
    refused = key_command("create", "--tenant", "acme", "--scope", "operator")
    assert refused.exit_code == 2 and "allowed: adapters:read" in refused.stderr


def test_limits_and_tier_are_set_and_shown() -> None:
    limits = ("--limit", "tokens_per_day=500", "--limit", "max_keys=3")
    assert tenant_command("create", "acme", "--tier", "gold", *limits).exit_code == 0
    shown = json.loads(tenant_command("show", "acme", "--json").stdout)
    assert (shown["tier"], shown["limits"]) == ("gold", {"tokens_per_day": 500, "max_keys": 3})
    for wrong in (
        "tokens=5",
        "tokens_per_day",
        "tokens_per_day=-1",
        "tokens_per_day=x",
        "max_keys=" + "9" * 17,
    ):
        assert tenant_command("create", "beta", "--limit", wrong).exit_code == 2, wrong
    assert tenant_command("show", "beta").exit_code == 1


def test_delete_asks_and_ends_the_tenant(database_url: str) -> None:
    tenant_command("create", "acme")
    refused = CliRunner().invoke(tenant.app, ["delete", "acme"], input="acne\n")
    assert refused.exit_code == 2 and tenant_command("show", "acme").exit_code == 0
    deleted = json.loads(tenant_command("delete", "acme", "--yes", "--json").stdout)
    assert deleted["deleted_at"] is not None and deleted["erased_at"] is None
    assert tenant_command("show", "acme").exit_code == 1
    assert tenant_command("delete", "acme", "--yes").exit_code == 1
    assert CliRunner().invoke(tenant.app, ["create", "acme"]).exit_code == 0
    assert CliRunner().invoke(tenant.app, ["delete", "acme"], input="acme\n").exit_code == 0
    assert json.loads(tenant_command("list", "--json").stdout) == []
    with psycopg.connect(database_url) as connection:
        written = connection.execute("SELECT actor_kind, action FROM audit_entries ORDER BY id").fetchall()
    assert written == [("command", f"tenant.{verb}") for verb in ("create", "delete") * 2]


def test_key_defaults_to_inference(database_url: str) -> None:
    tenant_command("create", "acme")
    plaintext = issued(key_command("create", "--tenant", "acme", "--json"))
    assert asyncio.run(scopes_of(database_url, plaintext)) == {"inference"}
    several = issued(
        key_command(
            *("create", "--tenant", "acme", "--json", "--environment", "test"),
            *("--scope", "usage:read", "--scope", "adapters:read", "--expires-in-days", "1"),
        )
    )
    assert several.startswith("lpx_test_")
    assert asyncio.run(scopes_of(database_url, several)) == {"usage:read", "adapters:read"}


def test_operator_key(database_url: str) -> None:
    plaintext = issued(key_command("create", "--operator", "--json"))
    assert plaintext.startswith("lpx_op_")
    assert asyncio.run(scopes_of(database_url, plaintext)) == {"operator"}
    rows = json.loads(key_command("list", "--operator", "--json").stdout)
    assert [row["key_id"] for row in rows] == [plaintext.split("_")[2]]


def test_rotate_and_revoke() -> None:
    tenant_command("create", "acme")
    old = issued(key_command("create", "--tenant", "acme", "--json")).split("_")[2]
    new = issued(key_command("rotate", old, "--tenant", "acme", "--grace-seconds", "60", "--json")).split(
        "_"
    )[2]
    revoked = json.loads(key_command("revoke", new, "--tenant", "acme", "--end-running", "--json").stdout)
    assert revoked["revoked_at"] is not None
    rows = {
        row["key_id"]: row for row in json.loads(key_command("list", "--tenant", "acme", "--json").stdout)
    }
    assert rows[old]["expires_at"] is not None and rows[old]["revoked_at"] is None
    assert key_command("rotate", new, "--tenant", "acme").exit_code == 1
    assert key_command("revoke", "nonesuch", "--tenant", "acme").exit_code == 1
    table = key_command("list", "--tenant", "acme").stdout
    assert old in table and new in table


def test_no_listing_shows_a_secret() -> None:
    plaintext = issued(tenant_command("create", "acme", "--json"))
    secret = plaintext.split("_")[3]
    for result in (
        key_command("list", "--tenant", "acme", "--json"),
        tenant_command("show", "acme", "--json"),
    ):
        assert result.exit_code == 0 and secret not in result.output


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_PORT", "none")
    result = tenant_command("list")
    assert result.exit_code == 2 and "port" in result.stderr


def test_networks_of_a_key() -> None:
    tenant_command("create", "acme")
    plaintext = issued(
        key_command(
            *("create", "--tenant", "acme", "--json", "--expires-in-days", "7"),
            *("--allowed-cidr", "10.0.0.0/8", "--allowed-cidr", "2001:db8::/32"),
        )
    )
    rows = {
        row["key_id"]: row for row in json.loads(key_command("list", "--tenant", "acme", "--json").stdout)
    }
    row = rows[plaintext.split("_")[2]]
    assert row["allowed_cidrs"] == ["10.0.0.0/8", "2001:db8::/32"] and row["created_by"] == "command"
    assert row["expires_at"] is not None and row["last_used_at"] is None
    refused = key_command("create", "--tenant", "acme", "--allowed-cidr", "10.0.0.1/8")
    assert refused.exit_code == 2 and "10.0.0.0/8" in refused.stderr


def test_running_servers_are_notified_of_a_revoked_key(
    valkey_url: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", valkey_url)
    tenant_command("create", "acme")
    key_id = issued(key_command("create", "--tenant", "acme", "--json")).split("_")[2]
    seen = []
    for run, arguments in (
        (key_command, ("rotate", key_id, "--tenant", "acme", "--grace-seconds", "60")),
        (key_command, ("revoke", key_id, "--tenant", "acme")),
        (tenant_command, ("suspend", "acme")),
        (tenant_command, ("resume", "acme")),
    ):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        seen.append(asyncio.run(policy_epochs(database_url, valkey_url)))
    assert all(known == published for known, published in seen)
    assert [known for known, _ in seen] == sorted({known for known, _ in seen})
    entries = asyncio.run(audit_of(database_url))
    assert [entry for entry in entries if entry.startswith("key.")] == [
        *("key.create", "key.rotate", "key.create", "key.revoke")
    ]


def test_a_change_is_reported_although_valkey_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", f"unix://{tmp_path}/none.socket")
    tenant_command("create", "acme")
    result = tenant_command("suspend", "acme", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["suspended_at"] is not None
    assert "within a second" in result.stderr
    monkeypatch.setenv("REDIS_URL", "http://localhost")
    assert tenant_command("resume", "acme").exit_code == 2
    assert json.loads(tenant_command("show", "acme", "--json").stdout)["suspended_at"] is not None


async def policy_epochs(database_url: str, valkey_url: str) -> tuple[int, int]:
    """The tenant's in the database, and the newest in Valkey."""
    database, client = Database(database_url), open_valkey(valkey_url)
    async with database.as_operator() as session:
        tenant = await TenantRepository(session).get("acme")
    newest = await Counters(client, command_s=10.0).publish_policy(tenant.id, 0)
    await client.aclose()
    await database.close()
    return tenant.policy_epoch, newest


async def audit_of(database_url: str) -> list[str]:
    database = Database(database_url)
    async with database.as_operator() as session:
        entries = await audit_entries(session, None, {}, None, 100)
    await database.close()
    assert all(entry.actor_kind == "command" for entry in entries)
    return [entry.action for entry in reversed(entries)]
