"""What the invoices of a tenant state: read from its billing data, which an operator sets."""

from datetime import date
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.billing.invoice_totals import InvoiceTerms
from loraplex.tenants.billing.months import Month
from loraplex.tenants.errors import TenantNotFound
from loraplex.tenants.models import Tenant, TenantBilling


async def billing_terms(
    session: AsyncSession, tenant_id: UUID, month: Month, default_currency: str
) -> InvoiceTerms:
    """Return the terms of a tenant's month; without data of its own it has neither tax nor minimum. Raises `TenantNotFound`."""
    tenant = await session.get(Tenant, tenant_id)
    if tenant is None:
        raise TenantNotFound(f"no tenant {tenant_id}")
    data = await session.get(TenantBilling, tenant_id) or TenantBilling(tax_rate_ppm=0, minimum_micro=0)
    return InvoiceTerms(
        currency=_currency(data, month.begin.date()) or default_currency,
        issuer=data.issuer or "",
        customer_name=data.customer_name or tenant.name,
        customer_address=data.customer_address or "",
        vat_id=data.vat_id,
        tax_rate_ppm=data.tax_rate_ppm,
        minimum_micro=data.minimum_micro if _is_customer(tenant, month) else 0,
    )


def _currency(data: TenantBilling, day: date) -> str | None:
    changed = data.next_currency_from is not None and day >= data.next_currency_from
    return data.next_currency if changed else data.currency


def _is_customer(tenant: Tenant, month: Month) -> bool:
    """Whether the tenant existed in the month."""
    deleted = tenant.deleted_at is not None and tenant.deleted_at <= month.begin
    return tenant.created_at < month.end and not deleted
