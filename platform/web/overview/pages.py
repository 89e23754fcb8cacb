"""`/console`: requests, errors and spend at a glance, and what needs attention. Invariant: a person sees what their scopes show."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, cast
from uuid import UUID

from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.services.people.own_account import is_fresh
from loraplex.platform.web.adapters.residency import residency
from loraplex.platform.web.console.addresses import chosen, query_form
from loraplex.platform.web.console.charts import ChartRow, Series, named, symbol
from loraplex.platform.web.console.endpoint import ConsoleEndpoint, redirect
from loraplex.platform.web.console.forms import Form, read_form
from loraplex.platform.web.limits import queries as limits
from loraplex.platform.web.overview import onboarding as first_steps
from loraplex.platform.web.overview import queries as overview
from loraplex.platform.web.overview.onboarding import FirstSteps
from loraplex.platform.web.overview.queries import (
    RANGES,
    Attention,
    RangeName,
    RequestOverview,
    SpendOverview,
)

ADAPTERS_READ: Final = "adapters:read"
KEYS_WRITE: Final = "keys:write"
USAGE_READ: Final = "usage:read"
MONEY_READ: Final = frozenset({USAGE_READ, "billing:read"})
RANGE_NAMES: Final = {"24h": "24 hours", "7d": "7 days", "30d": "30 days"}
PERIOD_NAMES: Final = {timedelta(hours=1): "Hour", timedelta(hours=6): "From", timedelta(days=1): "Day"}
OUTCOME_WORDS: Final = {
    "rate_limit_exceeded": "a limit per minute, or of requests at once, was reached",
    "insufficient_quota": "the tokens or the budget of a period are used up",
    "model_not_found": "no adapter, alias or version has the name that was asked for",
    "overloaded": "too many requests waited; they may be sent again",
    "engine_unavailable": "no engine answered; they may be sent again",
    "server_shutting_down": "the server was being restarted; they may be sent again",
    "schema_not_satisfied": "the answer did not meet its schema",
    "context_length_exceeded": "prompt and answer do not fit into the context",
    "invalid_value": "a parameter has a value that is not allowed",
    "unknown_parameter": "a parameter does not exist",
    "adapter_quarantined": "the adapter is quarantined",
    "tenant_suspended": "the tenant is suspended",
}


@dataclass(frozen=True, slots=True)
class _Read:
    """What one transaction reads for the page; None where the person's scopes do not show it."""

    requests: RequestOverview | None
    spend: SpendOverview | None
    attention: tuple[Attention, ...]
    limits: limits.StoredLimits
    steps: FirstSteps | None


def overview_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the route of the overview."""
    router = APIRouter()
    signed_in = Depends(endpoint.requires())

    @router.get("/console")
    async def show(request: Request, session: Annotated[ConsoleSession, signed_in]) -> Response:
        tenant_id, now = cast("UUID", session.tenant_id), datetime.now(UTC)
        range_name = cast("RangeName", chosen(query_form(request), "range", tuple(RANGES)))
        dependencies = endpoint.dependencies
        currency = dependencies.currency_of(tenant_id)
        skipped = endpoint.cookies.skipped_steps(request, tenant_id)

        async def read(transaction: AsyncSession) -> _Read:
            stored = await limits.stored(transaction, tenant_id)
            budget = stored.states[0].limits.budget_per_month
            spent = await overview.spend(transaction, tenant_id, currency, now, budget)
            sees_requests = ADAPTERS_READ in session.scopes
            return _Read(
                await overview.requests(transaction, tenant_id, range_name, now) if sees_requests else None,
                spent if MONEY_READ & session.scopes else None,
                _visible(await overview.attention(transaction, tenant_id, spent, now), session),
                stored,
                await first_steps.open_steps(transaction, tenant_id, skipped, now),
            )

        found = await endpoint.query(session, read)
        counted = await limits.with_use(dependencies.admission_controller, tenant_id, found.limits)
        return endpoint.page(
            request,
            session,
            "overview/overview.html",
            ranges=RANGE_NAMES,
            range_name=range_name,
            requests=found.requests,
            spend=found.spend,
            attention=found.attention,
            nearest=None if counted is None else limits.nearest(counted),
            charts=None if found.requests is None else _charts(found.requests),
            residency=await residency(dependencies.engine, dependencies.namespace_of(tenant_id)),
            days=_days(found.spend),
            prefix=symbol(currency),
            sees_keys=KEYS_WRITE in session.scopes,
            words=OUTCOME_WORDS,
            statuses=overview.STATUSES,
            currency=currency,
            steps=found.steps,
            offers_password=session.by_link_only and is_fresh(session, now),
            is_demo=endpoint.is_demo,
        )

    @router.post("/console/first-steps")
    async def skip_step(
        request: Request,
        session: Annotated[ConsoleSession, signed_in],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        """Skip one of the first steps, or all of them, in this browser."""
        wanted = form.text("step")
        steps = [each for each in first_steps.STEPS if wanted in (each, "all")]
        response = redirect(request, "/console")
        endpoint.cookies.skip_steps(request, response, cast("UUID", session.tenant_id), steps)
        return response

    return router


@dataclass(frozen=True, slots=True)
class OverviewCharts:
    """The two charts and the sparklines of the tiles; `head` names the column of their periods."""

    head: str
    adapters: tuple[Series, ...]
    requests: tuple[ChartRow, ...]
    latencies: tuple[Series, ...]
    ttft: tuple[ChartRow, ...]
    request_counts: tuple[int, ...]
    error_shares: tuple[int | None, ...]
    medians: tuple[int | None, ...]


def _charts(found: RequestOverview) -> OverviewCharts:
    periods = found.periods
    names = ["base model" if each.base_model else each.name or "other" for each in found.series]
    ids = [each.id for each in found.series]
    last = periods[-1].start
    return OverviewCharts(
        head=PERIOD_NAMES[found.step],
        adapters=named(names),
        requests=tuple(
            ChartRow(each.start, tuple(each.requests.get(name, 0) for name in ids), each.start == last)
            for each in periods
        ),
        latencies=named(("median", "p95")),
        ttft=tuple(
            ChartRow(each.start, (each.sums.ttft_ms(50), each.sums.ttft_ms(95)), each.start == last)
            for each in periods
        ),
        request_counts=tuple(each.sums.requests for each in periods),
        error_shares=tuple(
            each.sums.errors * 10_000 // each.sums.requests if each.sums.requests else None
            for each in periods
        ),
        medians=tuple(each.sums.ttft_ms(50) for each in periods),
    )


def _days(spent: SpendOverview | None) -> tuple[ChartRow, ...]:
    """The spend of each day of the month, in pico-units."""
    days = () if spent is None else spent.days
    return tuple(
        ChartRow(datetime(day.year, day.month, day.day, tzinfo=UTC), (pico,), day == days[-1][0])
        for day, pico in days
    )


def _visible(found: tuple[Attention, ...], session: ConsoleSession) -> tuple[Attention, ...]:
    """Leave out what the person's scopes do not show."""
    needed = {"quarantined": ADAPTERS_READ, "rejected": ADAPTERS_READ, "key_expires": KEYS_WRITE}
    return tuple(each for each in found if needed.get(each.kind, USAGE_READ) in session.scopes)
