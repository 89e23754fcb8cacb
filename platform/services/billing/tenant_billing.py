"""Use cases on the billing data of tenants, for operators. Invariant: a change writes one audit entry with the fields that
changed; one that changes nothing writes none.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.billing.tenant_billing import BillingData, TenantBillings
from loraplex.tenants.unit_of_work import UnitOfWork, require_revision

ACTION = "billing.change"


@dataclass(frozen=True, slots=True)
class ChangedBilling:
    """The billing data after a change, and their revision."""

    data: BillingData
    revision: int


async def change(
    uow: UnitOfWork, tenant_id: UUID, fields: Mapping[str, Any], *, seen: int | None = None
) -> ChangedBilling:
    """Set the billing data of a tenant that `fields` names. Another currency begins with the next month, or at once for a
    tenant that was never used. `seen`: the revision that the author has read, None for any.

    Raises `TenantNotFound`, `RevisionMoved`, and `InUse` for another currency in the month in which the last one began.
    """
    tenant = await TenantRepository(uow.session).living(tenant_id)
    billings = TenantBillings(uow.session)
    row = await billings.locked(tenant.id)
    require_revision(seen, row.revision)
    before = await billings.read(row)
    after = await billings.change(row, fields)
    if before != after:
        target = f"tenants/{tenant.id}/billing"
        await uow.audit.record(ACTION, target, asdict(before), asdict(after), tenant_id=tenant.id)
    return ChangedBilling(after, row.revision)
