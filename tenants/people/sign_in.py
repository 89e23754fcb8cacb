"""Signing in: by password and code, or by a link that works once.

Invariant: each sign-in has a new token, whatever cookie the browser had before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

from loraplex.tenants.database import Database, writing
from loraplex.tenants.errors import LinkNotValid, SignInRefused
from loraplex.tenants.people.credentials import Check
from loraplex.tenants.people.identity import ConsoleSession, console_session, person_actor
from loraplex.tenants.people.links import Link, LinkRepository
from loraplex.tenants.people.memberships import TenantOfPerson, tenants_of
from loraplex.tenants.people.session_rows import ABSOLUTE, NewSession, SessionRepository
from loraplex.tenants.people.sessions import Area
from loraplex.tenants.people.users import CredentialRepository, Credentials
from loraplex.tenants.stored_responses import DeriveKey
from loraplex.tenants.unit_of_work import UnitOfWork, unit_of_work


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A new session and its token, which is returned once."""

    token: str = field(repr=False)
    session: ConsoleSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The browser that signs in."""

    address: str | None
    user_agent: str | None


async def sign_in(
    database: Database,
    email: str,
    password: str,
    code: str | None,
    address: str | None,
    user_agent: str | None,
    *,
    derive_key: DeriveKey,
    area: Area | None = None,
    now: datetime | None = None,
) -> SignedIn:
    """Sign a person in. `code`: of the second factor, None where none was entered. `area` None: a tenant of the person, else the
    operator's area.

    Raises `SignInRefused`, `SecondFactorNeeded`, `SignInSlowed`, `DatabaseUnavailable`.
    """
    time, client = now or datetime.now(UTC), Client(address=address, user_agent=user_agent)
    check = Check(database=database, email=email, address=address, derive_key=derive_key, now=time)
    credentials = await check.password_and_code(password, code)
    actor = person_actor(credentials.email, address)
    async with unit_of_work(database, actor, None, None) as uow:
        return await open_session(uow, credentials, client, area=area, now=time)


async def find_link(database: Database, token: str, *, now: datetime | None = None) -> Link:
    """Return what a link is for, without using it. Raises `LinkNotValid`."""
    async with database.as_writer() as session:
        return await LinkRepository(session).find(token, now or datetime.now(UTC))


async def use_link(
    database: Database,
    token: str,
    address: str | None,
    user_agent: str | None,
    *,
    now: datetime | None = None,
) -> SignedIn:
    """Sign in by the link that the demo printed; it works once. Raises `LinkNotValid`, also for links of other purposes, which
    are not used up.
    """
    time = now or datetime.now(UTC)
    if (await find_link(database, token, now=time)).purpose != "demo":
        raise LinkNotValid("this link does not sign in by itself")
    async with unit_of_work(database, person_actor("demo", address), None, None) as uow:
        async with writing(uow.session):
            link = await LinkRepository(uow.session).use(token, time)
            credentials = await CredentialRepository(uow.session).by_email(link.email or "")
        if credentials is None or credentials.is_disabled:
            raise LinkNotValid("the account of this link is disabled")
        return await open_session(uow, credentials, Client(address=address, user_agent=user_agent), now=time)


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
    async with writing(uow.session):
        repository, users = SessionRepository(uow.session), CredentialRepository(uow.session)
        entered = _entered(await tenants_of(uow.session, credentials.user_id), credentials, area, tenant_id)
        new = NewSession(
            user_id=credentials.user_id,
            tenant_id=entered,
            expires_at=now + ABSOLUTE,
            second_factor=credentials.has_second_factor if confirmed is None else confirmed,
            address=client.address,
            user_agent=client.user_agent,
        )
        token = await repository.create(new)
        await users.seen(credentials.user_id, now)
        found = await repository.find(token, now)
    if found is None:
        raise SignInRefused("This account may not enter here any more.")
    await uow.audit.record("session.create", f"users/{credentials.user_id}", tenant_id=entered)
    return SignedIn(token, console_session(found, token))


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
