"""An invoice to find: a draft without usage."""

from datetime import UTC, datetime
from uuid import UUID

from loraplex.tenants.actors import system_actor
from loraplex.tenants.database import Database
from loraplex.tenants.invoices import use_cases as invoices
from loraplex.tenants.invoices.invoices import invoice_id
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.unit_of_work import unit_of_work


async def draft_invoice(database: Database, tenant_id: UUID) -> str:
    """Draft the tenant's invoice of January 2026, once; return its id."""
    month = Month(2026, 1)
    async with unit_of_work(database, system_actor("test"), None, None) as uow:
        await invoices.draft(uow, tenant_id, month, "USD", datetime(2999, 1, 1, tzinfo=UTC))
    return str(invoice_id(tenant_id, month, "USD", 0))
