"""Limits as they are set, and events of crossed budgets. Budgets in micro-units of money, times in UTC."""

from typing import Self
from uuid import UUID

from pydantic import Field

from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.records import Record, UtcTime


class LimitsDocument(Record):
    """The limits of a key or an adapter; where one is null, only that of the tenant applies."""

    requests_per_minute: int | None
    tokens_per_minute: int | None
    concurrent_requests: int | None
    tokens_per_day: int | None
    tokens_per_month: int | None
    budget_per_day: int | None
    budget_per_month: int | None
    tokens_per_session: int | None
    # Sent as the ETag, not in the body: so a result that is stored for a repetition has none.
    revision: int = Field(default=0, exclude=True)

    @classmethod
    def of(cls, limits: QuotaLimits, revision: int) -> Self:
        """Return the record of limits at a revision."""
        return cls.model_validate(limits).model_copy(update={"revision": revision})


class TenantLimitsDocument(LimitsDocument):
    """The limits of a tenant as set. Null: `max_adapters`, `max_adapter_bytes` and `max_keys` are the installation's defaults,
    `default_max_tokens` that of the tier or the installation.
    """

    max_adapters: int | None
    max_adapter_bytes: int | None
    max_keys: int | None
    default_max_tokens: int | None


class EventDocument(Record):
    """The use of a budget crossed `threshold` percent of its limit. `name` is null when the key or adapter is gone."""

    id: UUID
    at: UtcTime
    level: str
    name: str | None
    limit_name: str
    period: str
    threshold: int
    used: int
    limit: int
