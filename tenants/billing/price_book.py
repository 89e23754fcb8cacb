"""The prices of one gateway, in memory: admission asks them for every request and waits for no store.

Invariant: a price comes from one table as a whole, also while the next one is read.
"""

from datetime import datetime
from uuid import UUID

from loraplex.tenants.billing.price_table import PriceTable
from loraplex.tenants.billing.pricing import PriceVersion


class PriceBook:
    """The newest table of prices."""

    def __init__(self, table: PriceTable) -> None:
        self._table = table

    def price(self, tenant_id: UUID, tier: str, adapter_name: str | None, at: datetime) -> PriceVersion:
        """The price of a request that is admitted at that time. Raises `PriceMissing`."""
        return self._table.price(tenant_id, tier, adapter_name, at)

    def bound_nano(
        self,
        tenant_id: UUID,
        tier: str,
        adapter_name: str | None,
        at: datetime,
        prompt_tokens: int,
        completion_tokens: int,
    ) -> int:
        """As `PriceTable.bound_nano`. Raises `PriceMissing`."""
        return self._table.bound_nano(tenant_id, tier, adapter_name, at, prompt_tokens, completion_tokens)
