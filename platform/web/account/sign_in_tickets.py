"""Carries email and password from the first step of a sign-in to the step that asks for the code of the second factor.

Invariant: a ticket is encrypted with a key of this server and ends after five minutes; nothing of it is stored.
"""

import base64
from typing import Final

import msgspec
from cryptography.fernet import Fernet, InvalidToken

from loraplex.tenants.stored_responses import DeriveKey

DOMAIN: Final = b"loraplex/sign-in-ticket/v1"
LIFETIME_S: Final = 300


class Pair(msgspec.Struct, frozen=True):
    """An email address and a password, as they were typed."""

    email: str
    password: str


class SignInTickets:
    """Encrypts (Fernet) and decrypts tickets."""

    def __init__(self, derive_key: DeriveKey) -> None:
        self._fernet = Fernet(base64.urlsafe_b64encode(derive_key(DOMAIN)))

    def seal(self, pair: Pair) -> str:
        """Write a ticket."""
        return self._fernet.encrypt(msgspec.json.encode(pair)).decode()

    def open(self, ticket: str) -> Pair | None:
        """Read a ticket; None for one that has ended or is not of this server."""
        try:
            return msgspec.json.decode(self._fernet.decrypt(ticket, ttl=LIFETIME_S), type=Pair)
        except (InvalidToken, ValueError):
            return None
