"""The plan of tenants that sign up by themselves. Invariant: at most one plan is published, and what was published stays."""

from collections.abc import Mapping
from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import RateCard, SignUpPlan


class SignUpPlanRepository:
    """Plans, seen by a session of an operator or of the gateway's role."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def published(self, *, locked: bool = False) -> SignUpPlan | None:
        """Return the published plan. `locked`: until the transaction ends."""
        query = select(SignUpPlan).where(SignUpPlan.ended_at.is_(None))
        found = await self._session.scalars(query.with_for_update() if locked else query)
        return found.one_or_none()

    async def has_rate_card(self, tier: str) -> bool:
        """Whether a rate card of the tier, or of all requests, exists."""
        query = select(RateCard.id).where((RateCard.scope == "all") | (RateCard.tier == tier)).limit(1)
        return await self._session.scalar(query) is not None

    async def publish(self, tier: str, weight: float, limits: Mapping[str, int | None]) -> SignUpPlan:
        """Publish a plan in place of the present one, which is ended first."""
        await self.end()
        plan = SignUpPlan(tier=tier, weight=weight, limits=dict(limits))
        self._session.add(plan)
        await self._session.flush()
        return plan

    async def end(self) -> SignUpPlan | None:
        """Close sign-up; return the plan that was published, if any."""
        plan = await self.published(locked=True)
        if plan is not None:
            plan.ended_at = datetime.now(UTC)
            await self._session.flush()
        return plan
