"""Keys that the console makes for its own pages: short-lived, billed and limited as any key of the tenant, and not listed among
its keys.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.api_keys.key_format import generate_key
from loraplex.tenants.api_keys.keys import IssuedKey
from loraplex.tenants.api_keys.scopes import check_scopes
from loraplex.tenants.models import ApiKey

KIND: Final = "console"


async def issue_console_key(
    session: AsyncSession, tenant_id: UUID, name: str, scopes: Iterable[str], email: str, expires_at: datetime
) -> IssuedKey:
    """Issue a key to the person with this address."""
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
    working = (ApiKey.revoked_at.is_(None), ApiKey.expires_at > now)
    statement = update(ApiKey).where(ApiKey.kind == KIND, ApiKey.created_by == email, *working)
    if tenant_id is not None:
        statement = statement.where(ApiKey.tenant_id == tenant_id)
    ending = statement.values(revoked_at=now).returning(ApiKey.tenant_id)
    ended = await session.scalars(ending.execution_options(synchronize_session=False))
    return {each for each in ended if each is not None}
