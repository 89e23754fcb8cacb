"""The limits of a whole tenant, which an operator sets. Invariant: a tenant without a row has no limits, and is read as an
unchanged row.
"""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from sqlalchemy import Select, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import Quota
from loraplex.tenants.quotas.limits import QuotaLimits

FIRST_REVISION = 1


class TenantQuotas:
    """The limits of tenants, seen by one session of an operator. The caller ensures that the tenant exists."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def get(self, tenant_id: UUID) -> tuple[QuotaLimits, int]:
        """The limits and their revision."""
        quota = (await self._session.scalars(_of(tenant_id))).one_or_none()
        return QuotaLimits.of(quota), FIRST_REVISION if quota is None else quota.revision

    async def locked(self, tenant_id: UUID) -> Quota:
        """The row, created if missing, and locked until the transaction ends."""
        made = insert(Quota).values(tenant_id=tenant_id).on_conflict_do_nothing()
        await self._session.execute(made)
        quota: Quota = (await self._session.scalars(_of(tenant_id).with_for_update())).one()
        return quota

    async def change(self, quota: Quota, change: Mapping[str, int | None]) -> QuotaLimits:
        """Sets the limits that `change` names. Raises `InvalidField`."""
        limits = QuotaLimits(**{**dict(QuotaLimits.of(quota).items()), **change})
        for name, value in change.items():
            setattr(quota, name, value)
        await self._session.flush()
        return limits


def _of(tenant_id: UUID) -> Select[Any]:
    return select(Quota).where(
        Quota.tenant_id == tenant_id, Quota.api_key_id.is_(None), Quota.adapter_id.is_(None)
    )
