"""Sessions of the console, kept on the server: open, find, end, switch the tenant, look into a tenant as an operator.

Invariant: a session is found only while its person may be where it is: the account is enabled, the tenant is neither suspended
nor deleted, and the membership or the operator's right still exists. Its rights are read at every request, and another token stands
for other rights: a switch ends the old one. Keys that the console made end with the sessions, on the gateways of every tenant of the
person.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID, uuid4

from sqlalchemy import ColumnElement, ScalarSelect, and_, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.database import Database, writing
from loraplex.tenants.errors import LinkNotValid, SignInRefused, TenantNotFound, UserNotFound
from loraplex.tenants.models import Adapter, ApiKey, Membership, Tenant, User, UserSession
from loraplex.tenants.people import memberships, users
from loraplex.tenants.people.console_keys import end_console_keys
from loraplex.tenants.people.identity import ABSOLUTE, ConsoleSession
from loraplex.tenants.people.links import new_token, token_digest
from loraplex.tenants.people.memberships import TenantOfPerson, tenants_as_json, tenants_of
from loraplex.tenants.people.roles import VIEWING_SCOPES, scopes_of
from loraplex.tenants.people.users import Credentials
from loraplex.tenants.unit_of_work import UnitOfWork

Area: TypeAlias = Literal["tenant", "operator"]
CSRF_DOMAIN: Final = b"loraplex/csrf/v1\0"
IDLE: Final = timedelta(hours=12)
"""The time without a request after which a session ends."""
SEEN_EVERY: Final = timedelta(minutes=1)
"""How exactly the time of the last request is stored, which costs a write."""
MAX_AGENT_LENGTH: Final = 300


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A new session and its token, which is returned once."""

    token: str = field(repr=False)
    session: ConsoleSession


@dataclass(frozen=True, slots=True)
class Client:
    """The browser that signs in."""

    address: str | None
    user_agent: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOfPerson:
    """One of a person's sessions. `tenant_name` None: in the operator's area."""

    id: UUID
    tenant_name: str | None
    viewing: bool
    created_at: datetime
    last_seen_at: datetime
    expires_at: datetime
    address: IPv4Address | IPv6Address | None
    user_agent: str | None


async def open_session(
    uow: UnitOfWork,
    credentials: Credentials,
    client: Client,
    *,
    area: Area | None = None,
    tenant_id: UUID | None = None,
    confirmed: bool | None = None,
    now: datetime,
) -> SignedIn:
    """Open a session of a person whose identity was checked: part of every way to sign in. `uow` is an operator's.

    `tenant_id`: the tenant to enter, None for the first by name. `confirmed`: whether a second factor was used; None: if the
    account has one. Raises `SignInRefused` for a person who may enter nothing.
    """
    user_id = credentials.user_id
    async with writing(uow.session):
        entered = _entered(await tenants_of(uow.session, user_id), credentials, area, tenant_id)
        token = await _create(
            uow.session,
            user_id=user_id,
            tenant_id=entered,
            expires_at=now + ABSOLUTE,
            second_factor=credentials.has_second_factor if confirmed is None else confirmed,
            address=client.address,
            user_agent=client.user_agent,
        )
        await users.change(uow.session, user_id, last_seen_at=now)
        found = await _find(uow.session, token, now)
    if found is None:
        raise SignInRefused("This account may not enter here any more.")
    await uow.audit.record("session.create", _target(user_id), tenant_id=entered)
    return SignedIn(token, found)


def _entered(
    tenants: Sequence[TenantOfPerson], credentials: Credentials, area: Area | None, tenant_id: UUID | None
) -> UUID | None:
    """Return the tenant to enter; None for the operator's area."""
    if area == "operator" or (area is None and not tenants and credentials.is_operator):
        if not credentials.is_operator:
            raise SignInRefused("This account is no operator's.")
        return None
    if not tenants:
        raise SignInRefused("This account belongs to no tenant that is open.")
    own = [each.tenant_id for each in tenants]
    return tenant_id if tenant_id in own else own[0]


async def find_session(
    database: Database, token: str, area: Area, *, now: datetime | None = None
) -> ConsoleSession | None:
    """Return the session of a token in this area, if it works. Raises `DatabaseUnavailable`."""
    return await database.bounded(partial(_find_seen, database, token, area, now or datetime.now(UTC)))


async def _find_seen(database: Database, token: str, area: Area, now: datetime) -> ConsoleSession | None:
    async with database.as_writer() as session:
        found = await _find(session, token, now)
        if found is None or (found.tenant_id is None) != (area == "operator"):
            return None
        if now - found.last_seen_at >= SEEN_EVERY:
            used = update(UserSession).where(UserSession.id == found.id).values(last_seen_at=now)
            await session.execute(used)
            await users.change(session, found.user_id, last_seen_at=now)
        return found


