"""Use cases on the team of a tenant: invite, withdraw, change a role, remove, reset.

Invariant: a tenant keeps an admin; a change of a member's rights ends the member's sessions in the tenant at once.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

from loraplex.platform.services.people.invitations import accept_invitation
from loraplex.platform.services.people.sessions import leave_tenant
from loraplex.tenants.api_keys.delegation import KeyDelegation
from loraplex.tenants.database import writing
from loraplex.tenants.errors import AlreadyMember, InvitationPending, ResetForbidden
from loraplex.tenants.names import check_email
from loraplex.tenants.people.links import (
    INVITATION_LIFETIME,
    RESET_LIFETIME,
    InvitationRepository,
    LinkRepository,
)
from loraplex.tenants.people.memberships import MembershipRepository
from loraplex.tenants.people.records import UserDocument
from loraplex.tenants.people.roles import ROLE_SCOPES, check_role
from loraplex.tenants.people.team import member, members
from loraplex.tenants.people.users import CredentialRepository
from loraplex.tenants.unit_of_work import UnitOfWork, require_revision

__all__ = [
    "Invited",
    "accept_invitation",
    "change_role",
    "invite",
    "member",
    "members",
    "remove",
    "remove_member",
    "reset_member",
    "revoke_invitation",
]


@dataclass(frozen=True, slots=True)
class Invited:
    """An open invitation and the token of its link, which is returned once."""

    entry: UserDocument
    token: str = field(repr=False)


async def invite(
    uow: UnitOfWork, tenant_id: UUID, email: str, role: str, *, by_key: UUID | None = None
) -> Invited:
    """Invite a person; an open invitation of the same address ends. `by_key`: the key of the tenant that invites.

    Raises `InvalidField`, `AlreadyMember`, `CountReached`; for a key that may not give the role `ScopeNotHeld`, `BoundNotHeld`,
    `InvalidApiKey`.
    """
    address, now = check_email(email), datetime.now(UTC)
    await _require_right(uow, tenant_id, by_key, role)
    memberships, invitations = MembershipRepository(uow.session, tenant_id), InvitationRepository(uow.session)
    await memberships.lock()
    if await memberships.has_email(address):
        raise AlreadyMember(f"{address} is a member already")
    await invitations.require_room(tenant_id, address, now)
    invitation_id, token = await invitations.create(
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
    return Invited(entry, token)


async def revoke_invitation(uow: UnitOfWork, tenant_id: UUID, invitation_id: UUID) -> None:
    """Withdraw an open invitation: its link works no longer. Raises `UserNotFound`."""
    invitations = InvitationRepository(uow.session)
    record = await invitations.get(tenant_id, invitation_id)
    before = {"email": record.email, "role": record.role}
    await invitations.revoke(tenant_id, invitation_id)
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
    memberships = MembershipRepository(uow.session, tenant_id)
    await memberships.lock()
    if (await member(uow.session, tenant_id, user_id)).state == "invited":
        raise InvitationPending(
            "this invitation is not accepted yet: withdraw it, and invite with another role"
        )
    record, user = await memberships.get(user_id)
    require_revision(seen, record.revision)
    before = {"role": record.role}
    if record.role != role:
        await memberships.change_role(record, role)
        await leave_tenant(uow, tenant_id, user_id, user.email)
        await uow.audit.record(
            "user.change_role", _target(user_id), before, {"role": role}, tenant_id=tenant_id
        )
    return await member(uow.session, tenant_id, user_id)


async def remove_member(uow: UnitOfWork, tenant_id: UUID, user_id: UUID) -> None:
    """Remove a member: the member's sessions here end at once. Raises `UserNotFound`, `LastAdmin`."""
    memberships = MembershipRepository(uow.session, tenant_id)
    await memberships.lock()
    record, user = await memberships.get(user_id)
    before = {"email": user.email, "role": record.role}
    await memberships.remove(record)
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
    await MembershipRepository(uow.session, tenant_id).get(user_id)
    async with writing(uow.session):
        users = CredentialRepository(uow.session)
        if await users.belongs_elsewhere(user_id, tenant_id):
            raise ResetForbidden("this account is not of this tenant alone: an operator can reset it")
        if await users.has_identity(user_id):
            # Its owner would not notice a password, which opens also what the account leads to later.
            raise ResetForbidden("this account signs in by the identity provider: an operator can reset it")
        expires_at = datetime.now(UTC) + RESET_LIFETIME
        token = await LinkRepository(uow.session).issue(
            "reset", user_id, expires_at, removes_second_factor=second_factor
        )
    after = {"second_factor_removed": second_factor, "expires_at": expires_at}
    await uow.audit.record("user.reset", _target(user_id), None, after, tenant_id=tenant_id)
    return token


async def _require_right(uow: UnitOfWork, tenant_id: UUID, by_key: UUID | None, role: str) -> None:
    """Raise unless the author may give the role: `ScopeNotHeld`, `BoundNotHeld`, `InvalidApiKey`, `InvalidField`."""
    scopes = ROLE_SCOPES[check_role(role)]
    if by_key is not None:
        await KeyDelegation(uow.session, tenant_id, by_key).require_right_over_people(scopes)


def _target(entry_id: UUID) -> str:
    return f"users/{entry_id}"
