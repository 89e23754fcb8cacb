"""Use cases on passwords: change one's own, and set a new one by a link.

Invariant: after either, no session and no reset link of before works.
"""

from datetime import UTC, datetime

from loraplex.tenants.database import Database, writing
from loraplex.tenants.errors import LinkNotValid
from loraplex.tenants.people.identity import person_actor
from loraplex.tenants.people.links import LinkRepository
from loraplex.tenants.people.own_account import OwnAccount
from loraplex.tenants.people.password_hashing import check_password, hash_password
from loraplex.tenants.people.sessions import end_all_sessions, renew_session
from loraplex.tenants.people.users import CredentialRepository
from loraplex.tenants.unit_of_work import PolicyPublisher, unit_of_work


async def change_password(own: OwnAccount, new: str) -> str:
    """Change one's own password, or set the first one; return the new token of this session. All other sessions end.

    Raises `SignInRefused` for a wrong present one, `SignInSlowed`, `InvalidField`.
    """
    session = own.session
    check_password(new, session.email)
    await own.confirm()
    hashed = await hash_password(new)
    async with own.unit_of_work() as uow:
        async with writing(uow.session):
            await CredentialRepository(uow.session).set_password(session.user_id, hashed)
            await LinkRepository(uow.session).end("reset", session.user_id)
        await uow.audit.record("user.change_password", f"users/{session.user_id}")
        return await renew_session(uow, session)


async def reset_password(
    database: Database,
    token: str,
    new: str,
    *,
    address: str | None,
    publisher: PolicyPublisher | None = None,
    now: datetime | None = None,
) -> str:
    """Set a new password by a link that an admin, an operator or a mail gave; return the account's address. The person then
    signs in with it, and with the second factor unless the link removes that. All sessions end.

    Raises `LinkNotValid`, `InvalidField`; then the link is not used up.
    """
    time = now or datetime.now(UTC)
    async with database.as_writer() as session:
        link = await LinkRepository(session).find(token, time)
    if link.purpose != "reset" or link.user_id is None or link.email is None:
        raise LinkNotValid("this link resets no password")
    check_password(new, link.email)
    hashed = await hash_password(new)
    async with unit_of_work(database, person_actor(link.email, address), None, publisher) as uow:
        async with writing(uow.session):
            await LinkRepository(uow.session).use(token, time)
            users = CredentialRepository(uow.session)
            await users.set_password(link.user_id, hashed)
            if link.removes_second_factor:
                await users.set_second_factor(link.user_id, None)
        await uow.audit.record("user.change_password", f"users/{link.user_id}")
        await end_all_sessions(uow, link.user_id)
    return link.email
