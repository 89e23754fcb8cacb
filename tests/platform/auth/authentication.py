"""Keys, requests with them, and what an authenticator looks up."""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from sqlalchemy import event
from starlette.requests import Request

from loraplex.tenants.accounts.tenants import TenantRepository
from loraplex.tenants.api_keys.keys import KeyRepository
from loraplex.tenants.api_keys.last_used import LastUsedTracker
from loraplex.tenants.database import Database

NOWHERE = "postgresql://nobody@127.0.0.1:1/none"


async def make_key(
    database: Database,
    scopes: Sequence[str] = ("inference",),
    allowed_cidrs: Sequence[str] = (),
    *,
    tenant: str | None = "acme",
) -> str:
    """A key's text; of an operator for no tenant."""
    async with database.as_operator() as session:
        owner = None if tenant is None else (await TenantRepository(session).create(tenant)).id
        issued = await KeyRepository(session).create(owner, "key", scopes, allowed_cidrs=allowed_cidrs)
    return issued.plaintext


async def revoke(database: Database, plaintext: str, tenant: str = "acme") -> None:
    async with database.as_operator() as session:
        owner = await TenantRepository(session).get(tenant)
        await KeyRepository(session).revoke(owner.id, plaintext.split("_")[2])


def bearer(plaintext: str) -> list[str]:
    return [f"Bearer {plaintext}"]


def request_from(peer: str, plaintext: str, forwarded: str | None = None) -> Request:
    headers = [(b"authorization", f"Bearer {plaintext}".encode())]
    if forwarded is not None:
        headers.append((b"x-forwarded-for", forwarded.encode()))
    return Request({"type": "http", "headers": headers, "client": (peer, 1)})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Uses(LastUsedTracker):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[UUID] = []

    def note(self, api_key_id: UUID, at: datetime) -> None:
        self.noted.append(api_key_id)


def lookups_of(database: Database) -> list[str]:
    """The look-ups of keys from now on."""
    found: list[str] = []
    event.listen(
        database._engine.sync_engine,
        "before_cursor_execute",
        lambda *seen: found.append(seen[2]) if "find_api_key" in seen[2] else None,
    )
    return found
