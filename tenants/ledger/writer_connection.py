"""One ledger connection: prepared statements, each its own transaction, as a role bound by row-level security.

Invariant: the role is set when the connection opens and checked before its first statement. No statement outlives its time
limit, and a connection that failed is never used again.
"""

import asyncio
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection

from loraplex.tenants.database import CONNECT_SECONDS, parse_database_url
from loraplex.tenants.errors import DatabaseUnavailable, RoleUnsafe

ROLE = "app_writer"
STATEMENT_SECONDS = 5.0
LOCK_SECONDS = 2.0
# Internal errors too: PostgreSQL reports so that it is, or has become, a read-only standby.
FAILURES = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError)
WHO_AM_I = "SELECT current_user::text, rolsuper OR rolbypassrls FROM pg_roles WHERE rolname = current_user"


class WriterConnection:
    """Opens on first use and again after a failure; runs one statement at a time.

    `durable` False does not wait for the disk: a crash of PostgreSQL may lose the last transactions, never half of one.
    `role` None: `app_writer`. A statement waits `lock_s` seconds for each lock.
    """

    def __init__(
        self, url: str, *, durable: bool, role: str | None = None, lock_s: float = LOCK_SECONDS
    ) -> None:
        self._role = role or ROLE
        address = parse_database_url(url).set(drivername="postgresql")
        self._address = address.render_as_string(hide_password=False)
        # A plan prepared while tables are small is kept as they grow: so every lookup uses an index from the start.
        self._options = (
            f"-c role={self._role} -c enable_seqscan=off -c synchronous_commit={'on' if durable else 'off'} "
            f"-c statement_timeout={int(STATEMENT_SECONDS * 1000)} -c lock_timeout={int(lock_s * 1000)}"
        )
        self._connection: AsyncConnection[Any] | None = None
        self._lock = asyncio.Lock()

    async def fetch(self, statement: LiteralString, *parameters: object) -> list[tuple[Any, ...]]:
        """Run and commit one statement; return its rows. Raises `DatabaseUnavailable`, `psycopg.Error` for rejected values."""
        async with self._lock:
            try:
                async with asyncio.timeout(STATEMENT_SECONDS + CONNECT_SECONDS):
                    connection = self._connection or await self._open()
                    cursor = await connection.execute(statement, parameters, prepare=True)
                    return await cursor.fetchall()
            except (*FAILURES, OSError, TimeoutError) as error:
                await self._drop()
                raise DatabaseUnavailable(
                    f"PostgreSQL did not serve the usage ledger: {type(error).__name__}"
                ) from error
            except asyncio.CancelledError:
                await self._drop()
                raise

    async def close(self) -> None:
        async with self._lock:
            await self._drop()

    async def _open(self) -> AsyncConnection[Any]:
        connection: AsyncConnection[Any] = await AsyncConnection.connect(
            self._address, autocommit=True, connect_timeout=CONNECT_SECONDS, options=self._options
        )
        self._connection = connection
        user, bypasses = await (await connection.execute(WHO_AM_I)).fetchone() or ("no role", True)
        if user != self._role or bypasses:
            await self._drop()
            raise RoleUnsafe(
                f"the usage ledger is written as {self._role} under row-level security, not as {user}"
            )
        return connection

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
