"""Creates and finds tenants. Invariant: a suspended tenant keeps its data, but none of its keys
authenticates; a deleted tenant is found by its id only.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.records import MAX_WEIGHT, TierChange
from loraplex.tenants.errors import InvalidField, NameTaken, TenantNotFound
from loraplex.tenants.models import Tenant
from loraplex.tenants.models.accounts import UNKNOWN_PARAMETERS
from loraplex.tenants.names import TENANT_NAME, check_tenant_name, check_tier, is_name


class TenantRepository:
    """The tenants seen by one session."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def create(self, name: str, weight: float = 1.0, tier: str = "standard") -> Tenant:
        """Create a tenant. Raises `InvalidField` or `NameTaken`."""
        values = {"name": check_tenant_name(name), "weight": check_weight(weight), "tier": check_tier(tier)}
        statement = insert(Tenant).values(values).on_conflict_do_nothing().returning(Tenant)
        tenant = (await self._session.scalars(statement)).one_or_none()
        if tenant is None:
            raise NameTaken(f"a tenant named {name!r} exists already")
        return tenant

    async def get(self, name: str) -> Tenant:
        """Raises `TenantNotFound`."""
        query = select(Tenant).where(Tenant.name == name, Tenant.deleted_at.is_(None))
        tenant = (await self._session.scalars(query)).one_or_none() if is_name(name, TENANT_NAME) else None
        if tenant is None:
            raise TenantNotFound(f"no tenant named {name[:80]!r}")
        return tenant

    async def by_id(self, tenant_id: UUID) -> Tenant:
        """The tenant, also a deleted one. Raises `TenantNotFound`."""
        tenant = await self._session.get(Tenant, tenant_id)
        if tenant is None:
            raise TenantNotFound(f"no tenant {tenant_id}")
        return tenant

    async def living(self, tenant_id: UUID) -> Tenant:
        """The tenant, locked against other changes until the transaction ends; new rows, such as those of requests, may
        still refer to it. Raises `TenantNotFound`, also if it is deleted.
        """
        query = select(Tenant).where(Tenant.id == tenant_id, Tenant.deleted_at.is_(None))
        query = query.with_for_update(key_share=True).execution_options(populate_existing=True)
        tenant = (await self._session.scalars(query)).one_or_none()
        if tenant is None:
            raise TenantNotFound(f"no tenant {tenant_id}")
        return tenant

    async def list(self) -> list[Tenant]:
        """All living tenants, by name."""
        query = select(Tenant).where(Tenant.deleted_at.is_(None)).order_by(Tenant.name)
        return [*await self._session.scalars(query)]

    async def change_tier(self, tenant: Tenant, change: TierChange) -> None:
        """Raises `InvalidField`."""
        if change.tier is not None:
            tenant.tier = check_tier(change.tier)
        if change.weight is not None:
            tenant.weight = check_weight(change.weight)
        if change.unknown_parameters is not None:
            if change.unknown_parameters not in UNKNOWN_PARAMETERS:
                raise InvalidField("unknown_parameters", f"must be one of {', '.join(UNKNOWN_PARAMETERS)}")
            tenant.unknown_parameters = change.unknown_parameters
        await self._session.flush()


def check_weight(weight: float) -> float:
    if not 0 < weight <= MAX_WEIGHT:
        raise InvalidField("weight", f"weight must be above 0 and at most {MAX_WEIGHT:g}")
    return weight


async def names_of(session: AsyncSession, ids: Collection[UUID]) -> dict[UUID, str]:
    """The names of tenants by their ids, of deleted ones too, as an operator."""
    if not ids:
        return {}
    query = select(Tenant.id, Tenant.name).where(Tenant.id.in_(ids))
    return {row.id: row.name for row in await session.execute(query)}


@dataclass(frozen=True, slots=True)
class TenantWeight:
    """A tenant's name, and its share of the engine relative to others."""

    name: str
    weight: float


async def living_ids(session: AsyncSession) -> Sequence[UUID]:
    """The ids of all tenants that are not deleted, as an operator."""
    return (await session.scalars(select(Tenant.id).where(Tenant.deleted_at.is_(None)))).all()


async def weights_of(session: AsyncSession, ids: Collection[UUID]) -> dict[UUID, TenantWeight]:
    """Names and weights of tenants that are not deleted by their ids, as an operator."""
    if not ids:
        return {}
    query = select(Tenant.id, Tenant.name, Tenant.weight).where(
        Tenant.id.in_(ids), Tenant.deleted_at.is_(None)
    )
    return {row.id: TenantWeight(row.name, row.weight) for row in await session.execute(query)}
