"""Addresses of PostgreSQL and Valkey: DATABASE_URL and REDIS_URL where set, else the embedded servers of the data directory.

Invariant: the schema is the newest one before anything reads it. Only an operator migrates a database that contains data,
except the embedded one.
"""

from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from loraplex.platform.config import Settings
from loraplex.platform.datastores.embedded.dumps import dump_database
from loraplex.platform.datastores.embedded.errors import DumpFailed, EmbeddedError
from loraplex.platform.datastores.embedded.servers import EmbeddedServices
from loraplex.platform.datastores.migrations import (
    current_revision,
    is_newer,
    newest_revision,
    remedy,
    require_known,
    upgrade,
)
from loraplex.platform.startup_errors import DependencyFailed


@dataclass(frozen=True)
class StoreAddresses:
    """Addresses of both stores, with passwords."""

    database_url: str = field(repr=False)
    redis_url: str = field(repr=False)
    embedded_database: bool
    lost: Future[str] = field(default_factory=Future, repr=False)
    """Gets the reason when embedded servers cannot be kept running; the process must end then."""


@asynccontextmanager
async def open_stores(settings: Settings, *, transient: bool = False) -> AsyncIterator[StoreAddresses]:
    """Yield the addresses; start or join the embedded server of a store that is not configured. Raises `DependencyFailed`.

    `transient` is for commands that end soon; see `EmbeddedServices`.
    """
    database = None if settings.database_url is None else settings.database_url.get_secret_value()
    valkey = None if settings.redis_url is None else settings.redis_url.get_secret_value()
    async with AsyncExitStack() as stack:
        if database is None or valkey is None:
            services = EmbeddedServices(settings.data_dir, transient=transient)
            try:
                await stack.enter_async_context(services)
            except EmbeddedError as error:
                raise DependencyFailed(str(error)) from error
            addresses = StoreAddresses(
                database or services.database_url,
                valkey or services.redis_url,
                database is None,
                services.lost,
            )
        else:
            addresses = StoreAddresses(database, valkey, False)
        yield addresses


def ensure_schema(
    url: str, *, migrate: bool, migrate_empty: bool = False, embedded_in: Path | None = None
) -> None:
    """Migrate the database, or raise `DependencyFailed` when the schema is not the newest. Not for two threads at once.

    `migrate_empty` allows the migration of a database that was never migrated. An embedded database is dumped first; its data
    directory is `embedded_in`.
    """
    change_schema(
        url, schema_revision(url), migrate=migrate, migrate_empty=migrate_empty, embedded_in=embedded_in
    )


def schema_revision(url: str) -> str | None:
    """The revision of the database; None if it was never migrated. Raises `DependencyFailed`."""
    try:
        return current_revision(url)
    except SQLAlchemyError as error:
        raise _unusable(error) from error


def change_schema(
    url: str, current: str | None, *, migrate: bool, migrate_empty: bool, embedded_in: Path | None
) -> None:
    """As `ensure_schema`, of a database whose revision was read."""
    newest = newest_revision()
    if current == newest:
        return
    if is_newer(current) or not (migrate or (migrate_empty and current is None)):
        raise DependencyFailed(
            f"the database schema is at revision {current or 'none'}, this version needs {newest}: {remedy(current)}"
        )
    _migrate(url, current, embedded_in)


def _migrate(url: str, current: str | None, embedded_in: Path | None) -> None:
    from alembic.util import CommandError

    try:
        if embedded_in is not None and current is not None:
            require_known(url, current)
            dump_database(embedded_in, url, current)
        upgrade(url)
    except DumpFailed as error:
        raise DependencyFailed(str(error)) from error
    except (SQLAlchemyError, CommandError) as error:
        raise _unusable(error) from error


def _unusable(error: Exception) -> DependencyFailed:
    reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
    return DependencyFailed(f"the database could not be checked or migrated: {reason}")
