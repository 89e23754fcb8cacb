"""Time-based one-time codes (RFC 6238), and the encryption of their secrets: each account has a key of its own, derived from the
server secret, so that a secret moved to another row cannot be decrypted there.
"""

from datetime import datetime
from typing import Final
from uuid import UUID

import pyotp
from cryptography.fernet import InvalidToken

from loraplex.tenants.errors import SecondFactorState
from loraplex.tenants.stored_responses import DeriveKey, fernet_of

DOMAIN: Final = b"loraplex/totp/v1"
STEP_S: Final = 30


class SecondFactorSecrets:
    """Encrypts (Fernet) the secrets of accounts."""

    def __init__(self, derive_key: DeriveKey) -> None:
        self._derive_key = derive_key

    def encrypt(self, user_id: UUID, secret: str) -> bytes:
        return fernet_of(self._derive_key, DOMAIN, user_id.bytes).encrypt(secret.encode())

    def decrypt(self, user_id: UUID, encrypted: bytes) -> str:
        """Return the secret. Raises `SecondFactorState` when the server secret has changed since."""
        try:
            return fernet_of(self._derive_key, DOMAIN, user_id.bytes).decrypt(encrypted).decode()
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
