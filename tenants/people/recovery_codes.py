"""Recovery codes: each takes the place of one code of the authenticator app, once, where the app is lost.

Invariant: only digests are stored, keyed with the server secret, so that a copy of the database does not suffice to find codes; a
code is used by the DELETE that finds it. Every session here has the gateway's role (`as_writer`, `writing`).
"""

import secrets
from collections.abc import Iterable
from typing import Final
from uuid import UUID

from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.models import RecoveryCode, User
from loraplex.tenants.stored_responses import DeriveKey

DOMAIN: Final = b"loraplex/recovery-code/v1"
COUNT: Final = 10
LENGTH: Final = 10
ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
"""Base 32 of Crockford: without letters that are read as another one."""
_READ_AS: Final = str.maketrans("oil", "011", " -")


def recovery_code(entered: str) -> str | None:
    """Return what was entered as a recovery code; None if it has not the form of one, as a code of the app has not."""
    code = entered.strip().lower().translate(_READ_AS)
    return code if len(code) == LENGTH and all(each in ALPHABET for each in code) else None


async def issue_recovery_codes(session: AsyncSession, user_id: UUID, derive_key: DeriveKey) -> list[str]:
    """Store new codes of an account in place of the present ones; return them."""
    codes = ["".join(secrets.choice(ALPHABET) for _ in range(LENGTH)) for _ in range(COUNT)]
    await replace_codes(session, user_id, [_digest(derive_key, user_id, code) for code in codes])
    return [f"{code[: LENGTH // 2]}-{code[LENGTH // 2 :]}" for code in codes]


async def replace_codes(session: AsyncSession, user_id: UUID, digests: Iterable[bytes]) -> None:
    """Store the codes of an account in place of the present ones. Of two replacements at once, one set is left."""
    await session.execute(select(User.id).where(User.id == user_id).with_for_update())
    await session.execute(delete(RecoveryCode).where(RecoveryCode.user_id == user_id))
    rows = [{"user_id": user_id, "code_digest": each} for each in digests]
    if rows:
        await session.execute(insert(RecoveryCode).values(rows))


async def use_recovery_code(session: AsyncSession, user_id: UUID, code: str, derive_key: DeriveKey) -> bool:
    """Use a code up; False if the account has no such code."""
    digest = _digest(derive_key, user_id, code)
    own = (RecoveryCode.user_id == user_id, RecoveryCode.code_digest == digest)
    statement = delete(RecoveryCode).where(*own).returning(RecoveryCode.user_id)
    return await session.scalar(statement) is not None


async def codes_left(session: AsyncSession, user_id: UUID) -> int:
    """Return how many codes of an account are unused."""
    query = select(func.count()).where(RecoveryCode.user_id == user_id)
    return (await session.scalars(query)).one()


def _digest(derive_key: DeriveKey, user_id: UUID, code: str) -> bytes:
    return derive_key(DOMAIN, user_id.bytes, code.encode())
