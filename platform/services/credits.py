"""Use case on credits: grant one to a tenant. Invariant: a credit is never changed or taken back; invoices use it up."""

from typing import Any
from uuid import UUID

from loraplex.platform.services.unit_of_work import UnitOfWork
from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.invoices.credits import CreditRepository, GrantedCredit, NewCredit


async def grant(uow: UnitOfWork, tenant_id: UUID, credit: NewCredit) -> GrantedCredit:
    """Grant a credit, as an operator. Raises `TenantNotFound`, and `InvalidField` for an expiry in the past."""
    tenant = await TenantRepository(uow.session).living(tenant_id)
    granted = await CreditRepository(uow.session, tenant.id).grant(credit)
    target = f"tenants/{tenant.id}/credits/{granted.grant.id}"
    await uow.audit.record("credit.grant", target, None, snapshot(granted), tenant_id=tenant.id)
    return granted


def snapshot(granted: GrantedCredit) -> dict[str, Any]:
    """Return a grant's fields for the audit log."""
    names = ("currency", "amount_micro", "priority", "expires_at", "reason")
    return {name: getattr(granted.grant, name) for name in names}
