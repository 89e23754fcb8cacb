"""What takes a fault back may be repeated, and hits nothing else."""

import asyncio
import os
import signal
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import psycopg
import pytest
from sqlalchemy import select
from tests.platform.server.serve_process import until

from loraplex.platform.drills.drill_tenant import DrillTenantTerms, create_drill_tenant
from loraplex.platform.drills.undo import (
    AllowConnections,
    ContinueProcess,
    EndTenant,
    RemoveFile,
    allow_connections,
)
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database
from loraplex.tenants.errors import NameTaken
from loraplex.tenants.models import ApiKey

TERMS = DrillTenantTerms(concurrent_requests=4, tokens=1000)


async def test_a_database_that_refuses_connections_takes_them_again(database_url: str) -> None:
    await allow_connections(database_url, allowed=False)
    with pytest.raises(psycopg.OperationalError, match="not currently accepting connections"):
        psycopg.connect(database_url)
    for _ in range(2):
        await AllowConnections(database_url).run()
    psycopg.connect(database_url).close()


def test_only_the_stopped_process_itself_is_continued() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            os.kill(child.pid, signal.SIGSTOP)
            process = psutil.Process(child.pid)
            until(lambda: process.status() == psutil.STATUS_STOPPED)
            asyncio.run(ContinueProcess(child.pid, process.create_time() - 1).run())
            assert process.status() == psutil.STATUS_STOPPED
            asyncio.run(ContinueProcess(child.pid, process.create_time()).run())
            until(lambda: process.status() != psutil.STATUS_STOPPED)
            started_at = process.create_time()
        finally:
            child.kill()
    asyncio.run(ContinueProcess(child.pid, started_at).run())


async def test_a_file_is_removed_once(tmp_path: Path) -> None:
    file = tmp_path / "ballast"
    file.touch()
    for _ in range(2):
        await RemoveFile(str(file)).run()
    assert not file.exists()


async def test_an_installation_has_one_drill_until_its_tenant_is_ended(
    database: Database, database_url: str
) -> None:
    first = await create_drill_tenant(database, TERMS, 7200)
    with pytest.raises(NameTaken):
        await create_drill_tenant(database, TERMS, 7200)
    for _ in range(2):
        await EndTenant(database_url, first.tenant_id).run()
    second = await create_drill_tenant(database, TERMS, 7200)
    async with database.as_operator() as session:
        ends = await session.scalar(select(ApiKey.expires_at).where(ApiKey.tenant_id == second.tenant_id))
        assert ends is not None
        assert ends > datetime.now(UTC) + timedelta(hours=1), "a drill may take longer than an hour"
        assert (await TenantRepository(session).by_id(first.tenant_id)).deleted_at is not None
        assert (await TenantRepository(session).get("loraplex-drill")).id == second.tenant_id
