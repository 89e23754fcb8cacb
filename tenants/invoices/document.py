"""The record of an invoice: the same document over HTTP, from commands and in exports. Invariant: every amount is an integer; exact
pico-units are decimal strings, since they exceed what JSON readers keep.
"""

from typing import Any
from uuid import UUID

from loraplex.tenants.billing.tenant_billing import TERMS
from loraplex.tenants.invoices.content import InvoiceContent, line_columns
from loraplex.tenants.invoices.currencies import decimal_text, minor_digits
from loraplex.tenants.invoices.invoices import STATED, InvoiceDetails
from loraplex.tenants.invoices.lines import InvoiceLine
from loraplex.tenants.invoices.records import InvoiceDocument, InvoiceLineDocument
from loraplex.tenants.invoices.totals import InvoiceTotals


def invoice_document(invoice: InvoiceDetails) -> InvoiceDocument:
    """Return the whole invoice."""
    content = invoice.content
    return InvoiceDocument(
        **{name: getattr(invoice, name) for name in STATED},
        month=str(invoice.month),
        currency=content.terms.currency,
        **{name: getattr(content.terms, name) for name in TERMS},
        lines=[line_document(line, _name(content, line.adapter_id)) for line in content.totals.lines],
        **totals_document(content.totals, content.terms.currency),
    )


def line_document(line: InvoiceLine, adapter: str | None) -> InvoiceLineDocument:
    """Return one line; `adapter` is the adapter's name."""
    return InvoiceLineDocument(**line_columns(line), adapter=adapter, rounding_pico=line.rounding_pico)


def totals_document(totals: InvoiceTotals, currency: str) -> dict[str, Any]:
    """Return the sums below the lines as JSON; `total` is `total_micro` as people write it."""
    return {
        "subtotal_micro": totals.subtotal_micro,
        "credits": totals.credits_micro,
        "credit_uses": [
            {"grant_id": str(use.grant_id), "amount_micro": use.amount_micro} for use in totals.credit_uses
        ],
        "tax": totals.tax_micro,
        "rounding_micro": totals.rounding_micro,
        "total_micro": totals.total_micro,
        "total": decimal_text(totals.total_micro, minor_digits(currency)),
    }


def _name(content: InvoiceContent, adapter_id: UUID | None) -> str | None:
    return None if adapter_id is None else content.adapters.get(adapter_id)
