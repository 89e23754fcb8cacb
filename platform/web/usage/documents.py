"""Response schemas of usage and requests. Amounts are exact pico-units of money, as decimal strings.

Invariant: `prompt_tokens` includes `cached_tokens`, as in the responses of `/v1`.
"""

from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Generic, Literal, TypeVar
from uuid import UUID

from pydantic import Field

from loraplex.platform.web.cursors import Listing
from loraplex.platform.web.responses import ResponseModel
from loraplex.platform.web.sorting import Position, SortOrder
from loraplex.platform.web.usage.request_queries import MetLimits, Phase
from loraplex.tenants.ledger.request_log import LoggedRequest
from loraplex.tenants.ledger.usage_reports import UsageKey, UsageRow, UsageSums
from loraplex.tenants.quotas.limits import Level, LimitName
from loraplex.tenants.records import UtcTime

RowT = TypeVar("RowT", bound="UsageDocument")


def _absent(value: object) -> bool:
    return value is None


TokenClass = Annotated[str | None, Field(exclude_if=_absent)]


class UsageSumsDocument(ResponseModel):
    """`requests` were admitted and given to an engine, whatever their outcome: none that was refused is among them."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    amount_pico: str


class UsageTotalsDocument(UsageSumsDocument):
    """`refused`: requests that a limit, a full server or a check refused, in no currency, and in none of the rows."""

    refused: int


class UsageDocument(UsageSumsDocument):
    """The usage of one group from `start` on. `adapter` is null for the base model; it and `key_id` are null where the report
    is not grouped by them, and UUIDs where the adapter or the key was erased.

    `token_class` is there in reports by class, whose rows have the tokens and the amount of one class: `uncached_prompt`,
    `cached_prompt`, `completion`, or `correction` for an amount without tokens. `requests` is that of the whole group.
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


class RequestDocument(ResponseModel):
    """One finished request. `adapter` and `version` are null for the base model; times in milliseconds are null where unknown.
    `system_fingerprint`: as in the response, null where it is unknown.

    `reverses_id` and `reason` are there in corrections, whose tokens and amount are added to those of the request that they
    name.
    """

    id: UUID
    at: UtcTime
    adapter: str | None
    version: int | None
    digest: str | None
    key_id: str
    outcome: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_ms: int | None
    duration_ms: int | None
    amount_pico: str
    price_version_id: UUID | None
    client_request_id: str | None
    system_fingerprint: str | None
    reverses_id: Annotated[UUID | None, Field(exclude_if=_absent)] = None
    reason: Annotated[str | None, Field(exclude_if=_absent)] = None


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


class MetLimitsDocument(ResponseModel):
    """The limits that a request met. `mode`: `counted` by the counters of all gateways, or `degraded` by the share of one
    gateway while the counters were unavailable; then `limit` and `used` are those of the share.
    """

    mode: Literal["counted", "degraded"]
    met: list[MetLimitDocument]


class RequestDetailDocument(RequestDocument):
    """`limits` is null where it is not known: it is kept as long as the phases of the request."""

    limits: MetLimitsDocument | None


class SpanDocument(ResponseModel):
    """One phase of a request; `start_ms` counts from its arrival. `reason`: why it waited, or what was done; null where
    that is not known.
    """

    name: str
    start_ms: int
    duration_ms: int
    reason: str | None


class TimelineDocument(ResponseModel):
    """The phases in the order of their starts. Phases may overlap."""

    spans: list[SpanDocument]


def _write_key(key: UsageKey) -> Position:
    return (key.start.astimezone(UTC).isoformat(), *map(str, key[1:5]), key.token_class)


def _read_key(position: Position) -> UsageKey:
    start, *ids, currency, token_class = position
    tenant_id, adapter_id, api_key_id = (UUID(str(each)) for each in ids)
    at = datetime.fromisoformat(str(start))
    return UsageKey(at, tenant_id, adapter_id, api_key_id, str(currency), int(token_class))


BY_GROUP: Final[SortOrder[UsageRow, UsageKey]] = SortOrder(lambda row: row.key, _write_key, _read_key)
BY_ID: Final[SortOrder[LoggedRequest, UUID]] = SortOrder(
    lambda row: row[0].id, lambda key: (str(key),), lambda position: UUID(str(position[0]))
)


def totals_response(sums: UsageSums, refused: int) -> UsageTotalsDocument:
    return UsageTotalsDocument(**_sums(sums), refused=refused)


def usage_response(row: UsageRow) -> UsageDocument:
    return UsageDocument(**_fields(row))


def operator_usage_response(row: UsageRow) -> OperatorUsageDocument:
    tenant_id = row.key.tenant_id
    return OperatorUsageDocument(**_fields(row), tenant_id=tenant_id if tenant_id.int else None)


def request_response(row: LoggedRequest) -> RequestDocument:
    return RequestDocument(**_request_fields(row))


def request_detail_response(row: LoggedRequest, met: MetLimits | None) -> RequestDetailDocument:
    limits = None
    if met is not None:
        documents = [MetLimitDocument(**each._asdict()) for each in met.limits]
        limits = MetLimitsDocument(mode="degraded" if met.degraded else "counted", met=documents)
    return RequestDetailDocument(**_request_fields(row), limits=limits)


def _request_fields(row: LoggedRequest) -> dict[str, Any]:
    record, adapter, key_id, *_ = row
    same = ("id", "digest", "outcome", "cached_tokens", "completion_tokens", "ttft_ms", "duration_ms")
    more = ("price_version_id", "client_request_id", "system_fingerprint", "reverses_id", "reason")
    return {
        **{name: getattr(record, name) for name in (*same, *more)},
        "at": record.admitted_at,
        "adapter": adapter or (None if record.adapter_id is None else str(record.adapter_id)),
        "version": record.adapter_version,
        "key_id": key_id or str(record.api_key_id),
        "prompt_tokens": record.uncached_tokens + record.cached_tokens,
        "amount_pico": str(record.amount_pico),
    }


def timeline_response(phases: Iterable[Phase]) -> TimelineDocument:
    return TimelineDocument(spans=[SpanDocument(**asdict(phase)) for phase in phases])


def _fields(row: UsageRow) -> dict[str, Any]:
    return {
        **_sums(row.sums),
        "start": row.key.start,
        "adapter": row.adapter,
        "key_id": row.key_id,
        "token_class": row.token_class,
    }


def _sums(sums: UsageSums) -> dict[str, Any]:
    names = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    return {**{name: getattr(sums, name) for name in names}, "amount_pico": str(sums.amount_pico)}
