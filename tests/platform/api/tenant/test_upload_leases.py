"""The lease of the Idempotency-Key of a whole upload: only the running request has it, for as long as it runs."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text
from tests.platform.api.tenant.upload_program import submit_whole
from tests.platform.api.tenant.upload_server import UploadHome
from tests.tenants.registry_records import make_tenant

from loraplex.adapters.limits import UploadConfig
from loraplex.tenants.database import Database
from loraplex.tenants.errors import DatabaseUnavailable, IdempotencyInUse, UploadClaimed
from loraplex.tenants.registry.adapters import AdapterRepository

ROOT = Path(__file__).parents[4]
DIE = "from tests.platform.api.tenant.upload_program import die; die()"


async def prepare(database: Database) -> UUID:
    tenant_id = await make_tenant(database)
    async with database.as_operator() as session:
        await AdapterRepository(session, tenant_id).get_or_create("support")
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


async def test_the_key_of_a_dead_process_is_free_when_its_lease_ends(
    database: Database, tmp_path: Path
) -> None:
    assert UploadConfig().lease_s <= 60
    tenant_id, upload_id, lease_s = await prepare(database), uuid4(), 1.5
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / '.src'}{os.pathsep}{ROOT}"}
    arguments = (database.url, str(tmp_path), str(tenant_id), str(upload_id), str(lease_s))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DIE, *arguments, cwd=ROOT, env=environment
    )
    assert await child.wait() == -signal.SIGKILL
    died, home = time.monotonic(), gateway(database, tmp_path, lease_s)
    refused = 0
    while time.monotonic() - died < 20:
        try:
            version = await submit_whole(home, tenant_id, upload_id)
            break
        except IdempotencyInUse:
            refused += 1
            await asyncio.sleep(0.1)
    assert version.version == 1 and refused > 0
    assert time.monotonic() - died < lease_s + 3


async def test_a_running_request_renews_its_lease(database: Database, tmp_path: Path) -> None:
    tenant_id, upload_id = await prepare(database), uuid4()
    home, rival = slow(gateway(database, tmp_path, 1.5), 3.5), gateway(database, tmp_path, 1.5)
    first = asyncio.create_task(submit_whole(home, tenant_id, upload_id))
    await asyncio.sleep(0.2)
    while not first.done():
        with pytest.raises(IdempotencyInUse):
            await submit_whole(rival, tenant_id, upload_id)
        await asyncio.sleep(0.3)
    assert (await first).version == 1 and (await submit_whole(rival, tenant_id, upload_id)).version == 1
    assert (len(home.lifecycle.taken), rival.lifecycle.taken) == (1, [])


async def test_a_request_that_cannot_renew_stops_and_leaves_the_next_lease(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off from the database for a whole lease; then the next one with the key has it."""
    tenant_id, upload_id = await prepare(database), uuid4()
    home, next_one = (
        slow(gateway(Database(database.url), tmp_path, 0.6), 30.0),
        gateway(database, tmp_path, 5.0),
    )
    first = asyncio.create_task(submit_whole(home, tenant_id, upload_id))
    await asyncio.sleep(0.3)

    def cut_off(_: UUID) -> Any:
        raise DatabaseUnavailable("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(home.database, "as_tenant", cut_off)
        await asyncio.sleep(1.0)
        with pytest.raises((UploadClaimed, DatabaseUnavailable)):
            await asyncio.wait_for(first, 3)
    assert (await submit_whole(next_one, tenant_id, upload_id)).version == 1
    async with database.as_operator() as session:
        versions = await session.scalar(text("SELECT count(*) FROM adapter_versions"))
    assert (versions, home.lifecycle.taken, home.left()) == (1, [], [])
    await home.database.close()
