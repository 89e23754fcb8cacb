"""Counts a tenant's bytes against `max_adapter_bytes`: those of its versions and of its open uploads.

Invariant: bytes are counted and reserved under one lock per tenant, so that no two uploads reserve the same bytes.
"""

from collections.abc import Mapping
from decimal import Decimal
from uuid import UUID

from sqlalchemy import ColumnElement, ScalarSelect, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.database import default_limits, lock
from loraplex.tenants.errors import CountReached
from loraplex.tenants.models import Adapter, AdapterVersion, Quota, Upload


class StorageQuota:
    """The storage quota of one tenant, seen by one session."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def lock(self) -> None:
        """Prevent other reservations until the transaction ends.

        The lock is advisory, since a tenant's role may lock no row that all its uploads share.
        """
        await lock(self._session, f"loraplex adapter space {self._tenant_id}")

    async def require(self, size_bytes: int, adapter_id: UUID) -> None:
        """Raise `CountReached` unless `size_bytes` more fit the limits of the tenant and the adapter."""
        for limited_id, limit in (await self._limits(adapter_id)).items():
            used = await self.used(limited_id)
            if used + size_bytes > limit:
                owner = "tenant" if limited_id is None else "adapter"
                raise CountReached(
                    "max_adapter_bytes",
                    f"max_adapter_bytes of the {owner} is {limit}: {used} bytes are in use and {size_bytes} more were asked",
                )

    async def used(self, adapter_id: UUID | None = None) -> int:
        """Bytes of all the tenant's adapters, or of one. An upload's bytes count until it ends."""
        return int((await self._session.scalars(select(self.bytes_used(adapter_id)))).one())

    def bytes_used(self, adapter_id: UUID | None = None) -> ColumnElement[Decimal]:
        """The same as an expression of another statement."""
        return self._stored(adapter_id) + self._uploading(adapter_id)

    async def _limits(self, adapter_id: UUID) -> Mapping[UUID | None, int]:
        """The limit of the tenant (None), by default the installation's, and that of the adapter, if it has one."""
        query = select(Quota.adapter_id, Quota.max_adapter_bytes).where(
            Quota.tenant_id == self._tenant_id,
            Quota.api_key_id.is_(None),
            or_(Quota.adapter_id.is_(None), Quota.adapter_id == adapter_id),
        )
        limits: dict[UUID | None, int] = {None: default_limits(self._session).max_adapter_bytes}
        for limited_id, limit in await self._session.execute(query):
            if limit is not None:
                limits[limited_id] = limit
        return limits

    def _stored(self, adapter_id: UUID | None) -> ScalarSelect[Decimal]:
        query = (
            select(func.coalesce(func.sum(AdapterVersion.size_bytes), 0))
            .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
            .where(AdapterVersion.tenant_id == self._tenant_id, *_kept())
        )
        if adapter_id is not None:
            query = query.where(AdapterVersion.adapter_id == adapter_id)
        return query.scalar_subquery()

    def _uploading(self, adapter_id: UUID | None) -> ScalarSelect[Decimal]:
        query = select(func.coalesce(func.sum(Upload.size_bytes), 0)).where(
            Upload.tenant_id == self._tenant_id, Upload.state == "open"
        )
        if adapter_id is not None:
            query = query.where(Upload.adapter_id == adapter_id)
        return query.scalar_subquery()


def _kept() -> tuple[ColumnElement[bool], ...]:
    """Versions with stored files: a rejected one has none, a deleted one has them until they are removed."""
    return (
        AdapterVersion.state != "rejected",
        AdapterVersion.blob_deleted_at.is_(None),
        or_(Adapter.deleted_at.is_(None), AdapterVersion.state == "deleting"),
    )
