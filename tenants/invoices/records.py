"""Invoices and credits. Amounts named `_micro`, `credits` and `tax` are micro-units of the currency."""

from typing import Any, Final, Self
from uuid import UUID

from loraplex.tenants.invoices.currencies import decimal_text, minor_digits
from loraplex.tenants.records import Pico, Record, UtcTime

INVOICE_STATES: Final = ("draft", "final", "paid", "void")
MAX_REFERENCE: Final = 200
MAX_CREDIT_MICRO: Final = 10**15
MAX_PRIORITY: Final = 100
DEFAULT_PRIORITY: Final = 50
MAX_REASON: Final = 500
PAYMENT_DAYS: Final = 30
"""Days from an invoice's date to its due date."""


class InvoiceLineDocument(Record):
    """`kind`: `usage` of the month, `adjustment` of an earlier `month`, or the rest up to the `minimum`. `adapter` is null for
    the base model. `amount_pico` = `tokens` x `price` (micro-units per million tokens), rounded once to `amount_micro`; `price` is
    null for amounts of corrections and of usage from before rate cards. `billed_…`: what earlier invoices billed of the same.
    """

    kind: str
    month: str
    adapter: str | None
    adapter_id: UUID | None
    token_class: str | None
    price_version_id: UUID | None
    price: int | None
    tokens: int
    amount_pico: Pico
    amount_micro: int
    rounding_pico: int
    billed_tokens: int
    billed_pico: Pico


class CreditUseDocument(Record):
    """The part of a grant that an invoice uses."""

    grant_id: UUID
    amount_micro: int


class InvoiceDocument(Record):
    """`total_micro` = `subtotal_micro` - `credits` + `tax` + `rounding_micro`: a whole number of the currency's minor unit, which
    `total` has in decimals. A draft has no number; it is computed whenever it is read, and becomes final after `grace_ends_at`.
    """

    id: UUID
    tenant_id: UUID
    number: int | None
    state: str
    month: str
    currency: str
    issuer: str
    customer_name: str
    customer_address: str
    vat_id: str | None
    tax_rate_ppm: int
    minimum_micro: int
    lines: list[InvoiceLineDocument]
    subtotal_micro: int
    credits: int
    credit_uses: list[CreditUseDocument]
    tax: int
    rounding_micro: int
    total_micro: int
    total: str
    grace_ends_at: UtcTime | None
    finalized_at: UtcTime | None
    paid_at: UtcTime | None
    paid_reference: str | None
    voided_at: UtcTime | None


class InvoiceSummaryDocument(Record):
    """An invoice in a list. A draft has neither number nor total."""

    id: UUID
    tenant_id: UUID
    number: int | None
    state: str
    month: str
    currency: str
    total_micro: int | None
    total: str | None
    created_at: UtcTime
    grace_ends_at: UtcTime
    finalized_at: UtcTime | None
    paid_at: UtcTime | None
    voided_at: UtcTime | None

    @classmethod
    def of(cls, invoice: Any) -> Self:
        """Summarize a row of invoices."""
        fields = {name: getattr(invoice, name) for name in cls.model_fields if name != "total"}
        total = invoice.total_micro
        text = None if total is None else decimal_text(total, minor_digits(invoice.currency))
        return cls(**fields, total=text)


class TenantInvoice(InvoiceSummaryDocument):
    """An invoice among those of all tenants. `tenant`: its tenant's name."""

    tenant: str


class MonthDraft(Record):
    """The month that goes on, as its invoice would be now. `days_left` counts the days that are not over, this one too."""

    invoice: InvoiceDocument
    days_left: int


class CreditDocument(Record):
    """Of a lower `priority` it is used first, then by the earliest expiry, then by age. It pays for months that end before
    `expires_at`.
    """

    id: UUID
    currency: str
    amount_micro: int
    available_micro: int
    priority: int
    expires_at: UtcTime | None
    reason: str
    granted_at: UtcTime


class RankedCredit(CreditDocument):
    """A credit of one tenant. `place`: its turn among those that can still pay in its currency; None: it pays no more."""

    place: int | None


class TenantCredit(CreditDocument):
    """A credit among those of all tenants. `tenant`: its tenant's name."""

    tenant_id: UUID
    tenant: str
