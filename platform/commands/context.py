"""The database a command works on, and how its errors become exit codes.

Invariant: an embedded database is migrated before it is used; a production one is only checked.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from loraplex.platform.config import Settings, load_settings
from loraplex.platform.start_errors import StartError
from loraplex.platform.stores import ensure_schema, open_stores
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField, TenantsError


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
