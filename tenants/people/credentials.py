"""Checks passwords and codes of people.

Invariant: every check is counted before its result is known, and a wrong pair takes the same work whether the account exists or
not.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import UUID

from loraplex.tenants.api_keys.networks import client_network
from loraplex.tenants.database import Database, writing
from loraplex.tenants.errors import SecondFactorNeeded, SignInRefused
from loraplex.tenants.people import users
from loraplex.tenants.people.codes import SecondFactorSecrets, matching_step, recovery_code, use_recovery_code
from loraplex.tenants.people.identity import person_actor
from loraplex.tenants.people.passwords import password_matches
from loraplex.tenants.people.throttle import SignInTries
from loraplex.tenants.people.users import Credentials
from loraplex.tenants.stored_responses import DeriveKey
from loraplex.tenants.unit_of_work import unit_of_work

WRONG_PAIR: Final = "Email or password is wrong."
WRONG_CODE: Final = "The code is wrong, or was used already: enter the newest one."


@dataclass(frozen=True, slots=True)
class Check:
    """Checks one account from an address. `derive_key`: of the server secret."""

    database: Database
    email: str
    address: str | None
    derive_key: DeriveKey
    now: datetime

    async def password(self, password: str) -> Credentials:
        """Return the account that the password belongs to. Raises `SignInRefused`, `SignInSlowed`."""
        credentials = await self._password(password)
        # Codes that were wrong still count: else this would make room for further guesses.
        await self._uncount(succeeds=not credentials.has_second_factor)
        return credentials

    async def password_and_code(self, password: str, code: str | None) -> Credentials:
        """Return the account that both belong to. `code` None: none was entered.

        Raises `SignInRefused`, `SecondFactorNeeded`, `SignInSlowed`.
        """
        credentials = await self._password(password)
        if credentials.has_second_factor and code is None:
            await self._uncount(succeeds=False)
            raise SecondFactorNeeded("Enter the code of your authenticator app.")
        return await self._code(credentials, code)

    async def code(self, code: str) -> Credentials:
        """Return the account that the code belongs to. Raises `SignInRefused`, `SignInSlowed`."""
        credentials = await self._counted()
        if credentials is None:
            raise SignInRefused(WRONG_CODE)
        return await self._code(credentials, code)

    @asynccontextmanager
    async def guess(self) -> AsyncIterator[None]:
        """Count what the block checks as a try, which stays counted where the block raises. Raises `SignInSlowed`."""
        await self._counted()
        yield
        await self._uncount(succeeds=False)

    async def _password(self, password: str) -> Credentials:
        credentials = await self._counted()
        stored = None if credentials is None else credentials.password_hash
        matches = await password_matches(stored, password)
        if credentials is None or not matches or credentials.is_disabled:
            raise SignInRefused(WRONG_PAIR)
        return credentials

    async def _counted(self) -> Credentials | None:
        """Count the try; the first that a sign-in asks the database for, so this is what finds it away."""
        return await self.database.bounded(self._count)

    async def _count(self) -> Credentials | None:
        async with self.database.as_writer() as session:
            await SignInTries(session, self._account, self._network).take(self.now)
            return await users.credentials_of(session, self._account)

    async def _uncount(self, *, succeeds: bool) -> None:
        """Undo the count of a try that was no failure. `succeeds`: it signs in, so the account's failures are forgotten."""
        async with self.database.as_writer() as session:
            tries = SignInTries(session, self._account, self._network)
            await (tries.succeed if succeeds else tries.give_back)(self.now)

    async def _code(self, credentials: Credentials, code: str | None) -> Credentials:
        recovery = recovery_code(code or "")
        if credentials.has_second_factor and credentials.totp_secret is not None:
            if recovery is not None:
                await self._use_recovery_code(credentials.user_id, recovery)
            else:
                await self._use_code(credentials.user_id, credentials.totp_secret, code or "")
        await self._uncount(succeeds=True)
        return credentials

    async def _use_code(self, user_id: UUID, encrypted: bytes, code: str) -> None:
        secret = SecondFactorSecrets(self.derive_key).decrypt(user_id, encrypted)
        step = matching_step(secret, code, self.now)
        async with self.database.as_writer() as session:
            if step is None or not await users.use_step(session, user_id, step):
                raise SignInRefused(WRONG_CODE)

    async def _use_recovery_code(self, user_id: UUID, code: str) -> None:
        """Use a code up; its use stands in the audit log, since the owner may not know of it."""
        actor = person_actor(self._account, self.address)
        async with unit_of_work(self.database, actor, None, None) as uow:
            async with writing(uow.session):
                if not await use_recovery_code(uow.session, user_id, code, self.derive_key):
                    raise SignInRefused(WRONG_CODE)
            await uow.audit.record("user.use_recovery_code", f"users/{user_id}")

    @property
    def _account(self) -> str:
        return self.email.strip().lower()

    @property
    def _network(self) -> str:
        return client_network(self.address)
