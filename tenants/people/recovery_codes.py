"""Recovery codes: each takes the place of one code of the authenticator app, once, where the app is lost.

Invariant: only digests are stored, keyed with the server secret, so that a copy of the database does not suffice to find codes.
"""

import secrets
from typing import Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.people.recovery_code_rows import RecoveryCodeRepository
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
    """Store new codes of an account in place of the present ones; return them. `session` has the gateway's role (`writing`)."""
    codes = ["".join(secrets.choice(ALPHABET) for _ in range(LENGTH)) for _ in range(COUNT)]
    digests = [_digest(derive_key, user_id, code) for code in codes]
    await RecoveryCodeRepository(session).replace(user_id, digests)
    return [f"{code[: LENGTH // 2]}-{code[LENGTH // 2 :]}" for code in codes]


async def use_recovery_code(session: AsyncSession, user_id: UUID, code: str, derive_key: DeriveKey) -> bool:
    """Use a code up; False if the account has no such code. `session` has the gateway's role (`writing`)."""
    return await RecoveryCodeRepository(session).use(user_id, _digest(derive_key, user_id, code))


def _digest(derive_key: DeriveKey, user_id: UUID, code: str) -> bytes:
    return derive_key(DOMAIN, user_id.bytes, code.encode())
