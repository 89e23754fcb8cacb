"""Deletes tenants. Invariant: from `begin` on, the name is free and no key works; any process may run the remaining steps, any
number of times, and `erased_at` is set last.

Kept: the row itself, whose name is free, the usage ledger with its sums and exported meter events (numbers), what its bills need
(rate cards, billing data, credits, invoices), and phases of requests and the audit log for their retention times.
"""

from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import delete, func, inspect, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import TenantNotFound
from loraplex.tenants.models import (
    Adapter,
    AdapterAlias,
    AdapterVersion,
    AdmissionEpoch,
    AliasGate,
    AliasGuard,
    AliasTarget,
    ApiKey,
    Base,
    DataPolicy,
    DecisionCalibration,
    Evaluation,
    EvaluationAnswer,
    FailedRequest,
    IdempotencyRecord,
    Invitation,
    Membership,
    OutboxEvent,
    Quota,
    QuotaEvent,
    RecordedRequest,
    ReservationRow,
    Suite,
    Tenant,
    Upload,
    UploadPart,
    UserSession,
    WebhookDelivery,
    WebhookEndpoint,
)

ERASED_TABLES: Final[tuple[type[Base], ...]] = (
    *(UserSession, Invitation, Membership),
    *(WebhookDelivery, WebhookEndpoint, OutboxEvent),
    *(IdempotencyRecord, QuotaEvent, UploadPart, Upload),
    *(EvaluationAnswer, Evaluation, AliasGate, Suite),
    *(RecordedRequest, DataPolicy, FailedRequest, DecisionCalibration),
    *(AliasGuard, AliasTarget, AdapterAlias, AdapterVersion),
    *(Quota, Adapter, ApiKey, ReservationRow, AdmissionEpoch),
)
"""Referring tables come before the tables they refer to, so that no cascade is larger than a batch."""

KEPT_TABLES: Final = frozenset(
    {
        *(
            "usage_records",
            "usage_totals",
            "usage_rollups",
            "monthly_rollups",
            "request_rollups",
            "request_phases",
            "audit_entries",
        ),
        *("rate_cards", "tenant_billing", "meter_exports"),
        *("credit_grants", "credit_entries", "invoices", "invoice_lines"),
    }
)


class TenantDeletions:
    """The deletions seen by one session of an operator."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def locked(self, tenant_id: UUID) -> Tenant:
        """The tenant, deleted or not, locked until the transaction ends. Raises `TenantNotFound`."""
        # Rows that refer to it are written meanwhile: a settlement that waited here would hold what ends the running requests.
        tenant = await self._session.get(Tenant, tenant_id, with_for_update={"key_share": True})
        if tenant is None:
            raise TenantNotFound(f"no tenant {tenant_id}")
        return tenant

    async def begin(self, tenant_id: UUID) -> Tenant:
        """End the tenant at once; may be repeated. Raises `TenantNotFound`."""
        tenant = await self.locked(tenant_id)
        if tenant.deleted_at is None:
            tenant.deleted_at = await self._session.scalar(select(func.now()))
            tenant.suspended_at = tenant.suspended_at or tenant.deleted_at
            await self._session.flush()
        return tenant

    async def unfinished(self, limit: int) -> list[UUID]:
        """Deleted tenants with rows left to erase, the longest deleted first."""
        query = (
            select(Tenant.id)
            .where(Tenant.deleted_at.is_not(None), Tenant.erased_at.is_(None))
            .order_by(Tenant.deleted_at)
            .limit(limit)
        )
        return [*await self._session.scalars(query)]

    async def since(self, time: datetime) -> list[UUID]:
        """Tenants deleted at `time` or later."""
        query = select(Tenant.id).where(Tenant.deleted_at >= time).order_by(Tenant.deleted_at)
        return [*await self._session.scalars(query)]

    async def deleted_among(self, tenant_ids: set[UUID]) -> set[UUID]:
        """The deleted ones of these tenants; an unknown id is not among them."""
        query = select(Tenant.id).where(Tenant.id.in_(tenant_ids), Tenant.deleted_at.is_not(None))
        return set(await self._session.scalars(query))

    async def open_requests(self, tenant_id: UUID) -> int:
        """The number of the tenant's requests that are not settled."""
        query = select(func.count()).select_from(ReservationRow).where(ReservationRow.tenant_id == tenant_id)
        return (await self._session.scalars(query)).one()

    async def erase_rows(self, tenant_id: UUID, batch: int) -> bool:
        """Delete at most `batch` rows of a deleted tenant; return whether that was all. Raises `TenantNotFound` for a
        living one.
        """
        await self._deleted(tenant_id)
        left = batch
        for table in ERASED_TABLES:
            left -= await self._erase(table, tenant_id, left)
            if left <= 0:
                return False
        return True

    async def finish(self, tenant_id: UUID) -> bool:
        """Record that nothing is left to erase; False while rows are left. Raises `TenantNotFound` for a living tenant."""
        tenant = await self._deleted(tenant_id)
        for table in ERASED_TABLES:
            left = select(_owner(table)).where(_owner(table) == tenant_id).limit(1)
            if await self._session.scalar(left) is not None:
                return False
        tenant.erased_at = tenant.erased_at or await self._session.scalar(select(func.now()))
        return True

    async def _deleted(self, tenant_id: UUID) -> Tenant:
        tenant = await self._session.get(Tenant, tenant_id)
        if tenant is None or tenant.deleted_at is None:
            raise TenantNotFound(f"no deleted tenant {tenant_id}")
        return tenant

    async def _erase(self, table: type[Base], tenant_id: UUID, limit: int) -> int:
        key = tuple_(*inspect(table).primary_key)
        some = select(*inspect(table).primary_key).where(_owner(table) == tenant_id).limit(limit)
        statement = delete(table).where(key.in_(some)).execution_options(synchronize_session=False)
        result: Any = await self._session.execute(statement)
        return int(result.rowcount)


def _owner(table: type[Base]) -> Any:
    return table.__table__.c.tenant_id
