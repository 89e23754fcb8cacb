"""A tenant's slow requests wait for each other, and leave connections to the other tenants."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from tests.platform.api.management.test_endpoint import caller_of
from tests.platform.api.tenant.upload_server import CONFIG, UploadHome
from tests.tenants.registry_records import make_tenant

from loraplex.platform.api.management.endpoint import ManagementEndpoint
from loraplex.platform.api.management.responses import ApiResponse
from loraplex.platform.errors import Overloaded
from loraplex.platform.tenant_limiter import AT_ONCE, MAX_WAITING, WaitingTenantLimiter
from loraplex.tenants.audit_log import Actor
from loraplex.tenants.database import Database
from loraplex.tenants.errors import NotFound


async def test_one_tenant_leaves_connections_to_the_others(database: Database) -> None:
    slow, quick = [await caller_of(database, await make_tenant(database, name)) for name in ("slow", "quick")]
    small = Database(database.url, pool_size=AT_ONCE + 1)
    dependencies: Any = SimpleNamespace(database=small, derive_key=lambda *parts: bytes(32))
    endpoint, end, running = ManagementEndpoint(dependencies), asyncio.Event(), 0

    async def wait(session: AsyncSession) -> ApiResponse:
        nonlocal running
        running += 1
        await end.wait()
        return ApiResponse(204)

    async def answer(session: AsyncSession) -> ApiResponse:
        return ApiResponse(204)

    waiting = [asyncio.create_task(endpoint.read(slow, wait)) for _ in range(2 * AT_ONCE)]
    while running < AT_ONCE:
        await asyncio.sleep(0.01)
    assert (await asyncio.wait_for(endpoint.read(quick, answer), 4)).status_code == 204
    assert running == AT_ONCE
    end.set()
    assert {response.status_code for response in await asyncio.gather(*waiting)} == {204}
    assert running == 2 * AT_ONCE
    await small.close()


async def test_only_so_many_wait_and_none_is_remembered() -> None:
    turns, tenant_id, end = WaitingTenantLimiter(), uuid4(), asyncio.Event()

    async def take() -> None:
        async with turns.taken(tenant_id):
            await end.wait()

    tasks = [asyncio.create_task(take()) for _ in range(AT_ONCE + MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await take()
    async with turns.taken(uuid4()):
        tasks[-1].cancel()
        await asyncio.gather(tasks[-1], return_exceptions=True)
        tasks[-1] = asyncio.create_task(take())
        end.set()
        await asyncio.gather(*tasks)
    assert not turns._turns


async def test_transactions_of_uploads_take_turns(database: Database, tmp_path: Path) -> None:
    turns, tenant_id = WaitingTenantLimiter(), await make_tenant(database)
    uploads = UploadHome(database, tmp_path).uploads.in_turns(turns.taken)
    asked = (
        uploads.require_room(tenant_id, "nobody", 1, uuid4()),
        uploads.expected_size(tenant_id, uuid4(), CONFIG, 1),
        uploads.complete(tenant_id, uuid4(), Actor("key", "key")),
    )
    async with AsyncExitStack() as stack:
        for _ in range(AT_ONCE):
            await stack.enter_async_context(turns.taken(tenant_id))
        waiting = [asyncio.create_task(each) for each in asked]
        assert not (await asyncio.wait(waiting, timeout=0.1))[0]
    for task in waiting:
        with pytest.raises(NotFound):
            await task
