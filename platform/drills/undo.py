"""What takes a fault back: messages that the drill runs at its end, or its watchdog if the drill was killed.

Invariant: each may be repeated, and does nothing where there is nothing left to take back.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias
from uuid import UUID

import msgspec
import psutil
import psycopg
from psycopg import sql

from loraplex.platform.datastores.embedded.server_role import MAINTENANCE_DATABASE
from loraplex.platform.drills.drill_tenant import end_drill_tenant
from loraplex.tenants.database import Database, parse_database_url

CONNECT_S: Final = 5


class AllowConnections(msgspec.Struct, frozen=True, tag=True):
    """Let the database of this address take connections again."""

    database_url: str

    async def run(self) -> None:
        await allow_connections(self.database_url, allowed=True)


class ContinueProcess(msgspec.Struct, frozen=True, tag=True):
    """Continue a stopped process, unless its id belongs to another one by now."""

    pid: int
    started_at: float

    async def run(self) -> None:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if psutil.Process(self.pid).create_time() == self.started_at:
                os.kill(self.pid, signal.SIGCONT)


class RemoveFile(msgspec.Struct, frozen=True, tag=True):
    """Remove a file that the drill made."""

    path: str

    async def run(self) -> None:
        Path(self.path).unlink(missing_ok=True)


class EndTenant(msgspec.Struct, frozen=True, tag=True):
    """End the drill's tenant, and with it its key."""

    database_url: str
    tenant_id: UUID

    async def run(self) -> None:
        database = Database(self.database_url, pool_size=1)
        try:
            await end_drill_tenant(database, self.tenant_id)
        finally:
            await database.close()


Undo: TypeAlias = AllowConnections | ContinueProcess | RemoveFile | EndTenant


async def maintenance_connection(database_url: str) -> psycopg.AsyncConnection[tuple[object, ...]]:
    """Connect to the server of that address, but to its database `postgres`. Raises `psycopg.Error`."""
    url = parse_database_url(database_url).set(drivername="postgresql", database=MAINTENANCE_DATABASE)
    address = url.render_as_string(hide_password=False)
    return await psycopg.AsyncConnection.connect(address, autocommit=True, connect_timeout=CONNECT_S)


async def allow_connections(database_url: str, *, allowed: bool) -> None:
    """Let the database take connections or refuse them all. Raises `psycopg.Error`."""
    name = sql.Identifier(parse_database_url(database_url).database or "")
    statement = sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format(name, sql.Literal(allowed))
    async with await maintenance_connection(database_url) as connection:
        await connection.execute(statement)
