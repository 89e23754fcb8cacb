"""The usage of all tenants with what it was charged, and what serving it cost where the accelerators' price is known."""

from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Final
from uuid import UUID

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from loraplex.platform.web.console.addresses import day_of, link, query_form
from loraplex.platform.web.console.forms import Entered, Form, FormInvalid
from loraplex.platform.web.console.page import PageRequest, opens_operator
from loraplex.platform.web.usage.chart import usage_chart
from loraplex.platform.web.usage.documents import OperatorUsageDocument
from loraplex.platform.web.usage.queries import UsageFilters, csv_download, report
from loraplex.tenants.ledger.serving_cost import serving_cost

Operator = Annotated[PageRequest, opens_operator()]
PATH: Final = "/operator/console/usage"
DAY: Final = timedelta(days=1)
MAX_DAYS: Final = 92
"""The page reads each hour of each tenant: 0.7 s for the 164,000 of 150 tenants."""
MAX_CSV_DAYS: Final = 366
NO_TENANT: Final = UUID(int=0)

router = APIRouter()


@router.get(PATH)
async def show_usage(page: Operator) -> Response:
    form, now, price = query_form(page.http), datetime.now(UTC), page.dependencies.config.accelerator_price
    first, last, errors = _days(form, now.date(), MAX_DAYS)
    filters, cost = _filters(first, last), None
    currency = form.text("currency") or page.dependencies.currency_of(NO_TENANT)
    async with page.reading() as session:
        usage = await report(session, filters, currency)
        if price is not None and usage.periods:
            cost = await serving_cost(session, price, filters.start, filters.end, now)
    shown = {"from": first.isoformat(), "to": last.isoformat()}
    return page.show(
        "usage/operator_usage.html",
        report=usage,
        chart_of=usage_chart(usage, filters, [group.name or "other" for group in usage.groups], now),
        currency_links={each: link(PATH, {**shown, "currency": each}) for each in usage.currencies},
        csv=link(f"{PATH}.csv", shown),
        cost=cost,
        has_price=price is not None,
        goes_on=last >= now.date(),
        form=Entered({**shown, **page.http.query_params}, errors=errors),
    )


@router.get(f"{PATH}.csv")
async def download_csv(page: Operator) -> Response:
    """The usage of these days by day and tenant."""
    first, last, errors = _days(query_form(page.http), datetime.now(UTC).date(), MAX_CSV_DAYS)
    if errors:
        raise FormInvalid(errors)
    lines = csv_download(page.query, _filters(first, last), OperatorUsageDocument)
    headers = {"content-disposition": f'attachment; filename="usage-{first}-{last}.csv"'}
    return StreamingResponse(lines, media_type="text/csv; charset=utf-8", headers=headers)


def _filters(first: date, last: date) -> UsageFilters:
    """The report of all tenants by day and tenant."""
    return UsageFilters(
        tenant_id=None,
        start=datetime.combine(first, time(), UTC),
        end=datetime.combine(last + DAY, time(), UTC),
        bucket="1d",
        group_by=frozenset({"tenant"}),
    )


def _days(form: Form, today: date, longest: int) -> tuple[date, date, Mapping[str, str]]:
    """The first and the last day that are shown, by default those of this month, and what is wrong with the given ones."""
    month = today.replace(day=1)
    try:
        first, last = day_of(form, "from", month), day_of(form, "to", today)
    except FormInvalid as invalid:
        return month, today, invalid.errors
    if not timedelta() <= last - first < longest * DAY:
        return month, today, {"to": f"From 1 to {longest} days, the first one first."}
    return first, last, {}
