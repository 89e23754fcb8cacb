"""One transaction per unit of work; a database that is down raises another error than a bad request."""

import asyncio

import pytest
from sqlalchemy import text

from loraplex.tenants import database as database_module
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.circuit_breaker import FAILURES
from loraplex.tenants.database import Database, parse_database_url
from loraplex.tenants.errors import DatabaseUnavailable, InvalidField, TenantNotFound


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_accepted_schemes(scheme: str) -> None:
    url = parse_database_url(f"{scheme}://user:p%40ss@host:5433/name?sslmode=require")
    assert (url.drivername, url.password, url.port) == ("postgresql+psycopg", "p@ss", 5433)


@pytest.mark.parametrize(
    "url", ["mysql://host/name", "sqlite:///file", "host/name", "", "postgresql://h:port/d"]
)
def test_refused_addresses(url: str) -> None:
    with pytest.raises(InvalidField, match="DATABASE_URL"):
        parse_database_url(url)


async def test_commits_at_the_end(database: Database) -> None:
    async with database.as_operator() as session:
        await TenantRepository(session).create("acme")
    async with database.as_operator() as session:
        assert (await TenantRepository(session).get("acme")).name == "acme"


async def test_rolls_back_on_any_error(database: Database) -> None:
    with pytest.raises(RuntimeError):
        async with database.as_operator() as session:
            await TenantRepository(session).create("acme")
            raise RuntimeError
    async with database.as_operator() as session:
        with pytest.raises(TenantNotFound):
            await TenantRepository(session).get("acme")


async def test_an_unreachable_database_is_unavailable() -> None:
    database = Database("postgresql://user:pw@/name?host=/nonexistent")
    with pytest.raises(DatabaseUnavailable):
        await database.ping()
    await database.close()


async def test_survives_a_lost_connection(database: Database) -> None:
    await database.ping()
    async with database.as_operator() as session:
        await session.execute(text("RESET ROLE"))
        query = (
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await session.execute(text(f"SELECT pg_terminate_backend(pid) FROM ({query}) AS others"))
    with pytest.raises(DatabaseUnavailable):
        async with database.as_operator() as session:
            await session.execute(text("RESET ROLE"))
            await session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    await database.ping()


async def test_a_statement_has_a_time_limit(database: Database) -> None:
    async with database.as_operator() as session:
        assert await session.scalar(text("SHOW statement_timeout")) == "30s"


class Work:
    """What a request asks of PostgreSQL. `silent`: there is no answer, and a cancellation is not confirmed either."""

    def __init__(self) -> None:
        self.runs = 0
        self.silent = False
        self.end = asyncio.Event()

    async def run(self) -> int:
        self.runs += 1
        while self.silent and not self.end.is_set():
            try:
                await self.end.wait()
            except asyncio.CancelledError:
                continue
        return self.runs


async def test_work_that_gets_no_answer_is_given_up_and_then_not_begun(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "SHORT_BOUND_SECONDS", 0.02)
    work = Work()
    assert await database.bounded(work.run) == 1
    work.silent = True
    for _ in range(FAILURES):
        with pytest.raises(DatabaseUnavailable, match="did not answer"):
            await database.bounded(work.run, has_fallback=True)
    for has_fallback in (False, True):
        with pytest.raises(DatabaseUnavailable, match="ping"):
            await database.bounded(work.run, has_fallback=has_fallback)
    assert work.runs == 1 + FAILURES
    work.end.set()
    await database.ping()
    assert await database.bounded(work.run) == 2 + FAILURES


async def test_work_that_is_late_side_by_side_is_one_failure(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "SHORT_BOUND_SECONDS", 0.2)
    work = Work()
    work.silent = True
    for number in range(FAILURES):
        assert not database.breaker.is_open, number
        late = [database.bounded(work.run, has_fallback=True) for _ in range(2 * FAILURES)]
        errors = await asyncio.gather(*late, return_exceptions=True)
        assert all(isinstance(error, DatabaseUnavailable) for error in errors)
    assert database.breaker.is_open
    work.end.set()


async def test_errors_of_the_work_itself_open_no_breaker(database: Database) -> None:
    async def fails() -> None:
        raise TenantNotFound("none")

    for _ in range(2 * FAILURES):
        with pytest.raises(TenantNotFound):
            await database.bounded(fails)
    assert not database.breaker.is_open


async def test_pings_that_fail_open_the_breaker() -> None:
    database = Database("postgresql://user:pw@/name?host=/nonexistent")
    for _ in range(FAILURES):
        assert not database.breaker.is_open
        with pytest.raises(DatabaseUnavailable):
            await database.ping()
    assert database.breaker.is_open
    await database.close()
