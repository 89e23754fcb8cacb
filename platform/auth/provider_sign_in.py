"""Signing in by the identity provider.

Invariant: an identity is linked to an account by accepting an invitation to its address, and by nothing else; an equal address
alone links nothing. Linking ends every other way into the account.
"""

from datetime import UTC, datetime

from loraplex.platform.auth.identity_provider import ProviderIdentity
from loraplex.tenants.administration.invitations import enter, new_account
from loraplex.tenants.database import Database, writing
from loraplex.tenants.errors import LinkNotValid, SignInRefused
from loraplex.tenants.people import links, users
from loraplex.tenants.people.identity import person_actor
from loraplex.tenants.people.links import Link
from loraplex.tenants.people.sessions import Area, Client, SignedIn, end_all_sessions, open_session
from loraplex.tenants.people.sign_in import find_link
from loraplex.tenants.people.users import Credentials
from loraplex.tenants.unit_of_work import PolicyPublisher, UnitOfWork, unit_of_work


async def sign_in_by_provider(
    database: Database,
    identity: ProviderIdentity,
    client: Client,
    *,
    area: Area | None = None,
    now: datetime | None = None,
) -> SignedIn:
    """Sign in the account that is linked to an identity; a second factor is the provider's matter. Raises `SignInRefused`."""
    credentials = await _linked(database, identity)
    if credentials is None:
        raise SignInRefused(
            "No account is linked to this identity. Ask for an invitation, and accept it with the provider."
        )
    if credentials.is_disabled:
        raise SignInRefused("This account is disabled.")
    actor, time = person_actor(credentials.email, client.address), now or datetime.now(UTC)
    async with unit_of_work(database, actor, None, None) as uow:
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
    client: Client,
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
    async with unit_of_work(database, person_actor(identity.email, client.address), None, publisher) as uow:
        account = linked or await _account(uow, identity)
        if account.is_disabled:
            raise SignInRefused("This account is disabled.")
        issuer, subject = identity.issuer, identity.subject
        async with writing(uow.session):
            await links.use(uow.session, token, time)
            if not await users.link_identity(uow.session, account.user_id, issuer, subject):
                raise SignInRefused("This account is linked to another identity: an operator can help.")
        await uow.audit.record("user.link_identity", f"users/{account.user_id}", None, {"issuer": issuer})
        return await enter(uow, link, account.user_id, client, confirmed=False, now=time)


async def _linked(database: Database, identity: ProviderIdentity) -> Credentials | None:
    async with database.as_writer() as session:
        return await users.credentials_of_identity(session, identity.issuer, identity.subject)


async def _account(uow: UnitOfWork, identity: ProviderIdentity) -> Credentials:
    """Return the account of the identity's address, a new one where there is none. Every other way into one that exists ends:
    who made it showed a link, and not that the address is theirs, as the provider does.
    """
    async with writing(uow.session):
        known = await users.credentials_of(uow.session, identity.email)
    if known is None:
        user_id = await new_account(uow, identity.email, identity.name, None)
        async with writing(uow.session):
            return await users.credentials(uow.session, user_id)
    async with writing(uow.session):
        await users.change(uow.session, known.user_id, password_hash=None)
        await users.set_second_factor(uow.session, known.user_id, None)
    await end_all_sessions(uow, known.user_id)
    return known
