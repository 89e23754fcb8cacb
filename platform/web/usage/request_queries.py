"""The request log, and one request: where its time went, which weights answered, what each kind of token cost.

Invariant: a page reads a bounded number of rows; medians come from the hourly histograms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.web.usage.phase_reasons import WAITS, reason_of
from loraplex.tenants.invoices.billable_usage import prices_of
from loraplex.tenants.ledger import request_log
from loraplex.tenants.ledger.request_log import RequestFilters, RequestLog
from loraplex.tenants.ledger.request_reports import requests_of_adapter
from loraplex.tenants.models import OUTCOMES, RequestPhases
from loraplex.tenants.quotas.reservation import LimitAtAdmission
from loraplex.tenants.registry.summaries import registered_digest

PAGE_ROWS: Final = 50
MEDIAN_OVER: Final = timedelta(hours=24)
"""A request is compared with its adapter's median of so long before the end of its hour."""
HOUR: Final = timedelta(hours=1)
PARTS: Final = 1_000_000
OUTCOME_NAMES: Final = OUTCOMES
Filters: TypeAlias = RequestFilters


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """A finished request, or a correction of one. `adapter` and `version` are None for the base model.

    `key_name` is None once the key was erased; `key_id` is its UUID then. `is_listed_key`: the tenant manages it; the keys of
    the console's own pages, as of the playground, are in no list.
    """

    id: UUID
    at: datetime
    adapter: str | None
    version: int | None
    digest: str | None
    key_id: str
    key_name: str | None
    is_listed_key: bool
    outcome: str
    uncached_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_ms: int | None
    duration_ms: int | None
    amount_pico: int
    currency: str
    price_version_id: UUID | None
    client_request_id: str | None
    reverses_id: UUID | None
    reason: str | None

    @property
    def prompt_tokens(self) -> int:
        return self.uncached_tokens + self.cached_tokens


