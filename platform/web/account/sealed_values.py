"""Values that a browser carries for this server from one step of a sign-in to the next, in a form or a cookie.

Invariant: a value is encrypted with a key of this server and of its purpose, and ends by itself; nothing of it is stored here.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from cryptography.fernet import InvalidToken

from loraplex.tenants.stored_responses import DeriveKey, fernet_of

ValueT = TypeVar("ValueT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class SealedValues(Generic[ValueT]):
    """Encrypts (Fernet) and decrypts the values of one purpose. `domain`: names the purpose."""

    domain: bytes
    kind: type[ValueT]
    lifetime_s: int

    def seal(self, derive_key: DeriveKey, value: ValueT) -> str:
        """Encrypt a value."""
        return fernet_of(derive_key, self.domain).encrypt(msgspec.json.encode(value)).decode()

    def open(self, derive_key: DeriveKey, sealed: str) -> ValueT | None:
        """Decrypt a value; None for one that has ended, or is not of this server and purpose."""
        try:
            opened = fernet_of(derive_key, self.domain).decrypt(sealed, ttl=self.lifetime_s)
            return msgspec.json.decode(opened, type=self.kind)
        except (InvalidToken, ValueError):
            return None
