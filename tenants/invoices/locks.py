"""Advisory locks of billing, until the transaction ends. Invariant: a tenant's lock comes before an issuer's, so that no two
transactions wait for each other.
"""

from typing import Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.database import lock

_TRY_LOCK: Final = text("SELECT pg_try_advisory_xact_lock(hashtextextended(:name, 0))")


async def lock_tenant(session: AsyncSession, tenant_id: UUID) -> None:
    """Wait until no other transaction changes invoices or credits of the tenant."""
    await lock(session, _tenant(tenant_id))


async def try_lock_tenant(session: AsyncSession, tenant_id: UUID) -> bool:
    """Take the tenant's lock; return False while another transaction has it."""
    return bool(await session.scalar(_TRY_LOCK, {"name": _tenant(tenant_id)}))


async def lock_issuer(session: AsyncSession, issuer: str) -> None:
    """Wait until no other transaction takes a number of the issuer."""
    await lock(session, f"loraplex invoice numbers {issuer}")


def _tenant(tenant_id: UUID) -> str:
    return f"loraplex billing {tenant_id}"