async def sessions_of_person(
    database: Database, session: ConsoleSession, *, now: datetime | None = None
) -> Sequence[SessionOfPerson]:
    """Return the person's own sessions in all tenants and areas, the one used last first."""
    columns = (
        *(UserSession.id, Tenant.name.label("tenant_name"), UserSession.viewing, UserSession.created_at),
        *(UserSession.last_seen_at, UserSession.expires_at, UserSession.address, UserSession.user_agent),
    )
    query = select(*columns).outerjoin(Tenant, Tenant.id == UserSession.tenant_id)
    own = query.where(UserSession.user_id == session.user_id, *_in_time(now or datetime.now(UTC)))
    async with database.as_writer() as writer:
        found = await writer.execute(own.order_by(UserSession.last_seen_at.desc()))
        return [SessionOfPerson(**row._mapping) for row in found]


async def end_session(uow: UnitOfWork, session: ConsoleSession) -> None:
    """Sign out: end this session, and the keys that the console made for the person in this tenant."""
    async with writing(uow.session):
        await _end(uow.session, UserSession.id == session.id)
        if session.tenant_id is not None:
            uow.notify_of(await end_console_keys(uow.session, session.email, session.tenant_id))
    await uow.audit.record("session.end", _target(session.user_id))


async def end_own_session(uow: UnitOfWork, session: ConsoleSession, session_id: UUID) -> None:
    """End one session of the same person, in whatever tenant. Raises `UserNotFound` for one of another person."""
    own = (UserSession.id == session_id, UserSession.user_id == session.user_id)
    async with writing(uow.session):
        if not await _end(uow.session, *own, *_in_time(datetime.now(UTC))):
            raise UserNotFound("no such session")
        uow.notify_of(await end_console_keys(uow.session, session.email))
    await uow.audit.record("session.end", _target(session.user_id))


async def end_all_sessions(uow: UnitOfWork, user_id: UUID, *, but: UUID | None = None) -> int:
    """Sign a person out everywhere, in every tenant and area; return how many sessions were ended. `but`: one that stays."""
    async with writing(uow.session):
        ended = await _end_all(uow.session, user_id, but)
        person = await users.credentials(uow.session, user_id)
        uow.notify_of(await end_console_keys(uow.session, person.email))
    await uow.audit.record("session.end_all", _target(user_id), None, {"sessions": ended})
    return ended


async def end_member_sessions(uow: UnitOfWork, tenant_id: UUID, user_id: UUID) -> int:
    """Sign a member out of this tenant, as its admin; return how many sessions were ended. Raises `UserNotFound`."""
    _, user = await memberships.get(uow.session, tenant_id, user_id)
    ended = await leave_tenant(uow, tenant_id, user_id, user.email)
    await uow.audit.record("session.end_all", _target(user_id), None, {"sessions": ended})
    return ended


async def leave_tenant(uow: UnitOfWork, tenant_id: UUID, user_id: UUID, email: str) -> int:
    """End the sessions of a person in a tenant, and what they may still do: part of a change of the person's rights there."""
    async with writing(uow.session):
        here = (UserSession.tenant_id == tenant_id, UserSession.user_id == user_id)
        ended = await _end(uow.session, *here)
        uow.notify_of(await end_console_keys(uow.session, email, tenant_id))
    return ended


async def switch_tenant(uow: UnitOfWork, session: ConsoleSession, tenant_id: UUID) -> str:
    """Replace the session by one in another tenant of the person, with the same absolute end; return its token.

    Raises `TenantNotFound` for a tenant that the person is no member of, `UserNotFound` when the session has ended.
    """
    if tenant_id not in dict(session.tenants):
        raise TenantNotFound(f"no tenant {tenant_id}")
    async with writing(uow.session):
        return await _replace(uow.session, session.id, tenant_id)


async def view_as_operator(uow: UnitOfWork, session: ConsoleSession, tenant_id: UUID) -> str:
    """Open a session of an operator who looks into a tenant, read-only, next to the one in the operator's area; return its
    token. Raises `TenantNotFound`, also for a suspended tenant.
    """
    tenant = await TenantRepository(uow.session).living(tenant_id)
    if tenant.suspended_at is not None:
        raise TenantNotFound("this tenant is suspended: resume it before looking into it")
    async with writing(uow.session):
        token = await _replace(uow.session, session.id, tenant_id, viewing=True, keep=True)
    await uow.audit.record("tenant.view", f"tenants/{tenant_id}", tenant_id=tenant_id)
    return token


async def renew_session(
    uow: UnitOfWork, session: ConsoleSession, *, second_factor: bool | None = None
) -> str:
    """Replace the session's token and end all other sessions of the person, after a change of what protects the account: part
    of such use cases. `second_factor`: whether the new session counts as confirmed by a code; None: as before.
    """
    viewing = session.viewing_as_operator
    async with writing(uow.session):
        token = await _replace(
            uow.session, session.id, session.tenant_id, viewing=viewing, second_factor=second_factor
        )
        found = await _find(uow.session, token, datetime.now(UTC))
        await _end_all(uow.session, session.user_id, None if found is None else found.id)
        uow.notify_of(await end_console_keys(uow.session, session.email))
    return token


