"""Tenants and adapter versions for tests of the tenants package."""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any, cast
from uuid import UUID

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.actors import system_actor
from loraplex.tenants.administration import adapters, versions
from loraplex.tenants.database import Database
from loraplex.tenants.errors import AdapterNotFound, NameTaken
from loraplex.tenants.models import Adapter, AdapterVersion
from loraplex.tenants.registry import use_cases
from loraplex.tenants.registry.adapters import AdapterRepository, set_profile
from loraplex.tenants.registry.aliases import AliasRepository
from loraplex.tenants.registry.records import AdapterProfile, AliasDocument
from loraplex.tenants.unit_of_work import UnitOfWork


class RegistryWriter(AdapterRepository):
    """Writes adapters and versions as tests need them."""

    async def get_or_create(self, name: str) -> Adapter:
        with suppress(AdapterNotFound):
            return await self.get(name)
        # Another transaction may create it meanwhile.
        with suppress(NameTaken):
            return await self.create(name)
        return await self.get(name)

    async def add_version(
        self, name: str, *, profile: AdapterProfile | None = None, state: str = "ready", **columns: Any
    ) -> AdapterVersion:
        """The next version of `name`; as a push does, the existing one with the same digest and, if given, the same profile."""
        record = await self.equal_version(name, columns["digest"], profile)
        if record is None:
            adapter = await self.get(name)
            newest = select(func.max(AdapterVersion.version)).where(AdapterVersion.adapter_id == adapter.id)
            number = (await self._session.scalar(newest) or 0) + 1
            keys = {"tenant_id": self._tenant_id, "adapter_id": adapter.id, "version": number}
            record = AdapterVersion(**keys, **columns, state=state, defaults={})
            self._session.add(record)
        if profile is not None:
            set_profile(record, profile)
        await self._session.flush()
        await self._session.refresh(record, ["created_at"])
        return record


class AliasWriter(AliasRepository):
    """Moves, rolls back and deletes aliases in any session."""

    async def set(
        self, name: str, alias: str, targets: Mapping[int, int], expected: int | None = None
    ) -> AliasDocument:
        uow = unit(self._session, self._tenant_id)
        return await use_cases.move(uow, self._tenant_id, name, alias, targets, seen=expected)

    async def rollback(self, name: str, alias: str, expected: int | None = None) -> AliasDocument:
        uow = unit(self._session, self._tenant_id)
        return await use_cases.roll_back(uow, self._tenant_id, name, alias, seen=expected)

    async def delete(self, name: str, alias: str, expected: int | None = None) -> AliasDocument:
        uow = unit(self._session, self._tenant_id)
        return await use_cases.delete(uow, self._tenant_id, name, alias, seen=expected)


def unit(session: AsyncSession, tenant_id: UUID) -> UnitOfWork:
    """A unit of work in a transaction that is open already. It leaves no audit entry, so that tests count only theirs."""
    uow = UnitOfWork(session, system_actor("test"), tenant_id, cast("Database", None), ExitStack())
    uow.audit.record = _unrecorded  # type: ignore[method-assign]
    return uow


async def _unrecorded(*_: object, **__: object) -> None:
    """Record nothing."""


def digest(number: int) -> str:
    return f"{number:064x}"


async def make_tenant(database: Database, name: str = "acme") -> UUID:
    async with database.as_operator() as session:
        return (await TenantRepository(session).create(name)).id


async def add(registry: RegistryWriter, number: int, state: str = "ready") -> AdapterVersion:
    """A version of the adapter `support`."""
    await registry.get_or_create("support")
    return await registry.add_version(
        "support", digest=digest(number), size_bytes=10, rank=8, config={"r": 8}, report={}, state=state
    )


async def set_state(session: AsyncSession, state: str) -> None:
    """Of every version the session sees."""
    await session.execute(text("UPDATE adapter_versions SET state = :state"), {"state": state})


async def delete(session: AsyncSession, tenant_id: UUID, name: str, version: int | None = None) -> None:
    """Delete an adapter or one version, whether requests run on it or not."""
    uow = unit(session, tenant_id)
    if version is None:
        await adapters.force_delete(uow, tenant_id, name, end_running=False)
    else:
        await versions.force_delete(uow, tenant_id, name, version, end_running=False)
