"""Use cases on adapters and aliases: what deletion refuses, what forcing it records, and moves that change nothing."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select, text
from tests.platform.web.managed_tenant import RESERVE
from tests.tenants.registry_records import RegistryWriter, digest

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.actors import Actor
from loraplex.tenants.administration import adapters, versions
from loraplex.tenants.database import Database
from loraplex.tenants.errors import AdapterNotFound, InUse, InvalidName
from loraplex.tenants.ids import uuid7
from loraplex.tenants.models import AuditEntry
from loraplex.tenants.registry import use_cases as aliases
from loraplex.tenants.unit_of_work import UnitOfWork, unit_of_work

USER = Actor("command", "ada")


@pytest.fixture
async def tenant_id(database: Database) -> UUID:
    """The tenant `acme` with two ready versions of `voice` and no alias."""
    async with database.as_operator() as session:
        owner = (await TenantRepository(session).create("acme")).id
        registry = RegistryWriter(session, owner)
        await registry.get_or_create("voice")
        for number in (1, 2):
            await registry.add_version(
                "voice", digest=digest(number), size_bytes=10, rank=8, config={}, report={}
            )
        return owner


async def entries(database: Database, tenant_id: UUID) -> list[tuple[str, Any, Any]]:
    async with database.as_tenant(tenant_id) as session:
        rows = await session.scalars(select(AuditEntry).order_by(AuditEntry.id))
        return [(row.action, row.before, row.after) for row in rows]


async def run_request(database: Database, tenant_id: UUID) -> None:
    """A request that runs on version 1."""
    async with database.as_tenant(tenant_id) as session:
        adapter = await RegistryWriter(session, tenant_id).get("voice")
    values: Mapping[str, Any] = {
        "id": uuid7(),
        "tenant_id": tenant_id,
        "adapter_id": adapter.id,
        "digest": digest(1),
    }
    async with database.as_writer() as session:
        await session.execute(text(RESERVE), values)


async def move(uow: UnitOfWork, tenant_id: UUID, version: int) -> None:
    await aliases.move(uow, tenant_id, "voice", "production", {version: 100})


async def test_a_move_is_recorded_once(database: Database, tenant_id: UUID) -> None:
    for version in (1, 1, 2):
        async with unit_of_work(database, USER, tenant_id, None) as uow:
            await move(uow, tenant_id, version)
    assert await entries(database, tenant_id) == [
        ("alias.create", None, {"targets": {"1": 100}}),
        ("alias.move", {"targets": {"1": 100}}, {"targets": {"2": 100}}),
    ]


async def test_what_requests_use_is_deleted_by_force_only(database: Database, tenant_id: UUID) -> None:
    await run_request(database, tenant_id)
    async with unit_of_work(database, USER, tenant_id, None) as uow:
        await move(uow, tenant_id, 2)
    with pytest.raises(InUse, match="has these aliases"):
        async with unit_of_work(database, USER, tenant_id, None) as uow:
            await adapters.delete(uow, tenant_id, "voice")
    with pytest.raises(InUse, match="requests run on"):
        async with unit_of_work(database, USER, tenant_id, None) as uow:
            await versions.delete(uow, tenant_id, "voice", 1)
    async with unit_of_work(database, USER, tenant_id, None) as uow:
        await adapters.force_delete(uow, tenant_id, "voice")
    _, forced = await entries(database, tenant_id)
    before = {"description": "", "aliases": {"production": {"2": 100}}}
    assert forced == ("adapter.delete", before, {"forced": True, "end_running": True})
    with pytest.raises(AdapterNotFound):
        async with unit_of_work(database, USER, tenant_id, None) as uow:
            await adapters.force_delete(uow, tenant_id, "voice")


async def test_running_requests_alone_refuse_a_deletion(database: Database, tenant_id: UUID) -> None:
    await run_request(database, tenant_id)
    with pytest.raises(InUse, match="1 requests run on adapter voice"):
        async with unit_of_work(database, USER, tenant_id, None) as uow:
            await adapters.delete(uow, tenant_id, "voice")
    assert await entries(database, tenant_id) == []


@pytest.mark.parametrize("alias", ["\udcff", "\0", "a:b"])
async def test_an_alias_that_is_no_name_is_refused(database: Database, tenant_id: UUID, alias: str) -> None:
    with pytest.raises(InvalidName):
        async with unit_of_work(database, USER, tenant_id, None) as uow:
            await aliases.move(uow, tenant_id, "voice", alias, {1: 100})
