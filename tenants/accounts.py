"""Tenants as accounts: made, found, suspended and resumed. Invariant: a suspended tenant keeps all it has but no key of
it authenticates.
"""

from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import InvalidField, NameTaken, TenantNotFound
from loraplex.tenants.models import Tenant
from loraplex.tenants.names import TENANT_NAME, check_tenant_name, is_name

MAX_WEIGHT = 1000.0


class TenantRepository:
    """The tenants seen by one session."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def create(self, name: str, weight: float = 1.0) -> Tenant:
        """Raises `InvalidField` or `NameTaken`."""
        if not 0 < weight <= MAX_WEIGHT:
            raise InvalidField("weight", f"weight must be above 0 and at most {MAX_WEIGHT:g}")
        values = {"name": check_tenant_name(name), "weight": weight}
        statement = insert(Tenant).values(values).on_conflict_do_nothing().returning(Tenant)
        tenant = (await self._session.scalars(statement)).one_or_none()
        if tenant is None:
            raise NameTaken(f"a tenant named {name!r} exists already")
        return tenant

    async def get(self, name: str) -> Tenant:
        """Raises `TenantNotFound`."""
        query = select(Tenant).where(Tenant.name == name)
        tenant = (await self._session.scalars(query)).one_or_none() if is_name(name, TENANT_NAME) else None
        if tenant is None:
            raise TenantNotFound(f"no tenant named {name[:80]!r}")
        return tenant

    async def list(self) -> list[Tenant]:
        """All tenants, by name."""
        return [*await self._session.scalars(select(Tenant).order_by(Tenant.name))]

    async def suspend(self, name: str) -> Tenant:
        """Suspending again keeps the first time. Raises `TenantNotFound`."""
        tenant = await self.get(name)
        tenant.suspended_at = tenant.suspended_at or datetime.now(UTC)
        return tenant

    async def resume(self, name: str) -> Tenant:
        """Raises `TenantNotFound`."""
        tenant = await self.get(name)
        tenant.suspended_at = None
        return tenant
