"""Use cases on tenants, for operators: create, suspend, resume, delete, change the tier.

Invariant: a change writes one audit entry that names its tenant; a use case that changes nothing writes none. A deletion stops
the tenant at once; a gateway erases its data in the background.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from loraplex.platform.services import quotas
from loraplex.tenants.accounts.deletion import TenantDeletions
from loraplex.tenants.accounts.tenants import TenantRepository, TierChange
from loraplex.tenants.admission import fences
from loraplex.tenants.api_keys.keys import IssuedKey, KeyRepository
from loraplex.tenants.models import Tenant
from loraplex.tenants.scopes import TENANT_ADMIN
from loraplex.tenants.unit_of_work import UnitOfWork, require_revision

FIRST_KEY_NAME: Final = "admin"
SNAPSHOT: Final = (
    *("id", "name", "tier", "weight", "unknown_parameters"),
    *("created_at", "suspended_at", "deleted_at", "erased_at"),
)
"""The fields of a tenant in the audit log."""


@dataclass(frozen=True, slots=True)
class CreatedTenant:
    """A new tenant and its first key, which has the scope `tenant:admin`."""

    tenant: Tenant
    key: IssuedKey


async def create(
    uow: UnitOfWork,
    name: str,
    *,
    tier: str = "standard",
    weight: float = 1.0,
    limits: Mapping[str, int | None] | None = None,
    first_key_name: str = FIRST_KEY_NAME,
) -> CreatedTenant:
    """Create a tenant with its first key. `limits` are set as by `quotas.change`, with an audit entry of their own.

    Raises `InvalidField`, `NameTaken`.
    """
    tenant = await TenantRepository(uow.session).create(name, weight, tier)
    key = await KeyRepository(uow.session).create(tenant.id, first_key_name, [TENANT_ADMIN])
    after = {**snapshot(tenant), "key_id": key.record.key_id}
    await uow.audit.record("tenant.create", target(tenant), None, after, tenant_id=tenant.id)
    if limits:
        await quotas.change(uow, tenant.id, limits)
    return CreatedTenant(tenant, key)


async def create_without_key(
    uow: UnitOfWork, name: str, *, tier: str, weight: float, limits: Mapping[str, int | None]
) -> Tenant:
    """Create a tenant whose first admin is a person. `limits` are set as by `create`. Raises `InvalidField`, `NameTaken`."""
    tenant = await TenantRepository(uow.session).create(name, weight, tier)
    await uow.audit.record("tenant.create", target(tenant), None, snapshot(tenant), tenant_id=tenant.id)
    if limits:
        await quotas.change(uow, tenant.id, limits)
    return tenant


async def suspend(uow: UnitOfWork, tenant_id: UUID, *, end_running: bool = True) -> Tenant:
    """Suspend a tenant: none of its keys authenticates until it is resumed. `end_running`: what it runs ends, on every gateway,
    also where it was suspended without before. Raises `TenantNotFound`.
    """
    tenants = TenantRepository(uow.session)
    tenant = await tenants.living(tenant_id)
    before = snapshot(tenant)
    await tenants.suspend(tenant.name)
    await _record(
        uow,
        "tenant.suspend",
        tenant,
        before,
        ended=end_running and await fences.end_running(uow.session, tenant_id),
    )
    return tenant


async def resume(uow: UnitOfWork, tenant_id: UUID) -> Tenant:
    """Resume a suspended tenant. Raises `TenantNotFound`."""
    tenants = TenantRepository(uow.session)
    tenant = await tenants.living(tenant_id)
    before = snapshot(tenant)
    await tenants.resume(tenant.name)
    await _record(uow, "tenant.resume", tenant, before)
    return tenant


async def delete(uow: UnitOfWork, tenant_id: UUID) -> Tenant:
    """End a tenant for good, and what it runs; repeating it changes nothing. Its usage figures stay. Raises `TenantNotFound`."""
    deletions = TenantDeletions(uow.session)
    before = snapshot(await deletions.locked(tenant_id))
    tenant = await deletions.begin(tenant_id)
    ended = before["deleted_at"] is None and await fences.end_running(uow.session, tenant_id)
    await _record(uow, "tenant.delete", tenant, before, ended=ended)
    return tenant


async def change_tier(
    uow: UnitOfWork, tenant_id: UUID, change: TierChange, *, seen: int | None = None
) -> Tenant:
    """Change the tier or the share of the engine. `seen`: the revision that the author has read, None for any.

    Raises `TenantNotFound`, `RevisionMoved`, `InvalidField`.
    """
    tenants = TenantRepository(uow.session)
    tenant = await tenants.living(tenant_id)
    require_revision(seen, tenant.revision)
    before = snapshot(tenant)
    await tenants.change_tier(tenant, change)
    await _record(uow, "tenant.change_tier", tenant, before)
    return tenant


async def _record(
    uow: UnitOfWork, action: str, tenant: Tenant, before: Mapping[str, Any], *, ended: bool = False
) -> None:
    after = snapshot(tenant) | ({"end_running": True} if ended else {})
    if before != after:
        await uow.audit.record(action, target(tenant), before, after, tenant_id=tenant.id)


def snapshot(tenant: Tenant) -> dict[str, Any]:
    """Return a tenant's fields for the audit log."""
    return {name: getattr(tenant, name) for name in SNAPSHOT}


def target(tenant: Tenant) -> str:
    """Return the tenant's path in the audit log."""
    return f"tenants/{tenant.id}"
