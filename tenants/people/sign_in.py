"""Signing in: by password and code, or by a link that works once.

Invariant: each sign-in has a new token, whatever cookie the browser had before.
"""

from datetime import UTC, datetime

from loraplex.tenants.database import Database, writing
from loraplex.tenants.errors import LinkNotValid
from loraplex.tenants.people import links, users
from loraplex.tenants.people.credentials import Check
from loraplex.tenants.people.identity import person_actor
from loraplex.tenants.people.links import Link
from loraplex.tenants.people.sessions import Area, Client, SignedIn, open_session
from loraplex.tenants.stored_responses import DeriveKey
from loraplex.tenants.unit_of_work import unit_of_work


async def sign_in(
    database: Database,
    email: str,
    password: str,
    code: str | None,
    client: Client,
    *,
    derive_key: DeriveKey,
    area: Area | None = None,
    now: datetime | None = None,
) -> SignedIn:
    """Sign a person in. `code`: of the second factor, None where none was entered. `area` None: a tenant of the person, else the
    operator's area.

    Raises `SignInRefused`, `SecondFactorNeeded`, `SignInSlowed`, `DatabaseUnavailable`.
    """
    time = now or datetime.now(UTC)
    check = Check(database, email, client.address, derive_key, time)
    credentials = await check.password_and_code(password, code)
    actor = person_actor(credentials.email, client.address)
    async with unit_of_work(database, actor, None, None) as uow:
        return await open_session(uow, credentials, client, area=area, now=time)


async def find_link(database: Database, token: str, *, now: datetime | None = None) -> Link:
    """Return what a link is for, without using it. Raises `LinkNotValid`."""
    async with database.as_writer() as session:
        return await links.find(session, token, now or datetime.now(UTC))


async def use_link(
    database: Database, token: str, client: Client, *, area: Area | None = None, now: datetime | None = None
) -> SignedIn:
    """Sign in by the link that the demo or `loraplex open` printed; it works once. Raises `LinkNotValid`, also for links of other purposes, which
    are not used up.
    """
    time = now or datetime.now(UTC)
    if (await find_link(database, token, now=time)).purpose != "demo":
        raise LinkNotValid("this link does not sign in by itself")
    async with unit_of_work(database, person_actor("demo", client.address), None, None) as uow:
        async with writing(uow.session):
            link = await links.use(uow.session, token, time)
            credentials = await users.credentials_of(uow.session, link.email or "")
        if credentials is None or credentials.is_disabled:
            raise LinkNotValid("the account of this link is disabled")
        return await open_session(uow, credentials, client, area=area, now=time)
