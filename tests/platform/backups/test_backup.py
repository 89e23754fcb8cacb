"""A backup of a running installation restores it: rows, schema, owners, journals, adapters, secret."""

import asyncio
import json
import shutil
import stat
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url
from tests.tenants.admission.gateways import (
    TenantWithGateways,
    all_shipped,
    make_tenant_with_gateways,
    usage,
)
from typer.testing import CliRunner

from loraplex.platform.backups.manifest import MANIFEST_FILE, BackupFailed, file_facts, read_manifest
from loraplex.platform.backups.restore import RestoreTarget, require_new, restore
from loraplex.platform.cli.main import main
from loraplex.platform.datastores.embedded.binaries import find_postgres
from loraplex.platform.datastores.embedded.postgres import superuser_url
from loraplex.platform.datastores.embedded.servers import SERVICES_FOLDER, EmbeddedServices
from loraplex.platform.datastores.migrations import upgrade
from loraplex.platform.processes.progress import SILENT
from loraplex.platform.server.base_model_file import BaseModelFacts, write_base_model
from loraplex.platform.server.secret import server_secret
from loraplex.tenants.admission.recovery import ship_left_behind
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable
from loraplex.tenants.ledger.journal.journal import Journal
from loraplex.tenants.ledger.usage_ledger import UsageLedger

JOURNAL_BYTES = 64 << 20
DIGEST = "a" * 64


async def run(*arguments: str | Path, typed: str | None = None) -> dict[str, Any]:
    result = await asyncio.to_thread(CliRunner().invoke, main, [*map(str, arguments), "--json"], input=typed)
    assert result.exit_code == 0, result.output
    # The journal beside it logs to the same captured stream.
    document: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return document


async def refused(*arguments: str | Path) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, main, list(map(str, arguments)))
    assert result.exit_code == 1, result.output
    return " ".join(result.output.split())