@dataclass(frozen=True, slots=True)
class RequestPage:
    """`older` and `newer`: the ids that the pages beside this one follow; None where there is none. A filtered page may be
    short, or empty, and have others beside it.
    """

    requests: tuple[LoggedRequest, ...]
    older: UUID | None
    newer: UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of a request; `start_ms` counts from its arrival. `reason`: why it waited, or what was done; None where nothing
    is known of that.
    """

    name: str
    start_ms: int
    duration_ms: int
    reason: str | None

    @property
    def waits(self) -> bool:
        return self.name in WAITS

    @property
    def end_ms(self) -> int:
        return self.start_ms + self.duration_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """One kind of token: its number, its price in micro-units per million, and their exact product in pico-units."""

    token_class: str
    tokens: int
    price: int
    amount_pico: int


@dataclass(frozen=True, slots=True)
class MetLimits:
    """Every limit that a request met when it was admitted. `degraded`: counted by one gateway's share of the limits."""

    degraded: bool
    limits: tuple[LimitAtAdmission, ...]

    @property
    def nearest_first(self) -> tuple[LimitAtAdmission, ...]:
        """The limits, first those of which the request left the smallest part."""
        return tuple(sorted(self.limits, key=lambda each: each.left * PARTS // max(1, each.limit)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDetail:
    """`phases` are empty once they are deleted, and `met` is None then. `median_ttft_ms`: that of its adapter in the 24 hours
    before.

    `cost` is empty for corrections and for requests from before rate cards, whose amount is explained by no price.
    `registered_digest`: that of the version that answered, None if it has none any more.
    """

    request: LoggedRequest
    phases: tuple[Phase, ...]
    met: MetLimits | None
    median_ttft_ms: int | None
    cost: tuple[CostLine, ...]
    registered_digest: str | None

    @property
    def largest_wait(self) -> Phase | None:
        """The phase in which it waited longest; none where no phase took a millisecond of waiting."""
        return max(
            (each for each in self.phases if each.waits and each.duration_ms),
            key=lambda each: each.duration_ms,
            default=None,
        )


async def page(
    session: AsyncSession, tenant_id: UUID, filters: Filters, after: UUID | None, limit: int = PAGE_ROWS
) -> RequestPage:
    """Read a page of requests, newest first, those that are older than `after`."""
    found = await RequestLog(session, tenant_id).page(filters, after, limit)
    requests = tuple(map(_logged, found.requests))
    newer = None if after is None else _following(requests[:1], after)
    return RequestPage(requests, found.more_after, newer)


async def page_before(
    session: AsyncSession, tenant_id: UUID, filters: Filters, before: UUID, limit: int = PAGE_ROWS
) -> RequestPage:
    """Read the page of the next newer requests than `before`, newest first."""
    found = await RequestLog(session, tenant_id).page_before(filters, before, limit)
    requests = tuple(map(_logged, found.requests))
    return RequestPage(requests, _following(requests[-1:], before), found.more_after)


def _following(edge: Sequence[LoggedRequest], asked: UUID) -> UUID:
    """The id beside which a page goes on: that of its row at the edge, or on an empty page the one that was asked for."""
    return edge[0].id if edge else asked


async def find(session: AsyncSession, tenant_id: UUID, request_id: str) -> RequestDetail:
    """Read a request by its id or its `x-request-id`. Raises `RequestNotFound`."""
    log = RequestLog(session, tenant_id)
    row = await log.get(request_id)
    request = _logged(row)
    detail = await log.detail(request.id)
    end = request.at.replace(minute=0, second=0, microsecond=0) + HOUR
    around = await requests_of_adapter(session, tenant_id, row[0].adapter_id, end - MEDIAN_OVER, end)
    return RequestDetail(
        request=request,
        phases=() if detail is None else phases_of(detail.phases),
        met=met_limits(detail),
        median_ttft_ms=around.ttft_ms(50),
        cost=await _cost(session, request),
        registered_digest=await registered_digest(session, row[0].adapter_id, request.version),
    )


async def timeline(session: AsyncSession, tenant_id: UUID, request_id: str) -> tuple[Phase, ...]:
    """Read the phases of a request. Raises `RequestNotFound`, and `PhasesNotFound` once they are deleted."""
    return phases_of(await RequestLog(session, tenant_id).phases(request_id))


def phases_of(stored: Mapping[str, Any]) -> tuple[Phase, ...]:
    """The phases in the order of their starts; they may overlap."""
    phases = [
        Phase(
            name=name, start_ms=start, duration_ms=duration, reason=reason_of(name, next(iter(causes), None))
        )
        for name, (start, duration, *causes) in stored.items()
    ]
    return tuple(sorted(phases, key=lambda phase: (phase.start_ms, phase.name)))


def met_limits(detail: RequestPhases | None) -> MetLimits | None:
    """The limits that a request met; None where they are not stored, or not any more."""
    if detail is None or detail.limits is None:
        return None
    limits = tuple(LimitAtAdmission(*each) for each in detail.limits["met"])
    return MetLimits(detail.limits["degraded"], limits)


async def _cost(session: AsyncSession, request: LoggedRequest) -> tuple[CostLine, ...]:
    if request.price_version_id is None or request.reverses_id is not None:
        return ()
    price = (await prices_of(session, [request.price_version_id]))[request.price_version_id]
    parts: Sequence[tuple[str, int, int]] = (
        ("uncached_prompt", request.uncached_tokens, price.prompt),
        ("cached_prompt", request.cached_tokens, price.cached_prompt),
        ("completion", request.completion_tokens, price.completion),
    )
    return tuple(
        CostLine(token_class=name, tokens=tokens, price=each, amount_pico=tokens * each)
        for name, tokens, each in parts
    )


def _logged(row: request_log.LoggedRequest) -> LoggedRequest:
    record, adapter, key_id, key_name, key_kind = row
    same = (
        *("id", "digest", "outcome", "uncached_tokens", "cached_tokens", "completion_tokens", "ttft_ms"),
        *(
            "duration_ms",
            "amount_pico",
            "currency",
            "price_version_id",
            "client_request_id",
            "reverses_id",
            "reason",
        ),
    )
    return LoggedRequest(
        **{name: getattr(record, name) for name in same},
        at=record.admitted_at,
        adapter=adapter or (None if record.adapter_id is None else str(record.adapter_id)),
        version=record.adapter_version,
        key_id=key_id or str(record.api_key_id),
        key_name=key_name,
        is_listed_key=key_kind == "key",
    )
