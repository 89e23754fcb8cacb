"""What an invoice bills: computed from the usage of its tenant, or read as it was stored.

Invariant: what is stored when an invoice becomes final is all that it shows later, whatever changes in the tenant's data.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from typing import Any, Final
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.billing.tenant_billing import TERMS
from loraplex.tenants.invoices.billable_usage import Account, BillableUsage, prices_of
from loraplex.tenants.invoices.credits import CreditRepository, balances_of_all
from loraplex.tenants.invoices.lines import (
    Charge,
    InvoiceLine,
    billed_micro,
    charges_of,
    outstanding_lines,
)
from loraplex.tenants.invoices.months import Month
from loraplex.tenants.invoices.terms import terms_of_all
from loraplex.tenants.invoices.totals import (
    CreditBalance,
    InvoiceTerms,
    InvoiceTotals,
    total_invoice,
)
from loraplex.tenants.models import Invoice, InvoiceLineRow

_LINE: Final = (
    *("kind", "adapter_id", "token_class", "price_version_id"),
    *("price", "tokens", "amount_pico", "amount_micro"),
)
"""What a line and its row call the same and write alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceContent:
    """What an invoice bills, and by which terms. `credits`: what was left of the grants before. `adapters`: their names."""

    terms: InvoiceTerms
    totals: InvoiceTotals
    credits: tuple[CreditBalance, ...]
    adapters: Mapping[UUID, str] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.totals.lines


async def compute_contents(
    session: AsyncSession, tenant_id: UUID, month: Month, currencies: Iterable[str] = ()
) -> dict[str, InvoiceContent]:
    """Compute what is still to be billed of the month and of all before, by currency: those with usage, that of the month, and
    `currencies`. The minimum belongs to the currency of the month. Raises `TenantNotFound`.
    """
    found = await compute_for_all(session, month, {tenant_id: currencies})
    return {currency: content for (_, currency), content in found.items()}


async def compute_for_all(
    session: AsyncSession, month: Month, currencies: Mapping[UUID, Iterable[str]]
) -> dict[Account, InvoiceContent]:
    """Compute the contents of several tenants by tenant and currency, with as many statements as for one: as `compute_contents`
    of each key with its value.
    """
    usage = BillableUsage(session, currencies, month)
    terms = await terms_of_all(session, currencies.keys(), month)
    credits = await balances_of_all(session, currencies.keys())
    sums, billed = await usage.sums(), await usage.billed()
    used = {each.price_version_id for of_account in sums.values() for each in of_account}
    used |= {key.price_version_id for of_account in billed.values() for key in of_account}
    prices = await prices_of(session, {each for each in used if each is not None})
    asked = {(each, code) for each in currencies for code in (terms[each].currency, *currencies[each])}
    contents = {}
    for account in sorted({*asked, *sums, *billed}):
        before, own = billed.get(account, {}), _in_currency(terms[account[0]], account[1])
        lines = outstanding_lines(month, charges_of(sums.get(account, ()), prices), before, prices)
        balances = tuple(credits.get(account, ()))
        totals = total_invoice(month, lines, balances, own, billed_micro(month, before))
        contents[account] = InvoiceContent(terms=own, totals=totals, credits=balances)
    return await _with_names(usage, contents)


def _in_currency(terms: InvoiceTerms, currency: str) -> InvoiceTerms:
    """Return the terms of an invoice in this currency: the minimum is agreed in that of the month."""
    return terms if currency == terms.currency else replace(terms, currency=currency, minimum_micro=0)


async def _with_names(
    usage: BillableUsage, contents: Mapping[Account, InvoiceContent]
) -> dict[Account, InvoiceContent]:
    """Name the adapters of the lines."""
    ids = {
        account: {line.adapter_id for line in content.totals.lines if line.adapter_id is not None}
        for account, content in contents.items()
    }
    names = await usage.adapter_names(chain(*ids.values()))
    return {
        account: replace(content, adapters={each: names[each] for each in ids[account] if each in names})
        for account, content in contents.items()
    }


def fill_in(invoice: Invoice, content: InvoiceContent) -> None:
    """Write terms and totals into a draft."""
    terms, totals = content.terms, content.totals
    for name in TERMS:
        setattr(invoice, name, getattr(terms, name))
    for name in ("subtotal_micro", "credits_micro", "tax_micro", "rounding_micro", "total_micro"):
        setattr(invoice, name, getattr(totals, name))
    invoice.credit_balances = [balance_document(each) for each in content.credits]


def line_rows(invoice: Invoice, content: InvoiceContent) -> Iterator[InvoiceLineRow]:
    """Return the rows of the lines, in their order."""
    for position, line in enumerate(content.totals.lines):
        yield InvoiceLineRow(
            invoice_id=invoice.id,
            position=position,
            tenant_id=invoice.tenant_id,
            adapter=None if line.adapter_id is None else content.adapters.get(line.adapter_id),
            **line_columns(line),
        )


def line_columns(line: InvoiceLine) -> dict[str, Any]:
    """Return what the row and the document of a line call the same."""
    return {
        **{name: getattr(line, name) for name in _LINE},
        "month": str(line.month),
        "billed_tokens": line.billed.tokens,
        "billed_pico": line.billed.amount_pico,
    }


async def stored_content(session: AsyncSession, invoice: Invoice) -> InvoiceContent:
    """Read what an invoice that is no draft bills."""
    query = select(InvoiceLineRow).where(InvoiceLineRow.invoice_id == invoice.id)
    rows = (await session.scalars(query.order_by(InvoiceLineRow.position))).all()
    uses = await CreditRepository(session, invoice.tenant_id).used_by(invoice.id)
    return InvoiceContent(
        terms=InvoiceTerms(currency=invoice.currency, **{name: getattr(invoice, name) for name in TERMS}),
        totals=InvoiceTotals(
            lines=tuple(map(_stored_line, rows)),
            subtotal_micro=invoice.subtotal_micro or 0,
            credit_uses=tuple(uses),
            tax_micro=invoice.tax_micro or 0,
            rounding_micro=invoice.rounding_micro or 0,
        ),
        credits=tuple(balance_of(each) for each in invoice.credit_balances or ()),
        adapters={
            row.adapter_id: row.adapter
            for row in rows
            if row.adapter_id is not None and row.adapter is not None
        },
    )


def _stored_line(row: InvoiceLineRow) -> InvoiceLine:
    return InvoiceLine(
        **{name: getattr(row, name) for name in _LINE if name != "amount_pico"},
        month=Month.parse(row.month),
        amount_pico=int(row.amount_pico),
        billed=Charge(row.billed_tokens, int(row.billed_pico)),
    )


def balance_document(balance: CreditBalance) -> dict[str, Any]:
    """Return a balance as JSON; `balance_of` reads it."""
    return {
        "grant_id": str(balance.grant_id),
        "priority": balance.priority,
        "expires_at": None if balance.expires_at is None else balance.expires_at.isoformat(),
        "granted_at": balance.granted_at.isoformat(),
        "available_micro": balance.available_micro,
    }


def balance_of(document: Mapping[str, Any]) -> CreditBalance:
    """Read what `balance_document` wrote. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
    expires_at = document["expires_at"]
    return CreditBalance(
        grant_id=UUID(document["grant_id"]),
        priority=document["priority"],
        expires_at=None if expires_at is None else datetime.fromisoformat(expires_at),
        granted_at=datetime.fromisoformat(document["granted_at"]),
        available_micro=document["available_micro"],
    )