def contents(services: EmbeddedServices, folder: Path) -> dict[str, list[str]]:
    """Every row of every table as text, and the schema with its owners."""
    url = superuser_url(folder / SERVICES_FOLDER, services.database_url)
    with psycopg.connect(url) as connection:
        names = [
            row[0]
            for row in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        ]
        rows = {
            name: sorted(
                row[0]
                for row in connection.execute(
                    sql.SQL("SELECT t::text FROM {} t").format(sql.Identifier(name))
                ).fetchall()
            )
            for name in sorted(names)
        }
    address = make_url(url)
    environment = {"PGPASSWORD": str(address.password), "PGHOST": str(address.query["host"])}
    schema = subprocess.run(
        [find_postgres().dump, "--schema-only", f"--username={address.username}", str(address.database)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    # Each dump is restricted by a key of its own; a restored expression has fewer parentheses.
    without = str.maketrans("", "", "()")
    rows["schema"] = [line.translate(without) for line in schema.splitlines() if "restrict " not in line]
    return rows


class Installation:
    """A data directory with a tenant, and a gateway's journal that is in use."""

    def __init__(self, folder: Path, services: EmbeddedServices, tenant: TenantWithGateways) -> None:
        self.folder, self.services, self.tenant = folder, services, tenant
        self.ids: dict[str, UUID] = {}


@pytest.fixture
async def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Installation]:
    """One request is in the ledger, one only in the journal, and one is open."""
    folder = tmp_path / "data"
    async with EmbeddedServices(folder, transient=True) as services:
        await asyncio.to_thread(upgrade, services.database_url)
        database = Database(services.database_url)
        tenant = await make_tenant_with_gateways(database, services.redis_url, tokens_per_day=1000)
        installation = Installation(folder, services, tenant)
        server_secret(None, folder)
        blob = folder / "adapters" / str(tenant.tenant_id) / DIGEST
        blob.mkdir(parents=True)
        (blob / "adapter_model.safetensors").write_bytes(b"weights")
        journal = await Journal.open(folder / "journal", uuid4(), max_bytes=JOURNAL_BYTES)
        async with tenant.gateway(journal=journal, killed=True) as gateway:
            shipped, ended, running = [await gateway.admit(tenant.request()) for _ in range(3)]
            await gateway.settle(shipped, usage(shipped))
            await all_shipped(gateway)
            monkeypatch.setattr(UsageLedger, "settle", _unavailable)
            await gateway.settle(ended, usage(ended))
            installation.ids = {"shipped": shipped.id, "ended": ended.id, "running": running.id}
            yield installation
            monkeypatch.undo()
        await journal.close()
        await database.close()


async def _unavailable(*_: Any) -> Any:
    raise DatabaseUnavailable("away")


async def test_a_backup_of_a_running_installation_restores_it(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, restored = tmp_path / "backup", tmp_path / "restored"
    write_base_model(
        installation.folder, BaseModelFacts("tiny", "/models/tiny", "0" * 64, "fp_0123456789abcdef")
    )
    report = await run("backup", backup, "--data-dir", installation.folder)
    assert (report["journals"], report["has_secret"], report["adapters_in_bucket"]) == (1, True, False)
    assert report["system_fingerprint"] == "fp_0123456789abcdef"
    assert stat.S_IMODE(backup.stat().st_mode) == 0o700
    expected = contents(installation.services, installation.folder)
    await check_named_databases(installation, tmp_path, monkeypatch)
    monkeypatch.undo()

    for path in backup.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    await run("restore", backup, "--data-dir", restored)
    async with EmbeddedServices(restored, transient=True) as services:
        assert contents(services, restored) == expected
        database = Database(services.database_url)
        tenants = await ship_left_behind(
            database, restored / "journal", max_bytes=JOURNAL_BYTES, lease_s=45.0
        )
        assert tenants == {installation.tenant.tenant_id}
        tenant = TenantWithGateways(
            database, services.redis_url, installation.tenant.tenant_id, installation.tenant.key
        )
        outcomes = {
            row["id"]: row["outcome"] for row in await tenant.rows("SELECT id, outcome FROM usage_records")
        }
        await database.close()
    ids = installation.ids
    assert outcomes == {ids["shipped"]: "completed", ids["ended"]: "completed", ids["running"]: "unknown"}
    assert (restored / "server.secret").read_bytes() == (installation.folder / "server.secret").read_bytes()
    blob = Path("adapters", str(installation.tenant.tenant_id), DIGEST, "adapter_model.safetensors")
    assert (restored / blob).read_bytes() == b"weights"
    for name in ("adapters", "journal"):
        modes = {(each.is_dir(), stat.S_IMODE(each.stat().st_mode)) for each in (restored / name).rglob("*")}
        assert modes <= {(True, 0o700), (False, 0o600)}

    assert "a backup is written to a new folder" in await refused("backup", backup, "--data-dir", restored)
    assert "restored into a new data directory" in await refused("restore", backup, "--data-dir", restored)


async def check_named_databases(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With DATABASE_URL the named database is that of the server, and its address need not stand in arguments."""
    services, folder = installation.services, installation.folder
    monkeypatch.setenv("DATABASE_URL", services.database_url)
    monkeypatch.setenv("REDIS_URL", services.redis_url)
    url = superuser_url(folder / SERVICES_FOLDER, services.database_url)
    backup: tuple[str | Path, ...] = ("backup", tmp_path / "named", "--data-dir", folder, "--superuser-url")
    other = make_url(url).set(database="postgres").render_as_string(hide_password=False)
    assert "leads to another database" in await refused(*backup, other)
    assert (await run(*backup, "-", typed=f"{url}\n"))["has_secret"]


def test_an_address_is_one_of_a_database() -> None:
    result = CliRunner().invoke(main, ["backup", "new", "--superuser-url", "-"], input="secret@host\n")
    assert (result.exit_code, "secret" in result.output) == (2, False)


def _damage(backup: Path) -> None:
    with (backup / "database.dump").open("r+b") as file:
        file.seek(100)
        file.write(b"\0")


def _lose(backup: Path) -> None:
    (backup / "database.dump").unlink()


def _add(backup: Path) -> None:
    (backup / "more").touch()


def _link(backup: Path) -> None:
    (backup / "server.secret").symlink_to("/etc/passwd")


def _outdate(backup: Path) -> None:
    file = backup / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 2}))


@pytest.fixture
def small_backup(tmp_path: Path) -> Path:
    """A backup whose files are right, and whose database is never restored."""
    folder = tmp_path / "backup"
    folder.mkdir()
    (folder / "database.dump").write_bytes(b"x" * 200)
    facts = file_facts(folder / "database.dump")
    manifest = {
        "format": 1,
        "version": "0",
        "created_at": "2026-01-01T00:00:00Z",
        "schema_revision": "9999",
        "postgres_major": 18,
        "adapters_in_bucket": False,
        "has_secret": False,
        "journals": [],
        "files": {"database.dump": {"bytes": facts.bytes, "sha256": facts.sha256}},
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_damage, "is damaged: its size or its SHA-256"),
        (_lose, "lacks database.dump"),
        (_add, "more is not part of the backup"),
        (_link, "neither a file nor a folder"),
        (_outdate, "has format 2"),
        (shutil.rmtree, "is no backup"),
        (lambda backup: None, "is of a newer version"),
    ],
)
async def test_a_restore_checks_everything_first(
    small_backup: Path, tmp_path: Path, change: Any, reason: str
) -> None:
    change(small_backup)
    assert reason in await refused("restore", small_backup, "--data-dir", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


async def test_a_secret_that_is_not_in_the_backup_must_be_given(small_backup: Path, tmp_path: Path) -> None:
    file = small_backup / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_revision": "0001"}))
    assert "set LORAPLEX_SECRET" in await refused(
        "restore", small_backup, "--data-dir", tmp_path / "restored"
    )


def test_a_failed_restore_leaves_no_file(small_backup: Path, tmp_path: Path) -> None:
    manifest = read_manifest(small_backup, SILENT)
    (small_backup / "server.secret").write_text("s" * 32)
    (small_backup / "journal").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pg_restore").symlink_to("/bin/false")
    binaries = replace(find_postgres(), root=tmp_path)
    restored, address = tmp_path / "new" / "restored", make_url("postgresql://localhost/loraplex")
    target = RestoreTarget(data_dir=restored, address=address, owner="loraplex_server", binaries=binaries)
    with pytest.raises(BackupFailed, match="pg_restore ended with status 1"):
        restore(manifest, small_backup, target)
    assert list(restored.iterdir()) == []
    require_new(restored)
