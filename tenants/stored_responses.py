"""Encrypts (Fernet) the responses stored for repeated requests: they may hold a new API key, which is stored nowhere else.

Each response has its own encryption key, derived from the server secret, the caller and the Idempotency-Key. A record that
is moved to another row cannot be decrypted there.
"""

import base64
from collections.abc import Callable
from datetime import timedelta

import msgspec
from cryptography.fernet import Fernet, InvalidToken

from loraplex.tenants.errors import StoredResponseUnreadable
from loraplex.tenants.idempotency import RepeatableRequest

DOMAIN = b"loraplex/idempotency/v1"
DeriveKey = Callable[..., bytes]
"""Byte strings, the first of which names the purpose -> 32 bytes."""


def fernet_of(derive_key: DeriveKey, *parts: bytes) -> Fernet:
    """Return what encrypts with the key of these parts, the first of which names the purpose."""
    return Fernet(base64.urlsafe_b64encode(derive_key(*parts)))


class StoredResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A finished response. `replayed`: it was stored for an earlier request; never true of what is stored."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    replayed: bool = False


class EncryptedResponses:
    """Encrypts and decrypts the responses of repeatable requests, which are stored for `lifetime`."""

    def __init__(self, derive_key: DeriveKey, lifetime: timedelta) -> None:
        self._derive_key = derive_key
        self.lifetime = lifetime

    def encrypt(self, request: RepeatableRequest, response: StoredResponse) -> bytes:
        return self._fernet(request).encrypt(msgspec.json.encode(response))

    def decrypt(self, request: RepeatableRequest, encrypted: bytes) -> StoredResponse:
        """Return the stored response, marked as `replayed`.

        Raises `StoredResponseUnreadable` when the server secret has changed since.
        """
        try:
            content = self._fernet(request).decrypt(encrypted)
        except InvalidToken as error:
            raise StoredResponseUnreadable(
                "the response stored for this Idempotency-Key can no longer be read: use a new key"
            ) from error
        stored = msgspec.json.decode(content, type=StoredResponse)
        return msgspec.structs.replace(stored, replayed=True)

    def _fernet(self, request: RepeatableRequest) -> Fernet:
        return fernet_of(self._derive_key, DOMAIN, request.caller.encode(), request.key.encode())
