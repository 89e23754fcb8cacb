"""The request log, and one request: where its time went, which weights answered, what each kind of token cost.

Invariant: a page reads a bounded number of rows; medians come from the hourly histograms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.web.cursors import Listing, Page
from loraplex.platform.web.usage.documents import (
    MetLimitDocument,
    MetLimitsDocument,
    RequestDetailDocument,
    SpanDocument,
    TimelineDocument,
)
from loraplex.platform.web.usage.phase_reasons import reason_of
from loraplex.tenants.invoices.billable_usage import prices_of
from loraplex.tenants.ledger.request_log import SHOWN_OUTCOMES, RequestFilters, RequestLog, RequestPage
from loraplex.tenants.ledger.request_reports import requests_of_adapter
from loraplex.tenants.models import RequestPhases
from loraplex.tenants.registry.summaries import registered_digest
from loraplex.tenants.usage.records import LoggedRequest, RequestDocument

MEDIAN_OVER: Final = timedelta(hours=24)
"""A request is compared with its adapter's median of so long before the end of its hour."""
HOUR: Final = timedelta(hours=1)
OUTCOME_NAMES: Final = SHOWN_OUTCOMES
Filters: TypeAlias = RequestFilters


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """One kind of token: its number, its price in micro-units per million, and their exact product in pico-units."""

    token_class: str
    tokens: int
    price: int
    amount_pico: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDetail:
    """`phases` are empty once they are deleted, and `met` is None then. `median_ttft_ms`: that of its adapter in the 24 hours
    before.

    `cost` is empty for corrections and for requests from before rate cards, whose amount is explained by no price.
    `registered_digest`: that of the version that answered, None if it has none any more.
    """

    request: LoggedRequest
    phases: list[SpanDocument]
    met: MetLimitsDocument | None
    median_ttft_ms: int | None
    cost: tuple[CostLine, ...]
    registered_digest: str | None


async def page(
    session: AsyncSession, tenant_id: UUID, filters: RequestFilters, part: Page[LoggedRequest, UUID]
) -> RequestPage:
    """Return a page of requests, newest first."""
    return await RequestLog(session, tenant_id).page(filters, part.after, part.limit)


async def listing(
    session: AsyncSession, tenant_id: UUID, filters: RequestFilters, part: Page[LoggedRequest, UUID]
) -> Listing[RequestDocument]:
    """Return `page` as the API has it."""
    found = await page(session, tenant_id, filters, part)
    cursor = None if found.more_after is None else part.cursor(found.more_after)
    return Listing[RequestDocument](data=[*found.requests], next_cursor=cursor)


async def detail(session: AsyncSession, tenant_id: UUID, request_id: str) -> RequestDetailDocument:
    """Return a request with the limits that it met, as `find`. Raises `RequestNotFound`."""
    log = RequestLog(session, tenant_id)
    request = await log.get(request_id)
    return RequestDetailDocument(**dict(request), limits=met_limits(await log.detail(request.id)))


async def find(session: AsyncSession, tenant_id: UUID, request_id: str) -> RequestDetail:
    """Return a request by its id or its `x-request-id`. Raises `RequestNotFound`."""
    log = RequestLog(session, tenant_id)
    request = await log.get(request_id)
    stored = await log.detail(request.id)
    end = request.at.replace(minute=0, second=0, microsecond=0) + HOUR
    around = await requests_of_adapter(session, tenant_id, request.adapter_id, end - MEDIAN_OVER, end)
    return RequestDetail(
        request=request,
        phases=[] if stored is None else phases_of(stored.phases),
        met=met_limits(stored),
        median_ttft_ms=around.ttft_ms(50),
        cost=await _cost(session, request),
        registered_digest=await registered_digest(session, request.adapter_id, request.version),
    )


async def timeline(session: AsyncSession, tenant_id: UUID, request_id: str) -> TimelineDocument:
    """Return the phases of a request. Raises `RequestNotFound`, and `PhasesNotFound` once they are deleted."""
    return TimelineDocument(spans=phases_of(await RequestLog(session, tenant_id).phases(request_id)))


def phases_of(stored: Mapping[str, Any]) -> list[SpanDocument]:
    """Return the phases in the order of their starts."""
    phases = [
        SpanDocument(
            name=name, start_ms=start, duration_ms=duration, reason=reason_of(name, next(iter(causes), None))
        )
        for name, (start, duration, *causes) in stored.items()
    ]
    return sorted(phases, key=lambda phase: (phase.start_ms, phase.name))


def met_limits(stored: RequestPhases | None) -> MetLimitsDocument | None:
    """Return the limits that a request met; None where they are not stored, or not any more."""
    if stored is None or stored.limits is None:
        return None
    names = MetLimitDocument.model_fields
    met = [MetLimitDocument(**dict(zip(names, each, strict=True))) for each in stored.limits["met"]]
    return MetLimitsDocument(mode="degraded" if stored.limits["degraded"] else "counted", met=met)


async def _cost(session: AsyncSession, request: LoggedRequest) -> tuple[CostLine, ...]:
    if request.price_version_id is None or request.reverses_id is not None:
        return ()
    price = (await prices_of(session, [request.price_version_id]))[request.price_version_id]
    parts: Sequence[tuple[str, int, int]] = (
        ("uncached_prompt", request.uncached_tokens, price.prompt),
        ("cached_prompt", request.cached_tokens, price.cached_prompt),
        ("completion", request.answer_tokens, price.completion),
        ("reasoning", request.reasoning_tokens, price.of_reasoning),
    )
    return tuple(
        CostLine(token_class=name, tokens=tokens, price=each, amount_pico=tokens * each)
        for name, tokens, each in parts
        if tokens or name != "reasoning"
    )
