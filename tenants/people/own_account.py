"""A person's own account, before a change of what protects it.

Invariant: such a change takes the present password, or, for an account without one, a sign-in of the last minutes: a session
alone, as on a desk that was left, changes nothing of it.
"""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from loraplex.tenants.database import Database
from loraplex.tenants.errors import SignInRefused
from loraplex.tenants.people.credentials import Check
from loraplex.tenants.people.identity import ConsoleSession
from loraplex.tenants.people.recovery_code_rows import RecoveryCodeRepository
from loraplex.tenants.people.users import CredentialRepository
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
        return Check(
            database=self.database,
            email=self.session.email,
            address=self.address,
            derive_key=self.derive_key,
            now=self.now,
        )

    async def confirm(self) -> None:
        """Confirm that its owner acts. Raises `SignInRefused`, `SignInSlowed`."""
        async with self.database.as_writer() as session:
            credentials = await CredentialRepository(session).by_id(self.session.user_id)
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
        credentials = await CredentialRepository(writer).by_id(session.user_id)
        left = await RecoveryCodeRepository(writer).left(session.user_id)
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
