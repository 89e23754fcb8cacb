"""Tenants and adapter versions for tests of the tenants package."""

from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database
from loraplex.tenants.models import AdapterVersion
from loraplex.tenants.registry.adapters import AdapterRepository


def digest(number: int) -> str:
    return f"{number:064x}"


async def make_tenant(database: Database, name: str = "acme") -> UUID:
    async with database.as_operator() as session:
        return (await TenantRepository(session).create(name)).id


async def add(adapters: AdapterRepository, number: int, state: str = "ready") -> AdapterVersion:
    """A version of the adapter `support`."""
    await adapters.get_or_create("support")
    return await adapters.add_version(
        "support", digest=digest(number), size_bytes=10, rank=8, config={"r": 8}, report={}, state=state
    )


async def set_state(session: AsyncSession, state: str) -> None:
    """Of every version the session sees."""
    await session.execute(text("UPDATE adapter_versions SET state = :state"), {"state": state})
