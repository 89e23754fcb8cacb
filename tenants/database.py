"""The PostgreSQL connection pool. Invariant: one transaction per unit of work, committed here and nowhere else."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import URL, make_url, text
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from loraplex.tenants.errors import DatabaseUnavailable, InvalidField

DRIVER = "postgresql+psycopg"
SCHEMES = ("postgres", "postgresql", DRIVER)
CONNECT_SECONDS = 5
STATEMENT_MILLISECONDS = 30_000
IDLE_MILLISECONDS = 60_000
POOL_SIZE = 10
POOL_WAIT_SECONDS = 5


def parse_database_url(url: str) -> URL:
    """The SQLAlchemy URL of a `postgres://`, `postgresql://` or `postgresql+psycopg://` address."""
    scheme = url.partition(":")[0]
    if scheme not in SCHEMES:
        raise InvalidField(
            "DATABASE_URL", f"DATABASE_URL begins with {scheme[:20]!r}; allowed: {', '.join(SCHEMES)}"
        )
    try:
        return make_url(url).set(drivername=DRIVER)
    except (ArgumentError, ValueError) as error:
        raise InvalidField("DATABASE_URL", "DATABASE_URL is not a valid address") from error


class Database:
    """A pool of connections; repositories get their session from `transaction`."""

    def __init__(self, url: str, *, pool_size: int = POOL_SIZE) -> None:
        timeouts = (
            f"-c statement_timeout={STATEMENT_MILLISECONDS} "
            f"-c idle_in_transaction_session_timeout={IDLE_MILLISECONDS}"
        )
        self._engine = create_async_engine(
            parse_database_url(url),
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=POOL_WAIT_SECONDS,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args={"connect_timeout": CONNECT_SECONDS, "options": timeouts},
        )
        self._sessions = async_sessionmaker(self._engine, expire_on_commit=False)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """Commits at the end, rolls back on any error. Raises `DatabaseUnavailable` when PostgreSQL cannot serve."""
        try:
            async with self._sessions.begin() as session:
                yield session
        except (OperationalError, InterfaceError, PoolTimeout) as error:
            raise DatabaseUnavailable(f"PostgreSQL did not serve the request: {first_line(error)}") from error

    async def ping(self) -> None:
        """Raises `DatabaseUnavailable` unless PostgreSQL answers."""
        async with self.transaction() as session:
            await session.execute(text("SELECT 1"))

    async def close(self) -> None:
        await self._engine.dispose()


def first_line(error: Exception) -> str:
    cause = error.orig if isinstance(error, (OperationalError, InterfaceError)) else error
    return next(iter(str(cause).splitlines()), type(error).__name__)
