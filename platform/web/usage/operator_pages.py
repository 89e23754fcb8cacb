"""The usage of all tenants with what it was charged, and what serving it cost where the accelerators' price is known."""

from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Final

from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.services.serving_cost import ServingCost, serving_cost
from loraplex.platform.web.console.addresses import day_of, query_form
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.forms import Entered, FormInvalid
from loraplex.platform.web.usage import operator_queries as operator_usage

PATH: Final = "/operator/console/usage"
DAY: Final = timedelta(days=1)
MAX_DAYS: Final = 366


def usage_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the route of usage."""
    router = APIRouter()
    operator = Depends(endpoint.requires_operator())

    @router.get(PATH)
    async def show_usage(request: Request, session: Annotated[ConsoleSession, operator]) -> Response:
        now = datetime.now(UTC)
        first, last, errors = _days(request, now.date())
        start, end = datetime.combine(first, time(), UTC), datetime.combine(last + DAY, time(), UTC)
        price = endpoint.dependencies.config.accelerator_price

        async def find(found: AsyncSession) -> tuple[operator_usage.UsageOverview, ServingCost | None]:
            overview = await operator_usage.usage_by_tenant(found, start, end, now)
            if price is None or not overview.totals:
                return overview, None
            return overview, await serving_cost(found, price, start, end, now)

        usage, cost = await endpoint.query(session, find)
        shown = {"from": first.isoformat(), "to": last.isoformat()}
        return endpoint.page(
            request,
            session,
            "usage/operator_usage.html",
            status=422 if errors else 200,
            usage=usage,
            cost=cost,
            goes_on=last >= now.date(),
            form=Entered({**shown, **request.query_params}, errors=errors),
        )

    return router


def _days(request: Request, today: date) -> tuple[date, date, Mapping[str, str]]:
    """The first and the last day that are shown, by default those of this month, and what is wrong with the given ones."""
    form, month = query_form(request), today.replace(day=1)
    try:
        first, last = day_of(form, "from", month), day_of(form, "to", today)
    except FormInvalid as invalid:
        return month, today, invalid.errors
    if not timedelta() <= last - first < MAX_DAYS * DAY:
        return month, today, {"to": f"From 1 to {MAX_DAYS} days, the first one first."}
    return first, last, {}
