"""Encrypts (Fernet) the responses stored for repeated requests: they may hold a new API key, which is stored nowhere else.

Each response has its own encryption key, derived from the server secret, the caller and the Idempotency-Key. A record that
is moved to another row cannot be decrypted there.
"""

import base64
from collections.abc import Callable

import msgspec
from cryptography.fernet import Fernet, InvalidToken
from starlette.responses import Response

from loraplex.tenants.errors import StoredResponseUnreadable
from loraplex.tenants.idempotency import RepeatableRequest

DOMAIN = b"loraplex/idempotency/v1"
REPLAYED_HEADER = "idempotency-replayed"
DeriveKey = Callable[..., bytes]
"""Byte strings, the first of which names the purpose -> 32 bytes."""


class StoredResponse(msgspec.Struct, frozen=True):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class EncryptedResponses:
    """Encrypts and decrypts the responses of repeatable requests."""

    def __init__(self, derive_key: DeriveKey) -> None:
        self._derive_key = derive_key

    def encrypt(self, request: RepeatableRequest, response: Response) -> bytes:
        stored = StoredResponse(response.status_code, response.headers.items(), bytes(response.body))
        return self._fernet(request).encrypt(msgspec.json.encode(stored))

    def decrypt(self, request: RepeatableRequest, encrypted: bytes) -> Response:
        """Return the stored response with `idempotency-replayed: true`.

        Raises `StoredResponseUnreadable` when the server secret has changed since.
        """
        try:
            content = self._fernet(request).decrypt(encrypted)
        except InvalidToken as error:
            raise StoredResponseUnreadable(
                "the response stored for this Idempotency-Key can no longer be read: use a new key"
            ) from error
        stored = msgspec.json.decode(content, type=StoredResponse)
        headers = {**dict(stored.headers), REPLAYED_HEADER: "true"}
        return Response(stored.body, stored.status, headers)

    def _fernet(self, request: RepeatableRequest) -> Fernet:
        key = self._derive_key(DOMAIN, request.caller.encode(), request.key.encode())
        return Fernet(base64.urlsafe_b64encode(key))
