"""Links that go to their addressee by mail: resets, sign-ups, invitations.

Invariant: what a page answers does not tell whether an address has an account; the mail does, to its owner.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import structlog

from loraplex.platform.auth.mail import MailServer
from loraplex.platform.errors import MailNotSent
from loraplex.tenants.api_keys.networks import client_network
from loraplex.tenants.database import Database
from loraplex.tenants.errors import SignInSlowed, SignUpClosed
from loraplex.tenants.names import check_email
from loraplex.tenants.people import links, users
from loraplex.tenants.people.accounts import reset_user
from loraplex.tenants.people.identity import person_actor
from loraplex.tenants.people.records import SIGN_IN_PATH, link_address
from loraplex.tenants.people.sign_up import is_open
from loraplex.tenants.people.throttle import SignInTries
from loraplex.tenants.people.users import Credentials
from loraplex.tenants.unit_of_work import unit_of_work

LOG: Final = structlog.get_logger("loraplex.mail")


@dataclass(frozen=True, slots=True)
class MailedLinks:
    """`root`: the address of the console, which no request can choose."""

    database: Database
    server: MailServer
    root: str

    async def count(self, email: str, address: str | None) -> None:
        """Count one request for a mail; sign-ins from there are not slowed by it. Raises `InvalidField`, `SignInSlowed`."""
        await self._count("mail", check_email(email), client_network(address))

    async def reset(self, email: str, address: str | None) -> None:
        """Mail a link by which the owner of an account sets a new password; nothing to other addresses. Call `count` first."""
        account = await self._account(email)
        if account is None or account.is_disabled:
            return
        async with unit_of_work(self.database, person_actor(account.email, address), None, None) as uow:
            token = await reset_user(uow, account.email)
        await self._send(
            account.email,
            "Set a new password",
            f"Set a new password by this link. It works once, for 24 hours:\n\n{link_address(self.root, token)}\n\n"
            "If you did not ask for it, nothing needs to be done.\n",
        )

    async def sign_up(self, email: str, address: str | None) -> None:
        """Mail a link by which a person opens a tenant; to an address with an account, where to sign in. Call `count` first.

        Raises `SignUpClosed`.
        """
        if not await is_open(self.database):
            raise SignUpClosed("sign-up is closed")
        known, to = await self._account(email), check_email(email)
        if known is not None:
            text = f"You have an account here already. Sign in: {self.root}{SIGN_IN_PATH}\n"
            await self._send(to, "You have an account", text)
            return
        async with unit_of_work(self.database, person_actor(to, address), None, None) as uow:
            ends = datetime.now(UTC) + links.SIGN_UP_LIFETIME
            _, token = await links.invite(uow.session, "sign_up", to, ends, email=to)
        link = link_address(self.root, token)
        await self._send(
            to, "Set up your tenant", f"Go on by this link. It works once, for 24 hours:\n\n{link}\n"
        )

    async def invitation(self, email: str, token: str, tenant_name: str, invited_by: str) -> bool:
        """Mail the link of an invitation; return whether the mail server took it. A tenant that mails too many in a row, or too
        many to one address, mails none for a while.
        """
        text = f"{invited_by} invites you to {tenant_name}. Accept by this link. It works once, for 7 days:"
        return await self._send_bounded("invitation", email, tenant_name, f"Join {tenant_name}", text, token)

    async def member_reset(self, email: str, token: str, tenant_name: str, admin: str) -> bool:
        """Mail the link of a reset that an admin made; return whether the mail server took it. It is bounded as invitations are."""
        text = f"{admin} of {tenant_name} sends you this link to set a new password. It works once, for 24 hours:"
        return await self._send_bounded("reset", email, tenant_name, "Set a new password", text, token)

    async def _send_bounded(
        self, purpose: str, to: str, tenant_name: str, subject: str, text: str, token: str
    ) -> bool:
        try:
            await self._count(purpose, to, tenant_name)
        except SignInSlowed:
            return False
        return await self._send(to, subject, f"{text}\n\n{link_address(self.root, token)}\n")

    async def _count(self, purpose: str, addressee: str, sender: str) -> None:
        async with self.database.as_writer() as session:
            await SignInTries(session, addressee, sender, purpose=purpose).take(datetime.now(UTC))

    async def _account(self, email: str) -> Credentials | None:
        async with self.database.as_writer() as session:
            return await users.credentials_of(session, email)

    async def _send(self, to: str, subject: str, text: str) -> bool:
        try:
            await self.server.send(to, subject, text)
        except MailNotSent as error:
            LOG.warning("mail not sent", reason=str(error.__cause__)[:200])
            return False
        return True
