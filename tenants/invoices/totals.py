"""The sum of an invoice: lines, minimum, credits, tax, and the rounding to what can be paid.

Invariant: the steps come in this order and each rounds at most once, half to even. Credits never exceed the sum of the lines,
nor a grant its balance.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from loraplex.tenants.invoices.currencies import minor_unit_micro
from loraplex.tenants.invoices.lines import InvoiceLine, half_even, minimum_line
from loraplex.tenants.invoices.months import Month

PPM: Final = 1_000_000
_NEVER: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceTerms:
    """What of a tenant an invoice states. `tax_rate_ppm`: parts per million, such as 190,000 for 19 %."""

    currency: str
    issuer: str
    customer_name: str
    customer_address: str
    vat_id: str | None
    tax_rate_ppm: int
    minimum_micro: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditBalance:
    """What is left of a grant. Of a lower `priority` it is used first. `expires_at` None: never."""

    grant_id: UUID
    priority: int
    expires_at: datetime | None
    granted_at: datetime
    available_micro: int

    @property
    def burn_order(self) -> tuple[int, datetime, datetime, UUID]:
        """Sort by priority, then the earliest expiry, then the oldest grant."""
        return self.priority, self.expires_at or _NEVER, self.granted_at, self.grant_id


@dataclass(frozen=True, slots=True)
class CreditUse:
    """The part of a grant that an invoice uses; positive."""

    grant_id: UUID
    amount_micro: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceTotals:
    """Micro-units. `total_micro` = `subtotal_micro` - `credits_micro` + `tax_micro` + `rounding_micro`, a whole number of the
    currency's minor unit. A negative total is owed to the tenant.
    """

    lines: tuple[InvoiceLine, ...]
    subtotal_micro: int
    credit_uses: tuple[CreditUse, ...]
    tax_micro: int
    rounding_micro: int

    @property
    def credits_micro(self) -> int:
        return sum(use.amount_micro for use in self.credit_uses)

    @property
    def total_micro(self) -> int:
        return self.subtotal_micro - self.credits_micro + self.tax_micro + self.rounding_micro


def total_invoice(
    month: Month,
    lines: Sequence[InvoiceLine],
    credits: Iterable[CreditBalance],
    terms: InvoiceTerms,
    billed_micro: int = 0,
) -> InvoiceTotals:
    """Sum up an invoice. `lines` are those of usage and adjustments; the minimum is added here. `billed_micro`: what other
    invoices billed of the month.
    """
    rest = minimum_line(month, lines, terms.minimum_micro, billed_micro)
    every = (*lines,) if rest is None else (*lines, rest)
    subtotal = sum(line.amount_micro for line in every)
    uses = burn(month, credits, subtotal)
    taxable = subtotal - sum(use.amount_micro for use in uses)
    tax = half_even(taxable * terms.tax_rate_ppm, PPM)
    minor = minor_unit_micro(terms.currency)
    return InvoiceTotals(
        lines=every,
        subtotal_micro=subtotal,
        credit_uses=uses,
        tax_micro=tax,
        rounding_micro=half_even(taxable + tax, minor) * minor - (taxable + tax),
    )


def burn(month: Month, credits: Iterable[CreditBalance], amount_micro: int) -> tuple[CreditUse, ...]:
    """Use up credits in their order until the amount is covered. A grant pays for months that end before it expires."""
    uses = []
    for credit in sorted(credits, key=lambda each: each.burn_order):
        used = min(amount_micro, credit.available_micro)
        if used > 0 and is_usable(credit, month):
            uses.append(CreditUse(credit.grant_id, used))
            amount_micro -= used
    return tuple(uses)


def is_usable(credit: CreditBalance, month: Month) -> bool:
    """Return whether a grant pays for the month: it lasts to its end, whenever the invoice becomes final."""
    return credit.expires_at is None or credit.expires_at >= month.end
