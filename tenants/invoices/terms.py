"""What the invoices of a tenant state: read from its billing data, which an operator sets."""

from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.billing.tenant_billing import TenantBillings, currency_of
from loraplex.tenants.errors import TenantNotFound
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.totals import InvoiceTerms
from loraplex.tenants.models import Tenant, TenantBilling


async def billing_terms(session: AsyncSession, tenant_id: UUID, month: Month) -> InvoiceTerms:
    """Return the terms of a tenant's month; without data of its own it has neither tax nor minimum. Raises `TenantNotFound`."""
    tenant = await session.get(Tenant, tenant_id)
    if tenant is None:
        raise TenantNotFound(f"no tenant {tenant_id}")
    data = await session.get(TenantBilling, tenant_id) or TenantBilling(tax_rate_ppm=0, minimum_micro=0)
    default = await TenantBillings(session).default_currency()
    return InvoiceTerms(
        currency=currency_of(data, default).at(month.begin),
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
