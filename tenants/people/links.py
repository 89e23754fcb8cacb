"""Links that work once: resets of passwords, the demo's sign-in, and invitations of all kinds.

Invariant: a link is used by one UPDATE that finds it unused and in time, so that of two uses at once one succeeds.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, TypeAlias
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import CountReached, LinkNotValid, UserNotFound
from loraplex.tenants.models import Invitation, OneTimeLink, Tenant, User
from loraplex.tenants.people.tokens import new_token, token_digest

INVITATION_LIFETIME: Final = timedelta(days=7)
FIRST_RUN_LIFETIME: Final = timedelta(hours=1)
RESET_LIFETIME: Final = timedelta(hours=24)
DEMO_LIFETIME: Final = timedelta(days=7)
SIGN_UP_LIFETIME: Final = timedelta(hours=24)
DAY: Final = timedelta(days=1)
MAX_OPEN: Final = 100
"""The open invitations of one tenant."""
MAX_A_DAY: Final = 10
"""The invitations of one tenant to one address within a day."""

LinkPurpose: TypeAlias = Literal["member", "operator", "sign_up", "reset", "demo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link that can be used. `tenant_id`, `role`: of an invitation to a tenant. `email` None: the bearer chooses it.

    `user_id`: the account of a reset or of the demo, or the one that the invited address has already.
    """

    id: UUID
    purpose: LinkPurpose
    email: str | None
    user_id: UUID | None
    tenant_id: UUID | None = None
    tenant_name: str | None = None
    role: str | None = None
    removes_second_factor: bool = False


