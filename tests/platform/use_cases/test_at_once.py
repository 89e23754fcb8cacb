"""A change that two authors make at once is one change: the second finds it done, and only one audit entry is written."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeAlias
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import select
from tests.tenants.registry_records import RegistryWriter, digest

from loraplex.adapters.uploads import use_cases as uploads
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.actors import Actor
from loraplex.tenants.administration import tenants, versions
from loraplex.tenants.database import Database
from loraplex.tenants.models import AuditEntry
from loraplex.tenants.registry.uploads import DeclaredFile, UploadRepository, UploadTerms
from loraplex.tenants.unit_of_work import UnitOfWork, unit_of_work

Change: TypeAlias = Callable[[UnitOfWork], Awaitable[object]]
USER = Actor("command", "ada")
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
)
TERMS = UploadTerms(part_bytes=1024, lifetime=timedelta(hours=1), max_open=4)


@pytest.fixture
async def tenant_id(database: Database) -> UUID:
    """The tenant `acme` with a ready version of `voice`."""
    async with database.as_operator() as session:
        owner = (await TenantRepository(session).create("acme")).id
        registry = RegistryWriter(session, owner)
        await registry.get_or_create("voice")
        await registry.add_version("voice", digest=digest(1), size_bytes=10, rank=8, config={}, report={})
        return owner


async def actions_of_two(
    database: Database, database_url: str, tenant_id: UUID, change: Change, *, as_operator: bool = False
) -> list[str]:
    """Run the change, and once more while the first transaction is open; return the actions of all audit entries."""
    role = None if as_operator else tenant_id

    async def again() -> None:
        async with unit_of_work(database, USER, role, None) as uow:
            await change(uow)

    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as watching:
        async with unit_of_work(database, USER, role, None) as uow:
            await change(uow)
            second = asyncio.create_task(again())
            async with asyncio.timeout(60):
                while (await (await watching.execute(WAITING)).fetchone()) == (0,):
                    await asyncio.sleep(0.01)
        await second
    async with database.as_operator() as session:
        return [*await session.scalars(select(AuditEntry.action).order_by(AuditEntry.id))]


async def test_a_tenant_is_deleted_once(database: Database, database_url: str, tenant_id: UUID) -> None:
    actions = await actions_of_two(
        database, database_url, tenant_id, lambda uow: tenants.delete(uow, tenant_id), as_operator=True
    )
    assert actions == ["tenant.delete"]


async def test_a_version_is_deleted_once(database: Database, database_url: str, tenant_id: UUID) -> None:
    actions = await actions_of_two(
        database, database_url, tenant_id, lambda uow: versions.delete(uow, tenant_id, "voice", 1)
    )
    assert actions == ["version.delete"]


async def test_an_upload_is_aborted_once(database: Database, database_url: str, tenant_id: UUID) -> None:
    async with database.as_tenant(tenant_id) as session:
        files = [DeclaredFile("adapter_config.json", 2, "0" * 64)]
        upload = await UploadRepository(session, tenant_id).open("voice", files, TERMS, None)
    actions = await actions_of_two(
        database, database_url, tenant_id, lambda uow: uploads.abort_upload(uow, tenant_id, upload.id)
    )
    assert actions == ["upload.abort"]


async def test_each_profile_begins_where_the_other_ended(
    database: Database, database_url: str, tenant_id: UUID
) -> None:
    styles = iter(("hermes", "mistral"))

    def change(uow: UnitOfWork) -> Awaitable[object]:
        return versions.change_profile(uow, tenant_id, "voice", 1, {"tool_style": next(styles)})

    await actions_of_two(database, database_url, tenant_id, change)
    async with database.as_operator() as session:
        rows = await session.execute(select(AuditEntry.before, AuditEntry.after).order_by(AuditEntry.id))
        assert [(before, after) for before, after in rows] == [
            ({"tool_style": None}, {"tool_style": "hermes"}),
            ({"tool_style": "hermes"}, {"tool_style": "mistral"}),
        ]
