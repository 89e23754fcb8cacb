"""What the invoices of tenants state: read from their billing data, which an operator sets."""

from collections.abc import Collection
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.billing.tenant_billing import TenantBillings, currency_of
from loraplex.tenants.errors import TenantNotFound
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.totals import InvoiceTerms
from loraplex.tenants.models import Tenant, TenantBilling


async def billing_terms(session: AsyncSession, tenant_id: UUID, month: Month) -> InvoiceTerms:
    """Return the terms of a tenant's month. Raises `TenantNotFound`."""
    return (await terms_of_all(session, (tenant_id,), month))[tenant_id]


async def terms_of_all(
    session: AsyncSession, tenant_ids: Collection[UUID], month: Month
) -> dict[UUID, InvoiceTerms]:
    """Return the terms of a month by tenant; one without data of its own has neither tax nor minimum. Raises `TenantNotFound`."""
    query = (
        select(Tenant, TenantBilling)
        .outerjoin(TenantBilling, TenantBilling.tenant_id == Tenant.id)
        .where(Tenant.id.in_(tenant_ids))
    )
    rows = (await session.execute(query)).all()
    default = await TenantBillings(session).default_currency()
    terms = {tenant.id: _terms(tenant, data, default, month) for tenant, data in rows}
    for missing in set(tenant_ids) - terms.keys():
        raise TenantNotFound(f"no tenant {missing}")
    return terms


def _terms(tenant: Tenant, data: TenantBilling | None, default_currency: str, month: Month) -> InvoiceTerms:
    data = data or TenantBilling(tax_rate_ppm=0, minimum_micro=0)
    return InvoiceTerms(
        currency=currency_of(data, default_currency).at(month.begin),
        issuer=data.issuer or "",
        customer_name=data.customer_name or tenant.name,
        customer_address=data.customer_address or "",
        vat_id=data.vat_id,
        tax_rate_ppm=data.tax_rate_ppm,
        minimum_micro=data.minimum_micro if _is_customer(tenant, month) else 0,
    )


def _is_customer(tenant: Tenant, month: Month) -> bool:
    """Whether the tenant existed in the month."""
    deleted = tenant.deleted_at is not None and tenant.deleted_at <= month.begin
    return tenant.created_at < month.end and not deleted
