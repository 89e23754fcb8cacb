"""The team of a tenant as one list: its members and the open invitations to it."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Subquery, case, func, literal, null, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import UserNotFound
from loraplex.tenants.models import Invitation, Membership, User, UserSession
from loraplex.tenants.pages import Slice, sliced
from loraplex.tenants.people.records import MAX_PEOPLE, UserDocument

Position = tuple[datetime, UUID]


async def members(
    session: AsyncSession, tenant_id: UUID, part: Slice[Position] | None = None
) -> list[UserDocument]:
    """Return members and open invitations, the oldest first; without `part` up to `MAX_PEOPLE`."""
    team = _team(tenant_id)
    order = (team.c.created_at, team.c.id)
    query = select(team)
    query = query.order_by(*order).limit(MAX_PEOPLE) if part is None else sliced(query, part, *order)
    return [UserDocument.model_validate(row) for row in await session.execute(query)]


async def member(session: AsyncSession, tenant_id: UUID, entry_id: UUID) -> UserDocument:
    """Return one member or open invitation. Raises `UserNotFound`."""
    team = _team(tenant_id)
    row = (await session.execute(select(team).where(team.c.id == entry_id))).one_or_none()
    if row is None:
        raise UserNotFound("no such member or invitation")
    return UserDocument.model_validate(row)


def _team(tenant_id: UUID) -> Subquery:
    now = datetime.now(UTC)
    return union_all(_members(tenant_id, now), _invitations(tenant_id, now)).subquery()


def _members(tenant_id: UUID, now: datetime) -> Any:
    sessions = (
        select(func.count())
        .where(UserSession.user_id == User.id, UserSession.tenant_id == tenant_id)
        .where(UserSession.expires_at > now)
        .scalar_subquery()
    )
    return (
        select(
            *(User.id, User.email, User.name, Membership.role),
            case((User.disabled_at.is_(None), "active"), else_="disabled").label("state"),
            User.totp_confirmed_at.is_not(None).label("second_factor"),
            sessions.label("sessions"),
            *(User.last_seen_at, Membership.created_at),
            null().label("expires_at"),
            Membership.revision,
        )
        .join(Membership, Membership.user_id == User.id)
        .where(Membership.tenant_id == tenant_id)
    )


def _invitations(tenant_id: UUID, now: datetime) -> Any:
    return select(
        *(Invitation.id, Invitation.email, null().label("name"), Invitation.role),
        literal("invited").label("state"),
        literal(False).label("second_factor"),
        literal(0).label("sessions"),
        null().label("last_seen_at"),
        *(Invitation.created_at, Invitation.expires_at),
        literal(1).label("revision"),
    ).where(
        Invitation.tenant_id == tenant_id,
        Invitation.accepted_at.is_(None),
        Invitation.revoked_at.is_(None),
        Invitation.expires_at > now,
    )
