"""Use cases on sessions: find, end, switch the tenant, look into a tenant as an operator.

Invariant: a session's rights are read at every request, and another token stands for other rights: a switch ends the old one.
Keys that the console made end with the sessions, on the gateways of every tenant of the person.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, Literal, TypeAlias
from uuid import UUID

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database, writing
from loraplex.tenants.errors import TenantNotFound, UserNotFound
from loraplex.tenants.people import session_rows as stored
from loraplex.tenants.people.console_keys import end_console_keys
from loraplex.tenants.people.identity import ConsoleSession, console_session
from loraplex.tenants.people.memberships import MembershipRepository
from loraplex.tenants.people.session_rows import SessionOfPerson, SessionRepository
from loraplex.tenants.people.users import CredentialRepository
from loraplex.tenants.unit_of_work import UnitOfWork

Area: TypeAlias = Literal["tenant", "operator"]
SEEN_EVERY: Final = timedelta(minutes=1)
"""How exactly the time of the last request is stored, which costs a write."""


async def find_session(
    database: Database, token: str, area: Area, *, now: datetime | None = None
) -> ConsoleSession | None:
    """Return the session of a token in this area, if it works. Raises `DatabaseUnavailable`."""
    return await database.bounded(partial(_find, database, token, area, now or datetime.now(UTC)))


async def _find(database: Database, token: str, area: Area, now: datetime) -> ConsoleSession | None:
    async with database.as_writer() as session:
        repository = SessionRepository(session)
        found = await repository.find(token, now)
        if found is None or (found.tenant_id is None) != (area == "operator"):
            return None
        if now - found.last_seen_at >= SEEN_EVERY:
            await repository.touch(found.id, now)
            await CredentialRepository(session).seen(found.user_id, now)
        return console_session(found, token)


async def sessions_of_person(
    database: Database, session: ConsoleSession, *, now: datetime | None = None
) -> Sequence[SessionOfPerson]:
    """Return the person's own sessions in all tenants, the one used last first."""
    async with database.as_writer() as writer:
        return await SessionRepository(writer).of_person(session.user_id, now or datetime.now(UTC))


async def end_session(uow: UnitOfWork, session: ConsoleSession) -> None:
    """Sign out: end this session, and the keys that the console made for the person in this tenant."""
    async with writing(uow.session):
        await stored.end_session(uow.session, session.id)
        if session.tenant_id is not None:
            uow.notify_of(await end_console_keys(uow.session, session.email, session.tenant_id))
    await uow.audit.record("session.end", _target(session.user_id))


async def end_own_session(uow: UnitOfWork, session: ConsoleSession, session_id: UUID) -> None:
    """End one session of the same person, in whatever tenant. Raises `UserNotFound` for one of another person."""
    async with writing(uow.session):
        own = await SessionRepository(uow.session).of_person(session.user_id, datetime.now(UTC))
        if session_id not in [each.id for each in own]:
            raise UserNotFound("no such session")
        await stored.end_session(uow.session, session_id)
        uow.notify_of(await end_console_keys(uow.session, session.email))
    await uow.audit.record("session.end", _target(session.user_id))


async def end_all_sessions(uow: UnitOfWork, user_id: UUID, *, but: UUID | None = None) -> int:
    """Sign a person out everywhere, in every tenant and area; return how many sessions were ended. `but`: one that stays."""
    async with writing(uow.session):
        ended = await SessionRepository(uow.session).end_all(user_id, but=but)
        person = await CredentialRepository(uow.session).by_id(user_id)
        uow.notify_of(await end_console_keys(uow.session, person.email))
    await uow.audit.record("session.end_all", _target(user_id), None, {"sessions": ended})
    return ended


async def end_member_sessions(uow: UnitOfWork, tenant_id: UUID, user_id: UUID) -> int:
    """Sign a member out of this tenant, as its admin; return how many sessions were ended. Raises `UserNotFound`."""
    _, user = await MembershipRepository(uow.session, tenant_id).get(user_id)
    ended = await leave_tenant(uow, tenant_id, user_id, user.email)
    await uow.audit.record("session.end_all", _target(user_id), None, {"sessions": ended})
    return ended


async def leave_tenant(uow: UnitOfWork, tenant_id: UUID, user_id: UUID, email: str) -> int:
    """End the sessions of a person in a tenant, and what they may still do: part of a change of the person's rights there."""
    async with writing(uow.session):
        ended = await stored.end_sessions_in(uow.session, tenant_id, user_id)
        uow.notify_of(await end_console_keys(uow.session, email, tenant_id))
    return ended


async def switch_tenant(uow: UnitOfWork, session: ConsoleSession, tenant_id: UUID) -> str:
    """Replace the session by one in another tenant of the person, with the same absolute end; return its token.

    Raises `TenantNotFound` for a tenant that the person is no member of, `UserNotFound` when the session has ended.
    """
    if tenant_id not in dict(session.tenants):
        raise TenantNotFound(f"no tenant {tenant_id}")
    async with writing(uow.session):
        return await SessionRepository(uow.session).replace(session.id, tenant_id)


async def view_as_operator(uow: UnitOfWork, session: ConsoleSession, tenant_id: UUID) -> str:
    """Open a session of an operator who looks into a tenant, read-only, next to the one in the operator's area; return its
    token. Raises `TenantNotFound`, also for a suspended tenant.
    """
    tenant = await TenantRepository(uow.session).living(tenant_id)
    if tenant.suspended_at is not None:
        raise TenantNotFound("this tenant is suspended: resume it before looking into it")
    async with writing(uow.session):
        token = await SessionRepository(uow.session).replace(session.id, tenant_id, viewing=True, keep=True)
    await uow.audit.record("tenant.view", f"tenants/{tenant_id}", tenant_id=tenant_id)
    return token


async def renew_session(
    uow: UnitOfWork, session: ConsoleSession, *, second_factor: bool | None = None
) -> str:
    """Replace the session's token and end all other sessions of the person, after a change of what protects the account: part
    of such use cases. `second_factor`: whether the new session counts as confirmed by a code; None: as before.
    """
    async with writing(uow.session):
        repository = SessionRepository(uow.session)
        token = await repository.replace(
            session.id, session.tenant_id, viewing=session.viewing_as_operator, second_factor=second_factor
        )
        found = await repository.find(token, datetime.now(UTC))
        await repository.end_all(session.user_id, but=None if found is None else found.id)
        uow.notify_of(await end_console_keys(uow.session, session.email))
    return token


def _target(user_id: UUID) -> str:
    return f"users/{user_id}"
