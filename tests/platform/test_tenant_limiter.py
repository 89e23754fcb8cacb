"""Slots are bounded per tenant and in total; a tenant waits behind its own requests only."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from tests.platform.web.adapters.upload_program import submit_whole
from tests.platform.web.upload_server import CONFIG, UploadHome
from tests.tenants.registry_records import make_tenant

from loraplex.platform.errors import Overloaded, ShareExceeded
from loraplex.platform.inference.dependencies import ServingConfig
from loraplex.platform.tenant_limiter import AT_ONCE, MAX_WAITING, TenantLimiter
from loraplex.platform.web.runner import Runner
from loraplex.tenants.actors import Actor
from loraplex.tenants.database import Database
from loraplex.tenants.errors import NotFound


def requests() -> TenantLimiter:
    return TenantLimiter("requests", per_tenant=AT_ONCE, waiting=MAX_WAITING)


async def test_slots_are_bounded_in_total_and_for_each_tenant() -> None:
    limiter = TenantLimiter("uploads", total=3, per_tenant=2)
    first, second = uuid4(), uuid4()
    async with AsyncExitStack() as stack:
        for tenant_id in (first, first, second):
            await stack.enter_async_context(limiter.slot(tenant_id))
        with pytest.raises(ShareExceeded, match="This tenant has 2 uploads") as own:
            await stack.enter_async_context(limiter.slot(first))
        assert (own.value.limit, own.value.level) == ("uploads", "tenant")
        with pytest.raises(Overloaded, match="The server has as many uploads"):
            await stack.enter_async_context(limiter.slot(second))
    with pytest.raises(ZeroDivisionError):
        async with limiter.slot(first):
            raise ZeroDivisionError
    async with limiter.slot(first), limiter.slot(first), limiter.slot(second):
        pass
    assert not limiter._running


async def test_free_slots_go_to_the_waiting_tenants_in_turn() -> None:
    limiter, greedy, modest = TenantLimiter("requests", total=1, waiting=4), uuid4(), uuid4()
    order: list[UUID] = []

    async def take(tenant_id: UUID) -> None:
        async with limiter.slot(tenant_id):
            order.append(tenant_id)
            await asyncio.sleep(0)

    await asyncio.gather(*map(take, (greedy, greedy, greedy, modest, modest)))
    assert order == [greedy, modest, greedy, modest, greedy]
    assert not limiter._running and not limiter._waiting


class Owner:
    """Counts how often owners are looked at."""

    seen = 0

    def __hash__(self) -> int:
        Owner.seen += 1
        return id(self)


async def test_a_release_looks_at_no_owner_that_cannot_have_the_slot() -> None:
    limiter, end = TenantLimiter("look-ups", owner="address", total=1, waiting=1), asyncio.Event()

    async def take() -> None:
        async with limiter.slot(Owner()):
            await end.wait()

    async with limiter.slot(Owner()):
        tasks = [asyncio.create_task(take()) for _ in range(1000)]
        await asyncio.sleep(0)
        Owner.seen = 0
    assert 0 < Owner.seen < 100
    end.set()
    await asyncio.gather(*tasks)


async def test_a_slot_handed_to_a_cancelled_request_goes_to_the_next() -> None:
    limiter, tenant_id, reached = TenantLimiter("requests", per_tenant=1, waiting=2), uuid4(), []

    async def take(name: str) -> None:
        async with limiter.slot(tenant_id):
            reached.append(name)

    async with limiter.slot(tenant_id):
        late, next_one = asyncio.create_task(take("late")), asyncio.create_task(take("next"))
        await asyncio.sleep(0)
    late.cancel()
    await asyncio.gather(late, next_one, return_exceptions=True)
    assert reached == ["next"] and not limiter._running and not limiter._waiting


async def test_a_slow_tenant_leaves_connections_to_the_others(database: Database) -> None:
    slow, quick = [await make_tenant(database, name) for name in ("slow", "quick")]
    small = Database(database.url, pool_size=AT_ONCE + 1)
    dependencies: Any = SimpleNamespace(
        database=small, derive_key=lambda *parts: bytes(32), policy_publisher=None, config=ServingConfig()
    )
    runner, end, running = Runner(dependencies, "requests"), asyncio.Event(), 0

    async def wait(session: AsyncSession) -> bool:
        nonlocal running
        running += 1
        await end.wait()
        return True

    async def answer(session: AsyncSession) -> bool:
        return True

    waiting = [asyncio.create_task(runner.query(slow, wait)) for _ in range(2 * AT_ONCE)]
    while running < AT_ONCE:
        await asyncio.sleep(0.01)
    assert await asyncio.wait_for(runner.query(quick, answer), 60)
    assert running == AT_ONCE
    end.set()
    assert all(await asyncio.gather(*waiting))
    assert running == 2 * AT_ONCE
    await small.close()


async def test_a_bounded_number_waits_and_no_tenant_is_remembered() -> None:
    limiter, tenant_id, end = requests(), uuid4(), asyncio.Event()

    async def take() -> None:
        async with limiter.slot(tenant_id):
            await end.wait()

    tasks = [asyncio.create_task(take()) for _ in range(AT_ONCE + MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(ShareExceeded):
        await take()
    async with limiter.slot(uuid4()):
        tasks[-1].cancel()
        await asyncio.gather(tasks[-1], return_exceptions=True)
        tasks[-1] = asyncio.create_task(take())
        end.set()
        await asyncio.gather(*tasks)
    assert not limiter._running and not limiter._waiting


async def test_transactions_of_uploads_wait_for_a_slot(database: Database, tmp_path: Path) -> None:
    limiter, tenant_id = requests(), await make_tenant(database)
    home = UploadHome(database, tmp_path)
    uploads = home.uploads = home.uploads.in_turns(limiter.slot)
    asked = (
        submit_whole(home, tenant_id, uuid4()),
        uploads.expected_size(tenant_id, uuid4(), CONFIG, 1),
        uploads.complete(tenant_id, uuid4(), Actor("key", "key")),
    )
    async with AsyncExitStack() as stack:
        for _ in range(AT_ONCE):
            await stack.enter_async_context(limiter.slot(tenant_id))
        waiting = [asyncio.create_task(each) for each in asked]
        assert not (await asyncio.wait(waiting, timeout=0.1))[0]
    for task in waiting:
        with pytest.raises(NotFound):
            await task


async def test_all_tenants_together_have_a_bounded_queue() -> None:
    limiter = TenantLimiter("requests", total=1, waiting=2, waiting_in_total=2)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(limiter.slot(uuid4()))
        waiting = [asyncio.create_task(stack.enter_async_context(limiter.slot(uuid4()))) for _ in range(2)]
        await asyncio.sleep(0)
        assert (limiter.running, limiter.waiting) == (1, 2)
        with pytest.raises(Overloaded, match="2 requests wait already"):
            await stack.enter_async_context(limiter.slot(uuid4()))
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert limiter.running == limiter.waiting == 0
