"""Members of a tenant.

Invariant: the members of one tenant change one at a time, and no change of them leaves it without an admin who may sign in.
"""

from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ScalarSelect, func, select
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from loraplex.tenants.database import lock
from loraplex.tenants.errors import AlreadyMember, LastAdmin, UserNotFound
from loraplex.tenants.models import Membership, Tenant, User
from loraplex.tenants.people.roles import ADMIN, check_role


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantOfPerson:
    """A living tenant that a person may enter."""

    tenant_id: UUID
    name: str
    role: str


async def lock_members(session: AsyncSession, tenant_id: UUID) -> None:
    """Lock the tenant's members against other changes until this transaction ends."""
    await lock(session, f"members:{tenant_id}")


async def get(session: AsyncSession, tenant_id: UUID, user_id: UUID) -> tuple[Membership, User]:
    """Raises `UserNotFound`."""
    query = select(Membership, User).join(User, User.id == Membership.user_id)
    query = query.where(Membership.tenant_id == tenant_id, Membership.user_id == user_id)
    found = await session.execute(query.execution_options(populate_existing=True))
    row = found.one_or_none()
    if row is None:
        raise UserNotFound("no such member")
    return row[0], row[1]


async def add(session: AsyncSession, tenant_id: UUID, user_id: UUID, role: str) -> Membership:
    """Raises `InvalidField`, `AlreadyMember`."""
    await lock_members(session, tenant_id)
    if await session.get(Membership, (tenant_id, user_id)) is not None:
        raise AlreadyMember("this person is a member already")
    record = Membership(tenant_id=tenant_id, user_id=user_id, role=check_role(role))
    session.add(record)
    await session.flush()
    return record


async def has_email(session: AsyncSession, tenant_id: UUID, email: str) -> bool:
    """Whether a member has this address."""
    query = select(Membership.user_id).join(User, User.id == Membership.user_id)
    query = query.where(Membership.tenant_id == tenant_id, User.email == email)
    return await session.scalar(query) is not None


async def change_role(session: AsyncSession, record: Membership, role: str) -> None:
    """Call it under `lock_members`. Raises `InvalidField`, `LastAdmin`."""
    check_role(role)
    if role != ADMIN:
        await _require_another_admin(session, record)
    record.role = role
    await session.flush()


async def remove(session: AsyncSession, record: Membership) -> None:
    """Call it under `lock_members`. Raises `LastAdmin`."""
    await _require_another_admin(session, record)
    await session.delete(record)
    await session.flush()


async def _require_another_admin(session: AsyncSession, record: Membership) -> None:
    """Raise `LastAdmin` for the only admin of the tenant who may sign in."""
    if record.role == ADMIN and not await has_admin(session, record.tenant_id, besides=record.user_id):
        raise LastAdmin("this is the last admin of the tenant: make another member an admin first")


async def has_admin(session: AsyncSession, tenant_id: UUID, *, besides: UUID | None = None) -> bool:
    """Whether the tenant has an admin who may sign in. `besides`: a member who is not counted."""
    query = select(Membership.user_id).join(User, User.id == Membership.user_id)
    own = (Membership.tenant_id == tenant_id, Membership.role == ADMIN, User.disabled_at.is_(None))
    if besides is not None:
        query = query.where(Membership.user_id != besides)
    return await session.scalar(query.where(*own).limit(1)) is not None


async def tenants_of(session: AsyncSession, user_id: UUID) -> list[TenantOfPerson]:
    """Return the tenants that a person may enter, by name: living ones that are not suspended."""
    columns = (Tenant.id.label("tenant_id"), Tenant.name, Membership.role)
    query = select(*columns).join(Membership, _MEMBER).where(Membership.user_id == user_id, *_OPEN)
    return [TenantOfPerson(**row._mapping) for row in await session.execute(query.order_by(Tenant.name))]


async def administered_tenants(session: AsyncSession, user_id: UUID) -> dict[UUID, str]:
    """Return id and name of the living tenants of which a person is an admin, by name; suspended ones too."""
    query = select(Tenant.id, Tenant.name).join(Membership, _MEMBER)
    own = (Membership.user_id == user_id, Membership.role == ADMIN, Tenant.deleted_at.is_(None))
    found = await session.execute(query.where(*own).order_by(Tenant.name))
    return {row.id: row.name for row in found}


def tenants_as_json(user_id: InstrumentedAttribute[UUID]) -> ScalarSelect[Any]:
    """Return the same as a column of another statement, as pairs of id and name; null for none. `user_id` is a column of that
    statement.
    """
    each = func.jsonb_build_array(Tenant.id, Tenant.name)
    query = select(func.jsonb_agg(aggregate_order_by(each, Tenant.name)))
    query = query.join_from(Tenant, Membership, _MEMBER).where(Membership.user_id == user_id, *_OPEN)
    return query.correlate_except(Tenant, Membership).scalar_subquery()


_MEMBER: Final = Membership.tenant_id == Tenant.id
_OPEN: Final = (Tenant.deleted_at.is_(None), Tenant.suspended_at.is_(None))
