"""The lease of the Idempotency-Key of a whole upload: only the running request has it, for as long as it runs."""

import asyncio
import os
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import select, text, update
from tests.platform.web.adapters.upload_program import submit_whole
from tests.platform.web.upload_server import UploadHome
from tests.tenants.registry_records import RegistryWriter, make_tenant

from loraplex.adapters.limits import UploadConfig
from loraplex.adapters.uploads import lease
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, IdempotencyInUse, UploadClaimed
from loraplex.tenants.models import Upload

LEASE_S = 600.0
ROOT = Path(__file__).parents[4]
DIE = "from tests.platform.web.adapters.upload_program import die; die()"


async def prepare(database: Database) -> UUID:
    tenant_id = await make_tenant(database)
    async with database.as_operator() as session:
        await RegistryWriter(session, tenant_id).get_or_create("support")
    return tenant_id


def gateway(database: Database, home: Path, lease_s: float) -> UploadHome:
    return UploadHome(database, home, None, UploadConfig(lease_s=lease_s))


def slow(home: UploadHome, seconds: float) -> UploadHome:
    """Its versions take so long to begin."""
    register = home.lifecycle.register

    async def registering(*arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(seconds)
        return await register(*arguments, **named)

    home.lifecycle.register = registering  # type: ignore[method-assign]
    return home


async def lease_end(database: Database) -> datetime | None:
    """When the lease of the only upload ends; None if there is no upload or no lease."""
    async with database.as_operator() as session:
        return await session.scalar(select(Upload.claimed_until))


async def test_the_key_of_a_dead_process_is_free_when_its_lease_ends(
    database: Database, tmp_path: Path
) -> None:
    assert UploadConfig().lease_s <= 60
    tenant_id, upload_id = await prepare(database), uuid4()
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / '.src'}{os.pathsep}{ROOT}"}
    arguments = (database.url, str(tmp_path), str(tenant_id), str(upload_id), str(LEASE_S))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DIE, *arguments, cwd=ROOT, env=environment
    )
    assert await child.wait() == -signal.SIGKILL
    home, now = gateway(database, tmp_path, LEASE_S), datetime.now(UTC)
    end = await lease_end(database)
    assert end is not None and now < end < now + timedelta(seconds=LEASE_S)
    with pytest.raises(IdempotencyInUse):
        await submit_whole(home, tenant_id, upload_id)
    async with database.as_operator() as session:
        await session.execute(update(Upload).values(claimed_until=now))
    assert (await submit_whole(home, tenant_id, upload_id)).version == 1


async def test_a_running_request_renews_its_lease(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEWALS_PER_LEASE", LEASE_S / 0.1)
    tenant_id, upload_id, go_on = await prepare(database), uuid4(), asyncio.Event()
    home, rival = gateway(database, tmp_path, LEASE_S), gateway(database, tmp_path, LEASE_S)
    register = home.lifecycle.register

    async def registering(*arguments: Any, **named: Any) -> Any:
        await go_on.wait()
        return await register(*arguments, **named)

    home.lifecycle.register = registering  # type: ignore[method-assign]
    first = asyncio.create_task(submit_whole(home, tenant_id, upload_id))
    async with asyncio.timeout(60):
        ends: set[datetime] = set()
        while len(ends) < 3:
            await asyncio.sleep(0.02)
            ends |= {end} if (end := await lease_end(database)) else set()
    with pytest.raises(IdempotencyInUse):
        await submit_whole(rival, tenant_id, upload_id)
    go_on.set()
    assert (await first).version == 1 and (await submit_whole(rival, tenant_id, upload_id)).version == 1
    assert (len(home.lifecycle.taken), rival.lifecycle.taken) == (1, [])


async def test_a_request_that_cannot_renew_stops_and_leaves_the_next_lease(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off from the database for a whole lease; then the next one with the key has it."""
    tenant_id, upload_id = await prepare(database), uuid4()
    home, next_one = (
        slow(gateway(Database(database.url), tmp_path, 0.6), 30.0),
        gateway(database, tmp_path, LEASE_S),
    )
    first = asyncio.create_task(submit_whole(home, tenant_id, upload_id))
    await asyncio.sleep(0.3)

    def cut_off(_: UUID) -> Any:
        raise DatabaseUnavailable("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(home.database, "as_tenant", cut_off)
        await asyncio.sleep(1.0)
        with pytest.raises((UploadClaimed, DatabaseUnavailable)):
            await asyncio.wait_for(first, 60)
    assert (await submit_whole(next_one, tenant_id, upload_id)).version == 1
    async with database.as_operator() as session:
        versions = await session.scalar(text("SELECT count(*) FROM adapter_versions"))
    assert (versions, home.lifecycle.taken, home.left()) == (1, [], [])
    await home.database.close()
