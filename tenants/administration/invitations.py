"""Accepting an invitation: to a tenant, to the operators, or to a tenant of one's own.

Invariant: link, account, rights and session change in one transaction, so that a refused acceptance leaves the link usable. An
account that exists is entered with its own password only.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

from loraplex.tenants.administration import tenants
from loraplex.tenants.database import Database, writing
from loraplex.tenants.errors import InvalidField, LinkNotValid, SignUpClosed
from loraplex.tenants.names import check_email, check_person_name
from loraplex.tenants.people import links, memberships, users
from loraplex.tenants.people.credentials import Check
from loraplex.tenants.people.identity import person_actor
from loraplex.tenants.people.links import Link
from loraplex.tenants.people.passwords import check_password, hash_password
from loraplex.tenants.people.roles import ADMIN
from loraplex.tenants.people.sessions import Area, Client, SignedIn, open_session
from loraplex.tenants.people.sign_in import find_link
from loraplex.tenants.people.sign_up import published_plan
from loraplex.tenants.stored_responses import DeriveKey
from loraplex.tenants.unit_of_work import UnitOfWork, unit_of_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What a person enters to accept. `email`: where the invitation names none. `code`: of the second factor of an account that
    exists. `tenant_name`: of a sign-up.
    """

    password: str = field(repr=False)
    name: str = ""
    email: str = ""
    code: str | None = field(default=None, repr=False)
    tenant_name: str = ""


async def accept_invitation(
    database: Database,
    token: str,
    entered: Acceptance,
    client: Client,
    *,
    derive_key: DeriveKey,
    now: datetime | None = None,
) -> SignedIn:
    """Accept an invitation and sign in. `find_link` tells whether the address has an account: then its password is entered, and
    no name.

    Raises `LinkNotValid`, `InvalidField`, `AlreadyMember`, `NameTaken`, `SignUpClosed`, and as `sign_in` for an account.
    """
    time = now or datetime.now(UTC)
    link = await find_link(database, token, now=time)
    if link.purpose in ("reset", "demo"):
        raise LinkNotValid("this link is no invitation")
    email = check_email(link.email or entered.email)
    async with database.as_writer() as session:
        known = await users.credentials_of(session, email)
    if known is not None:
        check = Check(database, email, client.address, derive_key, time)
        await check.password_and_code(entered.password, entered.code)
        hashed = None
    else:
        check_person_name(entered.name)
        hashed = await hash_password(check_password(entered.password, email))
    async with unit_of_work(database, person_actor(email, client.address), None, None) as uow:
        async with writing(uow.session):
            await links.use(uow.session, token, time)
        user_id = await new_account(uow, email, entered.name, hashed) if known is None else known.user_id
        return await enter(uow, link, user_id, client, tenant_name=entered.tenant_name, now=time)


async def new_account(uow: UnitOfWork, email: str, name: str, hashed: str | None) -> UUID:
    """Create an account, as part of an acceptance; return its id. `hashed` None: without a password.

    Raises `InvalidField`, `NameTaken`.
    """
    user_id = await users.create(uow.session, email, name, hashed)
    await uow.audit.record("user.create", f"users/{user_id}", None, {"email": email, "name": name})
    return user_id


async def enter(
    uow: UnitOfWork,
    link: Link,
    user_id: UUID,
    client: Client,
    *,
    tenant_name: str = "",
    confirmed: bool | None = None,
    now: datetime,
) -> SignedIn:
    """Give a person what the used invitation is for, and a session there, as part of an acceptance. `confirmed`: as of
    `open_session`.

    Open links that reset the password end: who made one had no right to what the account leads to from now on.

    Raises `AlreadyMember`, `InvalidField`, `NameTaken`, `SignUpClosed`.
    """
    async with writing(uow.session):
        await links.end(uow.session, "reset", user_id)
    tenant_id = await _grant(uow, link, user_id, tenant_name)
    async with writing(uow.session):
        present = await users.credentials(uow.session, user_id)
    area: Area = "operator" if link.purpose == "operator" else "tenant"
    return await open_session(
        uow, present, client, area=area, tenant_id=tenant_id, confirmed=confirmed, now=now
    )


async def _grant(uow: UnitOfWork, link: Link, user_id: UUID, tenant_name: str) -> UUID | None:
    """Return the tenant that the invitation leads to, None for the operator's area."""
    target = f"users/{user_id}"
    if link.purpose == "operator":
        await users.change(uow.session, user_id, is_operator=True)
        await uow.audit.record("user.grant_operator", target, None, {"operator": True})
        return None
    tenant_id, role = link.tenant_id, link.role or ADMIN
    if tenant_id is None:
        tenant_id = await _new_tenant(uow, tenant_name)
    await memberships.add(uow.session, tenant_id, user_id, role)
    await uow.audit.record("user.join", target, None, {"role": role}, tenant_id=tenant_id)
    return tenant_id


async def _new_tenant(uow: UnitOfWork, name: str) -> UUID:
    plan = await published_plan(uow.session)
    if plan is None:
        raise SignUpClosed("sign-up is closed: ask the operator for an invitation")
    try:
        tenant = await tenants.create_without_key(
            uow, name, tier=plan.tier, weight=plan.weight, limits=plan.limits
        )
    except InvalidField as error:
        raise InvalidField("tenant_name", str(error)) from error
    return tenant.id
