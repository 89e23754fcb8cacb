"""Keys that the console makes for its own pages: bearers of ten minutes with which playground and uploader call the API as the
person who is signed in. They are billed and limited as any key of the tenant, and not listed among its keys.

Invariant: of each purpose, a bounded number of a person's keys works in a tenant, in all sessions together.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypeAlias
from uuid import UUID

from sqlalchemy import ColumnElement, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.api_keys.key_format import generate_key
from loraplex.tenants.api_keys.keys import IssuedKey
from loraplex.tenants.database import lock
from loraplex.tenants.errors import ScopeNotHeld
from loraplex.tenants.models import ApiKey
from loraplex.tenants.people.identity import ConsoleSession
from loraplex.tenants.scopes import check_scopes
from loraplex.tenants.unit_of_work import UnitOfWork

TokenScope: TypeAlias = Literal["inference", "adapters:write"]
LIFETIME: Final = timedelta(minutes=10)
NAMES: Final = {"inference": "playground", "adapters:write": "uploader"}
SCOPES: Final = {"inference": ("inference",), "adapters:write": ("adapters:read", "adapters:write")}
KIND: Final = "console"
MAX_LIVE: Final = 3
"""The oldest key ends when a person is issued another: scripts of the console get a new one when theirs has ended."""


@dataclass(frozen=True, slots=True)
class ConsoleToken:
    """A key of the API that ends by itself at `expires_at`."""

    api_key: str = field(repr=False)
    expires_at: datetime


async def issue_console_token(uow: UnitOfWork, session: ConsoleSession, scope: TokenScope) -> ConsoleToken:
    """Issue a bearer for the playground (`inference`) or the uploader (`adapters:write`) of the session's tenant.

    It is no change of what the tenant has, so it leaves no audit entry. It may end an older one. Raises `ScopeNotHeld`.
    """
    if session.tenant_id is None or scope not in session.scopes:
        raise ScopeNotHeld(f"this needs a role with the scope `{scope}`")
    ends = datetime.now(UTC) + LIFETIME
    issued = await issue_console_key(
        uow.session, session.tenant_id, NAMES[scope], SCOPES[scope], session.email, ends
    )
    uow.notify_of([session.tenant_id])
    return ConsoleToken(issued.plaintext, ends)


async def issue_console_key(
    session: AsyncSession,
    tenant_id: UUID,
    name: str,
    scopes: Iterable[str],
    email: str,
    expires_at: datetime,
    *,
    most: int = MAX_LIVE,
) -> IssuedKey:
    """Issue a key to the person with this address, and end the oldest where there are `most`."""
    await lock(session, f"console keys:{tenant_id}:{email}")
    now = datetime.now(UTC)
    live = (ApiKey.tenant_id == tenant_id, ApiKey.name == name, *_working(email, now))
    newest = select(ApiKey.id).where(*live).order_by(ApiKey.created_at.desc(), ApiKey.id).offset(most - 1)
    ending = update(ApiKey).where(ApiKey.id.in_(newest)).values(revoked_at=now)
    await session.execute(ending.execution_options(synchronize_session=False))
    key = generate_key("live")
    record = ApiKey(
        tenant_id=tenant_id,
        kind=KIND,
        key_id=key.key_id,
        environment=key.environment,
        name=name,
        secret_sha256=key.secret_sha256,
        scopes=check_scopes(scopes, operator=False),
        allowed_cidrs=[],
        expires_at=expires_at,
        created_by=email,
        successor=None,
    )
    session.add(record)
    await session.flush()
    return IssuedKey(record, key.plaintext)


async def end_console_keys(session: AsyncSession, email: str, tenant_id: UUID | None = None) -> set[UUID]:
    """End the console's keys of a person, in one tenant or in all; return the tenants whose keys were ended.

    `session` has the gateway's role (`writing`).
    """
    now = datetime.now(UTC)
    statement = update(ApiKey).where(*_working(email, now))
    if tenant_id is not None:
        statement = statement.where(ApiKey.tenant_id == tenant_id)
    ending = statement.values(revoked_at=now).returning(ApiKey.tenant_id)
    ended = await session.scalars(ending.execution_options(synchronize_session=False))
    return {each for each in ended if each is not None}


def _working(email: str, now: datetime) -> tuple[ColumnElement[bool], ...]:
    """The console's keys of a person that work."""
    own = (ApiKey.kind == KIND, ApiKey.created_by == email)
    return (*own, ApiKey.revoked_at.is_(None), ApiKey.expires_at > now)
