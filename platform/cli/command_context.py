"""Opens the stores of a command and maps its errors to exit codes.

Invariant: an embedded database is migrated before it is used; a production one is only checked.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from loraplex.platform.config import Settings, load_settings
from loraplex.platform.datastores.connections import ensure_schema, open_stores
from loraplex.platform.datastores.embedded.servers import running_redis_url
from loraplex.platform.startup_errors import StartError
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField, TenantsError


@dataclass(frozen=True, slots=True)
class CommandStores:
    """Stores of a command. `redis_url` None: no Valkey is configured, and none runs in the data directory."""

    database: Database
    redis_url: str | None = field(repr=False)


@asynccontextmanager
async def open_database(data_dir: Path | None = None) -> AsyncIterator[Database]:
    """Open the migrated database for the duration of a command. Raises `StartError`."""
    async with open_command_stores(data_dir) as stores:
        yield stores.database


@asynccontextmanager
async def open_command_stores(data_dir: Path | None = None) -> AsyncIterator[CommandStores]:
    """Open the migrated database, and find the Valkey of the running servers. Raises `StartError`."""
    settings = load_settings({"data_dir": data_dir})
    async with store_addresses(settings) as (url, embedded, redis_url):
        folder = settings.data_dir if embedded else None
        await asyncio.to_thread(ensure_schema, url, migrate=embedded, embedded_in=folder)
        database = Database(url, pool_size=2, limits=settings.default_limits)
        try:
            yield CommandStores(database, redis_url)
        finally:
            await database.close()


@asynccontextmanager
async def store_addresses(settings: Settings) -> AsyncIterator[tuple[str, bool, str | None]]:
    """Yield the database's address, whether it is embedded, and Valkey's address. With DATABASE_URL no server is started."""
    redis_url = None if settings.redis_url is None else settings.redis_url.get_secret_value()
    if settings.database_url is not None:
        redis_url = redis_url or running_redis_url(settings.data_dir)
        yield settings.database_url.get_secret_value(), False, redis_url
        return
    async with open_stores(settings, transient=True) as addresses:
        yield addresses.database_url, True, redis_url or addresses.redis_url


def run_command(work: Awaitable[None]) -> None:
    """Run a command to its end. A known error becomes one line on standard error and exit code 1 (2: wrong usage)."""

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
