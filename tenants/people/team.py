"""The team of a tenant, its members and the open invitations to it: list, invite, withdraw, change a role, remove, reset.

Invariant: a tenant keeps an admin; a change of a member's rights ends the member's sessions in the tenant at once.
"""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Subquery, case, func, literal, null, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.delegation import KeyDelegation
from loraplex.tenants.database import writing
from loraplex.tenants.errors import AlreadyMember, InvitationPending, ResetForbidden, UserNotFound
from loraplex.tenants.models import Invitation, Membership, User, UserSession
from loraplex.tenants.names import check_email
from loraplex.tenants.pages import Slice, sliced
from loraplex.tenants.people import links, memberships, users
from loraplex.tenants.people.accounts import issue_reset
from loraplex.tenants.people.links import INVITATION_LIFETIME
from loraplex.tenants.people.records import MAX_PEOPLE, InvitationDocument, UserDocument, link_address
from loraplex.tenants.people.roles import ROLE_SCOPES, check_role
from loraplex.tenants.people.sessions import leave_tenant
from loraplex.tenants.unit_of_work import UnitOfWork, require_revision

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


async def invite(
    uow: UnitOfWork, tenant_id: UUID, email: str, role: str, *, by_key: UUID | None = None
) -> InvitationDocument:
    """Invite a person; an open invitation of the same address ends. `by_key`: the key of the tenant that invites.

    Raises `InvalidField`, `AlreadyMember`, `CountReached`; for an operator `TenantNotFound`; for a key that may not give the role
    `ScopeNotHeld`, `BoundNotHeld`, `InvalidApiKey`.
    """
    address, now = check_email(email), datetime.now(UTC)
    if uow.tenant_id is None:
        await TenantRepository(uow.session).living(tenant_id)
    await _require_right(uow, tenant_id, by_key, role)
    await memberships.lock_members(uow.session, tenant_id)
    if await memberships.has_email(uow.session, tenant_id, address):
        raise AlreadyMember(f"{address} is a member already")
    await links.require_room(uow.session, tenant_id, address, now)
    invitation_id, token = await links.invite(
        uow.session,
        "member",
        uow.actor.name,
        now + INVITATION_LIFETIME,
        email=address,
        tenant_id=tenant_id,
        role=role,
    )
    entry = await member(uow.session, tenant_id, invitation_id)
    after = {"email": address, "role": role, "expires_at": entry.expires_at}
    await uow.audit.record("user.invite", _target(invitation_id), None, after, tenant_id=tenant_id)
    return InvitationDocument(**dict(entry), invitation_path=link_address("", token))


async def revoke_invitation(uow: UnitOfWork, tenant_id: UUID, invitation_id: UUID) -> None:
    """Withdraw an open invitation: its link works no longer. Raises `UserNotFound`."""
    before = await links.revoke_invitation(uow.session, tenant_id, invitation_id)
    await uow.audit.record(
        "user.revoke_invitation", _target(invitation_id), before, None, tenant_id=tenant_id
    )


async def change_role(
    uow: UnitOfWork,
    tenant_id: UUID,
    user_id: UUID,
    role: str,
    *,
    seen: int | None = None,
    by_key: UUID | None = None,
) -> UserDocument:
    """Change a member's role; the member signs in again. `seen`: the revision that the author has read, None for any.
    `by_key`: the key of the tenant that changes it.

    Raises `UserNotFound`, `InvitationPending`, `RevisionMoved`, `InvalidField`, `LastAdmin`, and for a key as `invite`.
    """
    await _require_right(uow, tenant_id, by_key, role)
    await memberships.lock_members(uow.session, tenant_id)
    if (await member(uow.session, tenant_id, user_id)).state == "invited":
        raise InvitationPending(
            "this invitation is not accepted yet: withdraw it, and invite with another role"
        )
    record, user = await memberships.get(uow.session, tenant_id, user_id)
    require_revision(seen, record.revision)
    before = {"role": record.role}
    if record.role != role:
        await memberships.change_role(uow.session, record, role)
        await leave_tenant(uow, tenant_id, user_id, user.email)
        await uow.audit.record(
            "user.change_role", _target(user_id), before, {"role": role}, tenant_id=tenant_id
        )
    return await member(uow.session, tenant_id, user_id)


async def remove_member(uow: UnitOfWork, tenant_id: UUID, user_id: UUID) -> None:
    """Remove a member: the member's sessions here end at once. Raises `UserNotFound`, `LastAdmin`."""
    await memberships.lock_members(uow.session, tenant_id)
    record, user = await memberships.get(uow.session, tenant_id, user_id)
    before = {"email": user.email, "role": record.role}
    await memberships.remove(uow.session, record)
    await leave_tenant(uow, tenant_id, user_id, user.email)
    await uow.audit.record("user.remove", _target(user_id), before, None, tenant_id=tenant_id)


async def remove(uow: UnitOfWork, tenant_id: UUID, entry_id: UUID) -> None:
    """Remove a member, or withdraw an invitation, by its id. Raises `UserNotFound`, `LastAdmin`."""
    entry = await member(uow.session, tenant_id, entry_id)
    await (revoke_invitation if entry.state == "invited" else remove_member)(uow, tenant_id, entry_id)


async def reset_member(
    uow: UnitOfWork, tenant_id: UUID, user_id: UUID, *, second_factor: bool = False
) -> str:
    """Return the token of a link by which a member sets a new password. `second_factor`: it removes that, too.

    Raises `UserNotFound`, and `ResetForbidden` for a person who belongs to another tenant too, is an operator, or signs in by the
    identity provider: then an operator resets.
    """
    await memberships.get(uow.session, tenant_id, user_id)
    async with writing(uow.session):
        if await users.belongs_elsewhere(uow.session, user_id, tenant_id):
            raise ResetForbidden("this account is not of this tenant alone: an operator can reset it")
        if await users.has_identity(uow.session, user_id):
            # Its owner would not notice a password, which opens also what the account leads to later.
            raise ResetForbidden("this account signs in by the identity provider: an operator can reset it")
    return await issue_reset(uow, user_id, second_factor=second_factor, tenant_id=tenant_id)


async def _require_right(uow: UnitOfWork, tenant_id: UUID, by_key: UUID | None, role: str) -> None:
    """Raise unless the author may give the role: `ScopeNotHeld`, `BoundNotHeld`, `InvalidApiKey`, `InvalidField`."""
    scopes = ROLE_SCOPES[check_role(role)]
    if by_key is not None:
        await KeyDelegation(uow.session, tenant_id, by_key).require_right_over_people(scopes)


def _target(entry_id: UUID) -> str:
    return f"users/{entry_id}"


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
