"""Use cases of operators on sign-up: publish a plan, and close.

Invariant: a tenant that signs up gets the plan that is published at that moment, and a price.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import check_weight
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.models import SignUpPlan
from loraplex.tenants.names import check_tier
from loraplex.tenants.people.sign_up_plans import SignUpPlanRepository
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.unit_of_work import UnitOfWork

TARGET = "sign-up-plan"


async def is_open(database: Database) -> bool:
    """Whether a plan is published."""
    async with database.as_writer() as session:
        return await SignUpPlanRepository(session).published() is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPlan:
    """What a tenant gets that signs up now. `limits`: those that are set."""

    tier: str
    weight: float
    limits: Mapping[str, int]
    published_at: datetime


async def published_plan(session: AsyncSession) -> PublishedPlan | None:
    """Return the published plan; None while sign-up is closed."""
    plan = await SignUpPlanRepository(session).published()
    if plan is None:
        return None
    return PublishedPlan(
        tier=plan.tier, weight=plan.weight, limits=plan.limits, published_at=plan.published_at
    )


async def publish_plan(
    uow: UnitOfWork, tier: str, limits: Mapping[str, int | None], *, weight: float = 1.0
) -> SignUpPlan:
    """Let people sign up with this tier, share and limits; it takes the place of the present plan. The tier chooses the rate
    card. Raises `InvalidField`, also for a tier without a rate card.
    """
    plans = SignUpPlanRepository(uow.session)
    given = {name: value for name, value in QuotaLimits(**limits).items() if value is not None}
    if not await plans.has_rate_card(check_tier(tier)):
        raise InvalidField("tier", f"no rate card applies to the tier {tier}: create one first")
    former = await plans.published()
    before = None if former is None else snapshot(former)
    plan = await plans.publish(tier, check_weight(weight), given)
    after = snapshot(plan)
    if before != after:
        await uow.audit.record("sign_up.publish", TARGET, before, after)
    return plan


async def end_plan(uow: UnitOfWork) -> None:
    """Close sign-up; links that were mailed work no longer. Repeating it changes nothing."""
    plan = await SignUpPlanRepository(uow.session).end()
    if plan is not None:
        await uow.audit.record("sign_up.close", TARGET, snapshot(plan), None)


def snapshot(plan: SignUpPlan) -> dict[str, Any]:
    """Return a plan's fields for the audit log."""
    return {"tier": plan.tier, "weight": plan.weight, "limits": plan.limits}
