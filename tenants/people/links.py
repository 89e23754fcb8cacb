"""Links that work once: resets of passwords, the demo's sign-in, and invitations of all kinds.

Invariant: a link is used by one UPDATE that finds it unused and in time, so that of two uses at once one succeeds.
"""

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal, TypeAlias
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import CountReached, LinkNotValid, UserNotFound
from loraplex.tenants.models import Invitation, OneTimeLink, Tenant, User

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
_TOKEN_BYTES: Final = 32
"""Of tokens of links and sessions, of which only the SHA-256 is stored."""
_MAX_TOKEN_LENGTH: Final = 100

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


def new_token() -> str:
    """Return a new token, in characters of a URL."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def token_digest(token: str) -> bytes:
    """Return the digest by which a token is found. Raises `LinkNotValid` for a text that is none."""
    if not token.isascii() or not 1 <= len(token) <= _MAX_TOKEN_LENGTH:
        raise LinkNotValid("this is no valid token")
    return hashlib.sha256(token.encode()).digest()


async def find(session: AsyncSession, token: str, now: datetime) -> Link:
    """Return the link without using it. Raises `LinkNotValid`."""
    digest = token_digest(token)
    one_time = (OneTimeLink.id, OneTimeLink.purpose, OneTimeLink.user_id, OneTimeLink.removes_second_factor)
    link = select(*one_time, User.email).join(User, User.id == OneTimeLink.user_id)
    columns = (Invitation.id, Invitation.purpose, Invitation.email, Invitation.tenant_id, Invitation.role)
    invitation = (
        select(*columns, User.id.label("user_id"), Tenant.name.label("tenant_name"))
        .outerjoin(User, User.email == Invitation.email)
        .outerjoin(Tenant, Tenant.id == Invitation.tenant_id)
        .where(Tenant.deleted_at.is_(None), Tenant.suspended_at.is_(None))
    )
    for query in (link.where(_open_link(digest, now)), invitation.where(_open_invitation(digest, now))):
        row = (await session.execute(query)).one_or_none()
        if row is not None:
            return Link(**row._mapping)
    raise LinkNotValid("this link was used, has expired, or never was")


async def use(session: AsyncSession, token: str, now: datetime) -> Link:
    """Use the link up. Raises `LinkNotValid`."""
    link = await find(session, token, now)
    digest = token_digest(token)
    if link.purpose in ("reset", "demo"):
        statement = update(OneTimeLink).where(_open_link(digest, now)).values(used_at=now)
        used = await session.scalar(statement.returning(OneTimeLink.id))
    else:
        accepting = update(Invitation).where(_open_invitation(digest, now)).values(accepted_at=now)
        used = await session.scalar(accepting.returning(Invitation.id))
    if used is None:
        raise LinkNotValid("this link was used at this moment")
    return link


async def issue(
    session: AsyncSession,
    purpose: Literal["reset", "demo"],
    user_id: UUID,
    expires_at: datetime,
    *,
    removes_second_factor: bool = False,
) -> str:
    """Return the token of a new link, which replaces the open ones of the same purpose."""
    await end(session, purpose, user_id)
    token = new_token()
    await session.execute(
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


async def end(session: AsyncSession, purpose: Literal["reset", "demo"], user_id: UUID) -> None:
    """End the open links of a purpose to an account."""
    own = (OneTimeLink.user_id == user_id, OneTimeLink.purpose == purpose)
    statement = update(OneTimeLink).where(*own, OneTimeLink.used_at.is_(None))
    await session.execute(statement.values(used_at=func.now()))


async def invite(
    session: AsyncSession,
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
    await session.execute(update(Invitation).where(*same, _is_open()).values(revoked_at=func.now()))
    invitation_id, token = uuid4(), new_token()
    await session.execute(
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


async def require_room(session: AsyncSession, tenant_id: UUID, email: str, now: datetime) -> None:
    """Raise `CountReached` where the tenant has too many open invitations, or has invited this address too often.

    Call it under the lock of the tenant's members.
    """
    own = Invitation.tenant_id == tenant_id
    others = select(func.count()).where(own, _is_open(), Invitation.expires_at > now)
    if (await session.scalars(others.where(Invitation.email != email))).one() >= MAX_OPEN:
        raise CountReached(
            "max_invitations",
            f"a tenant has at most {MAX_OPEN} open invitations: withdraw one first",
            "email",
        )
    recent = select(func.count()).where(own, Invitation.email == email, Invitation.created_at > now - DAY)
    if (await session.scalars(recent)).one() >= MAX_A_DAY:
        raise CountReached(
            "max_invitations",
            f"{email} was invited {MAX_A_DAY} times within 24 hours: the newest link works, or try again tomorrow",
            "email",
        )


async def revoke_invitation(session: AsyncSession, tenant_id: UUID, invitation_id: UUID) -> dict[str, str]:
    """End an open invitation; return its address and role. Raises `UserNotFound`."""
    own = (Invitation.tenant_id == tenant_id, Invitation.id == invitation_id, _is_open())
    statement = update(Invitation).where(*own).values(revoked_at=func.now())
    row = (await session.execute(statement.returning(Invitation.email, Invitation.role))).one_or_none()
    if row is None:
        raise UserNotFound("no such invitation")
    return {"email": row.email, "role": row.role}


def _open_link(digest: bytes, now: datetime) -> ColumnElement[bool]:
    own = (OneTimeLink.token_sha256 == digest) & OneTimeLink.used_at.is_(None)
    return own & (OneTimeLink.expires_at > now)


def _open_invitation(digest: bytes, now: datetime) -> ColumnElement[bool]:
    return (Invitation.token_sha256 == digest) & _is_open() & (Invitation.expires_at > now)


def _is_open() -> ColumnElement[bool]:
    return Invitation.accepted_at.is_(None) & Invitation.revoked_at.is_(None)
