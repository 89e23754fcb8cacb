"""Use cases of operators on accounts: the first operator, further ones, resets, and accounts that may not sign in.

Invariant: no account has a password that its person did not choose.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.database import Database, writing
from loraplex.tenants.models import Invitation, User
from loraplex.tenants.names import check_email
from loraplex.tenants.people import links, memberships, users
from loraplex.tenants.people.links import DEMO_LIFETIME, FIRST_RUN_LIFETIME, RESET_LIFETIME
from loraplex.tenants.people.memberships import administered_tenants, tenants_of
from loraplex.tenants.people.roles import ADMIN
from loraplex.tenants.people.sessions import end_all_sessions
from loraplex.tenants.unit_of_work import UnitOfWork

DEMO_EMAIL: Final = "demo@example.com"
DEMO_NAME: Final = "Demo"


async def has_operator(database: Database) -> bool:
    """Whether a person may enter the operator's area."""
    async with database.as_operator() as session:
        query = select(User.id).where(User.is_operator, User.disabled_at.is_(None)).limit(1)
        return await session.scalar(query) is not None


async def was_operator_invited(database: Database, by: str) -> bool:
    """Whether `by` made a link for an operator within the lifetime of such a link."""
    recent = Invitation.created_at > datetime.now(UTC) - FIRST_RUN_LIFETIME
    own = (Invitation.purpose == "operator", Invitation.invited_by == by, recent)
    async with database.as_operator() as session:
        return await session.scalar(select(Invitation.id).where(*own).limit(1)) is not None


async def all_users(session: AsyncSession) -> Sequence[User]:
    """Return all accounts, by address, as an operator."""
    return (await session.scalars(select(User).order_by(User.email))).all()


async def invite_operator(uow: UnitOfWork, email: str | None = None) -> str:
    """Return the token of a link by which a person becomes an operator. It works once, for an hour.

    `email` None: the person chooses the address. Raises `InvalidField`.
    """
    address = None if email is None else check_email(email)
    expires_at = datetime.now(UTC) + FIRST_RUN_LIFETIME
    invitation_id, token = await links.invite(
        uow.session, "operator", uow.actor.name, expires_at, email=address
    )
    after = {"email": address, "operator": True, "expires_at": expires_at}
    await uow.audit.record("user.invite", _target(invitation_id), None, after)
    return token


async def reset_user(uow: UnitOfWork, email: str, *, second_factor: bool = False) -> str:
    """Return the token of a link by which a person sets a new password. `second_factor`: it removes that, too.

    Raises `UserNotFound`.
    """
    user = await users.get(uow.session, email)
    return await issue_reset(uow, user.id, second_factor=second_factor)


async def issue_reset(
    uow: UnitOfWork, user_id: UUID, *, second_factor: bool, tenant_id: UUID | None = None
) -> str:
    """Return the token of a reset, as part of one. `tenant_id`: the tenant whose admin makes it."""
    expires_at = datetime.now(UTC) + RESET_LIFETIME
    async with writing(uow.session):
        token = await links.issue(
            uow.session, "reset", user_id, expires_at, removes_second_factor=second_factor
        )
    after = {"second_factor_removed": second_factor, "expires_at": expires_at}
    await uow.audit.record("user.reset", _target(user_id), None, after, tenant_id=tenant_id)
    return token


@dataclass(frozen=True, slots=True)
class Disabled:
    """A disabled account. `without_admin`: the names of its tenants that now have no admin who may sign in."""

    user: User
    without_admin: list[str]


async def disable_user(uow: UnitOfWork, email: str) -> Disabled:
    """Let a person sign in nowhere; all sessions end at once. An account may be in wrong hands, so a tenant's only admin is
    disabled, too.

    Raises `UserNotFound`.
    """
    user = await users.get(uow.session, email)
    administered = await administered_tenants(uow.session, user.id)
    # In one order, so that two of these changes at once wait for each other and never deadlock.
    for tenant_id in sorted(administered):
        await memberships.lock_members(uow.session, tenant_id)
    if user.disabled_at is None:
        user.disabled_at = datetime.now(UTC)
        await uow.session.flush()
        await uow.audit.record("user.disable", _target(user.id), {"disabled": False}, {"disabled": True})
        await end_all_sessions(uow, user.id)
    without = [
        name
        for tenant_id, name in administered.items()
        if not await memberships.has_admin(uow.session, tenant_id)
    ]
    return Disabled(user, without)


async def enable_user(uow: UnitOfWork, email: str) -> User:
    """Let a disabled person sign in again. Raises `UserNotFound`."""
    user = await users.get(uow.session, email)
    if user.disabled_at is not None:
        user.disabled_at = None
        await uow.session.flush()
        await uow.audit.record("user.enable", _target(user.id), {"disabled": True}, {"disabled": False})
    return user


async def demo_link(uow: UnitOfWork, tenant_id: UUID) -> str:
    """Return the token of a link that signs the demo's person, an admin of the tenant, in once. Earlier ones end."""
    user = await users.by_email(uow.session, DEMO_EMAIL)
    user_id = await users.create(uow.session, DEMO_EMAIL, DEMO_NAME, None) if user is None else user.id
    async with writing(uow.session):
        known = tenant_id in [each.tenant_id for each in await tenants_of(uow.session, user_id)]
    if not known:
        await memberships.add(uow.session, tenant_id, user_id, ADMIN)
        await uow.audit.record("user.join", _target(user_id), None, {"role": ADMIN}, tenant_id=tenant_id)
    async with writing(uow.session):
        expires_at = datetime.now(UTC) + DEMO_LIFETIME
        return await links.issue(uow.session, "demo", user_id, expires_at)


async def sign_in_link(uow: UnitOfWork, email: str) -> str:
    """Return the token of a link that signs a person in once, within an hour; earlier ones end. Raises `UserNotFound`."""
    user = await users.get(uow.session, email)
    expires_at = datetime.now(UTC) + FIRST_RUN_LIFETIME
    async with writing(uow.session):
        token = await links.issue(uow.session, "demo", user.id, expires_at)
    await uow.audit.record("user.sign_in_link", _target(user.id), None, {"expires_at": expires_at})
    return token


def _target(user_id: UUID) -> str:
    return f"users/{user_id}"
