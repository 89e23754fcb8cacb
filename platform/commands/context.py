"""The stores a command works on: DATABASE_URL and REDIS_URL where set, else the embedded servers of the data directory.

Invariant: an embedded database is migrated before it is used; a production one is only checked.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import typer
from alembic.util import CommandError
from rich.console import Console
from rich.markup import escape
from sqlalchemy.exc import SQLAlchemyError

from loraplex.platform.config import Settings, load_settings
from loraplex.platform.embedded import EmbeddedError, EmbeddedServices
from loraplex.platform.schema import current_revision, newest_revision, upgrade
from loraplex.platform.start_errors import DependencyFailed, StartError
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField, TenantsError


@dataclass(frozen=True)
class StoreAddresses:
    """Where both stores are; the addresses hold passwords."""

    database_url: str = field(repr=False)
    redis_url: str = field(repr=False)
    embedded_database: bool


@asynccontextmanager
async def open_stores(settings: Settings, *, transient: bool = False) -> AsyncIterator[StoreAddresses]:
    """Starts or joins the embedded servers for what is not configured. Raises `DependencyFailed`.

    `transient` is for commands that end soon, see `EmbeddedServices`.
    """
    database = None if settings.database_url is None else settings.database_url.get_secret_value()
    valkey = None if settings.redis_url is None else settings.redis_url.get_secret_value()
    async with AsyncExitStack() as stack:
        if database is None or valkey is None:
            services = EmbeddedServices(settings.data_dir, transient=transient)
            await stack.enter_async_context(started(services))
            addresses = StoreAddresses(
                database or services.database_url, valkey or services.redis_url, database is None
            )
        else:
            addresses = StoreAddresses(database, valkey, False)
        yield addresses


@asynccontextmanager
async def started(services: EmbeddedServices) -> AsyncIterator[None]:
    try:
        await services.__aenter__()
    except EmbeddedError as error:
        raise DependencyFailed(str(error)) from error
    try:
        yield
    finally:
        await services.__aexit__(None, None, None)


@asynccontextmanager
async def open_database(data_dir: Path | None = None) -> AsyncIterator[Database]:
    """The migrated database of a command, for its duration. Raises `StartError`."""
    settings = load_settings({"data_dir": data_dir})
    async with database_address(settings) as (url, embedded):
        await asyncio.to_thread(ensure_schema, url, migrate=embedded)
        database = Database(url, pool_size=2)
        try:
            yield database
        finally:
            await database.close()


@asynccontextmanager
async def database_address(settings: Settings) -> AsyncIterator[tuple[str, bool]]:
    """The database's address and whether it is embedded; Valkey is not looked at where DATABASE_URL is set."""
    if settings.database_url is not None:
        yield settings.database_url.get_secret_value(), False
        return
    async with open_stores(settings, transient=True) as addresses:
        yield addresses.database_url, True


def ensure_schema(url: str, *, migrate: bool) -> None:
    """Migrates, or raises `DependencyFailed` when the schema is not the newest. Not for two threads at once."""
    try:
        current, newest = current_revision(url), newest_revision(url)
        if current == newest:
            return
        if not migrate:
            raise DependencyFailed(
                f"the database schema is at revision {current or 'none'}, this version needs {newest}: "
                "run `loraplex migrate`"
            )
        upgrade(url)
    except (SQLAlchemyError, CommandError) as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise DependencyFailed(f"the database could not be checked or migrated: {reason}") from error


def run_command(work: Awaitable[None]) -> None:
    """Runs a command to its end; a known error becomes one line on standard error and exit code 1 (2: wrong usage)."""

    async def within() -> None:
        await work

    with exit_codes():
        asyncio.run(within())


@contextmanager
def exit_codes() -> Iterator[None]:
    try:
        yield
    except (TenantsError, StartError) as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(str(error))}")
        code = (
            error.exit_code if isinstance(error, StartError) else 2 if isinstance(error, InvalidField) else 1
        )
        raise typer.Exit(code) from error