async def _create(session: AsyncSession, *, user_agent: str | None, **values: object) -> str:
    """Store a session and return its token, which is stored nowhere. `values`: its columns, with `expires_at`, its absolute end.

    This, and what follows, takes a session of the gateway's role (`as_writer`, `writing`).
    """
    token, agent = new_token(), "".join(filter(str.isprintable, user_agent or ""))[:MAX_AGENT_LENGTH]
    new = insert(UserSession).values(**values, id=uuid4(), token_sha256=token_digest(token), user_agent=agent)
    await session.execute(new)
    return token


async def _replace(
    session: AsyncSession,
    old: UUID,
    tenant_id: UUID | None,
    *,
    viewing: bool = False,
    second_factor: bool | None = None,
    keep: bool = False,
) -> str:
    """Store a session like `old` with another token, tenant and rights, and end `old` unless `keep`. Both end absolutely at
    the same time. Returns the token. Raises `UserNotFound` when `old` has ended.
    """
    columns = (UserSession.user_id, UserSession.expires_at, UserSession.address, UserSession.user_agent)
    query = select(*columns, UserSession.second_factor).where(UserSession.id == old)
    row = (await session.execute(query.with_for_update())).one_or_none()
    if row is None:
        raise UserNotFound("this session has ended")
    values = {**row._mapping, "address": None if row.address is None else str(row.address)}
    if second_factor is not None:
        values["second_factor"] = second_factor
    token = await _create(session, **values, tenant_id=tenant_id, viewing=viewing)
    if not keep:
        await _end(session, UserSession.id == old)
    return token


async def _end(session: AsyncSession, *conditions: ColumnElement[bool]) -> int:
    """End sessions; return how many."""
    result: Any = await session.execute(delete(UserSession).where(*conditions))
    return int(result.rowcount)


async def _end_all(session: AsyncSession, user_id: UUID, but: UUID | None) -> int:
    others = () if but is None else (UserSession.id != but,)
    return await _end(session, UserSession.user_id == user_id, *others)


async def _find(session: AsyncSession, token: str, now: datetime) -> ConsoleSession | None:
    """Return the session of a token if it works now."""
    try:
        digest = token_digest(token)
    except LinkNotValid:
        return None
    row = (await session.execute(_working(digest, now))).one_or_none()
    if row is None:
        return None
    viewing = row.viewing_as_operator
    derived = {
        "role": None if viewing else row.role,
        "scopes": VIEWING_SCOPES if viewing else scopes_of(row.role),
        "tenants": tuple((UUID(tenant_id), name) for tenant_id, name in row.tenants or ()),
        "csrf_token": hashlib.sha256(CSRF_DOMAIN + token.encode()).hexdigest(),
    }
    return ConsoleSession(**{**row._mapping, **derived})


def _working(digest: bytes, now: datetime) -> Any:
    member = and_(Membership.tenant_id == UserSession.tenant_id, Membership.user_id == UserSession.user_id)
    may_enter = or_(
        and_(UserSession.tenant_id.is_(None), User.is_operator),
        and_(
            UserSession.tenant_id.is_not(None),
            Tenant.deleted_at.is_(None),
            Tenant.suspended_at.is_(None),
            or_(Membership.role.is_not(None), UserSession.viewing & User.is_operator),
        ),
    )
    keys = (ApiKey.kind == "key", ApiKey.revoked_at.is_(None), (ApiKey.expires_at <= now).is_not(True))
    columns = (
        *(UserSession.id, UserSession.user_id, UserSession.tenant_id, UserSession.second_factor),
        *(UserSession.created_at, UserSession.last_seen_at, UserSession.expires_at),
        UserSession.viewing.label("viewing_as_operator"),
        *(User.email, User.name, User.is_operator.label("operator")),
        *(Tenant.name.label("tenant_name"), Membership.role),
        and_(User.password_hash.is_(None), User.oidc_issuer.is_(None)).label("by_link_only"),
        _count(Adapter, Adapter.deleted_at.is_(None)).label("adapters"),
        _count(ApiKey, *keys).label("keys"),
        tenants_as_json(UserSession.user_id).label("tenants"),
    )
    return (
        select(*columns)
        .join(User, User.id == UserSession.user_id)
        .outerjoin(Tenant, Tenant.id == UserSession.tenant_id)
        .outerjoin(Membership, member)
        .where(UserSession.token_sha256 == digest, User.disabled_at.is_(None), *_in_time(now), may_enter)
    )


def _in_time(now: datetime) -> tuple[ColumnElement[bool], ...]:
    return UserSession.expires_at > now, UserSession.last_seen_at > now - IDLE


def _count(of: type[Adapter] | type[ApiKey], *conditions: ColumnElement[bool]) -> ScalarSelect[int]:
    """Count the rows of the session's tenant: none in the operator's area."""
    query = select(func.count()).select_from(of).where(of.tenant_id == UserSession.tenant_id, *conditions)
    return query.correlate(UserSession).scalar_subquery()


def _target(user_id: UUID) -> str:
    return f"users/{user_id}"
