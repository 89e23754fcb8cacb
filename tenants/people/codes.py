"""Codes of the second factor: time-based ones of an authenticator app (RFC 6238), and recovery codes, each of which takes the place
of one code of the app, once, where the app is lost.

Invariant: each account's TOTP secret is encrypted with a key of its own, derived from the server secret, so that a secret moved to
another row cannot be decrypted there. Of recovery codes only digests are stored, keyed with the server secret, so that a copy of the
database does not suffice to find codes; a code is used by the DELETE that finds it. Every session here has the gateway's role
(`as_writer`, `writing`).
"""

import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Final
from uuid import UUID

import pyotp
from cryptography.fernet import InvalidToken
from sqlalchemy import delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.tenants.errors import SecondFactorState
from loraplex.tenants.models import RecoveryCode, User
from loraplex.tenants.stored_responses import DeriveKey, fernet_of

TOTP_DOMAIN: Final = b"loraplex/totp/v1"
STEP_S: Final = 30
RECOVERY_DOMAIN: Final = b"loraplex/recovery-code/v1"
RECOVERY_CODES: Final = 10
RECOVERY_LENGTH: Final = 10
ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
"""Base 32 of Crockford: without letters that are read as another one."""
_READ_AS: Final = str.maketrans("oil", "011", " -")


class SecondFactorSecrets:
    """Encrypts (Fernet) the secrets of accounts."""

    def __init__(self, derive_key: DeriveKey) -> None:
        self._derive_key = derive_key

    def encrypt(self, user_id: UUID, secret: str) -> bytes:
        return fernet_of(self._derive_key, TOTP_DOMAIN, user_id.bytes).encrypt(secret.encode())

    def decrypt(self, user_id: UUID, encrypted: bytes) -> str:
        """Return the secret. Raises `SecondFactorState` when the server secret has changed since."""
        try:
            return fernet_of(self._derive_key, TOTP_DOMAIN, user_id.bytes).decrypt(encrypted).decode()
        except InvalidToken as error:
            raise SecondFactorState(
                "the second factor can no longer be read: an operator resets it with `loraplex user reset`"
            ) from error


def matching_step(secret: str, code: str, now: datetime) -> int | None:
    """Return the time step of a code, of the present step or one next to it; None for a wrong code."""
    entered = code.replace(" ", "")
    present = int(now.timestamp()) // STEP_S
    generator = pyotp.TOTP(secret, interval=STEP_S)
    steps = (present, present - 1, present + 1)
    return next(
        (step for step in steps if pyotp.utils.strings_equal(entered, generator.generate_otp(step))), None
    )


def recovery_code(entered: str) -> str | None:
    """Return what was entered as a recovery code; None if it has not the form of one, as a code of the app has not."""
    code = entered.strip().lower().translate(_READ_AS)
    return code if len(code) == RECOVERY_LENGTH and all(each in ALPHABET for each in code) else None


async def issue_recovery_codes(session: AsyncSession, user_id: UUID, derive_key: DeriveKey) -> list[str]:
    """Store new codes of an account in place of the present ones; return them."""
    codes = ["".join(secrets.choice(ALPHABET) for _ in range(RECOVERY_LENGTH)) for _ in range(RECOVERY_CODES)]
    await replace_codes(session, user_id, [_digest(derive_key, user_id, code) for code in codes])
    return [f"{code[: RECOVERY_LENGTH // 2]}-{code[RECOVERY_LENGTH // 2 :]}" for code in codes]


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
    return derive_key(RECOVERY_DOMAIN, user_id.bytes, code.encode())
