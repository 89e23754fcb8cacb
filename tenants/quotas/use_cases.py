"""Use cases on limits: an operator sets a tenant's; a tenant narrows those of its keys and adapters.

Invariant: a change writes one audit entry per subject with the limits that changed, and none for one whose limits stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys import use_cases as api_keys
from loraplex.tenants.api_keys.records import KeyChange, NewKeyDocument
from loraplex.tenants.api_keys.use_cases import Delegated, Member
from loraplex.tenants.quotas.delegated_quotas import QuotaRepository, QuotaState, state_of
from loraplex.tenants.quotas.limits import NO_LIMITS, QuotaLimits
from loraplex.tenants.quotas.records import LimitsDocument, TenantLimitsDocument
from loraplex.tenants.unit_of_work import UnitOfWork, require_revision

ACTION = "quotas.change"


async def change(
    uow: UnitOfWork, tenant_id: UUID, limits: Mapping[str, int | None], *, seen: int | None = None
) -> TenantLimitsDocument:
    """Set the limits of a tenant that `limits` names, as an operator. `seen`: the revision that the author has read, None
    for any.

    Raises `TenantNotFound`, `RevisionMoved`, `InvalidField`.
    """
    tenant = await TenantRepository(uow.session).living(tenant_id)
    quotas = QuotaRepository(uow.session, tenant.id)
    row = await quotas.locked(state_of("tenant", tenant.id, tenant.name, None))
    require_revision(seen, row.revision)
    before = QuotaLimits.of(row)
    after = replace(before, **limits)
    await quotas.set(row, after)
    if before != after:
        target = f"tenants/{tenant.id}/quotas"
        await uow.audit.record(ACTION, target, dict(before.items()), dict(after.items()), tenant_id=tenant.id)
    return TenantLimitsDocument.of(after, row.revision)


async def narrow_key(
    uow: UnitOfWork,
    authority: Delegated | Member,
    key_id: str,
    limits: QuotaLimits,
    *,
    seen: int | None = None,
) -> LimitsDocument:
    """Set all limits of a key. A key that manages passes on what it is limited in itself; a person has no limits to pass on.

    Raises `KeyNotFound`, `ScopeNotHeld`, `BoundNotHeld`, `RevisionMoved`, and `InvalidField` for a limit above the tenant's.
    """
    state = await QuotaRepository(uow.session, authority.tenant_id).key(key_id)
    granted = await authority.keys(uow).limits_for(key_id, dict(limits.items()))
    return await _narrow(uow, authority.tenant_id, state, QuotaLimits(**granted), seen)


async def create_limited_key(
    uow: UnitOfWork,
    authority: Delegated | Member,
    name: str,
    scopes: Sequence[str],
    bounds: KeyChange,
    limits: QuotaLimits,
) -> NewKeyDocument:
    """Create a key as `api_keys.create`, and set its limits as `narrow_key` if it has any. Raises as these two."""
    made = await api_keys.create(uow, authority, name, scopes, bounds)
    if limits != NO_LIMITS:
        await narrow_key(uow, authority, made.id, limits)
    return made


async def narrow_adapter(
    uow: UnitOfWork, tenant_id: UUID, name: str, limits: QuotaLimits, *, seen: int | None = None
) -> LimitsDocument:
    """Set all limits of an adapter. Raises `AdapterNotFound`, `RevisionMoved`, and `InvalidField` for a limit above the tenant's."""
    state = await QuotaRepository(uow.session, tenant_id).adapter(name)
    return await _narrow(uow, tenant_id, state, limits, seen)


async def _narrow(
    uow: UnitOfWork, tenant_id: UUID, state: QuotaState, after: QuotaLimits, seen: int | None
) -> LimitsDocument:
    quotas = QuotaRepository(uow.session, tenant_id)
    row = await quotas.locked(state)
    require_revision(seen, row.revision)
    before = QuotaLimits.of(row)
    replaced = await quotas.narrow(row, after)
    if before != after:
        target = f"{state.level}s/{state.name}/quotas"
        await uow.audit.record(ACTION, target, dict(before.items()), dict(after.items()), tenant_id=tenant_id)
    for key in replaced:
        old, new = dict(key.before.items()), dict(key.after.items())
        await uow.audit.record(ACTION, f"keys/{key.key_id}/quotas", old, new, tenant_id=tenant_id)
    return LimitsDocument.of(after, row.revision)
