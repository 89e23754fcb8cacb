"""Use cases on tenants, for operators: create, suspend, resume, delete, change the tier.

Invariant: a change writes one audit entry that names its tenant; a use case that changes nothing writes none. A deletion stops
the tenant at once; a gateway erases its data in the background.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from loraplex.tenants import running_requests
from loraplex.tenants.accounts.deletion import TenantDeletions
from loraplex.tenants.accounts.records import NewTenantDocument, TenantAccountDocument, TierChange
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.models import Tenant
from loraplex.tenants.quotas import use_cases as quotas
from loraplex.tenants.scopes import TENANT_ADMIN
from loraplex.tenants.unit_of_work import UnitOfWork, require_revision

FIRST_KEY_NAME: Final = "admin"


async def create(
    uow: UnitOfWork,
    name: str,
    *,
    tier: str = "standard",
    weight: float = 1.0,
    limits: Mapping[str, int | None] | None = None,
    first_key_name: str = FIRST_KEY_NAME,
) -> NewTenantDocument:
    """Create a tenant with its first key. `limits` are set as by `quotas.change`, with an audit entry of their own.

    Raises `InvalidField`, `NameTaken`.
    """
    tenant = await TenantRepository(uow.session).create(name, weight, tier)
    key = await KeyRepository(uow.session).create(tenant.id, first_key_name, [TENANT_ADMIN])
    created = await _created(uow, tenant, limits, {"key_id": key.record.key_id})
    return NewTenantDocument(**dict(created), api_key=key.plaintext)


async def create_without_key(
    uow: UnitOfWork, name: str, *, tier: str, weight: float, limits: Mapping[str, int | None]
) -> TenantAccountDocument:
    """Create a tenant whose first admin is a person. `limits` are set as by `create`. Raises `InvalidField`, `NameTaken`."""
    return await _created(uow, await TenantRepository(uow.session).create(name, weight, tier), limits)


async def suspend(uow: UnitOfWork, tenant_id: UUID, *, end_running: bool = True) -> TenantAccountDocument:
    """Suspend a tenant: none of its keys authenticates until it is resumed. `end_running`: what it runs ends, on every gateway,
    also where it was suspended without before. Raises `TenantNotFound`.
    """
    tenant = await TenantRepository(uow.session).living(tenant_id)
    before = _snapshot(tenant)
    tenant.suspended_at = tenant.suspended_at or datetime.now(UTC)
    await uow.session.flush()
    ended = end_running and await running_requests.end(uow.session, tenant_id)
    return await _changed(uow, "tenant.suspend", tenant, before, ended=ended)


async def resume(uow: UnitOfWork, tenant_id: UUID) -> TenantAccountDocument:
    """Resume a suspended tenant. Raises `TenantNotFound`."""
    tenant = await TenantRepository(uow.session).living(tenant_id)
    before = _snapshot(tenant)
    tenant.suspended_at = None
    await uow.session.flush()
    return await _changed(uow, "tenant.resume", tenant, before)


async def delete(uow: UnitOfWork, tenant_id: UUID) -> TenantAccountDocument:
    """End a tenant for good, and what it runs; repeating it changes nothing. Its usage figures stay. Raises `TenantNotFound`."""
    deletions = TenantDeletions(uow.session)
    before = _snapshot(await deletions.locked(tenant_id))
    tenant = await deletions.begin(tenant_id)
    ended = before["deleted_at"] is None and await running_requests.end(uow.session, tenant_id)
    return await _changed(uow, "tenant.delete", tenant, before, ended=ended)


async def change_tier(
    uow: UnitOfWork, tenant_id: UUID, change: TierChange, *, seen: int | None = None
) -> TenantAccountDocument:
    """Change the tier or the share of the engine. `seen`: the revision that the author has read, None for any.

    Raises `TenantNotFound`, `RevisionMoved`, `InvalidField`.
    """
    tenants = TenantRepository(uow.session)
    tenant = await tenants.living(tenant_id)
    require_revision(seen, tenant.revision)
    before = _snapshot(tenant)
    await tenants.change_tier(tenant, change)
    return await _changed(uow, "tenant.change_tier", tenant, before)


async def _created(
    uow: UnitOfWork,
    tenant: Tenant,
    limits: Mapping[str, int | None] | None,
    also_recorded: Mapping[str, Any] = MappingProxyType({}),
) -> TenantAccountDocument:
    after = {**_snapshot(tenant), **also_recorded}
    await uow.audit.record("tenant.create", f"tenants/{tenant.id}", None, after, tenant_id=tenant.id)
    if limits:
        await quotas.change(uow, tenant.id, limits)
    return TenantAccountDocument.model_validate(tenant)


async def _changed(
    uow: UnitOfWork, action: str, tenant: Tenant, before: Mapping[str, Any], *, ended: bool = False
) -> TenantAccountDocument:
    after = _snapshot(tenant) | ({"end_running": True} if ended else {})
    if before != after:
        await uow.audit.record(action, f"tenants/{tenant.id}", before, after, tenant_id=tenant.id)
    return TenantAccountDocument.model_validate(tenant)


def _snapshot(tenant: Tenant) -> dict[str, Any]:
    return TenantAccountDocument.model_validate(tenant).model_dump()
