"""Recovery codes of accounts. Invariant: a code is used by the DELETE that finds it, so that it works once."""

from collections.abc import Iterable
from uuid import UUID

from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import RecoveryCode, User


class RecoveryCodeRepository:
    """The digests of unused codes, seen by a session of the gateway's role (`as_writer`, `writing`)."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def replace(self, user_id: UUID, digests: Iterable[bytes]) -> None:
        """Store new codes of an account in place of the present ones. Of two replacements at once, one set is left."""
        await self._session.execute(select(User.id).where(User.id == user_id).with_for_update())
        await self._session.execute(delete(RecoveryCode).where(RecoveryCode.user_id == user_id))
        rows = [{"user_id": user_id, "code_digest": each} for each in digests]
        if rows:
            await self._session.execute(insert(RecoveryCode).values(rows))

    async def use(self, user_id: UUID, digest: bytes) -> bool:
        """Use a code up; False if the account has no such code."""
        own = (RecoveryCode.user_id == user_id, RecoveryCode.code_digest == digest)
        statement = delete(RecoveryCode).where(*own).returning(RecoveryCode.user_id)
        return await self._session.scalar(statement) is not None

    async def left(self, user_id: UUID) -> int:
        """Return how many codes of an account are unused."""
        query = select(func.count()).where(RecoveryCode.user_id == user_id)
        return (await self._session.scalars(query)).one()
