"""The team of a tenant as one list: its members and the open invitations to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy import case, func, literal, null, select, tuple_, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import UserNotFound
from loraplex.tenants.models import Invitation, Membership, User, UserSession

STATES: Final = ("active", "disabled", "invited")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamEntry:
    """A member of a tenant, or an open invitation to it: then `state` is `invited`, and `name` and `last_seen_at` are None.

    `sessions`: how many of the member's sessions are in this tenant. `expires_at`: the end of the invitation, None of a member.
    """

    id: UUID
    email: str
    name: str | None
    role: str
    state: Literal["active", "disabled", "invited"]
    second_factor: bool
    sessions: int
    last_seen_at: datetime | None
    created_at: datetime
    expires_at: datetime | None
    revision: int


class TeamRepository:
    """The team of one tenant, seen by one session."""

    def __init__(self, session: AsyncSession, tenant_id: UUID, now: datetime) -> None:
        self._session = session
        self._tenant_id = tenant_id
        self._now = now

    async def page(self, after: tuple[datetime, UUID] | None, limit: int) -> Sequence[TeamEntry]:
        """Return at most `limit` entries, oldest first, behind the one that was created at that time and has that id."""
        both = union_all(self._members(), self._invitations()).subquery()
        query = select(both).order_by(both.c.created_at, both.c.id).limit(limit)
        if after is not None:
            query = query.where(tuple_(both.c.created_at, both.c.id) > after)
        return [TeamEntry(**row._mapping) for row in await self._session.execute(query)]

    async def get(self, entry_id: UUID) -> TeamEntry:
        """Return the member or invitation of this id. Raises `UserNotFound`."""
        both = union_all(self._members(), self._invitations()).subquery()
        row = (await self._session.execute(select(both).where(both.c.id == entry_id))).one_or_none()
        if row is None:
            raise UserNotFound("no such member or invitation")
        return TeamEntry(**row._mapping)

    def _members(self) -> Any:
        sessions = (
            select(func.count())
            .where(UserSession.user_id == User.id, UserSession.tenant_id == self._tenant_id)
            .where(UserSession.expires_at > self._now)
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
            .where(Membership.tenant_id == self._tenant_id)
        )

    def _invitations(self) -> Any:
        return select(
            *(Invitation.id, Invitation.email, null().label("name"), Invitation.role),
            literal("invited").label("state"),
            literal(False).label("second_factor"),
            literal(0).label("sessions"),
            null().label("last_seen_at"),
            *(Invitation.created_at, Invitation.expires_at),
            literal(1).label("revision"),
        ).where(
            Invitation.tenant_id == self._tenant_id,
            Invitation.accepted_at.is_(None),
            Invitation.revoked_at.is_(None),
            Invitation.expires_at > self._now,
        )
