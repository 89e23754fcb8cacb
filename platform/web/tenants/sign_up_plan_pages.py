"""The plan of tenants that sign up by themselves: `/operator/console/plan`, where an operator opens and closes sign-up."""

from datetime import UTC, datetime
from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from loraplex.platform.web.console.amounts import decimal
from loraplex.platform.web.console.form_routes import form_post
from loraplex.platform.web.console.forms import Entered
from loraplex.platform.web.console.page import PageRequest
from loraplex.platform.web.rate_cards import queries as rate_cards
from loraplex.platform.web.tenants.operator_pages import Operator, Submission
from loraplex.platform.web.tenants.operator_routes import Weight
from loraplex.platform.web.tenants.tenant_forms import Limits
from loraplex.tenants.people import sign_up
from loraplex.tenants.people.records import PublishedPlan

PATH: Final = "/operator/console/plan"
BUDGETS: Final = ("budget_per_day", "budget_per_month")


class PlanForm(Limits):
    """A plan: the tier, the share of the engine, and the limits of tenants that sign up."""

    tier: str
    weight: Weight = 1.0


FIELDS: Final = tuple(PlanForm.model_fields)


router = APIRouter()


@router.get(PATH)
async def show_plan(page: Operator) -> Response:
    return await _show(page)


async def _show(page: PageRequest, refused: Entered | None = None) -> Response:
    """Show the plan; `refused`: one that was not published."""
    async with page.reading() as session:
        plan = await sign_up.published_plan(session)
        cards = await rate_cards.cards(session, datetime.now(UTC))
    tier = "standard" if plan is None else plan.tier
    return page.show(
        "tenants/sign_up_plan.html",
        plan=plan,
        form=refused or _entered(plan),
        tier=tier,
        cards=[each for each in cards if each.scope == "all" or each.key.tier == tier],
    )


@form_post(router, PATH, _show, fields=FIELDS)
async def publish_plan(submission: Submission) -> Response:
    plan = submission.parse(PlanForm)
    limits = plan.model_dump(exclude={"tier", "weight"})
    await submission.run(sign_up.publish_plan, plan.tier, limits, weight=plan.weight)
    return submission.back(PATH, f"Tenants that sign up from now on get the tier {plan.tier}.")


@router.post(f"{PATH}/close")
async def close_sign_up(submission: Submission) -> Response:
    await submission.run(sign_up.end_plan)
    return submission.back(PATH, "Sign-up is closed; links that were mailed work no longer.")


def _entered(plan: PublishedPlan | None) -> Entered:
    """Return the published plan as its form shows it."""
    if plan is None:
        return Entered({"tier": "standard", "weight": "1"})
    limits = {name: decimal(value) if name in BUDGETS else str(value) for name, value in plan.limits.items()}
    return Entered({"tier": plan.tier, "weight": f"{plan.weight:g}", **limits})
