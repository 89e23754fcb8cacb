"""Sign-up of tenants: an operator publishes what they get, and closes.

Invariant: at most one plan is published, and what was published stays; a tenant that signs up gets the plan of that moment, and a price.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import check_weight
from loraplex.tenants.database import Database
from loraplex.tenants.errors import InvalidField
from loraplex.tenants.models import RateCard, SignUpPlan
from loraplex.tenants.names import check_tier
from loraplex.tenants.people.records import PublishedPlan
from loraplex.tenants.quotas.limits import QuotaLimits
from loraplex.tenants.unit_of_work import UnitOfWork

TARGET = "sign-up-plan"


async def is_open(database: Database) -> bool:
    """Whether a plan is published."""
    async with database.as_writer() as session:
        return await published_plan(session) is not None


async def published_plan(session: AsyncSession) -> PublishedPlan | None:
    """Return the published plan, as an operator or the gateway; None while sign-up is closed."""
    plan = (await session.scalars(select(SignUpPlan).where(SignUpPlan.ended_at.is_(None)))).one_or_none()
    return None if plan is None else PublishedPlan.model_validate(plan)


async def publish_plan(
    uow: UnitOfWork, tier: str, limits: Mapping[str, int | None], *, weight: float = 1.0
) -> SignUpPlan:
    """Let people sign up with this tier, share and limits; it takes the place of the present plan. The tier chooses the rate
    card. Raises `InvalidField`, also for a tier without a rate card.
    """
    given = {name: value for name, value in QuotaLimits(**limits).items() if value is not None}
    applies = (RateCard.scope == "all") | (RateCard.tier == check_tier(tier))
    if await uow.session.scalar(select(RateCard.id).where(applies).limit(1)) is None:
        raise InvalidField("tier", f"no rate card applies to the tier {tier}: create one first")
    former = await _end(uow.session)
    plan = SignUpPlan(tier=tier, weight=check_weight(weight), limits=given)
    uow.session.add(plan)
    await uow.session.flush()
    before, after = None if former is None else snapshot(former), snapshot(plan)
    if before != after:
        await uow.audit.record("sign_up.publish", TARGET, before, after)
    return plan


async def end_plan(uow: UnitOfWork) -> None:
    """Close sign-up; links that were mailed work no longer. Repeating it changes nothing."""
    plan = await _end(uow.session)
    if plan is not None:
        await uow.audit.record("sign_up.close", TARGET, snapshot(plan), None)


async def _end(session: AsyncSession) -> SignUpPlan | None:
    """End the published plan, and return it."""
    query = select(SignUpPlan).where(SignUpPlan.ended_at.is_(None))
    plan = (await session.scalars(query.with_for_update())).one_or_none()
    if plan is not None:
        plan.ended_at = datetime.now(UTC)
        await session.flush()
    return plan


def snapshot(plan: SignUpPlan) -> dict[str, Any]:
    """Return a plan's fields for the audit log."""
    return {"tier": plan.tier, "weight": plan.weight, "limits": plan.limits}
