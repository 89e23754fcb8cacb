"""The PostgreSQL connection pool. Invariant: one transaction per unit of work, committed here and nowhere else. Each takes a
role bound by row-level security; the connecting user's own rights are never used.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, TypeVar
from uuid import UUID

import structlog
from sqlalchemy import URL, func, make_url, select, text
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from loraplex.tenants.circuit_breaker import CircuitBreaker
from loraplex.tenants.default_limits import STANDARD_LIMITS, DefaultLimits
from loraplex.tenants.errors import DatabaseUnavailable, InvalidField, RoleUnsafe
from loraplex.tenants.single_flight import SingleFlight

DRIVER = "postgresql+psycopg"
SCHEMES = ("postgres", "postgresql", DRIVER)
CONNECT_SECONDS = 5
STATEMENT_MILLISECONDS = 30_000
IDLE_MILLISECONDS = 60_000
WORK_MEMORY = "16MB"
POOL_SIZE = 10
POOL_WAIT_SECONDS = 5
BOUND_SECONDS = 10.0
SHORT_BOUND_SECONDS = 0.5
ROLES = ("app_tenant", "app_operator", "app_writer")
# Both settings end with the transaction, so a pooled connection keeps neither.
TAKE_ROLE = text("SELECT set_config('role', :role, true), set_config('app.tenant_id', :tenant_id, true)")
SET_ROLE = text("SELECT set_config('role', :role, true)")
CURRENT_ROLE = text("SELECT current_setting('role')")
BYPASSES = text("SELECT rolsuper OR rolbypassrls FROM pg_roles WHERE rolname = current_user")

Result = TypeVar("Result")
LOG = structlog.get_logger("loraplex.database")

_DEFAULT_LIMITS: Final = "default_limits"


def default_limits(session: AsyncSession) -> DefaultLimits:
    """The defaults of the `Database` that opened the session."""
    limits = session.info.get(_DEFAULT_LIMITS)
    return limits if isinstance(limits, DefaultLimits) else DefaultLimits()


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
    """A pool of connections; repositories get their session, and with it the default limits, from a transaction.

    `breaker` is open while PostgreSQL is away: then `bounded` work is refused at once. A successful `ping` closes it.
    """

    def __init__(
        self, url: str, *, pool_size: int = POOL_SIZE, limits: DefaultLimits = STANDARD_LIMITS
    ) -> None:
        self.url, self.limits = url, limits
        self.breaker = CircuitBreaker()
        # Reports group some 100,000 rollups, which PostgreSQL sorts on disk if it has less memory. A month's report, of 32 ms,
        # takes 64 when PostgreSQL compiles it first (`jit`), and 460 when it optimizes that as well.
        options = (
            f"-c statement_timeout={STATEMENT_MILLISECONDS} "
            f"-c idle_in_transaction_session_timeout={IDLE_MILLISECONDS} "
            f"-c work_mem={WORK_MEMORY} -c jit=off"
        )
        self._engine = create_async_engine(
            parse_database_url(url),
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=POOL_WAIT_SECONDS,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args={"connect_timeout": CONNECT_SECONDS, "options": options},
        )
        self._sessions = async_sessionmaker(
            self._engine, expire_on_commit=False, info={_DEFAULT_LIMITS: limits}
        )

    def as_tenant(self, tenant_id: UUID) -> AbstractAsyncContextManager[AsyncSession]:
        """A transaction that sees and writes the rows of one tenant."""
        return self._transaction("app_tenant", str(tenant_id))

    def as_operator(self) -> AbstractAsyncContextManager[AsyncSession]:
        """A transaction that manages all tenants."""
        return self._transaction("app_operator", "")

    def as_writer(self) -> AbstractAsyncContextManager[AsyncSession]:
        """A transaction that finds keys and writes the usage ledger."""
        return self._transaction("app_writer", "")

    async def bounded(
        self, work: Callable[[], Coroutine[Any, Any, Result]], *, has_fallback: bool = False
    ) -> Result:
        """Run work that a request waits for: at most `BOUND_SECONDS`, or `SHORT_BOUND_SECONDS` where it has a fallback.

        Raises `DatabaseUnavailable`: without any wait while the breaker is open, and after the bound. The driver waits
        seconds for a silent server to confirm a cancellation; the request does not.
        """
        if self.breaker.is_open:
            raise DatabaseUnavailable("PostgreSQL is not used until a ping has succeeded")
        seconds, began = SHORT_BOUND_SECONDS if has_fallback else BOUND_SECONDS, self.breaker.clock()
        try:
            async with asyncio.timeout(seconds):
                result = await SingleFlight[Result]().run(None, work)
        except (TimeoutError, DatabaseUnavailable) as error:
            self._failed(began)
            if isinstance(error, DatabaseUnavailable):
                raise
            raise DatabaseUnavailable(f"PostgreSQL did not answer within {seconds:g} s") from error
        self.breaker.succeeded()
        return result

    def _failed(self, began: float) -> None:
        was_open = self.breaker.is_open
        self.breaker.failed(began)
        if self.breaker.is_open and not was_open:
            LOG.warning("PostgreSQL is away; only callers that were read recently are served")

    async def ping(self) -> None:
        """Close the breaker if PostgreSQL answers. Raises `DatabaseUnavailable` if not.

        A ping that fails, or is given up by its caller, counts as a failure: so requests need not find out by waiting.
        """
        began = self.breaker.clock()
        try:
            async with self.as_writer() as session:
                await session.execute(text("SELECT 1"))
        except BaseException:
            self._failed(began)
            raise
        if self.breaker.is_open:
            LOG.warning("PostgreSQL is available again")
        self.breaker.close()

    async def check_roles(self) -> None:
        """Raises `RoleUnsafe` when a role cannot be taken, or row-level security would not bind it."""
        for role in ROLES:
            try:
                async with self._transaction(role, "") as session:
                    bypasses = (await session.execute(BYPASSES)).scalar_one()
            except ProgrammingError as error:
                raise RoleUnsafe(
                    f"the database user may not take the role {role}: {first_line(error)}"
                ) from error
            if bypasses:
                raise RoleUnsafe(
                    f"the database role {role} bypasses row-level security; take that right from it"
                )

    @asynccontextmanager
    async def _transaction(self, role: str, tenant_id: str) -> AsyncIterator[AsyncSession]:
        """Commits at the end, rolls back on any error. Raises `DatabaseUnavailable` when PostgreSQL cannot serve."""
        try:
            async with self._sessions.begin() as session:
                await session.execute(TAKE_ROLE, {"role": role, "tenant_id": tenant_id})
                yield session
        # A read-only standby refuses writes with an internal error.
        except (OperationalError, InterfaceError, InternalError, PoolTimeout) as error:
            raise DatabaseUnavailable(f"PostgreSQL did not serve the request: {first_line(error)}") from error

    async def close(self) -> None:
        await self._engine.dispose()


async def lock(session: AsyncSession, name: str) -> None:
    """Wait for the advisory lock of this name, and hold it until the transaction ends."""
    await session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(name, 0))))


@asynccontextmanager
async def writing(session: AsyncSession) -> AsyncIterator[None]:
    """Run the statements of the block as `app_writer`, within the session's transaction; then its role is back."""
    role = await session.scalar(CURRENT_ROLE)
    await session.execute(SET_ROLE, {"role": "app_writer"})
    yield
    await session.execute(SET_ROLE, {"role": role})


def first_line(error: Exception) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return next(iter(str(cause).splitlines()), type(error).__name__)
