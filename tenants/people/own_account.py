"""A person's own account: what protects it, and its password.

Invariant: a change of what protects it takes the present password, or, for an account without one, a sign-in of the last minutes: a
session alone, as on a desk that was left, changes nothing of it. After a new password no session and no reset link of before works.
"""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from loraplex.tenants.database import Database, writing
from loraplex.tenants.errors import LinkNotValid, SignInRefused
from loraplex.tenants.people import links, users
from loraplex.tenants.people.codes import codes_left
from loraplex.tenants.people.credentials import Check
from loraplex.tenants.people.identity import ConsoleSession, person_actor
from loraplex.tenants.people.passwords import check_password, hash_password
from loraplex.tenants.people.sessions import end_all_sessions, renew_session
from loraplex.tenants.people.sign_in import find_link
from loraplex.tenants.stored_responses import DeriveKey
from loraplex.tenants.unit_of_work import PolicyPublisher, UnitOfWork, unit_of_work

FRESH: Final = timedelta(minutes=5)
"""The time after a sign-in for which it stands for the password of an account that has none."""
NOT_FRESH: Final = "This takes a sign-in of the last 5 minutes: sign in again, then repeat it."


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAccount:
    """The account of a signed-in person. `password`: the present one, as it was typed; empty for an account without one."""

    database: Database
    session: ConsoleSession
    password: str = field(repr=False)
    address: str | None
    request_id: str | None
    derive_key: DeriveKey
    publisher: PolicyPublisher | None
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def check(self) -> Check:
        """The check of this account from this address."""
        return Check(self.database, self.session.email, self.address, self.derive_key, self.now)

    async def confirm(self) -> None:
        """Confirm that its owner acts. Raises `SignInRefused`, `SignInSlowed`."""
        async with self.database.as_writer() as session:
            credentials = await users.credentials(session, self.session.user_id)
        if credentials.password_hash is not None:
            await self.check.password(self.password)
        elif not is_fresh(self.session, self.now):
            raise SignInRefused(NOT_FRESH)

    def unit_of_work(self) -> AbstractAsyncContextManager[UnitOfWork]:
        """Open a unit of work of the person."""
        actor = self.session.actor(self.address, self.request_id)
        return unit_of_work(self.database, actor, self.session.tenant_id, self.publisher)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What protects an account. `recovery_codes`: how many are unused. `needs_sign_in`: a change of this takes a new sign-in."""

    has_password: bool
    second_factor: bool
    recovery_codes: int
    needs_sign_in: bool


async def protection(
    database: Database, session: ConsoleSession, *, now: datetime | None = None
) -> Protection:
    """Return what protects the person's own account."""
    async with database.as_writer() as writer:
        credentials = await users.credentials(writer, session.user_id)
        left = await codes_left(writer, session.user_id)
    has_password = credentials.password_hash is not None
    return Protection(
        has_password=has_password,
        second_factor=credentials.has_second_factor,
        recovery_codes=left,
        needs_sign_in=not has_password and not is_fresh(session, now or datetime.now(UTC)),
    )


def is_fresh(session: ConsoleSession, now: datetime) -> bool:
    """Return whether the session's sign-in stands for the password of an account that has none."""
    return now - session.signed_in_at <= FRESH


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
            await users.change(uow.session, session.user_id, password_hash=hashed)
            await links.end(uow.session, "reset", session.user_id)
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
    link = await find_link(database, token, now=time)
    if link.purpose != "reset" or link.user_id is None or link.email is None:
        raise LinkNotValid("this link resets no password")
    check_password(new, link.email)
    hashed = await hash_password(new)
    async with unit_of_work(database, person_actor(link.email, address), None, publisher) as uow:
        async with writing(uow.session):
            await links.use(uow.session, token, time)
            await users.change(uow.session, link.user_id, password_hash=hashed)
            if link.removes_second_factor:
                await users.set_second_factor(uow.session, link.user_id, None)
        await uow.audit.record("user.change_password", f"users/{link.user_id}")
        await end_all_sessions(uow, link.user_id)
    return link.email
