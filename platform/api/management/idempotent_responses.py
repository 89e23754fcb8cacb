"""Answers kept for repeated requests, encrypted (Fernet): they may hold a new key, which is shown once and stored nowhere.

Each is sealed with a key of its own, derived from the server secret, the caller and the Idempotency-Key, so that a record
moved to another place does not open there.
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
"""Parts as bytes, the first of which names the purpose -> 32 bytes."""


class StoredResponse(msgspec.Struct, frozen=True):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


class EncryptedResponses:
    """Seals and opens the answers of repeatable requests."""

    def __init__(self, derive_key: DeriveKey) -> None:
        self._derive_key = derive_key

    def seal(self, request: RepeatableRequest, response: Response) -> bytes:
        kept = StoredResponse(response.status_code, response.headers.items(), bytes(response.body))
        return self._fernet(request).encrypt(msgspec.json.encode(kept))

    def open(self, request: RepeatableRequest, sealed: bytes) -> Response:
        """The same answer, marked as a repetition. Raises `StoredResponseUnreadable` when the server secret has changed since."""
        try:
            content = self._fernet(request).decrypt(sealed)
        except InvalidToken as error:
            raise StoredResponseUnreadable(
                "the answer to this Idempotency-Key can no longer be read: take a new one"
            ) from error
        kept = msgspec.json.decode(content, type=StoredResponse)
        headers = {**dict(kept.headers), REPLAYED_HEADER: "true"}
        return Response(kept.body, kept.status, headers)

    def _fernet(self, request: RepeatableRequest) -> Fernet:
        key = self._derive_key(DOMAIN, request.caller.encode(), request.key.encode())
        return Fernet(base64.urlsafe_b64encode(key))
