"""Members of a tenant.

Invariant: the members of one tenant change one at a time, and no change of them leaves it without an admin who may sign in.
"""

from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import ScalarSelect, func, select, text
from sqlalchemy.dialects.postgresql import aggregate_order_by
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from loraplex.tenants.errors import AlreadyMember, LastAdmin, UserNotFound
from loraplex.tenants.models import Membership, Tenant, User
from loraplex.tenants.people.roles import ADMIN, check_role

LOCK = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantOfPerson:
    """A living tenant that a person may enter."""

    tenant_id: UUID
    name: str
    role: str


class MembershipRepository:
    """The members of one tenant, seen by one session of the tenant or of an operator."""

    def __init__(self, session: AsyncSession, tenant_id: UUID) -> None:
        self._session = session
        self._tenant_id = tenant_id

    async def lock(self) -> None:
        """Lock the tenant's members against other changes until this transaction ends."""
        await self._session.execute(LOCK, {"name": f"members:{self._tenant_id}"})

    async def get(self, user_id: UUID) -> tuple[Membership, User]:
        """Raises `UserNotFound`."""
        query = select(Membership, User).join(User, User.id == Membership.user_id)
        query = query.where(Membership.tenant_id == self._tenant_id, Membership.user_id == user_id)
        found = await self._session.execute(query.execution_options(populate_existing=True))
        row = found.one_or_none()
        if row is None:
            raise UserNotFound("no such member")
        return row[0], row[1]

    async def add(self, user_id: UUID, role: str) -> Membership:
        """Raises `InvalidField`, `AlreadyMember`."""
        await self.lock()
        key = (self._tenant_id, user_id)
        if await self._session.get(Membership, key) is not None:
            raise AlreadyMember("this person is a member already")
        record = Membership(tenant_id=self._tenant_id, user_id=user_id, role=check_role(role))
        self._session.add(record)
        await self._session.flush()
        return record

    async def has_email(self, email: str) -> bool:
        """Whether a member has this address."""
        query = select(Membership.user_id).join(User, User.id == Membership.user_id)
        query = query.where(Membership.tenant_id == self._tenant_id, User.email == email)
        return await self._session.scalar(query) is not None

    async def change_role(self, record: Membership, role: str) -> None:
        """Call it under `lock`. Raises `InvalidField`, `LastAdmin`."""
        check_role(role)
        if role != ADMIN:
            await self.require_another_admin(record.user_id, record.role)
        record.role = role
        await self._session.flush()

    async def remove(self, record: Membership) -> None:
        """Call it under `lock`. Raises `LastAdmin`."""
        await self.require_another_admin(record.user_id, record.role)
        await self._session.delete(record)
        await self._session.flush()

    async def require_another_admin(self, user_id: UUID, role: str) -> None:
        """Raise `LastAdmin` unless the tenant has an admin who may sign in besides this member with `role`, or the member is
        no admin. Call it under `lock`.
        """
        if role == ADMIN and not await self.has_admin(besides=user_id):
            raise LastAdmin("this is the last admin of the tenant: make another member an admin first")

    async def has_admin(self, *, besides: UUID | None = None) -> bool:
        """Whether the tenant has an admin who may sign in. `besides`: a member who is not counted."""
        query = select(Membership.user_id).join(User, User.id == Membership.user_id)
        own = (Membership.tenant_id == self._tenant_id, Membership.role == ADMIN, User.disabled_at.is_(None))
        if besides is not None:
            query = query.where(Membership.user_id != besides)
        return await self._session.scalar(query.where(*own).limit(1)) is not None


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
    """The same as a column of another statement, read by `tenants_from_json`. `user_id` is a column of that statement."""
    each = func.jsonb_build_array(Tenant.id, Tenant.name, Membership.role)
    query = select(func.jsonb_agg(aggregate_order_by(each, Tenant.name))).join_from(
        Tenant, Membership, _MEMBER
    )
    query = query.where(Membership.user_id == user_id, *_OPEN)
    return query.correlate_except(Tenant, Membership).scalar_subquery()


def tenants_from_json(stored: list[tuple[str, str, str]] | None) -> list[TenantOfPerson]:
    """Read a value of `tenants_as_json`; None where the person may enter no tenant."""
    return [
        TenantOfPerson(tenant_id=UUID(tenant_id), name=name, role=role)
        for tenant_id, name, role in stored or ()
    ]


_MEMBER: Final = Membership.tenant_id == Tenant.id
_OPEN: Final = (Tenant.deleted_at.is_(None), Tenant.suspended_at.is_(None))
