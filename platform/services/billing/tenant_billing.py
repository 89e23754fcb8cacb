"""Use cases on the billing data of tenants, for operators. Invariant: a change writes one audit entry with the fields that
changed; one that changes nothing writes none.
"""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.billing.records import TenantBillingDocument
from loraplex.tenants.billing.tenant_billing import TenantBillings
from loraplex.tenants.unit_of_work import UnitOfWork, require_revision

ACTION = "billing.change"


async def change(
    uow: UnitOfWork, tenant_id: UUID, fields: Mapping[str, Any], *, seen: int | None = None
) -> TenantBillingDocument:
    """Set the billing data of a tenant that `fields` names. Another currency begins with the next month, or at once for a
    tenant that was never used. `seen`: the revision that the author has read, None for any.

    Raises `TenantNotFound`, `RevisionMoved`, and `InUse` for another currency in the month in which the last one began.
    """
    tenant = await TenantRepository(uow.session).living(tenant_id)
    billings = TenantBillings(uow.session)
    row = await billings.locked(tenant.id)
    require_revision(seen, row.revision)
    before = (await billings.read(row)).model_dump()
    changed = await billings.change(row, fields)
    after = changed.model_dump()
    if before != after:
        target = f"tenants/{tenant.id}/billing"
        await uow.audit.record(ACTION, target, before, after, tenant_id=tenant.id)
    return changed
