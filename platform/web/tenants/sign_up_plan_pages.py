"""The plan of tenants that sign up by themselves: `/operator/console/plan`, where an operator opens and closes sign-up."""

from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import APIRouter, Depends
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import Request
from starlette.responses import Response

from loraplex.platform.services.people import sign_up
from loraplex.platform.services.people.identity import ConsoleSession
from loraplex.platform.services.people.sign_up import PublishedPlan
from loraplex.platform.web.console.amounts import decimal
from loraplex.platform.web.console.endpoint import ConsoleEndpoint
from loraplex.platform.web.console.form_routes import entered_again
from loraplex.platform.web.console.forms import Entered, Form, FormInvalid, field_errors, parse, read_form
from loraplex.platform.web.rate_cards import queries as rate_cards
from loraplex.platform.web.rate_cards.queries import Card
from loraplex.platform.web.tenants.tenant_forms import Limits, Weight
from loraplex.tenants.unit_of_work import UnitOfWork

PATH: Final = "/operator/console/plan"
BUDGETS: Final = ("budget_per_day", "budget_per_month")


class PlanForm(Limits):
    """A plan: the tier, the share of the engine, and the limits of tenants that sign up."""

    tier: str
    weight: Weight = 1.0

    async def publish(self, uow: UnitOfWork) -> None:
        """Raises what `sign_up.publish_plan` raises."""
        limits = self.model_dump(exclude={"tier", "weight"})
        await sign_up.publish_plan(uow, self.tier, limits, weight=self.weight)


FIELDS: Final = tuple(PlanForm.model_fields)


def sign_up_plan_pages(endpoint: ConsoleEndpoint) -> APIRouter:
    """Build the routes of the plan."""
    router = APIRouter()
    operator = Depends(endpoint.requires_operator())

    @router.get(PATH)
    async def show_plan(request: Request, session: Annotated[ConsoleSession, operator]) -> Response:
        return await _page(endpoint, request, session)

    @router.post(PATH)
    async def publish_plan(
        request: Request,
        session: Annotated[ConsoleSession, operator],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        try:
            plan = parse(form, PlanForm)
            with field_errors():
                await endpoint.perform(request, session, form, plan.publish)
        except FormInvalid as error:
            return await _page(endpoint, request, session, entered_again(form, error, FIELDS))
        return endpoint.back(
            request, session, PATH, f"Tenants that sign up from now on get the tier {plan.tier}."
        )

    @router.post(f"{PATH}/close")
    async def close_sign_up(
        request: Request,
        session: Annotated[ConsoleSession, operator],
        form: Annotated[Form, Depends(read_form)],
    ) -> Response:
        await endpoint.perform(request, session, form, sign_up.end_plan)
        return endpoint.back(
            request, session, PATH, "Sign-up is closed; links that were mailed work no longer."
        )

    return router


async def _page(
    endpoint: ConsoleEndpoint, request: Request, session: ConsoleSession, refused: Entered | None = None
) -> Response:
    async def read(found: AsyncSession) -> tuple[PublishedPlan | None, tuple[Card, ...]]:
        return await sign_up.published_plan(found), await rate_cards.cards(found, datetime.now(UTC))

    plan, cards = await endpoint.query(session, read)
    tier = "standard" if plan is None else plan.tier
    return endpoint.page(
        *(request, session, "tenants/sign_up_plan.html"),
        status=200 if refused is None else 422,
        plan=plan,
        form=refused or _entered(plan),
        tier=tier,
        cards=[each for each in cards if each.scope == "all" or each.key.tier == tier],
    )


def _entered(plan: PublishedPlan | None) -> Entered:
    """Return the published plan as its form shows it."""
    if plan is None:
        return Entered({"tier": "standard", "weight": "1"})
    limits = {name: decimal(value) if name in BUDGETS else str(value) for name, value in plan.limits.items()}
    return Entered({"tier": plan.tier, "weight": f"{plan.weight:g}", **limits})