class LinkRepository:
    """Links by their tokens, seen by a session of the gateway's role (`as_writer`, `writing`)."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def find(self, token: str, now: datetime) -> Link:
        """Return the link without using it. Raises `LinkNotValid`."""
        digest = token_digest(token)
        found = await self._one_time(_open_link(digest, now)) or await self._invitation(
            _open_invitation(digest, now)
        )
        if found is None:
            raise LinkNotValid("this link was used, has expired, or never was")
        return found

    async def use(self, token: str, now: datetime) -> Link:
        """Use the link up. Raises `LinkNotValid`."""
        link = await self.find(token, now)
        digest = token_digest(token)
        if link.purpose in ("reset", "demo"):
            statement = update(OneTimeLink).where(_open_link(digest, now)).values(used_at=now)
            used = await self._session.scalar(statement.returning(OneTimeLink.id))
        else:
            accepting = update(Invitation).where(_open_invitation(digest, now)).values(accepted_at=now)
            used = await self._session.scalar(accepting.returning(Invitation.id))
        if used is None:
            raise LinkNotValid("this link was used at this moment")
        return link

    async def issue(
        self,
        purpose: Literal["reset", "demo"],
        user_id: UUID,
        expires_at: datetime,
        *,
        removes_second_factor: bool = False,
    ) -> str:
        """Return the token of a new link, which replaces the open ones of the same purpose."""
        await self.end(purpose, user_id)
        token = new_token()
        await self._session.execute(
            insert(OneTimeLink).values(
                id=uuid4(),
                token_sha256=token_digest(token),
                purpose=purpose,
                user_id=user_id,
                expires_at=expires_at,
                removes_second_factor=removes_second_factor,
            )
        )
        return token

    async def end(self, purpose: Literal["reset", "demo"], user_id: UUID) -> None:
        """End the open links of a purpose to an account."""
        own = (OneTimeLink.user_id == user_id, OneTimeLink.purpose == purpose)
        statement = update(OneTimeLink).where(*own, OneTimeLink.used_at.is_(None))
        await self._session.execute(statement.values(used_at=func.now()))

    async def _one_time(self, condition: ColumnElement[bool]) -> Link | None:
        columns = (
            OneTimeLink.id,
            OneTimeLink.purpose,
            OneTimeLink.user_id,
            OneTimeLink.removes_second_factor,
        )
        query = select(*columns, User.email).join(User, User.id == OneTimeLink.user_id).where(condition)
        row = (await self._session.execute(query)).one_or_none()
        return None if row is None else Link(**row._mapping)

    async def _invitation(self, condition: ColumnElement[bool]) -> Link | None:
        columns = (Invitation.id, Invitation.purpose, Invitation.email, Invitation.tenant_id, Invitation.role)
        query = (
            select(*columns, User.id.label("user_id"), Tenant.name.label("tenant_name"))
            .outerjoin(User, User.email == Invitation.email)
            .outerjoin(Tenant, Tenant.id == Invitation.tenant_id)
            .where(condition, Tenant.deleted_at.is_(None), Tenant.suspended_at.is_(None))
        )
        row = (await self._session.execute(query)).one_or_none()
        return None if row is None else Link(**row._mapping)


class InvitationRepository:
    """Invitations, seen by a session of an operator, or of the tenant that they lead to."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def create(
        self,
        purpose: Literal["member", "operator", "sign_up"],
        invited_by: str,
        expires_at: datetime,
        *,
        email: str | None = None,
        tenant_id: UUID | None = None,
        role: str | None = None,
    ) -> tuple[UUID, str]:
        """Return id and token of a new invitation, which replaces the open ones with the same address and tenant."""
        same = (Invitation.purpose == purpose, Invitation.email == email, Invitation.tenant_id == tenant_id)
        await self._session.execute(update(Invitation).where(*same, _is_open()).values(revoked_at=func.now()))
        invitation_id, token = uuid4(), new_token()
        await self._session.execute(
            insert(Invitation).values(
                id=invitation_id,
                tenant_id=tenant_id,
                purpose=purpose,
                email=email,
                role=role,
                token_sha256=token_digest(token),
                invited_by=invited_by,
                expires_at=expires_at,
            )
        )
        return invitation_id, token

    async def was_operator_invited(self, by: str, since: datetime) -> bool:
        """Whether this author has made a link for an operator since then."""
        made = (Invitation.purpose == "operator", Invitation.invited_by == by)
        found = select(Invitation.id).where(*made, Invitation.created_at > since).limit(1)
        return await self._session.scalar(found) is not None

    async def require_room(self, tenant_id: UUID, email: str, now: datetime) -> None:
        """Raise `CountReached` where the tenant has too many open invitations, or has invited this address too often.

        Call it under the lock of the tenant's members.
        """
        own = Invitation.tenant_id == tenant_id
        others = select(func.count()).where(own, _is_open(), Invitation.expires_at > now)
        if (await self._session.scalars(others.where(Invitation.email != email))).one() >= MAX_OPEN:
            raise CountReached(
                "max_invitations",
                f"a tenant has at most {MAX_OPEN} open invitations: withdraw one first",
                "email",
            )
        recent = select(func.count()).where(own, Invitation.email == email, Invitation.created_at > now - DAY)
        if (await self._session.scalars(recent)).one() >= MAX_A_DAY:
            raise CountReached(
                "max_invitations",
                f"{email} was invited {MAX_A_DAY} times within 24 hours: the newest link works, or try again tomorrow",
                "email",
            )

    async def get(self, tenant_id: UUID, invitation_id: UUID) -> Invitation:
        """Return an open invitation. Raises `UserNotFound`."""
        own = (Invitation.tenant_id == tenant_id, Invitation.id == invitation_id, _is_open())
        found = (await self._session.scalars(select(Invitation).where(*own))).one_or_none()
        if found is None:
            raise UserNotFound("no such invitation")
        return found

    async def revoke(self, tenant_id: UUID, invitation_id: UUID) -> bool:
        """End an open invitation; False if it is not open any more."""
        own = (Invitation.tenant_id == tenant_id, Invitation.id == invitation_id, _is_open())
        statement = update(Invitation).where(*own).values(revoked_at=func.now()).returning(Invitation.id)
        return await self._session.scalar(statement) is not None


def _open_link(digest: bytes, now: datetime) -> ColumnElement[bool]:
    own = (OneTimeLink.token_sha256 == digest) & OneTimeLink.used_at.is_(None)
    return own & (OneTimeLink.expires_at > now)


def _open_invitation(digest: bytes, now: datetime) -> ColumnElement[bool]:
    return (Invitation.token_sha256 == digest) & _is_open() & (Invitation.expires_at > now)


def _is_open() -> ColumnElement[bool]:
    return Invitation.accepted_at.is_(None) & Invitation.revoked_at.is_(None)
