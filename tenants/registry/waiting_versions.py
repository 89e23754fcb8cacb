"""Versions of all tenants that wait for their verdict, for those who go on with what a process left. Read as the operator."""

from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import AdapterVersion

MOST_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class WaitingVersion:
    """A version in the state `validating`. `digest` None: nothing is stored of it yet."""

    tenant_id: UUID
    version_id: UUID
    digest: str | None = None


class WaitingVersions:
    """Seen by one session of the operator."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def get(self, version_id: UUID) -> WaitingVersion | None:
        """None when it does not exist or has its verdict."""
        found = await self._read(_waiting().where(AdapterVersion.id == version_id))
        return found[0] if found else None

    async def older_than(self, seconds: float) -> list[WaitingVersion]:
        """The oldest of them, `MOST_AT_ONCE` at most."""
        bound = func.now() - timedelta(seconds=seconds)
        return await self._read(_waiting().where(AdapterVersion.created_at < bound))

    async def _read(self, query: Select[UUID, UUID, str | None]) -> list[WaitingVersion]:
        rows = await self._session.execute(query.order_by(AdapterVersion.created_at).limit(MOST_AT_ONCE))
        return [WaitingVersion(*row) for row in rows]


def _waiting() -> Select[UUID, UUID, str | None]:
    columns = (AdapterVersion.tenant_id, AdapterVersion.id, AdapterVersion.digest)
    return select(*columns).where(AdapterVersion.state == "validating")
