"""Use case on credits: grant one to a tenant. Invariant: a credit is never changed or taken back; invoices use it up."""

from datetime import datetime
from typing import Any
from uuid import UUID

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.billing.tenant_billing import TenantBillings
from loraplex.tenants.invoices.credits import DEFAULT_PRIORITY, CreditRepository, GrantedCredit, NewCredit
from loraplex.tenants.unit_of_work import UnitOfWork


async def grant(
    uow: UnitOfWork,
    tenant_id: UUID,
    amount_micro: int,
    reason: str,
    *,
    priority: int = DEFAULT_PRIORITY,
    expires_at: datetime | None = None,
    currency: str | None = None,
) -> GrantedCredit:
    """Grant a credit, as an operator. `currency` None: that of the tenant now. Raises `TenantNotFound`, `InvalidField`."""
    tenant = await TenantRepository(uow.session).living(tenant_id)
    present = await TenantBillings(uow.session).get(tenant.id)
    credit = NewCredit(
        currency=currency or present.currency,
        amount_micro=amount_micro,
        reason=reason,
        priority=priority,
        expires_at=expires_at,
    )
    granted = await CreditRepository(uow.session, tenant.id).grant(credit)
    target = f"tenants/{tenant.id}/credits/{granted.grant.id}"
    await uow.audit.record("credit.grant", target, None, snapshot(granted), tenant_id=tenant.id)
    return granted


def snapshot(granted: GrantedCredit) -> dict[str, Any]:
    """Return a grant's fields for the audit log."""
    names = ("currency", "amount_micro", "priority", "expires_at", "reason")
    return {name: getattr(granted.grant, name) for name in names}
