"""The usage of all tenants with what it was charged, and what serving it cost where the accelerators' price is known."""

from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Final

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.console.addresses import day_of, query_form
from loraplex.platform.web.console.forms import Entered, Form, FormInvalid
from loraplex.platform.web.console.page import PageRequest, opens_operator
from loraplex.platform.web.usage.queries import usage_by_tenant
from loraplex.tenants.ledger.serving_cost import serving_cost

Operator = Annotated[PageRequest, opens_operator()]
PATH: Final = "/operator/console/usage"
DAY: Final = timedelta(days=1)
MAX_DAYS: Final = 366

router = APIRouter()


@router.get(PATH)
async def show_usage(page: Operator) -> Response:
    now, price = datetime.now(UTC), page.dependencies.config.accelerator_price
    first, last, errors = _days(query_form(page.http), now.date())
    start, end = datetime.combine(first, time(), UTC), datetime.combine(last + DAY, time(), UTC)
    async with page.reading() as session:
        usage, cost = await usage_by_tenant(session, start, end, now), None
        if price is not None and usage.totals:
            cost = await serving_cost(session, price, start, end, now)
    shown = {"from": first.isoformat(), "to": last.isoformat(), **page.http.query_params}
    return page.show(
        "usage/operator_usage.html",
        usage=usage,
        cost=cost,
        goes_on=last >= now.date(),
        form=Entered(shown, errors=errors),
    )


def _days(form: Form, today: date) -> tuple[date, date, Mapping[str, str]]:
    """The first and the last day that are shown, by default those of this month, and what is wrong with the given ones."""
    month = today.replace(day=1)
    try:
        first, last = day_of(form, "from", month), day_of(form, "to", today)
    except FormInvalid as invalid:
        return month, today, invalid.errors
    if not timedelta() <= last - first < MAX_DAYS * DAY:
        return month, today, {"to": f"From 1 to {MAX_DAYS} days, the first one first."}
    return first, last, {}
