"""Response schemas of usage and of one request. Amounts are exact pico-units of money, as decimal strings.

Invariant: `prompt_tokens` includes `cached_tokens`, and `completion_tokens` includes `reasoning_tokens`, as in the responses of
`/v1`.
"""

from typing import Annotated, Generic, Literal, TypeVar
from uuid import UUID

from pydantic import Field

from loraplex.platform.web.cursors import Listing
from loraplex.platform.web.responses import ResponseModel
from loraplex.platform.web.usage.phase_reasons import WAITS
from loraplex.tenants.quotas.limits import Level, LimitName
from loraplex.tenants.records import Pico, UtcTime
from loraplex.tenants.usage.records import RequestDocument, is_absent

RowT = TypeVar("RowT", bound="UsageDocument")
PARTS = 1_000_000
TokenClass = Annotated[str | None, Field(exclude_if=is_absent)]


class UsageSumsDocument(ResponseModel):
    """`requests` were admitted and given to an engine, whatever their outcome: none that was refused is among them."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    amount_pico: Pico


class UsageTotalsDocument(UsageSumsDocument):
    """`refused`: requests that a limit, a full server or a check refused, in no currency, and in none of the rows."""

    refused: int


class UsageDocument(UsageSumsDocument):
    """The usage of one group from `start` on. `adapter` is null for the base model; it and `key_id` are null where the report
    is not grouped by them, and UUIDs where the adapter or the key was erased.

    `token_class` is there in reports by class, whose rows have the tokens and the amount of one class: `uncached_prompt`,
    `cached_prompt`, `completion` without its reasoning, `reasoning`, or `correction` for an amount without tokens. `requests`
    is that of the whole group.
    """

    start: UtcTime
    adapter: str | None
    key_id: str | None
    token_class: TokenClass = None


class OperatorUsageDocument(UsageDocument):
    """`tenant_id` is null where the report is not grouped by tenant."""

    tenant_id: UUID | None


class UsageReportDocument(Listing[RowT], Generic[RowT]):
    """`totals` are those of the whole range when the first page was read, on every page."""

    totals: UsageTotalsDocument
    currency: str


class MetLimitDocument(ResponseModel):
    """One limit when the request was admitted. `used` and `reserved`: before the request. `asked`: the most that it would
    use. Budgets in micro-units.
    """

    level: Level
    name: LimitName
    limit: int
    used: int
    reserved: int
    asked: int

    @property
    def left(self) -> int:
        """What the request left of it."""
        return self.limit - self.used - self.reserved - self.asked


class MetLimitsDocument(ResponseModel):
    """The limits that a request met. `mode`: `counted` by the counters of all gateways, or `degraded` by the share of one
    gateway while the counters were unavailable; then `limit` and `used` are those of the share.
    """

    mode: Literal["counted", "degraded"]
    met: list[MetLimitDocument]

    @property
    def nearest_first(self) -> list[MetLimitDocument]:
        """The limits, first those of which the request left the smallest part."""
        return sorted(self.met, key=lambda each: each.left * PARTS // max(1, each.limit))


class RequestDetailDocument(RequestDocument):
    """`limits` is null where it is not known: it is kept as long as the phases of the request."""

    limits: MetLimitsDocument | None


class SpanDocument(ResponseModel):
    """One phase of a request; `start_ms` counts from its first phase. `reason`: why it waited, or what was done; null where
    that is not known.
    """

    name: str
    start_ms: int
    duration_ms: int
    reason: str | None

    @property
    def waits(self) -> bool:
        """Whether the request waited in it."""
        return self.name in WAITS

    @property
    def end_ms(self) -> int:
        """When it ended, counted from the request's arrival."""
        return self.start_ms + self.duration_ms


class TimelineDocument(ResponseModel):
    """The phases in the order of their starts. Each begins where the one before it ends, and all add up to the request's
    duration.
    """

    spans: list[SpanDocument]
