"""People for tests: accounts made in the database, and their sessions. Passwords cost next to nothing here."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from uuid import UUID

import pytest
from argon2 import PasswordHasher
from argon2.profiles import CHEAPEST
from sqlalchemy import select

from loraplex.platform.server.secret import derive
from loraplex.tenants.database import Database
from loraplex.tenants.models import AuditEntry
from loraplex.tenants.people import memberships, passwords, users
from loraplex.tenants.people.identity import ConsoleSession
from loraplex.tenants.people.own_account import OwnAccount
from loraplex.tenants.people.passwords import hash_password
from loraplex.tenants.people.sessions import Area, Client, SignedIn
from loraplex.tenants.people.sign_in import sign_in
from loraplex.tenants.unit_of_work import PolicyPublisher, UnitOfWork, unit_of_work

PASSWORD = "correct horse battery"
ADDRESS, AGENT = "192.0.2.7", "Firefox/145"


def derive_key(*parts: bytes) -> bytes:
    return derive(b"a secret of these tests", *parts)


@pytest.fixture
def cheap_passwords(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hash with the least work that argon2 allows."""
    monkeypatch.setattr(passwords, "_HASHER", PasswordHasher.from_parameters(CHEAPEST))
    passwords._unknown_hash.cache_clear()
    yield
    passwords._unknown_hash.cache_clear()


async def add_person(
    database: Database,
    email: str,
    *,
    operator: bool = False,
    roles: dict[UUID, str] | None = None,
) -> UUID:
    """Add an account with `PASSWORD` and these roles by tenant; return its id."""
    hashed = await hash_password(PASSWORD)
    async with database.as_operator() as session:
        user_id = await users.create(session, email, email.partition("@")[0].title(), hashed)
        await users.change(session, user_id, is_operator=operator)
        for tenant_id, role in (roles or {}).items():
            await memberships.add(session, tenant_id, user_id, role)
    return user_id


async def signed_in(
    database: Database,
    email: str,
    password: str = PASSWORD,
    *,
    code: str | None = None,
    address: str = ADDRESS,
    area: Area | None = None,
    now: datetime | None = None,
) -> SignedIn:
    """Sign in as the console does."""
    client = Client(address, AGENT)
    return await sign_in(database, email, password, code, client, derive_key=derive_key, area=area, now=now)


def own_account(
    database: Database,
    session: ConsoleSession,
    password: str = PASSWORD,
    *,
    publisher: PolicyPublisher | None = None,
    now: datetime | None = None,
) -> OwnAccount:
    """The own account of a signed-in person, who enters this password."""
    return OwnAccount(
        database=database,
        session=session,
        password=password,
        address=ADDRESS,
        request_id=None,
        derive_key=derive_key,
        publisher=publisher,
        now=now or datetime.now(UTC),
    )


@asynccontextmanager
async def acting(database: Database, session: ConsoleSession) -> AsyncIterator[UnitOfWork]:
    """Open a unit of work of a signed-in person, as the console does."""
    async with unit_of_work(database, session.actor(ADDRESS, "req-1"), session.tenant_id, None) as uow:
        yield uow


async def actions(database: Database, tenant_id: UUID | None) -> list[str]:
    """Return the actions in the audit log of a tenant, or of none, oldest first; without sign-ins."""
    async with database.as_operator() as session:
        query = select(AuditEntry.action).where(AuditEntry.tenant_id == tenant_id).order_by(AuditEntry.id)
        return [each for each in await session.scalars(query) if each != "session.create"]
