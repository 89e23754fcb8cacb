"""The first steps of a tenant: a key, an adapter, a request, a budget. Invariant: a step is done once its thing exists, and none
is shown to a tenant that an adapter has answered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, TypeAlias, get_args
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.ledger.request_log import RequestFilters, RequestLog
from loraplex.tenants.ledger.request_reports import FailureRow, latest_failures
from loraplex.tenants.models import NO_ID
from loraplex.tenants.registry.resolution import ModelResolver

Step: TypeAlias = Literal["key", "adapter", "request", "budget"]
STEPS: Final[tuple[Step, ...]] = get_args(Step)
HOUR: Final = timedelta(hours=1)
# Who made a key that an operator, a command or the demo made saw its text; people of the tenant need not have.
_EXISTING: Final = text("""
SELECT (
        SELECT ARRAY[name, key_id] FROM api_keys
        WHERE tenant_id = :tenant_id AND kind = 'key' AND created_by NOT IN ('operator', 'command', 'system')
        ORDER BY created_at LIMIT 1
    ) AS key,
    EXISTS (
        SELECT FROM adapter_versions v JOIN adapters a ON a.id = v.adapter_id
        WHERE v.tenant_id = :tenant_id AND v.state = 'ready' AND a.deleted_at IS NULL
    ) AS adapter,
    EXISTS (SELECT FROM request_rollups WHERE tenant_id = :tenant_id AND status = 'completed') AS request,
    EXISTS (
        SELECT FROM quotas WHERE tenant_id = :tenant_id AND num_nonnulls(budget_per_day, budget_per_month) > 0
    ) AS budget,
    EXISTS (
        SELECT FROM request_rollups
        WHERE tenant_id = :tenant_id AND status = 'completed' AND adapter_id <> :no_id
    ) AS in_use
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnboardingStatus:
    """What exists already; None for what does not. `key` is name and public id of the oldest key that the tenant made itself,
    `adapter` the newest ready version's name and number, `refusal` the last request that was refused or failed
    within the hour.

    `skipped`: steps that the person wants to see no more.
    """

    key: Sequence[str] | None
    adapter: tuple[str, int] | None
    answered_at: datetime | None
    refusal: FailureRow | None
    has_budget: bool
    skipped: frozenset[str]

    @property
    def done(self) -> frozenset[Step]:
        """The steps whose thing exists."""
        exists = (self.key, self.adapter, self.answered_at, self.has_budget or None)
        return frozenset(step for step, found in zip(STEPS, exists, strict=True) if found is not None)

    @property
    def current(self) -> Step | None:
        """The first step that is neither done nor skipped."""
        return next((step for step in STEPS if step not in self.done | self.skipped), None)


async def open_steps(
    session: AsyncSession, tenant_id: UUID, skipped: frozenset[str], now: datetime
) -> OnboardingStatus | None:
    """Return the first steps until an adapter has answered, while one of them is neither done nor skipped, else None."""
    wanted = frozenset[str](STEPS) - skipped
    if not wanted:
        return None
    # Most tenants are done, which one statement says, from indexes and rollups.
    row = (await session.execute(_EXISTING, {"tenant_id": tenant_id, "no_id": NO_ID})).one()
    found = {name: value for name, value in row._mapping.items() if value}
    if "in_use" in found or wanted <= found.keys():
        return None
    versions = await ModelResolver(session, tenant_id).versions(1)
    answered = await _answered_at(session, tenant_id)
    steps = OnboardingStatus(
        key=found.get("key"),
        adapter=(versions[0].name, versions[0].version) if versions else None,
        answered_at=answered,
        refusal=None if answered else await _refusal(session, tenant_id, now),
        has_budget="budget" in found,
        skipped=skipped,
    )
    return None if steps.current is None else steps


async def _answered_at(session: AsyncSession, tenant_id: UUID) -> datetime | None:
    completed = await RequestLog(session, tenant_id).page(RequestFilters(outcome="completed"), None, 1)
    return completed.requests[0].at if completed.requests else None


async def _refusal(session: AsyncSession, tenant_id: UUID, now: datetime) -> FailureRow | None:
    failures = await latest_failures(session, tenant_id, now - HOUR, 1)
    return failures[0] if failures else None
