"""What the bills of a tenant show."""

from datetime import date
from typing import Final

from pydantic import Field

from loraplex.tenants.records import Record

FIRST_REVISION: Final = 1
MAX_TAX_RATE_PPM: Final = 1_000_000


class TenantBillingDocument(Record):
    """`next_currency` replaces `currency` on the first day of a month, `next_currency_from`, at 00:00 UTC. `tax_rate_ppm` is in
    millionths: 190000 is 19 %. `minimum_micro`: the least amount of a month, in micro-units of the currency.
    """

    currency: str
    next_currency: str | None
    next_currency_from: date | None
    issuer: str | None
    customer_name: str | None
    customer_address: str | None
    vat_id: str | None
    tax_rate_ppm: int
    minimum_micro: int
    # Sent in the ETag alone.
    revision: int = Field(default=FIRST_REVISION, exclude=True)
