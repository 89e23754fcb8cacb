"""A dump before each migration of an embedded database that has data: restorable, private, bounded in number."""

import os
import stat
import subprocess
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text

from loraplex.platform.datastores.connections import ensure_schema
from loraplex.platform.datastores.embedded.binaries import find_postgres
from loraplex.platform.datastores.embedded.dumps import MAX_DUMPS, dump_database
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.platform.datastores.migrations import current_revision, newest_revision, upgrade
from loraplex.platform.startup_errors import DependencyFailed
from loraplex.tenants.database import Database

OLD_REVISION = "0009"


def dumps(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "dumps").glob("*"))


def restored(dump: Path) -> str:
    """The SQL of a dump, by the program that restores it."""
    program = find_postgres().dump.with_name("pg_restore")
    return subprocess.run(
        [str(program), "--file=-", str(dump)], check=True, capture_output=True, text=True, timeout=120
    ).stdout


async def test_a_database_with_data_is_dumped_before_its_migration(tmp_path: Path) -> None:
    async with EmbeddedServices(tmp_path, transient=True) as services:
        url = services.database_url
        upgrade(url, OLD_REVISION)
        database = Database(url)
        async with database.as_operator() as session:
            await session.execute(text("INSERT INTO tenants (id, name) VALUES (gen_random_uuid(), 'acme')"))
        (tmp_path / "dumps").mkdir(mode=0o700)
        abandoned = tmp_path / "dumps" / "of-a-killed-process.unfinished"
        abandoned.touch()
        os.utime(abandoned, (0, 0))
        ensure_schema(url, migrate=True, embedded_in=tmp_path)
        assert current_revision(url) == newest_revision()
        (dump,) = dumps(tmp_path)
        assert dump.name.startswith(f"{OLD_REVISION}-")
        assert [stat.S_IMODE(path.stat().st_mode) for path in (dump, dump.parent)] == [0o600, 0o700]
        assert "acme" in restored(dump)
        ensure_schema(url, migrate=True, embedded_in=tmp_path)
        for _ in range(MAX_DUMPS):
            newest = dump_database(tmp_path, url, "0010")
        assert len(dumps(tmp_path)) == MAX_DUMPS and newest in dumps(tmp_path) and dump not in dumps(tmp_path)
        await database.close()


async def test_a_failed_dump_stops_the_migration(tmp_path: Path) -> None:
    async with EmbeddedServices(tmp_path, transient=True) as services:
        url = services.database_url
        ensure_schema(url, migrate=False, migrate_empty=True, embedded_in=tmp_path)
        assert not (tmp_path / "dumps").exists()
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE alembic_version SET version_num = 'of a newer version'")
            connection.commit()
            with pytest.raises(DependencyFailed, match="of a newer version"):
                ensure_schema(url, migrate=True, embedded_in=tmp_path)
            assert not (tmp_path / "dumps").exists()
            connection.execute("UPDATE alembic_version SET version_num = %s", (OLD_REVISION,))
        (tmp_path / "dumps").write_text("not a folder")
        with pytest.raises(DependencyFailed, match="the database could not be dumped to .*dumps"):
            ensure_schema(url, migrate=True, embedded_in=tmp_path)
        assert current_revision(url) == OLD_REVISION
