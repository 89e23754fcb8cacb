"""`loraplex backup` and `loraplex restore`: the whole of an installation as a folder of files.

Invariant: with DATABASE_URL, rows are read and written as a role that row-level security does not bind, which the operator
names; the serving role cannot.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psycopg
import typer
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from loraplex.platform.backups.backup import BackupSource, back_up
from loraplex.platform.backups.manifest import BackupFailed, Manifest, read_manifest
from loraplex.platform.backups.restore import RestoreTarget, require_new, restore
from loraplex.platform.cli.command_context import DataDir, async_command
from loraplex.platform.cli.output import AsJson, print_document
from loraplex.platform.config import Settings, load_settings
from loraplex.platform.datastores.connections import open_stores
from loraplex.platform.datastores.embedded.binaries import POSTGRES_MAJORS, PostgresBinaries, find_postgres
from loraplex.platform.datastores.embedded.postgres import superuser_url
from loraplex.platform.datastores.embedded.server_role import prepare_row_roles
from loraplex.platform.datastores.embedded.servers import SERVICES_FOLDER
from loraplex.platform.datastores.installation import require_installation
from loraplex.platform.datastores.migrations import current_revision, newest_revision
from loraplex.platform.processes.progress import Progress, shown_progress
from loraplex.tenants.valkey import open_valkey


def _database_address(given: str | None) -> str | None:
    """`-` is the first line of standard input, since other users see what stands in arguments."""
    address = sys.stdin.readline().strip() if given == "-" else given
    try:
        if address is not None:
            make_url(address)
    except ArgumentError as error:
        raise typer.BadParameter("not the address of a database") from error
    return address


Folder = Annotated[Path, typer.Argument(help="The backup's folder.")]
Superuser = Annotated[
    str | None,
    typer.Option(
        "--superuser-url",
        callback=_database_address,
        help="With DATABASE_URL: the address of the same database for a role that row-level security does not bind; "
        "- reads it from standard input.",
    ),
]


@dataclass(frozen=True, slots=True)
class _Databases:
    """The addresses of one database for the serving role and for the superuser, and the programs for its version."""

    serving: URL
    superuser: URL
    binaries: PostgresBinaries
    redis_url: str


@async_command
async def backup_command(
    folder: Folder, data_dir: DataDir = None, superuser_url: Superuser = None, as_json: AsJson = False
) -> None:
    """Back up the installation to a new folder, while it serves. Keep it as you would keep its secret."""
    settings = load_settings({"data_dir": data_dir})
    require_installation(settings, files=True)
    async with _open_databases(settings, superuser_url) as databases:
        with shown_progress() as progress:
            manifest = await asyncio.to_thread(_back_up, settings, databases, folder, progress)
    _print(manifest, folder, as_json)


@async_command
async def restore_command(
    folder: Folder, data_dir: DataDir = None, superuser_url: Superuser = None, as_json: AsJson = False
) -> None:
    """Restore a backup into a new data directory and an empty database. The next start ships its journals."""
    settings = load_settings({"data_dir": data_dir})
    with shown_progress() as progress:
        manifest = await asyncio.to_thread(read_manifest, folder, progress)
    if manifest.schema_revision > newest_revision():
        raise BackupFailed(f"{folder} is of a newer version: its schema is {manifest.schema_revision}")
    if not manifest.has_secret and settings.secret is None:
        raise BackupFailed(
            f"{folder} has no secret: set LORAPLEX_SECRET to that of the installation it is of"
        )
    require_new(settings.data_dir)
    async with _open_databases(settings, superuser_url) as databases:
        await _require_empty_valkey(databases.redis_url)
        with shown_progress() as progress:
            progress("restoring adapters, journals and the database")
            await asyncio.to_thread(_restore, settings, databases, manifest, folder)
    _print(manifest, folder, as_json)


@asynccontextmanager
async def _open_databases(settings: Settings, superuser: str | None) -> AsyncIterator[_Databases]:
    """Raises `BackupFailed`, `DependencyFailed`."""
    async with open_stores(settings, transient=True) as addresses:
        serving = addresses.database_url
        if addresses.embedded_database:
            superuser = superuser_url(settings.data_dir / SERVICES_FOLDER, serving)
        privileged = make_url(superuser or serving)
        major, database = await asyncio.to_thread(_identify, privileged)
        if (await asyncio.to_thread(_identify, make_url(serving)))[1] != database:
            raise BackupFailed("--superuser-url leads to another database than DATABASE_URL")
        binaries = find_postgres(major if major in POSTGRES_MAJORS else None)
        if major > binaries.major:
            raise BackupFailed(
                f"the database is PostgreSQL {major}; the bundled programs are of {binaries.major}"
            )
        yield _Databases(make_url(serving), privileged, binaries, addresses.redis_url)


def _identify(address: URL) -> tuple[int, tuple[int, int]]:
    """The server's major version; the identifiers of its cluster and of the database there. Raises `BackupFailed`."""
    identity = (
        "SELECT system_identifier, oid, pg_is_in_recovery() FROM pg_control_system(), pg_database "
        "WHERE datname = current_database()"
    )
    try:
        with psycopg.connect(_dsn(address)) as connection:
            ((cluster, database, is_standby),) = connection.execute(identity).fetchall()
            major = connection.info.server_version // 10_000
    except psycopg.Error as error:
        raise BackupFailed(f"the database cannot be reached: {str(error).strip()}") from error
    if is_standby:
        raise BackupFailed(
            "the database is a standby: usage that the primary has is in no journal, and may not be here yet"
        )
    return major, (cluster, database)


def _back_up(settings: Settings, databases: _Databases, folder: Path, progress: Progress) -> Manifest:
    revision = current_revision(_dsn(databases.serving))
    if revision is None:
        raise BackupFailed("there is nothing to back up: the database was never migrated")
    source = BackupSource(
        data_dir=settings.data_dir,
        address=databases.superuser,
        binaries=databases.binaries,
        schema_revision=revision,
        adapters_in_bucket=settings.blob_store == "s3",
    )
    return back_up(source, folder, progress)


def _restore(settings: Settings, databases: _Databases, manifest: Manifest, folder: Path) -> None:
    if current_revision(_dsn(databases.serving)) is not None:
        raise BackupFailed("the database has a schema already; a backup is restored into an empty one")
    owner = str(databases.serving.username)
    with psycopg.connect(_dsn(databases.superuser), autocommit=True) as connection:
        prepare_row_roles(connection, owner)
    target = RestoreTarget(
        data_dir=settings.data_dir, address=databases.superuser, owner=owner, binaries=databases.binaries
    )
    restore(manifest, folder, target)


async def _require_empty_valkey(redis_url: str) -> None:
    """Counters of another ledger would outlive the restore. Raises `BackupFailed`."""
    client = open_valkey(redis_url)
    try:
        async for key in client.scan_iter(match="loraplex:*", count=1000):
            raise BackupFailed(f"Valkey has keys of an installation ({key!r}): flush it first")
    finally:
        await client.aclose()


def _dsn(address: URL) -> str:
    return address.set(drivername="postgresql").render_as_string(hide_password=False)


def _print(manifest: Manifest, folder: Path, as_json: bool) -> None:
    document = {
        "folder": str(folder),
        "created_at": manifest.created_at.isoformat(),
        "schema_revision": manifest.schema_revision,
        "files": len(manifest.files),
        "bytes": manifest.total_bytes,
        "journals": len(manifest.journals),
        "adapters_in_bucket": manifest.adapters_in_bucket,
        "has_secret": manifest.has_secret,
        "system_fingerprint": manifest.system_fingerprint,
    }
    print_document(document, as_json)
