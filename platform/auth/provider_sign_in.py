"""Signing in by the identity provider.

Invariant: an identity is linked to an account by accepting an invitation to its address, and by nothing else; an equal address
alone links nothing. Linking ends every other way into the account.
"""

from datetime import UTC, datetime
from uuid import UUID

from loraplex.platform.auth.identity_provider import ProviderIdentity
from loraplex.tenants.administration.invitations import grant, new_account
from loraplex.tenants.database import Database, writing
from loraplex.tenants.errors import LinkNotValid, SignInRefused
from loraplex.tenants.people.identity import person_actor
from loraplex.tenants.people.links import Link, LinkRepository
from loraplex.tenants.people.sessions import Area, end_all_sessions
from loraplex.tenants.people.sign_in import Client, SignedIn, find_link, open_session
from loraplex.tenants.people.users import CredentialRepository, Credentials
from loraplex.tenants.unit_of_work import PolicyPublisher, UnitOfWork, unit_of_work


async def sign_in_by_provider(
    database: Database,
    identity: ProviderIdentity,
    address: str | None,
    user_agent: str | None,
    *,
    area: Area | None = None,
    now: datetime | None = None,
) -> SignedIn:
    """Sign in the account that is linked to an identity; a second factor is the provider's matter. Raises `SignInRefused`."""
    time = now or datetime.now(UTC)
    credentials = await _linked(database, identity)
    if credentials is None:
        raise SignInRefused(
            "No account is linked to this identity. Ask for an invitation, and accept it with the provider."
        )
    if credentials.is_disabled:
        raise SignInRefused("This account is disabled.")
    client = Client(address=address, user_agent=user_agent)
    async with unit_of_work(database, person_actor(credentials.email, address), None, None) as uow:
        return await open_session(uow, credentials, client, area=area, confirmed=False, now=time)


async def find_invitation(
    database: Database, identity: ProviderIdentity, token: str, *, now: datetime | None = None
) -> Link:
    """Return the invitation that an identity may accept, without using it.

    Raises `LinkNotValid`, and `SignInRefused` for an invitation to another address.
    """
    link = await find_link(database, token, now=now)
    if link.purpose not in ("member", "operator"):
        raise LinkNotValid("this link is no invitation")
    if link.email is not None and link.email != identity.email:
        raise SignInRefused(f"This invitation is for {link.email}, and you are {identity.email}.")
    return link


async def accept_by_provider(
    database: Database,
    identity: ProviderIdentity,
    token: str,
    address: str | None,
    user_agent: str | None,
    *,
    publisher: PolicyPublisher | None = None,
    now: datetime | None = None,
) -> SignedIn:
    """Accept an invitation to a tenant or to the operators as the person whom the provider signed in, and link both. An account
    that exists loses its password, second factor and sessions when it is linked.

    Raises `LinkNotValid`, `AlreadyMember`, and `SignInRefused` for an invitation to another address, and for an account that is
    disabled or linked to another identity.
    """
    time = now or datetime.now(UTC)
    link = await find_invitation(database, identity, token, now=time)
    linked = await _linked(database, identity)
    async with unit_of_work(database, person_actor(identity.email, address), None, publisher) as uow:
        credentials = linked or await _account(uow, identity)
        if credentials.is_disabled:
            raise SignInRefused("This account is disabled.")
        await _use(uow, token, credentials, identity, time)
        tenant_id = await grant(uow, link, credentials.user_id, "")
        async with writing(uow.session):
            present = await CredentialRepository(uow.session).by_id(credentials.user_id)
        return await open_session(
            uow,
            present,
            Client(address=address, user_agent=user_agent),
            area=_area(link),
            tenant_id=tenant_id,
            confirmed=False,
            now=time,
        )


def _area(link: Link) -> Area:
    return "operator" if link.purpose == "operator" else "tenant"


async def _linked(database: Database, identity: ProviderIdentity) -> Credentials | None:
    async with database.as_writer() as session:
        return await CredentialRepository(session).by_identity(identity.issuer, identity.subject)


async def _account(uow: UnitOfWork, identity: ProviderIdentity) -> Credentials:
    async with writing(uow.session):
        known = await CredentialRepository(uow.session).by_email(identity.email)
    if known is None:
        return await new_account(uow, identity.email, identity.name, None)
    await _take_over(uow, known.user_id)
    return known


async def _take_over(uow: UnitOfWork, user_id: UUID) -> None:
    """End every other way into an account: who made it showed a link, and not that the address is theirs, as the provider does."""
    async with writing(uow.session):
        users = CredentialRepository(uow.session)
        await users.set_password(user_id, None)
        await users.set_second_factor(user_id, None)
    await end_all_sessions(uow, user_id)


async def _use(
    uow: UnitOfWork, token: str, credentials: Credentials, identity: ProviderIdentity, now: datetime
) -> None:
    async with writing(uow.session):
        await LinkRepository(uow.session).use(token, now)
        users = CredentialRepository(uow.session)
        if not await users.link_identity(credentials.user_id, identity.issuer, identity.subject):
            raise SignInRefused("This account is linked to another identity: an operator can help.")
    await uow.audit.record(
        "user.link_identity", f"users/{credentials.user_id}", None, {"issuer": identity.issuer}
    )
