"""Use cases on invoices and credits: draft, finalize, record the payment, void; grant a credit.

Invariant: a credit is never changed or taken back; invoices use it up. Each use case on invoices takes the tenant's billing lock,
may be repeated, and writes one audit entry for what it changes. A repeated step that finds its work done changes nothing.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import func, select

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.billing.tenant_billing import TenantBillings
from loraplex.tenants.errors import InvalidField, MonthNotOver, NothingToBill
from loraplex.tenants.invoices.content import compute_contents
from loraplex.tenants.invoices.credits import CreditRepository, NewCredit
from loraplex.tenants.invoices.document import invoice_document
from loraplex.tenants.invoices.invoices import InvoiceRepository, details_of, require_state
from loraplex.tenants.invoices.locks import lock_tenant
from loraplex.tenants.invoices.months import Month, passed_everywhere
from loraplex.tenants.invoices.records import (
    DEFAULT_PRIORITY,
    MAX_REFERENCE,
    CreditDocument,
    InvoiceDocument,
    InvoiceSummaryDocument,
)
from loraplex.tenants.invoices.tables import Invoice
from loraplex.tenants.invoices.terms import billing_terms
from loraplex.tenants.unit_of_work import UnitOfWork
from loraplex.tenants.webhooks.events import InvoiceFinalized, add_event

SNAPSHOT: Final = ("number", "state", "month", "currency", "total_micro", "paid_reference")
"""The fields of an invoice in the audit log."""
CREDIT_SNAPSHOT: Final = ("currency", "amount_micro", "priority", "expires_at", "reason")
"""The fields of a credit in the audit log."""


async def draft(
    uow: UnitOfWork, tenant_id: UUID, month: Month, currency: str, grace_ends_at: datetime
) -> InvoiceSummaryDocument | None:
    """Write the first draft of a month. Return None if the month has an invoice already, be it void."""
    await lock_tenant(uow.session, tenant_id)
    invoices = InvoiceRepository(uow.session)
    if await invoices.attempts(tenant_id, month, currency):
        return None
    invoice = await invoices.draft(tenant_id, month, currency, 0, grace_ends_at)
    await _record(uow, "invoice.draft", invoice, None)
    return InvoiceSummaryDocument.of(invoice)


async def finalize(
    uow: UnitOfWork,
    tenant_id: UUID,
    month: Month,
    *,
    now: datetime | None = None,
    currency: str | None = None,
) -> InvoiceDocument:
    """Make the invoice of a month final, whether its grace has ended or not. One that is final already stays as it is.

    `now` None: the time that has passed for every gateway. `currency` None: that of the tenant in the month.
    After a void invoice this makes the next one.
    Raises `TenantNotFound`, `MonthNotOver`, and `NothingToBill` where there is no draft either.
    """
    now = await passed_everywhere(uow.session) if now is None else now
    if now < month.end:
        raise MonthNotOver(f"{month} ends at {month.end:%Y-%m-%dT%H:%M:%SZ}")
    await lock_tenant(uow.session, tenant_id)
    terms = await billing_terms(uow.session, tenant_id, month)
    chosen = currency or terms.currency
    invoices = InvoiceRepository(uow.session)
    invoice = await invoices.living(tenant_id, month, chosen)
    if invoice is not None and invoice.state != "draft":
        return await _shown(uow, invoice)
    content = (await compute_contents(uow.session, tenant_id, month, (chosen,)))[chosen]
    if invoice is None:
        if content.is_empty:
            raise NothingToBill(f"{month} has nothing to bill in {chosen}")
        attempt = await invoices.attempts(tenant_id, month, chosen)
        invoice = await invoices.draft(tenant_id, month, chosen, attempt, now)
    before = _snapshot(invoice)
    await invoices.finalize(invoice, content)
    await _record(uow, "invoice.finalize", invoice, before)
    event = InvoiceFinalized(
        invoice_id=invoice.id,
        number=str(invoice.number),
        month=invoice.month,
        currency=invoice.currency,
        total_micro=content.totals.total_micro,
    )
    await add_event(uow.session, tenant_id, event)
    # Not read back: others wait for the lock of the number.
    return invoice_document(details_of(invoice, content))


async def pay(uow: UnitOfWork, invoice_id: UUID, reference: str) -> InvoiceDocument:
    """Record the payment of a final invoice; repeating it with the same reference changes nothing.

    Raises `InvoiceNotFound`, `InvoiceStateForbids`, `InvalidField`.
    """
    if not 1 <= len(reference) <= MAX_REFERENCE or not reference.isprintable():
        raise InvalidField("reference", f"reference must be 1 to {MAX_REFERENCE} printable characters")
    invoice = await _locked(uow, invoice_id)
    if (invoice.state, invoice.paid_reference) != ("paid", reference):
        require_state(invoice, "final")
        before, paid_at = _snapshot(invoice), await uow.session.scalar(select(func.now()))
        invoice.state, invoice.paid_at, invoice.paid_reference = "paid", paid_at, reference
        await uow.session.flush()
        await _record(uow, "invoice.pay", invoice, before)
    return await _shown(uow, invoice)


async def void(uow: UnitOfWork, invoice_id: UUID) -> InvoiceDocument:
    """Cancel a final invoice and give its credits back; repeating it changes nothing. It keeps its number.

    What it billed is billed again: by the next invoice of its month or of a later one.
    Raises `InvoiceNotFound`, and `InvoiceStateForbids` for a draft and for a paid one.
    """
    invoice = await _locked(uow, invoice_id)
    if invoice.state != "void":
        require_state(invoice, "final")
        await CreditRepository(uow.session, invoice.tenant_id).give_back(invoice.id)
        before, voided_at = _snapshot(invoice), await uow.session.scalar(select(func.now()))
        invoice.state, invoice.voided_at = "void", voided_at
        await uow.session.flush()
        await _record(uow, "invoice.void", invoice, before)
    return await _shown(uow, invoice)


async def grant_credit(
    uow: UnitOfWork,
    tenant_id: UUID,
    amount_micro: int,
    reason: str,
    *,
    priority: int = DEFAULT_PRIORITY,
    expires_at: datetime | None = None,
    currency: str | None = None,
) -> CreditDocument:
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
    target = f"tenants/{tenant.id}/credits/{granted.id}"
    after = {name: getattr(credit, name) for name in CREDIT_SNAPSHOT}
    await uow.audit.record("credit.grant", target, None, after, tenant_id=tenant.id)
    return granted


async def _locked(uow: UnitOfWork, invoice_id: UUID) -> Invoice:
    """Return the invoice as it is under its tenant's lock. Raises `InvoiceNotFound`."""
    invoices = InvoiceRepository(uow.session)
    await lock_tenant(uow.session, (await invoices.by_id(invoice_id)).tenant_id)
    return await invoices.by_id(invoice_id)


async def _shown(uow: UnitOfWork, invoice: Invoice) -> InvoiceDocument:
    return invoice_document(await InvoiceRepository(uow.session).details(invoice))


async def _record(uow: UnitOfWork, action: str, invoice: Invoice, before: Mapping[str, Any] | None) -> None:
    target = f"tenants/{invoice.tenant_id}/invoices/{invoice.id}"
    await uow.audit.record(action, target, before, _snapshot(invoice), tenant_id=invoice.tenant_id)


def _snapshot(invoice: Invoice) -> dict[str, Any]:
    return {name: getattr(invoice, name) for name in SNAPSHOT}
