"""The time of last use: noted in memory, written together, and by no request."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import event, text
from tests.platform.database_proxy import proxied
from tests.tenants.registry_records import make_tenant

from loraplex.tenants import database as database_module
from loraplex.tenants.api_keys import last_used
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.api_keys.last_used import LastUsedTracker, writing_use
from loraplex.tenants.circuit_breaker import FAILURES
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


async def make_keys(database: Database, count: int) -> tuple[UUID, list[UUID]]:
    tenant_id = await make_tenant(database)
    async with database.as_operator() as session:
        keys = KeyRepository(session)
        issued = [await keys.create(tenant_id, "key", ["inference"]) for _ in range(count)]
    return tenant_id, [key.record.id for key in issued]


async def stored_use(database: Database) -> dict[UUID, datetime | None]:
    async with database.as_operator() as session:
        rows = await session.execute(text("SELECT id, last_used_at FROM api_keys"))
    return {row.id: row.last_used_at for row in rows}


async def test_many_uses_are_one_statement_and_no_revision(database: Database) -> None:
    _, (first, second, third) = await make_keys(database, 3)
    used = LastUsedTracker()
    for seconds in range(500):
        used.note(first, NOW + timedelta(seconds=seconds))
        used.note(second, NOW)
    used.note(uuid4(), NOW)
    statements: list[str] = []
    event.listen(
        database._engine.sync_engine, "before_cursor_execute", lambda *seen: statements.append(seen[2])
    )
    await used.flush(database)
    assert sum("UPDATE api_keys" in statement for statement in statements) == 1
    assert await stored_use(database) == {first: NOW + timedelta(seconds=499), second: NOW, third: None}
    statements.clear()
    await used.flush(database)
    assert statements == []
    async with database.as_operator() as session:
        assert (await session.scalars(text("SELECT DISTINCT revision FROM api_keys"))).all() == [1]
        assert (await session.scalars(text("SELECT policy_epoch FROM tenants"))).all() == [1]


async def test_an_older_use_of_another_gateway_does_not_win(database: Database) -> None:
    _, (key,) = await make_keys(database, 1)
    for at in (NOW, NOW - timedelta(hours=1), NOW + timedelta(seconds=59)):
        used = LastUsedTracker()
        used.note(key, at)
        await used.flush(database)
    assert await stored_use(database) == {key: NOW}  # within a minute nothing is written again


async def test_a_flush_waits_for_nobody(database: Database) -> None:
    tenant_id, (held, free) = await make_keys(database, 2)
    used = LastUsedTracker()
    used.note(held, NOW)
    used.note(free, NOW)
    async with database.as_tenant(tenant_id) as session:
        await session.execute(text("UPDATE api_keys SET name = 'held' WHERE id = :id"), {"id": held})
        async with asyncio.timeout(60):
            await used.flush(database)
    assert await stored_use(database) == {held: None, free: NOW}


async def test_what_a_database_that_is_down_did_not_take_is_kept(database: Database) -> None:
    _, (first, second) = await make_keys(database, 2)
    down = Database("postgresql://nobody@127.0.0.1:1/none")
    used = LastUsedTracker()
    used.note(first, NOW)
    used.note(second, NOW)
    with pytest.raises(DatabaseUnavailable):
        await used.flush(down)
    used.note(second, NOW + timedelta(seconds=1))
    await used.flush(database)
    assert await stored_use(database) == {first: NOW, second: NOW + timedelta(seconds=1)}
    await down.close()


async def test_a_silent_database_delays_no_flush_for_good_and_loses_no_use(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "BOUND_SECONDS", 0.02)
    _, (first, second) = await make_keys(database, 2)
    used = LastUsedTracker()
    used.note(first, NOW)
    async with proxied(database.url) as proxy:
        through = Database(proxy.url)
        with proxy.silent():
            for _ in range(FAILURES):
                with pytest.raises(DatabaseUnavailable):
                    await used.flush(through)
            assert through.breaker.is_open
            used.note(second, NOW)
            with pytest.raises(DatabaseUnavailable):
                await used.flush(through)
        await through.ping()
        monkeypatch.setattr(database_module, "BOUND_SECONDS", 60.0)
        await used.flush(through)
        await through.close()
    assert await stored_use(database) == {first: NOW, second: NOW}


async def test_the_memory_is_bounded(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    _, keys = await make_keys(database, 3)
    monkeypatch.setattr(last_used, "MAX_KEYS", 2)
    used = LastUsedTracker()
    for key in keys:
        used.note(key, NOW)
    used.note(keys[0], NOW + timedelta(seconds=1))
    await used.flush(database)
    assert await stored_use(database) == {keys[0]: NOW + timedelta(seconds=1), keys[1]: NOW, keys[2]: None}


async def test_an_unexpected_error_does_not_end_the_writing(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (key,) = await make_keys(database, 1)
    used, write, calls = LastUsedTracker(), last_used._write, 0

    async def fail_once(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        await write(*arguments)

    monkeypatch.setattr(last_used, "_write", fail_once)
    used.note(key, NOW)
    running = asyncio.create_task(used.run(database, seconds=0.02))
    async with asyncio.timeout(60):
        while not running.done() and (await stored_use(database))[key] is None:
            await asyncio.sleep(0.02)
    assert not running.done()
    running.cancel()


async def test_it_is_written_by_itself_and_at_the_end(database: Database) -> None:
    _, (first, second) = await make_keys(database, 2)
    task = LastUsedTracker()
    running = asyncio.create_task(task.run(database, seconds=0.02))
    task.note(first, NOW)
    async with asyncio.timeout(60):
        while (await stored_use(database))[first] is None:
            await asyncio.sleep(0.02)
    running.cancel()
    async with writing_use(database) as used:
        used.note(second, NOW)
    assert (await stored_use(database))[second] == NOW
