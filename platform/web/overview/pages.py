"""`/` in a browser, and `/console`: requests, errors and spend at a glance, and what needs attention. Invariant: a
person sees what their scopes show.
"""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.web.adapters.residency import residency
from loraplex.platform.web.console.addresses import chosen, query_form
from loraplex.platform.web.console.charts import ChartRow, named, symbol
from loraplex.platform.web.console.endpoint import redirect
from loraplex.platform.web.console.form_routes import FormSubmission, submits
from loraplex.platform.web.console.page import OpenPage, PageRequest, opens
from loraplex.platform.web.limits import queries as limits
from loraplex.platform.web.overview import onboarding
from loraplex.platform.web.overview import queries as overview
from loraplex.platform.web.overview.queries import RANGES, RangeName, RequestOverview, SpendOverview
from loraplex.tenants.people.own_account import is_fresh
from loraplex.tenants.scopes import ADAPTERS_READ, BILLING_READ, KEYS_WRITE, USAGE_READ

MONEY_READ: Final = frozenset({USAGE_READ, BILLING_READ})
NEEDED: Final = {"quarantined": ADAPTERS_READ, "rejected": ADAPTERS_READ, "key_expires": KEYS_WRITE}
"""The scope that shows what needs attention; of all other kinds `usage:read`."""
RANGE_NAMES: Final = {"24h": "24 hours", "7d": "7 days", "30d": "30 days"}
PERIOD_NAMES: Final = {timedelta(hours=1): "Hour", timedelta(hours=6): "From", timedelta(days=1): "Day"}
SignedIn = Annotated[PageRequest, opens(None)]
Submission = Annotated[FormSubmission, submits(None)]

router = APIRouter()


@router.get("/")
async def index(request: Request) -> Response:
    """Show where the console, the documentation and the probes are. It asks for no session and no store."""
    response = OpenPage(request.app.state.endpoint, request, None).show("index.html")
    response.headers["vary"] = "accept"
    return response


@router.get("/console")
async def show_overview(page: SignedIn) -> Response:
    tenant_id, now, scopes = page.tenant_id, datetime.now(UTC), page.session.scopes
    range_name = cast("RangeName", chosen(query_form(page.http), "range", tuple(RANGES)))
    dependencies, currency = page.dependencies, page.dependencies.currency_of(tenant_id)
    skipped, requests = page.cookies.skipped_steps(tenant_id), None
    async with page.reading() as session:
        stored = await limits.stored(session, tenant_id)
        budget = stored.states[0].limits.budget_per_month
        spend = await overview.spend(session, tenant_id, currency, now, budget)
        if ADAPTERS_READ in scopes:
            requests = await overview.requests(session, tenant_id, range_name, now)
        attention = await overview.attention(session, tenant_id, spend, now)
        steps = await onboarding.open_steps(session, tenant_id, skipped, now)
    counted = await limits.with_use(dependencies.admission_controller, tenant_id, stored)
    sees_money = bool(MONEY_READ & scopes)
    return page.show(
        "overview/overview.html",
        ranges=RANGE_NAMES,
        range_name=range_name,
        requests=requests,
        spend=spend if sees_money else None,
        attention=[each for each in attention if NEEDED.get(each.kind, USAGE_READ) in scopes],
        nearest=None if counted is None else limits.nearest(counted),
        has_limits=any(subject.limits for subject in counted or ()),
        charts=None if requests is None else _charts(requests),
        residency=await residency(dependencies.engine, dependencies.namespace_of(tenant_id)),
        days=_days(spend) if sees_money else (),
        prefix=symbol(currency),
        sees_keys=KEYS_WRITE in scopes,
        currency=currency,
        steps=steps,
        offers_password=page.session.by_link_only and is_fresh(page.session, now),
        is_demo=page.endpoint.is_demo,
    )


@router.post("/console/first-steps")
async def skip_step(submission: Submission) -> Response:
    """Skip one of the first steps, or all of them, in this browser."""
    wanted = submission.form.text("step")
    steps = [each for each in onboarding.STEPS if wanted in (each, "all")]
    response = redirect(submission.http, "/console")
    submission.cookies.skip_steps(response, submission.tenant_id, steps)
    return response


def _charts(found: RequestOverview) -> dict[str, object]:
    """Return the two charts, and the sparklines of the tiles; `head` names the column of their periods."""
    periods, ids = found.periods, [each.id for each in found.series]
    last = periods[-1].start
    return {
        "head": PERIOD_NAMES[found.step],
        "adapters": named(
            ["no adapter" if each.base_model else each.name or "other" for each in found.series]
        ),
        "requests": [
            ChartRow(each.start, tuple(each.requests.get(name, 0) for name in ids), each.start == last)
            for each in periods
        ],
        "latencies": named(("median", "p95")),
        "ttft": [
            ChartRow(each.start, (each.sums.ttft_ms(50), each.sums.ttft_ms(95)), each.start == last)
            for each in periods
        ],
        "request_counts": [each.sums.requests for each in periods],
        "error_shares": [
            each.sums.errors * 10_000 // each.sums.requests if each.sums.requests else None
            for each in periods
        ],
        "medians": [each.sums.ttft_ms(50) for each in periods],
    }


def _days(spend: SpendOverview) -> tuple[ChartRow, ...]:
    """The spend of each day of the month, in pico-units."""
    return tuple(
        ChartRow(datetime(day.year, day.month, day.day, tzinfo=UTC), (pico,), day == spend.days[-1][0])
        for day, pico in spend.days
    )
