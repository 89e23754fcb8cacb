"""The database of a command and the state of its schema."""

import json
from pathlib import Path

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from loraplex.platform.cli import migrate
from loraplex.platform.cli.command_context import open_database
from loraplex.platform.config import load_settings
from loraplex.platform.datastores.connections import open_stores
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.platform.datastores.migrations import current_revision, newest_revision
from loraplex.platform.startup_errors import DependencyFailed


async def test_a_configured_database_is_checked_but_not_changed(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    with pytest.raises(DependencyFailed, match="loraplex migrate"):
        async with open_database():
            pytest.fail("opened a database without a schema")
    assert current_revision(empty_database_url) is None


def test_migrate_twice(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    for _ in range(2):
        result = CliRunner().invoke(migrate.app, ["--json"])
        newest = json.dumps({"revision": newest_revision()})
        assert (result.exit_code, result.stdout) == (0, f"{newest}\n"), result.output
    assert current_revision(empty_database_url) == newest_revision()


async def test_an_unreachable_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://user:secret@/name?host=/nonexistent")
    with pytest.raises(DependencyFailed) as caught:
        async with open_database():
            pytest.fail("opened a database that does not exist")
    assert "secret" not in str(caught.value)


async def test_a_schema_from_the_future(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    async with open_database() as database, database.as_operator() as session:
        await session.execute(text("RESET ROLE"))
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DependencyFailed, match="9999"):
        async with open_database():
            pytest.fail("opened a database of a newer version")


async def test_the_embedded_database_is_migrated_and_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("REDIS_URL", raising=False)
    async with open_stores(load_settings({"data_dir": tmp_path})) as stores:
        assert stores.embedded_database and stores.redis_url.startswith("unix://")
        async with open_database(tmp_path) as database:
            await database.ping()
        assert current_revision(stores.database_url) == newest_revision()
    async with EmbeddedServices(tmp_path) as services:
        assert services.owned


async def test_a_data_directory_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(DependencyFailed, match="file"):
        async with open_database(tmp_path / "file"):
            pytest.fail("used a file as a data directory")
